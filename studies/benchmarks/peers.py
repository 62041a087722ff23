"""How others distribute the documents of a global batch, each called through its own package where it has one.

- verl: ``get_seqlen_balanced_partitions``, Karmarkar-Karp differencing into exactly N micro-batches, over the same
  prices that ours get. Its partitions know no limit on tokens.
- TRL: ``pack_dataset(strategy="bfd")``, best fit decreasing into as many bins of a context window as it needs. It moves
  the tokens as well, through Arrow, which is inside its time.
- Megatron-Core: ``DpBalancedScheduler``, next fit in arrival order. The releases on PyPI (checked: 0.16.1) have no such
  class, so its rule is reproduced here from the behaviour of the development branch, without its padding of the
  number of bins to a multiple of the data-parallel size.

The last two make more than N micro-batches where the documents do not fit N windows exactly; a step has as many as they
make, and its imbalance is taken over those.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.parts.measurement import versions

Groups = list[list[int]]


@dataclass(frozen=True)
class Peer:
    """``partition`` alone is timed; ``prepare`` and ``read`` convert to and from the data types it works on.

    ``prepare`` takes lengths, seconds, N and the context window; ``read`` returns the indices of each micro-batch.
    """

    label: str
    prepare: Callable[[Sequence[int], Sequence[float], int, int], Any]
    partition: Callable[[Any], Any]
    read: Callable[[Any], Groups]


def installed_peers() -> tuple[list[Peer], list[str]]:
    """The peers that can be called here, and the labels of those that are not installed."""
    candidates = (("verl", _verl), ("trl", _trl))
    peers = [make(versions(name)[name]) for name, make in candidates if importlib.util.find_spec(name)]
    missing = [name for name, _ in candidates if not importlib.util.find_spec(name)]
    return [*peers, _next_fit_peer()], missing


def _verl(version: str) -> Peer:
    partitions = importlib.import_module("verl.utils.seqlen_balancing").get_seqlen_balanced_partitions

    def prepare(lengths: Sequence[int], seconds: Sequence[float], micro_batches: int, window: int) -> Any:
        return [round(price * 1e12) for price in seconds], micro_batches  # it compares whole numbers: picoseconds

    def partition(prepared: Any) -> Groups:
        prices, micro_batches = prepared
        return partitions(prices, micro_batches, equal_size=False)  # type: ignore[no-any-return]

    return Peer(f"verl {version}, Karmarkar-Karp", prepare, partition, lambda groups: groups)


def _trl(version: str) -> Peer:
    arrow = importlib.import_module("pyarrow")
    datasets = importlib.import_module("datasets")
    pack_dataset = importlib.import_module("trl").pack_dataset
    datasets.disable_progress_bars()
    whole_batch = {"batch_size": None, "keep_in_memory": True, "load_from_cache_file": False}

    def prepare(lengths: Sequence[int], seconds: Sequence[float], micro_batches: int, window: int) -> Any:
        """A data set whose tokens are the index of their document, from which ``read`` tells what went where."""
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        column = arrow.ListArray.from_arrays(offsets, tokens)
        return datasets.Dataset(arrow.table({"input_ids": column})), window

    def partition(prepared: Any) -> Any:
        dataset, window = prepared
        return pack_dataset(dataset, window, strategy="bfd", map_kwargs=whole_batch)

    def read(packed: Any) -> Groups:
        table = packed.with_format("arrow")[:]
        tokens = table["input_ids"].combine_chunks().values.to_numpy()
        groups, first = [], 0
        for lengths in table["seq_lengths"].to_pylist():
            starts = first + np.concatenate([[0], np.cumsum(lengths)])
            groups.append(tokens[starts[:-1]].tolist())
            first = int(starts[-1])
        return groups

    return Peer(f"TRL {version}, bfd", prepare, partition, read)


def _next_fit_peer() -> Peer:
    def prepare(lengths: Sequence[int], seconds: Sequence[float], micro_batches: int, window: int) -> Any:
        return lengths, window

    return Peer("Megatron-Core, next fit (reproduced)", prepare, _next_fit, lambda groups: groups)


def _next_fit(prepared: tuple[Sequence[int], int]) -> Groups:
    """Fill one micro-batch after the other; a document that does not fit the open one opens the next."""
    lengths, window = prepared
    groups: Groups = [[]]
    room = window
    for index, length in enumerate(lengths):
        if length > room and groups[-1]:
            groups.append([])
            room = window
        groups[-1].append(index)
        room -= length
    return groups
