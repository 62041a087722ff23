"""From a device and a model shape to a ``WorkloadProfile`` and the measurements that test it.

Profiled sizes are powers of a ratio; interpolation between them is exact for any cost a d^2 + b d. Held-out sizes are
random, so they fall between those, on no multiple of a tile. Both are measured in the same rounds, under the same
conditions. What one block takes is multiplied by the number of layers, and what surrounds the blocks is added to the
linear part.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from wlb import __version__
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.models.transformer import check_built
from wlb.profiling.timing import Case, CudaClock, Effort, ProcessClock, Timing, WallClock, measure_in_turns
from wlb.profiling.workbench import Workbench
from wlb.training.environment import keep_freed_memory
from wlb.workload import ModelShape
from wlb.workload.profile import Measurements, PrefixMeasurements, WorkloadProfile

_EFFORT, _QUICK_EFFORT = Effort(60.0, fewest_rounds=3), Effort(6.0, fewest_rounds=2)
_SMALLEST_DOCUMENT = 16
_SMALLEST_MICRO_BATCH = 64
_SMALLEST_MAX_LENGTH = 256  # leaves every axis at least two sizes
_LARGEST_MAX_LENGTH = 2**22  # beyond, one measurement takes hours
_HELD_OUT_DOCUMENTS = 12
_HELD_OUT_PIECES = 12
_HELD_OUT_MICRO_BATCHES = 8

_Key = tuple[str | int, ...]  # the kind of a case, and its sizes


@dataclass(frozen=True)
class ProfileSettings:
    """What is measured, and on what; ``max_length`` is in tokens, of documents and of micro-batches."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    max_length: int
    tp: int = 1
    threads: int = 1
    quick: bool = False


class Piece(NamedTuple):
    """Queries ``start`` to ``stop`` of a segment, which attend the keys up to their own."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ProfiledSizes:
    """Sizes (tokens) that the profile holds."""

    documents: tuple[int, ...]
    micro_batches: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class HeldOutSizes:
    """Sizes (tokens) that the profile has not seen; ``micro_batches`` are segment lengths."""

    documents: tuple[int, ...]
    pieces: tuple[Piece, ...]
    micro_batches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class HeldOutSeconds:
    """Held-out sizes with their measured seconds, forward and backward over all layers."""

    sizes: HeldOutSizes
    documents: tuple[float, ...]
    pieces: tuple[float, ...]
    micro_batches: tuple[float, ...]


def measure_profile(
    settings: ProfileSettings, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[WorkloadProfile, HeldOutSeconds]:
    """Measure ``settings.shape`` and return the profile, and held-out measurements to test it with.

    ``on_progress`` is told how many samples are taken and how many there will be. Raises ``UserError`` if ``tp``
    does not divide the shape, if the device has no flash attention for the type, and if its memory is too small.
    """
    shard = tensor_parallel_shard(settings.shape, settings.tp)
    sizes = profiled_sizes(settings.max_length, settings.quick)
    held_out = held_out_sizes(settings.max_length, settings.quick)
    clock = _clock(settings)
    if settings.device.type == "cpu":
        keep_freed_memory()  # as ranks do
    with _threads(settings.threads):
        try:
            bench = Workbench(shard, settings.max_length, settings.device, settings.dtype)
            cases = _cases(bench, sizes, held_out)
            effort = _QUICK_EFFORT if settings.quick else _EFFORT
            measured = measure_in_turns({key: case for key, (case, _) in cases.items()}, clock, effort, on_progress)
        except torch.OutOfMemoryError:
            raise UserError(
                f"the device has too little memory for {settings.max_length} tokens; lower --max-length or raise --tp"
            ) from None
    timings = _Timings({key: timing * (1 / cases[key][1]) for key, timing in measured.items()}, shard.layers)
    return _profile(settings, clock, sizes, timings), _held_out(held_out, timings)


def tensor_parallel_shard(shape: ModelShape, tp: int) -> ModelShape:
    """What one of ``tp`` ranks holds: its heads, and its columns of the feed-forward layer and output head.

    Raises ``UserError`` if ``tp`` does not divide them, and for a model that is only priced.
    """
    check_built(shape)
    if shape.sliding_window is not None:
        raise UserError(
            f"the model has sliding_window = {shape.sliding_window}, and profiles measure full attention; profile the "
            "model without it, or simulate it by its hardware preset"
        )
    names = ("heads", "kv_heads", "ffn_hidden", "vocab_size")
    for name in names:
        if getattr(shape, name) % tp:
            raise UserError(f"--tp {tp} does not divide the model's {name} = {getattr(shape, name)}; choose another")
    return replace(shape, **{name: getattr(shape, name) // tp for name in names})


def profiled_sizes(max_length: int, quick: bool) -> ProfiledSizes:
    """Documents and micro-batches of up to ``max_length`` tokens; fewer of them if ``quick``.

    Raises ``UserError`` if ``max_length`` is too small for that, or too large.
    """
    if max_length < _SMALLEST_MAX_LENGTH:
        raise UserError(f"--max-length {max_length} is below {_SMALLEST_MAX_LENGTH} tokens; raise it")
    if max_length > _LARGEST_MAX_LENGTH:
        raise UserError(f"--max-length {max_length} is over {_LARGEST_MAX_LENGTH} tokens; lower it")
    ratio, table_ratio = (2.0, 8.0) if quick else (2**0.5, 4.0)
    return ProfiledSizes(
        documents=_powers(_SMALLEST_DOCUMENT, max_length, ratio),
        micro_batches=_powers(_SMALLEST_MICRO_BATCH, max_length, ratio**2),
        queries=_powers(_SMALLEST_DOCUMENT, max_length // 2, table_ratio),
        keys=_powers(_SMALLEST_MICRO_BATCH, max_length, table_ratio),
    )


def held_out_sizes(max_length: int, quick: bool) -> HeldOutSizes:
    """Random documents, context-parallel chunks of documents, and micro-batches of sampled documents."""
    random = np.random.default_rng(max_length)
    share = 2 if quick else 1

    def lengths(smallest: int, count: int) -> tuple[int, ...]:
        drawn = np.exp(random.uniform(np.log(smallest), np.log(max_length), count // share))
        return tuple(sorted({int(length) for length in drawn}))

    documents = lengths(_SMALLEST_DOCUMENT, _HELD_OUT_DOCUMENTS)
    pieces = tuple(_chunk(random, stop) for stop in lengths(_SMALLEST_MICRO_BATCH, _HELD_OUT_PIECES))
    tokens = random.integers(max_length // 2, max_length, _HELD_OUT_MICRO_BATCHES // share, endpoint=True)
    micro_batches = tuple(_fill(int(count), max_length, seed) for seed, count in enumerate(tokens))
    return HeldOutSizes(documents, pieces, micro_batches)


def _powers(smallest: int, largest: int, ratio: float) -> tuple[int, ...]:
    """About ``ratio`` apart, both ends included."""
    count = max(2, 1 + round(np.log(largest / smallest) / np.log(ratio)))
    return tuple(np.unique(np.rint(np.geomspace(smallest, largest, count)).astype(int)).tolist())


def _chunk(random: np.random.Generator, stop: int) -> Piece:
    """One of 4 to 32 chunks of a document, as sharding over 2 to 16 ranks cuts it, not the first."""
    chunks = 2 ** int(random.integers(2, 5, endpoint=True))
    size = max(1, stop // chunks)
    return Piece(stop - size, stop)


def _fill(tokens: int, context_window: int, seed: int) -> tuple[int, ...]:
    """Sampled documents one after another, the last one cut so that they add up to ``tokens``."""
    lengths = sample_lengths(tokens, context_window, seed)
    ends = np.minimum(np.cumsum(lengths), tokens)
    filled = np.diff(ends[: 1 + int(np.argmax(ends == tokens))], prepend=0)
    return tuple(filled.tolist())


def _cases(bench: Workbench, sizes: ProfiledSizes, held_out: HeldOutSizes) -> dict[_Key, tuple[Case, float]]:
    """All cases, and how many documents (or which share of a micro-batch) a call of each is."""
    pieces = [(piece.tokens, piece.start) for piece in held_out.pieces]
    documents = (*sizes.documents, *held_out.documents, *(tokens for tokens, _ in pieces))
    ends = (*sizes.micro_batches, *map(sum, held_out.micro_batches))
    return {
        **{("documents", length): bench.documents(length) for length in documents},
        **{("prefix", *prefix): bench.prefix(*prefix) for prefix in (*product(sizes.queries, sizes.keys), *pieces)},
        **{("linear", tokens): (bench.linear(tokens), 1.0) for tokens in sizes.micro_batches},
        **{("block", *lengths): (bench.block(lengths), 1.0) for lengths in held_out.micro_batches},
        **{("ends", tokens): bench.ends(tokens) for tokens in ends},
    }


class _Timings(NamedTuple):
    """Seconds by case, of one layer or of the ends, and over all layers."""

    by_case: dict[_Key, Timing]
    layers: int

    def attention(self, kind: str, *sizes: int) -> Timing:
        return self.by_case[kind, *sizes] * self.layers

    def micro_batch(self, kind: str, *lengths: int) -> Timing:
        return self.by_case[kind, *lengths] * self.layers + self.by_case["ends", sum(lengths)]


def _profile(
    settings: ProfileSettings, clock: ProcessClock, sizes: ProfiledSizes, timings: _Timings
) -> WorkloadProfile:
    table = [[timings.attention("prefix", queries, keys) for keys in sizes.keys] for queries in sizes.queries]
    return WorkloadProfile(
        machine=_machine(settings),
        versions={"wlb-llm": __version__, "torch": torch.__version__, "python": platform.python_version()},
        dtype=str(settings.dtype).removeprefix("torch."),
        clock=clock.name,
        threads=settings.threads,
        model=settings.shape,
        tp=settings.tp,
        attention=_measurements(
            sizes.documents, [timings.attention("documents", length) for length in sizes.documents]
        ),
        linear=_measurements(
            sizes.micro_batches, [timings.micro_batch("linear", tokens) for tokens in sizes.micro_batches]
        ),
        prefix_attention=PrefixMeasurements(
            queries=sizes.queries,
            keys=sizes.keys,
            forward_seconds=tuple(tuple(timing.forward for timing in row) for row in table),
            backward_seconds=tuple(tuple(timing.backward for timing in row) for row in table),
        ),
    )


def _measurements(tokens: tuple[int, ...], timings: list[Timing]) -> Measurements:
    return Measurements(
        tokens=tokens,
        forward_seconds=tuple(timing.forward for timing in timings),
        backward_seconds=tuple(timing.backward for timing in timings),
    )


def _held_out(sizes: HeldOutSizes, timings: _Timings) -> HeldOutSeconds:
    return HeldOutSeconds(
        sizes,
        documents=tuple(timings.attention("documents", length).both for length in sizes.documents),
        # As context_parallel_attention runs a piece: among its own tokens, and over those before it.
        pieces=tuple(
            (timings.attention("documents", piece.tokens) + timings.attention("prefix", piece.tokens, piece.start)).both
            for piece in sizes.pieces
        ),
        micro_batches=tuple(timings.micro_batch("block", *lengths).both for lengths in sizes.micro_batches),
    )


def _clock(settings: ProfileSettings) -> ProcessClock:
    if settings.device.type == "cuda":
        return CudaClock()
    return ProcessClock() if settings.threads == 1 else WallClock()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _machine(settings: ProfileSettings) -> str:
    if settings.device.type == "cuda":
        return torch.cuda.get_device_name(settings.device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    return f"{settings.threads} thread{'s' if settings.threads > 1 else ''} of {cpu}"
