"""Kill ranks of a job at random moments, again and again, and hold what it trained against a job left in peace.

    .venv/bin/python -m tests.training.soak --kills 30 [--seed 0] [--launcher torchrun] [--preset elastic]

Both train one epoch of the same documents on two processes. Kills (SIGKILL, a rank drawn at random) fall between any
two steps, into the writing of a checkpoint, and into the seconds in which ranks start. In the end the losses and
gradient norms of all steps must be the same bits, and every document must have been trained exactly once.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.limits import HUNG_SECONDS
from tests.programs import Program, forked
from tests.training.jobs import VOCABULARY, read_steps, write_config
from tests.training.processes import ranks_of, steps_written
from wlb.documents.store.reader import TokenStoreWriter
from wlb.job.config import PRESETS
from wlb.training.checkpoint.files import HIDDEN

EVERY = 3  # steps between checkpoints
COMPARED = ("step", "document_ids", "loss", "grad_norm", "learning_rate", "tokens")
MOMENTS = ("between steps", "in a checkpoint", "at the start")
_START_SECONDS = 6.0  # ranks take about so long until their first step
_POLL_SECONDS = 0.002
_SHORTEST, _LONGEST = 8, 200  # tokens of a document: few make a step, and some are longer than the context window


@dataclass
class Report:
    """What a soak did and found; ``differences`` is empty if all is well."""

    kills: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    documents: int = 0
    seconds: float = 0.0
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        moments = ", ".join(f"{self.kills[moment]} {moment}" for moment in MOMENTS)
        verdict = "; ".join(self.differences) or "losses and gradient norms identical, every document exactly once"
        return (
            f"{self.kills.total()} kills ({moments}) in {self.seconds:.0f} s; "
            f"{self.steps} steps, {self.documents} documents: {verdict}"
        )


def soak(
    folder: Path, kills: int, seed: int, launcher: str = "wlb", documents: int = 200, preset: str = "best"
) -> Report:
    """Train an epoch of ``documents`` twice in ``folder``, the second time with ``kills`` kills drawn from ``seed``."""
    peaceful, disturbed = folder / "peaceful", folder / "disturbed"
    for place in (peaceful, disturbed):
        place.mkdir(parents=True)
        _write_store(place / "store", documents)
    with running(peaceful, launcher, preset, restarts=0) as process:
        process.wait(timeout=HUNG_SECONDS + documents)
    expected = read_steps(peaceful)
    report = Report(steps=len(expected), documents=documents)
    began = time.monotonic()
    with running(disturbed, launcher, preset, restarts=kills) as process:
        _disturb(process, disturbed, kills, len(expected), random.Random(seed), report)
        process.wait(timeout=HUNG_SECONDS + documents)
    report.seconds = time.monotonic() - began
    report.differences = list(_differences(expected, disturbed, process.returncode, documents))
    return report


def _write_store(prefix: Path, documents: int) -> None:
    rng = np.random.default_rng(5)
    with TokenStoreWriter(prefix, vocab_size=VOCABULARY) as writer:
        for length in rng.integers(_SHORTEST, _LONGEST + 1, documents):
            writer.add(rng.integers(0, VOCABULARY, length))


@contextmanager
def running(folder: Path, launcher: str, preset: str, restarts: int) -> Iterator[Program]:
    """A job in ``folder``, of which nothing is left afterwards; what it says is kept in the file ``stderr``."""
    config = write_config(
        folder,
        preset,
        parallel={"dp": 2},
        packing={"micro_batches": 2},  # small steps, so many of them
        training={"steps": None, "max_restarts": restarts},
        checkpoint={"dir": str(folder / "checkpoints"), "every": EVERY},
    )
    command = {
        "wlb": ["-m", "wlb", "train"],
        "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={restarts}"],
    }[launcher]
    module = ["-m", "wlb.training"] if launcher == "torchrun" else []
    with forked(*command, *module, config) as program, (folder / "stderr").open("w") as kept:
        listening = threading.Thread(target=kept.writelines, args=(program.stderr,))
        listening.start()
        try:
            yield program
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
            listening.join()


def _disturb(process: Program, folder: Path, kills: int, steps: int, rng: random.Random, report: Report) -> None:
    """Kill at moments that are spread over the job: for each, wait for a step, then for something to happen there."""
    for kill in range(kills):
        moment = MOMENTS[kill % len(MOMENTS)]
        from_step = 1 + int(kill / kills * (steps - 2 * EVERY))
        if moment == "at the start":  # of the restart after the kill before
            _wait(process, lambda: bool(ranks_of(process.pid)))
            time.sleep(rng.uniform(0, _START_SECONDS))
        else:
            _wait(process, lambda target=from_step: steps_written(folder) >= target)  # type: ignore[misc]
        if moment == "in a checkpoint":
            _wait(process, lambda: any((folder / "checkpoints").glob(f"{HIDDEN}*")))
        elif moment == "between steps":
            time.sleep(rng.uniform(0, 0.5))
        ranks = ranks_of(process.pid)
        if process.poll() is not None or not ranks:
            continue
        os.kill(rng.choice(ranks), signal.SIGKILL)
        report.kills[moment] += 1
        _wait(process, lambda before=ranks: not set(before) & set(ranks_of(process.pid)))  # type: ignore[misc]


def _wait(process: Program, condition: Callable[[], bool], seconds: float = HUNG_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and not condition():
        assert time.monotonic() < deadline, "ran out of time"
        time.sleep(_POLL_SECONDS)


def _differences(expected: list[dict[str, Any]], folder: Path, status: int | None, documents: int) -> Iterator[str]:
    if status:
        yield f"the job ended with exit status {status}: {(folder / 'stderr').read_text().splitlines()[-1]}"
    actual = read_steps(folder)
    if len(actual) != len(expected):
        yield f"{len(actual)} steps instead of {len(expected)}"
    for one, other in zip(expected, actual, strict=False):
        for key in COMPARED:
            if one[key] != other[key]:
                yield f"step {one['step']} has {key} {other[key]} instead of {one[key]}"
    trained = Counter(document for row in actual for document in row["document_ids"])
    wrong = [document for document in range(documents) if trained[document] != 1]
    if wrong or trained.total() != documents:
        yield f"documents not trained exactly once: {wrong[:20]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launcher", choices=["wlb", "torchrun"], default="wlb")
    parser.add_argument("--preset", choices=list(PRESETS), default="best")
    parser.add_argument("--documents", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = soak(
            Path(folder),
            arguments.kills,
            arguments.seed,
            arguments.launcher,
            arguments.documents,
            arguments.preset,
        )
    print(report)
    sys.exit(bool(report.differences))


if __name__ == "__main__":
    main()
