"""Benchmark of large corpora: how soon the first step is planned, what a rank holds, and how soon it resumes.

    .venv/bin/python -m benchmarks.corpora [--documents N ...] [--on-disk N] [--shards N] [--out FILE]

Every corpus is opened in a process of its own, which plans steps of a 7B model (window 128K, 32 micro-batches, tp 8,
cp 2, pp 4, dp 4) with the preset ``best``. "First step" goes from opening the store to the first plan, ``decide``
included and imports not; "resume" from opening it to the first plan after a random position of epoch 3. Memory is what
the kernel counts as a process's own (``RssAnon``) at the end; pages of the index, and of libraries, belong to all
processes of a machine. A document's turn is its place in the order, which is given alone too, and its
length, taken in blocks of 64; the first time, pages of the index come from the disk. What a planner takes are segments.
These are CPU times.

Up to ``--on-disk`` documents the index is really written, 20 bytes for each, to ``--directory``, and dropped from the
page cache before it is opened; the token file is sparse. Above that, the index is virtual: a million lengths that
repeat, computed where the reader asks for them, so that nothing is read from a disk. Needs Linux.

Last come ``--shards`` stores of ``SHARD_DOCUMENTS`` documents that are opened as one. Their token files are sparse. The
documents of a block of 64 lie in as many shards, whose indexes are mapped for it; a read maps the token file as well,
for one token.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.parts.measurement import CpuTimer, command, console, facts, freeze_imports, make_parser, show, write
from wlb.documents.order import DocumentStream
from wlb.documents.permutation import Permutation
from wlb.documents.store.index import IndexWriter, TokenIndex, store_path
from wlb.documents.store.reader import Shard, TokenStore
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.planner import StepPlanner
from wlb.simulate import simulated_job
from wlb.simulate.decide import decide

WINDOW, PERIOD = 131_072, 1 << 20
TOKENS = np.dtype("<u2")
BLOCK, BLOCKS = 64, 1500  # documents taken together, and how often
SHARD_DOCUMENTS, SHARD_BLOCKS = 100, 100
STEPS = 20  # planned before memory is read


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what was asked for, print a table, and write it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[10**8, 10**9, 10**10], metavar="N")
    parser.add_argument("--on-disk", type=int, default=10**8, metavar="N", help="write the index of up to N documents")
    parser.add_argument("--shards", type=int, default=10_000, metavar="N", help="stores that are opened as one")
    parser.add_argument("--directory", type=Path, help="where (default: a temporary directory)")
    options = parser.parse_args(arguments)
    if sys.platform != "linux":
        raise UserError("memory that is private to a process is read from /proc, which only Linux has")
    rows = [_measured_apart(documents, options) for documents in options.documents]
    columns = {
        "documents": "{documents:.0e}",
        "index": "{index}",
        "first step (s)": "{first_step[seconds]:.2f}",
        "CPU s": "{first_step[cpu_seconds]:.2f}",
        "of which opening": "{opening[cpu_seconds]:.2f}",
        "resume (s)": "{resume[seconds]:.2f}",
        "resume, CPU s": "{resume[cpu_seconds]:.2f}",
        "private MiB": "{private_mib:.0f}",
        "before": "{private_mib_before:.0f}",
        "place (us)": "{place_microseconds:.2f}",
        "turn, pages first touched (us)": "{first_turn_microseconds:.2f}",
        "turn (us)": "{turn_microseconds:.2f}",
        "as segments (us)": "{segments_microseconds:.2f}",
    }
    show("Large corpora: one rank that plans", rows, columns)
    shards = _apart(options.directory, _write_shards, _measured_shards, options.shards)
    columns = {
        "shards": "{shards}",
        "opening (s)": "{opening[seconds]:.2f}",
        "CPU s": "{opening[cpu_seconds]:.2f}",
        "handles": "{handles}",
        "turn (us)": "{turn_microseconds:.1f}",
        "read (us)": "{read_microseconds:.1f}",
    }
    show(f"Shards of {SHARD_DOCUMENTS} documents, opened as one store", [shards], columns)
    write(facts() | {"seed": 0, "rows": rows, "shards": shards}, options.out)


def _measured_apart(documents: int, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, which has no other memory than this takes."""
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        prefix = Path(directory) / "corpus"
        written = documents <= options.on_disk
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:
            if written:
                console.print(f"writing the index of {documents:,} documents")
                apart.submit(_write, prefix, documents).result()
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:
            return apart.submit(_measured, prefix, documents, written).result()


def _apart(directory: Path | None, make: Callable[..., None], measure: Callable[..., Any], number: int) -> Any:
    """What ``measure`` finds in a process of its own of the ``number`` that ``make`` wrote in another."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for step in (make, measure):
            with ProcessPoolExecutor(1, get_context("spawn")) as apart:
                found = apart.submit(step, Path(folder), number).result()
        return found


def _write_shards(folder: Path, shards: int) -> None:
    lengths = sample_lengths(SHARD_DOCUMENTS, WINDOW, seed=0)
    for number in range(shards):
        prefix = folder / f"{number:05}_tokens"
        with store_path(prefix, ".idx").open("w+b") as file:
            writer = IndexWriter(file, TOKENS)
            writer.add(lengths)
            writer.finish()
        with store_path(prefix, ".bin").open("wb") as file:
            file.truncate(int(lengths.sum()) * TOKENS.itemsize)


def _measured_shards(folder: Path, shards: int) -> dict[str, Any]:
    freeze_imports()
    handles = len(os.listdir("/proc/self/fd"))
    since = _Clock()
    store = TokenStore.open(folder)
    opening = since()
    order = Permutation(len(store), 0, 0, 0)
    blocks = [order.between(start, start + BLOCK) for start in range(0, BLOCK * SHARD_BLOCKS, BLOCK)]
    lengths: Any = store.stored_lengths
    turn_seconds = _cpu_seconds(lambda: [lengths[block] for block in blocks])
    read_seconds = _cpu_seconds(lambda: [store.read(document, 0, 1) for document in np.concatenate(blocks).tolist()])
    return {
        "shards": shards,
        "documents": len(store),
        "opening": opening,
        "handles": len(os.listdir("/proc/self/fd")) - handles,
        "turn_microseconds": 1e6 * turn_seconds / (BLOCK * SHARD_BLOCKS),
        "read_microseconds": 1e6 * read_seconds / (BLOCK * SHARD_BLOCKS),
    }


def _lengths() -> NDArray[np.int64]:
    return sample_lengths(PERIOD, WINDOW, seed=0)


def _write(prefix: Path, documents: int) -> None:
    """An index of ``documents`` documents, and a token file of nothing but its size."""
    lengths, left = _lengths(), documents
    with store_path(prefix, ".idx").open("w+b", buffering=1 << 20) as file:
        writer, tokens = IndexWriter(file, TOKENS), 0
        while left:
            part = lengths[: min(left, PERIOD)]
            writer.add(part)
            left, tokens = left - len(part), tokens + int(part.sum())
        writer.finish()
        file.flush()
        os.fsync(file.fileno())
    with store_path(prefix, ".bin").open("wb") as file:
        file.truncate(tokens * TOKENS.itemsize)
    with store_path(prefix, ".idx").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _Virtual:
    """An array of an index whose entries ``entry`` computes where they are asked for."""

    def __init__(self, size: int, entry: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> None:
        self._size, self._entry = size, entry

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, places: Any) -> Any:
        if isinstance(places, slice):
            return self._entry(np.arange(*places.indices(self._size)))
        return self._entry(np.asarray(places) % self._size)


class _VirtualStore(TokenStore):
    """``documents`` documents whose lengths repeat after a million."""

    identity = "virtual"

    def __init__(self, documents: int) -> None:
        lengths = _lengths()
        begins, period = np.cumsum(lengths) - lengths, int(lengths.sum())

        def pointers(places: NDArray[np.int64]) -> NDArray[np.int64]:
            return (places // PERIOD * period + begins[places % PERIOD]) * TOKENS.itemsize

        arrays: list[Any] = [
            _Virtual(documents, lambda places: lengths[places % PERIOD].astype(np.int32)),
            _Virtual(documents, pointers),
            _Virtual(documents + 1, lambda places: places),
        ]
        index = TokenIndex("virtual", TOKENS, *arrays)
        self._virtual = Shard(index, np.broadcast_to(np.zeros(1, TOKENS), index.tokens), {})
        super().__init__([["virtual"]])

    def _open_shard(self, prefix: str) -> Shard:
        return self._virtual


def _measured(prefix: Path, documents: int, written: bool) -> dict[str, Any]:
    job = simulated_job("7b", WINDOW, "best", micro_batches=8, dp=4, pp=4, tp=8, cp=2)
    freeze_imports()
    before = _private_mib()

    def opened() -> TokenStore:
        return TokenStore.open(prefix) if written else _VirtualStore(documents)

    since = _Clock()
    lengths: Any = opened().stored_lengths
    opening = since()
    planner = StepPlanner(decide(job, lengths), lengths)
    next(planner)
    first_step = since()

    state = planner.state_dict()
    place = int(np.random.default_rng(0).integers(documents))
    state["stream"]["stores"][0] |= {"epoch": 3, "cursor": place}
    since = _Clock()
    lengths = opened().stored_lengths
    resumed = StepPlanner(decide(job, lengths), lengths)
    resumed.load_state_dict(state)
    next(resumed)
    resume = since()

    for _ in islice(resumed, STEPS):
        pass
    order, stream = Permutation(documents, 0, 0, 0), DocumentStream(lengths, job.data)
    starts = [place // 2 + BLOCK * block for block in range(BLOCKS)]
    place_seconds = _cpu_seconds(lambda: [order.between(start, start + BLOCK) for start in starts])
    first_turn_seconds, turn_seconds = (
        _cpu_seconds(lambda: [lengths[order.between(start, start + BLOCK)] for start in starts]) for _ in range(2)
    )
    segments_seconds = _cpu_seconds(lambda: [stream.take(BLOCK) for _ in starts])
    gc.collect()
    return {
        "documents": documents,
        "index": f"{store_path(prefix, '.idx').stat().st_size / 1e9:.0f} GB on disk" if written else "virtual",
        "opening": opening,
        "first_step": first_step,
        "resume": resume,
        "private_mib_before": before,
        "private_mib": _private_mib(),
        "place_microseconds": 1e6 * place_seconds / (BLOCK * BLOCKS),
        "first_turn_microseconds": 1e6 * first_turn_seconds / (BLOCK * BLOCKS),
        "turn_microseconds": 1e6 * turn_seconds / (BLOCK * BLOCKS),
        "segments_microseconds": 1e6 * segments_seconds / (BLOCK * BLOCKS),
    }


class _Clock:
    def __init__(self) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def __call__(self) -> dict[str, float]:
        cpu = time.process_time() - self._cpu_began
        return {"seconds": time.perf_counter() - self._began, "cpu_seconds": cpu}


def _cpu_seconds(run: Callable[[], object]) -> float:
    timer = CpuTimer()
    timer(run)
    return timer.seconds


def _private_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


if __name__ == "__main__":
    sys.exit(main())
