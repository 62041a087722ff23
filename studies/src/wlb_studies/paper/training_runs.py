"""The small models that ``convergence`` trains: their data and jobs, and running the unfinished ones.

Each run is a ``wlb train`` with its own directory, ``OUT/convergence/STEPS-steps/METHOD-SEED``, and checkpoints: an
interrupted experiment continues, and finished runs are not repeated. As many runs go on at once as there are cores,
with one thread each.
"""

import json
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wlb.documents.prepare import prepare_store
from wlb.documents.prepare.sources import StdlibCorpus
from wlb.documents.prepare.tokenization import load_tokenizer
from wlb.documents.store.reader import TokenStore
from wlb.documents.store.writer import TokenStoreWriter
from wlb.errors import UserError
from wlb.os_limits import usable_cores

WINDOW = 2048  # with hidden size 128 attention weighs as much as at 64K for 7B (docs/workload.md)
MICRO_BATCHES = 4
HELD_OUT_EVERY = 20  # one document in so many is held out
HELD_OUT_DOCUMENTS = 64
_EVALUATIONS = 10
_POLL_SECONDS = 0.5
_CHECKPOINTS = 4
_WARM_UP_SHARE = 20
_LEARNING_RATE = 2e-3

# The settings of each method. One micro-batch as large as the step takes any document at once: nothing is cut, delayed
# or reordered, and the gradient equals training one document at a time (tests/training/test_steps_equivalence.py).
METHODS: dict[str, dict[str, Any]] = {
    "unpacked": {
        "packing.method": "variable_length",
        "packing.outlier_thresholds": [],
        "packing.max_length_factor": MICRO_BATCHES + 1.0,
    },
    "sequential": {"preset": "plain-4d"},
    "fixed_greedy:1": {"preset": "fixed-4d"},
    "fixed_greedy:8": {"preset": "fixed-4d", "packing.window": 8},
    "WLB-LLM": {"preset": "wlb-llm"},
    "balanced": {},
}


class SeedRun(NamedTuple):
    """One training run; its directory holds ``job.toml``, ``metrics/``, ``checkpoints/`` and ``log.txt``."""

    method: str
    seed: int
    steps: int
    folder: Path

    @property
    def finished(self) -> bool:
        evaluations = self.evaluations()
        return bool(evaluations) and evaluations[-1]["step"] == self.steps and len(self.lines()) == self.steps

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def lines(self) -> list[dict[str, Any]]:
        """The rows of steps.jsonl."""
        return _json_lines(self.folder / "metrics" / "steps.jsonl")

    def evaluations(self) -> list[dict[str, Any]]:
        return _json_lines(self.folder / "metrics" / "evaluation.jsonl")


def runs_of(out: Path, steps: int, seeds: Sequence[int]) -> list[SeedRun]:
    """All runs, seed by seed, so that an early stop leaves complete comparisons."""
    folder = out / "convergence" / f"{steps}-steps"
    return [
        SeedRun(method, seed, steps, folder / f"{method.replace(':', '')}-{seed}")
        for seed in seeds
        for method in METHODS
    ]


def prepare_data(folder: Path) -> tuple[Path, Path]:
    """Token stores of this Python's standard library, for training and held out; made once."""
    train, held_out = folder / "train", folder / "held-out"
    if held_out.with_suffix(".idx").exists():
        return train, held_out
    folder.mkdir(parents=True, exist_ok=True)
    everything = folder / "stdlib"
    tokenizer = load_tokenizer("bytes")
    prepare_store(StdlibCorpus(), everything, tokenizer, overwrite=True)
    store = TokenStore.open(everything)
    for prefix, held in ((train, False), (held_out, True)):
        with TokenStoreWriter(prefix, vocab_size=tokenizer.vocab_size, overwrite=True) as writer:
            for document in range(len(store)):
                if (document % HELD_OUT_EVERY == 0) == held:
                    writer.add(store.read(document))
            writer.details = {"tokenizer": tokenizer.identity}
    return train, held_out


def train_all(runs: Sequence[SeedRun], data: tuple[Path, Path], on_progress: Callable[[str], None]) -> None:
    """Train the unfinished runs. Raises ``UserError`` with the last line of the first run that fails."""
    waiting = deque(run for run in runs if not run.finished)
    done = len(runs) - len(waiting)
    running: dict[SeedRun, subprocess.Popen[bytes]] = {}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no run is left behind
    try:
        while waiting or running:
            while waiting and len(running) < usable_cores():
                run = waiting.popleft()
                running[run] = _start(run, data)
            time.sleep(_POLL_SECONDS)
            for run in [run for run, process in running.items() if process.poll() is not None]:
                _check(run, running.pop(run).returncode)
                done += 1
                on_progress(f"{done} of {len(runs)} runs finished, the last {run.method}, seed {run.seed}")
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in running.values():
            process.terminate()  # it writes a checkpoint
        for process in running.values():
            process.wait()


def _start(run: SeedRun, data: tuple[Path, Path]) -> subprocess.Popen[bytes]:
    run.folder.mkdir(parents=True, exist_ok=True)
    config = run.folder / "job.toml"
    config.write_text(_to_toml(_settings(run, data)), encoding="utf-8")
    with run.log.open("ab") as output:
        return subprocess.Popen([sys.executable, "-m", "wlb", "train", str(config)], stdout=output, stderr=output)


def _check(run: SeedRun, status: int) -> None:
    if status == 0 and run.finished:
        return
    last = run.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise UserError(f"training {run.method} with seed {run.seed} failed, see {run.log}: {''.join(last)}")


def _settings(run: SeedRun, data: tuple[Path, Path]) -> dict[str, Any]:
    """The job as flat settings, ``section.key`` or ``preset``."""
    train, held_out = data
    return {
        "model.name": "tiny",
        "data.store": str(train),
        "data.context_window": WINDOW,
        "data.seed": run.seed,
        "packing.global_batch": MICRO_BATCHES,
        "training.steps": run.steps,
        "training.seed": run.seed,
        "training.device": "cpu",
        "training.threads": 1,
        "training.learning_rate": _LEARNING_RATE,
        "training.warmup_steps": run.steps // _WARM_UP_SHARE,
        "evaluation.store": str(held_out),
        "evaluation.every": max(1, run.steps // _EVALUATIONS),
        "evaluation.documents": HELD_OUT_DOCUMENTS,
        "checkpoint.dir": str(run.folder / "checkpoints"),
        "checkpoint.every": max(1, run.steps // _CHECKPOINTS),
        "checkpoint.keep": 1,
        "metrics.dir": str(run.folder / "metrics"),
        "metrics.document_ids": True,
        "metrics.tensorboard": False,
    } | METHODS[run.method]


def _to_toml(settings: dict[str, Any]) -> str:
    """Dotted keys are valid TOML, and so are JSON strings, numbers, booleans and lists of numbers."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
