"""Large corpora: how soon a rank has its first plan, what memory it holds, and how soon many shards are open.

    .venv/bin/python -m benchmarks.corpora [--documents N ...] [--shards N] [--out FILE]

Every corpus is opened in a process of its own, which plans steps of a 7B model (window 128K, 32 micro-batches, tp 8,
cp 2, pp 4, dp 4) with the preset ``balanced``. "First documents" goes from opening the store to its first block of the
order, "first step" to the first plan, ``decide`` included and imports not; "resume" is a first plan after a random
position of epoch 3. Memory is what the kernel counts as a process's own (``RssAnon``); pages of the index, and of
libraries, belong to all processes of a machine. The index is really written, 20 bytes for each document, to
``--directory``, and dropped from the page cache before it is opened; token files are sparse. Then ``--shards`` stores
of 100 documents are opened as one, and a block of 64 documents lies in as many of them. Needs Linux.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parts.measurement import command, facts, freeze_imports, make_parser, show, write
from wlb.documents.permutation import Permutation
from wlb.documents.store.index import write_index
from wlb.documents.store.reader import TokenStore
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.planner import StepPlanner
from wlb.simulate import simulated_job
from wlb.simulate.decide import decide

WINDOW, PERIOD = 131_072, 1 << 20  # lengths repeat after a million documents
TOKENS = np.dtype("<u2")
BLOCK, BLOCKS, SHARD_DOCUMENTS = 64, 100, 100


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what was asked for, print tables, and write them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[10**8], metavar="N")
    parser.add_argument("--shards", type=int, default=10_000, metavar="N", help="stores that are opened as one")
    parser.add_argument("--directory", type=Path, help="where (default: a temporary directory)")
    options = parser.parse_args(arguments)
    if sys.platform != "linux":
        raise UserError("memory that is private to a process is read from /proc, which only Linux has")
    rows = [_apart(options.directory, _write_one, _measured, documents) for documents in options.documents]
    columns = {
        "documents": "{documents:.0e}",
        **{
            f"{what}, CPU s": f"{{{what.replace(' ', '_')}:.2f}}"
            for what in ("first documents", "first step", "resume")
        },
        "private MiB": "{private_mib:.0f}",
        "before": "{private_mib_before:.0f}",
    }
    show("Large corpora: one rank that plans", rows, columns)
    shards = _apart(options.directory, _write_shards, _measured_shards, options.shards)
    columns = {
        "shards": "{shards}",
        "opening, CPU s": "{opening:.2f}",
        "handles": "{handles}",
        "block of lengths (us a document)": "{lengths_microseconds:.1f}",
        "read (us)": "{read_microseconds:.1f}",
    }
    show(f"Shards of {SHARD_DOCUMENTS} documents, opened as one store", [shards], columns)
    write(facts() | {"seed": 0, "rows": rows, "shards": shards}, options.out)


def _apart(directory: Path | None, make: Callable[..., None], measure: Callable[..., Any], number: int) -> Any:
    """What ``measure`` finds of the ``number`` that ``make`` wrote, each in a process of its own."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for step in (make, measure):
            with ProcessPoolExecutor(1, get_context("spawn")) as apart:
                found = apart.submit(step, Path(folder), number).result()
        return found


def _write_one(folder: Path, documents: int) -> None:
    _write(folder / "corpus", documents)


def _write_shards(folder: Path, shards: int) -> None:
    for number in range(shards):
        _write(folder / f"{number:05}_tokens", SHARD_DOCUMENTS)


def _write(prefix: Path, documents: int) -> None:
    """An index of ``documents`` documents, and a token file of nothing but its size."""
    lengths = np.resize(sample_lengths(min(documents, PERIOD), WINDOW, seed=0).astype(np.int32), documents)
    index = Path(f"{prefix}.idx")
    write_index(index, TOKENS, lengths)
    with index.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(int(lengths.sum(dtype=np.int64)) * TOKENS.itemsize)


def _measured(folder: Path, documents: int) -> dict[str, Any]:
    job = simulated_job("7b", WINDOW, "balanced", micro_batches=8, dp=4, pp=4, tp=8, cp=2)
    freeze_imports()
    before, began = _private_mib(), time.process_time()
    lengths: Any = TokenStore.open(folder / "corpus").stored_lengths
    _ = lengths[Permutation(documents, 0, 0, 0).between(0, BLOCK)]
    first_documents = time.process_time() - began
    planner = StepPlanner(decide(job, lengths), lengths)
    next(planner)
    first_step = time.process_time() - began
    state = planner.state_dict()
    state["stream"]["stores"][0] |= {"epoch": 3, "cursor": int(np.random.default_rng(0).integers(documents))}
    began = time.process_time()
    lengths = TokenStore.open(folder / "corpus").stored_lengths
    resumed = StepPlanner(decide(job, lengths), lengths)
    resumed.load_state_dict(state)
    next(resumed)
    return {
        "documents": documents,
        "first_documents": first_documents,
        "first_step": first_step,
        "resume": time.process_time() - began,
        "private_mib_before": before,
        "private_mib": _private_mib(),
    }


def _measured_shards(folder: Path, shards: int) -> dict[str, Any]:
    freeze_imports()
    handles, began = len(os.listdir("/proc/self/fd")), time.process_time()
    store = TokenStore.open(folder)
    opened = time.process_time()
    order = Permutation(len(store), 0, 0, 0)
    lengths: Any = store.stored_lengths
    blocks = [order.between(start, start + BLOCK) for start in range(0, BLOCK * BLOCKS, BLOCK)]
    looked_up = time.process_time()
    for block in blocks:
        _ = lengths[block]
    reading = time.process_time()
    for document in np.concatenate(blocks).tolist():
        store.read(document, 0, 1)
    ended = time.process_time()
    return {
        "shards": shards,
        "documents": len(store),
        "opening": opened - began,
        "handles": len(os.listdir("/proc/self/fd")) - handles,
        "lengths_microseconds": 1e6 * (reading - looked_up) / (BLOCK * BLOCKS),
        "read_microseconds": 1e6 * (ended - reading) / (BLOCK * BLOCKS),
    }


def _private_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


if __name__ == "__main__":
    sys.exit(main())
