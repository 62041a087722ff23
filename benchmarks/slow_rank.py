"""Two processes of which one is slowed: seconds of a level step with and without ``training.calibrate``.

    .venv/bin/python -m benchmarks.slow_rank [--slow SHARE] [--steps N] [--turns N] [--out FILE]

Measured, on CPUs: the trainer itself, on synthetic documents, with one thread and one core for each process. The second
one is stopped for a share of every 20 ms (SIGSTOP, SIGCONT), so its work takes 1 / (1 - share) of the time; the share
that it was really stopped is printed. Jobs of two equal ranks, and with a slowed one without and with calibration take
turns; reported are medians over the last half of the steps. Run it on an idle machine with two cores.
"""

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
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parts.measurement import command, facts, in_turns, make_parser, show, write
from wlb.documents.store.reader import TokenStoreWriter
from wlb.documents.synthetic import sample_lengths
from wlb.job.config import JobConfig

_PERIOD = 0.02  # seconds, of which a micro-batch takes many
_WINDOW, _DOCUMENTS, _VOCABULARY = 1024, 4000, 256
_MOST_SECONDS = 120  # of a job; a longer one is ended
_COLUMNS = {
    "training.calibrate": "{calibrate}",
    "really stopped": "{stopped:.1%}",
    "seconds a step": "{seconds:.3f}",
    "over equal ranks": "{over:.2f}",
    "turns": "{turns}",
}


def write_documents(prefix: Path) -> None:
    """Random tokens in documents of up to a context window."""
    rng = np.random.default_rng(0)
    with TokenStoreWriter(prefix, vocab_size=_VOCABULARY) as writer:
        for length in sample_lengths(_DOCUMENTS, _WINDOW, seed=0):
            writer.add(rng.integers(0, _VOCABULARY, length))


def configured(store: Path, metrics: Path, steps: int, calibrate: int) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_hidden": 176},
            "data": {"store": str(store), "context_window": _WINDOW},
            "parallel": {"dp": 2},
            "packing": {"grouping": "level", "global_batch": 12, "max_length_factor": 2.0},
            "training": {"steps": steps, "device": "cpu", "threads": 1, "calibrate": calibrate},
            "metrics": {"dir": str(metrics)},
        }
    )


def train_rank(config: JobConfig, rank: int, port: int) -> None:
    """Be a rank of the job, on a core of its own."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in here.items()} | {"MASTER_ADDR": "127.0.0.1"}
    from wlb.training.process import Termination
    from wlb.training.trainer import train

    train(config, Termination())
    os._exit(0)  # as ranks do, without waiting for the other one


def step_seconds(store: Path, folder: Path, steps: int, calibrate: int, slow: float) -> tuple[float, float]:
    """The median of the last half of the steps of one job, and the share of the time for which a rank was stopped."""
    config = configured(store, folder, steps, calibrate)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=train_rank, args=(config, rank, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        stopped = stop_in_turns(ranks, slow)
        for rank in ranks:
            rank.join(10)
        if any(rank.exitcode != 0 for rank in ranks):
            raise RuntimeError(f"ranks ended with {[rank.exitcode for rank in ranks]}; None: not in {_MOST_SECONDS} s")
    finally:
        for rank in ranks:
            rank.kill()
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return float(statistics.median(row["step_seconds"] for row in rows[len(rows) // 2 :])), stopped


def stop_in_turns(ranks: Sequence[SpawnProcess], slow: float) -> float:
    """Stop the second rank for a share of every period, until a rank ends; the share for which it was stopped."""
    slowed = ranks[1].pid
    assert slowed is not None
    began, stopped = time.monotonic(), 0.0
    while all(rank.is_alive() for rank in ranks) and time.monotonic() < began + _MOST_SECONDS:
        if slow:
            since = time.monotonic()
            os.kill(slowed, signal.SIGSTOP)
            time.sleep(slow * _PERIOD)
            os.kill(slowed, signal.SIGCONT)
            stopped += time.monotonic() - since
        runs_until = began + stopped / slow if slow else 0.0  # by what it was really stopped, as sleeps end late
        time.sleep(max(_PERIOD / 10, runs_until - time.monotonic()))
    return stopped / (time.monotonic() - began)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--slow", type=float, default=0.25, help="share of the time for which a rank is stopped")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--every", type=int, default=4, help="training.calibrate")
    parser.add_argument("--turns", type=int, default=3, help="jobs of each kind")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "store")

        def measure(slow: float, calibrate: int) -> tuple[float, float]:
            with tempfile.TemporaryDirectory(dir=folder) as metrics:
                return step_seconds(folder / "store", Path(metrics), options.steps, calibrate, slow)

        jobs = {
            "0, no rank slowed": (0.0, 0),
            "0": (options.slow, 0),
            str(options.every): (options.slow, options.every),
        }
        found = in_turns({name: partial(measure, *job) for name, job in jobs.items()}, options.turns)
    rows: list[dict[str, Any]] = []
    for name, turns in found.items():
        seconds, stopped = ([turn[column] for turn in turns] for column in range(2))
        median = statistics.median(seconds)
        row = {"calibrate": name, "seconds": median, "stopped": statistics.median(stopped)}
        row["over"] = median / (rows[0]["seconds"] if rows else median)
        rows.append(row | {"turns": ", ".join(f"{each:.3f}" for each in seconds)})
    show(f"two processes, one stopped {options.slow:.0%} of the time", rows, _COLUMNS)
    write(facts("torch") | {"slow": options.slow, "rows": rows}, options.out)


if __name__ == "__main__":
    sys.exit(main())
