"""Two processes of which one is slowed: seconds of a level step with and without ``training.calibrate``.

    .venv/bin/python -m benchmarks.slow_rank [--slow SHARE] [--steps N] [--turns N] [--out FILE]

Measured, on CPUs: the trainer itself, on synthetic documents, with one thread and one core for each process. The second
one is stopped for a share of every 20 ms (SIGSTOP, SIGCONT), as if its core were slower by it. Jobs with and without
calibration take turns; reported are medians over the last half of the steps. Run it on an idle machine with two cores.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parts.measurement import command, facts, in_turns, make_parser, show, write
from wlb.documents.store.reader import TokenStoreWriter
from wlb.documents.synthetic import sample_lengths
from wlb.job.config import JobConfig

_PERIOD = 0.02  # seconds, of which a micro-batch takes many
_WINDOW, _DOCUMENTS, _VOCABULARY = 1024, 4000, 256
_COLUMNS = {"training.calibrate": "{calibrate}", "seconds a step": "{seconds:.3f}", "turns": "{turns}"}


def write_documents(prefix: Path) -> None:
    """Random tokens in documents of up to a context window."""
    rng = np.random.default_rng(0)
    with TokenStoreWriter(prefix, vocab_size=_VOCABULARY) as writer:
        for length in sample_lengths(_DOCUMENTS, _WINDOW, seed=0):
            writer.add(rng.integers(0, _VOCABULARY, length))


def configured(store: Path, metrics: Path, steps: int, calibrate: int) -> JobConfig:
    return JobConfig.model_validate(
        {
            "preset": "elastic",
            "model": {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_hidden": 176},
            "data": {"store": str(store), "context_window": _WINDOW},
            "parallel": {"dp": 2},
            "packing": {"grouping": "level", "micro_batches": 12, "max_length_factor": 2.0},
            "training": {"steps": steps, "device": "cpu", "threads": 1, "calibrate": calibrate},
            "metrics": {"dir": str(metrics)},
        }
    )


def train_rank(config: JobConfig, rank: int, port: int) -> None:
    """Be a rank of the job, on a core of its own."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in here.items()} | {"MASTER_ADDR": "127.0.0.1"}
    from wlb.training.termination import Termination
    from wlb.training.trainer import train

    train(config, Termination())
    os._exit(0)  # as ranks do, without waiting for the other one


def step_seconds(store: Path, folder: Path, steps: int, calibrate: int, slow: float) -> float:
    """The median of the last half of the steps of one job."""
    config = configured(store, folder, steps, calibrate)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=train_rank, args=(config, rank, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    slowed = ranks[1]
    assert slowed.pid is not None
    while all(rank.is_alive() for rank in ranks):
        os.kill(slowed.pid, signal.SIGSTOP)
        time.sleep(slow * _PERIOD)
        os.kill(slowed.pid, signal.SIGCONT)
        time.sleep((1 - slow) * _PERIOD)
    for rank in ranks:
        rank.join(60)
        if rank.exitcode != 0:
            rank.kill()
            raise RuntimeError(f"a rank ended with {rank.exitcode}")
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return float(statistics.median(row["step_seconds"] for row in rows[len(rows) // 2 :]))


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--slow", type=float, default=0.25, help="share of the time for which a rank is stopped")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=4, help="training.calibrate")
    parser.add_argument("--turns", type=int, default=3, help="jobs of each kind")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "store")

        def measure(calibrate: int) -> float:
            with tempfile.TemporaryDirectory(dir=folder) as metrics:
                return step_seconds(folder / "store", Path(metrics), options.steps, calibrate, options.slow)

        alternatives = {str(every): partial(measure, every) for every in (0, options.every)}
        found = in_turns(alternatives, options.turns)
    rows: list[dict[str, Any]] = [
        {"calibrate": every, "seconds": statistics.median(seconds), "turns": ", ".join(f"{s:.3f}" for s in seconds)}
        for every, seconds in found.items()
    ]
    show(f"two processes, one stopped {options.slow:.0%} of the time", rows, _COLUMNS)
    write(facts("torch") | {"slow": options.slow, "rows": rows}, options.out)


if __name__ == "__main__":
    sys.exit(main())
