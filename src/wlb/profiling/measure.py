"""Measure a ``WorkloadProfile`` of a model shape on a device, and held-out sizes to test it with.

Profiled sizes are powers of a ratio; interpolation between them is exact for any cost a d^2 + b d. Held-out sizes are
random, so they fall between profiled sizes and on no multiple of a tile. The same rounds measure both.
"""

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wlb import __version__
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.models.transformer import check_built
from wlb.profiling.timing import Timing, measure_in_turns
from wlb.profiling.workbench import Key, Workbench
from wlb.runtime.clock import PROCESS_TIME, WALL_TIME, Clock, clock_of
from wlb.runtime.environment import activate_fast_attention
from wlb.training.environment import keep_freed_memory
from wlb.workload import Costs, ModelShape
from wlb.workload.profile import Measurements, PrefixMeasurements, WorkloadProfile

_ROUNDS, _QUICK_ROUNDS = 5, 2
_SMALLEST_DOCUMENT, _SMALLEST_MICRO_BATCH = 16, 64
_SMALLEST_MAX_LENGTH, _LARGEST_MAX_LENGTH = 256, 2**22  # gives two sizes on every axis; takes hours
_HELD_OUT = 12  # documents, and as many pieces; two thirds as many micro-batches

Sizes = tuple[int, ...]
# Held-out sizes in tokens, with their seconds over all layers: "documents" by length, "pieces of documents" by start
# and stop of their queries, "micro-batches" by segment lengths.
HeldOut = dict[str, dict[Any, float]]


@dataclass(frozen=True)
class ProfileSettings:
    """What to measure, and on which device; ``max_length`` limits documents and micro-batches, in tokens."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    max_length: int
    tp: int = 1
    threads: int = 1
    quick: bool = False

    @property
    def clock(self) -> Clock:
        """CPU time if there is one CPU thread, because other programs do not lengthen it; else wall time."""
        return clock_of(self.device, PROCESS_TIME if self.threads == 1 else WALL_TIME)


def measure_profile(
    settings: ProfileSettings, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[WorkloadProfile, HeldOut]:
    """Measure ``settings.shape``; returns the profile, and held-out measurements to test it with.

    Raises ``UserError`` if ``tp`` does not divide the shape, if the device has no flash attention for the type, or if
    it has too little memory.
    """
    shard = tensor_parallel_shard(settings.shape, settings.tp)
    lengths, tokens, queries, keys = axes = profiled_sizes(settings.max_length, settings.quick)
    documents, pieces, micro_batches = held_out_sizes(settings.max_length, settings.quick)
    prefixes = [(stop - start, start) for start, stop in pieces]
    alone = (*lengths, *documents, *(queries for queries, _ in prefixes))
    cases: list[Key] = [("documents", (length,)) for length in alone]
    cases += [("prefix", both) for both in (*product(queries, keys), *prefixes)]
    cases += [("linear", (count,)) for count in tokens] + [("block", lengths) for lengths in micro_batches]
    cases += [("ends", (count,)) for count in (*tokens, *map(sum, micro_batches))]
    timings = _measure(settings, shard, cases, on_progress)

    def seconds(kind: str, *tokens: int) -> float:
        return float(timings[kind, tokens].sum())

    # As context_parallel_attention runs a piece: inside itself, and over the tokens before it.
    of_pieces = {(a, b): seconds("documents", b - a) + seconds("prefix", b - a, a) for a, b in pieces}
    return _profile(settings, axes, timings), {
        "documents": {length: seconds("documents", length) for length in documents},
        "pieces of documents": of_pieces,
        "micro-batches": {lengths: seconds("block", *lengths) for lengths in micro_batches},
    }


def tensor_parallel_shard(shape: ModelShape, tp: int) -> ModelShape:
    """The shape that one of ``tp`` ranks holds: its heads, and its columns of the feed-forward layer and output head.

    Raises ``UserError`` if ``tp`` does not divide them, and for a model that can only be priced.
    """
    check_built(shape)
    if shape.experts is not None:
        raise UserError(
            "a profile times dense blocks, and the model has experts; name a dense model, such as llama3-8b"
        )
    if shape.sliding_window is not None:
        raise UserError(
            f"a profile cannot have sliding_window = {shape.sliding_window}; simulate the model by its preset"
        )
    names = ("heads", "kv_heads", "ffn_hidden", "vocab_size")
    for name in names:
        if getattr(shape, name) % tp:
            raise UserError(f"--tp {tp} does not divide the model's {name} = {getattr(shape, name)}; choose another")
    return replace(shape, **{name: getattr(shape, name) // tp for name in names})


def profiled_sizes(max_length: int, quick: bool) -> tuple[Sizes, Sizes, Sizes, Sizes]:
    """Sizes of documents, micro-batches, queries and keys, up to ``max_length`` tokens; fewer if ``quick``.

    Raises ``UserError`` if ``max_length`` is too small or too large.
    """
    if max_length < _SMALLEST_MAX_LENGTH:
        raise UserError(f"--max-length {max_length} is below {_SMALLEST_MAX_LENGTH} tokens; raise it")
    if max_length > _LARGEST_MAX_LENGTH:
        raise UserError(f"--max-length {max_length} is over {_LARGEST_MAX_LENGTH} tokens; lower it")

    def powers(smallest: int, largest: int, ratio: float) -> Sizes:  # about ``ratio`` apart, including both ends
        count = max(2, 1 + round(np.log(largest / smallest) / np.log(ratio)))
        return tuple(np.unique(np.rint(np.geomspace(smallest, largest, count)).astype(int)).tolist())

    ratio, of_table = (2.0, 8.0) if quick else (2**0.5, 4.0)
    queries, keys = (_SMALLEST_DOCUMENT, max_length // 2, of_table), (_SMALLEST_MICRO_BATCH, max_length, of_table)
    documents, tokens = (_SMALLEST_DOCUMENT, max_length, ratio), (_SMALLEST_MICRO_BATCH, max_length, ratio**2)
    return powers(*documents), powers(*tokens), powers(*queries), powers(*keys)


def held_out_sizes(max_length: int, quick: bool) -> tuple[list[int], list[tuple[int, int]], list[Sizes]]:
    """Random documents, context-parallel chunks of documents, and micro-batches of sampled documents."""
    random = np.random.default_rng(max_length)
    count = _HELD_OUT // 2 if quick else _HELD_OUT

    def lengths(smallest: int) -> list[int]:
        return sorted({int(n) for n in np.exp(random.uniform(np.log(smallest), np.log(max_length), count))})

    def filled(tokens: int, seed: int) -> Sizes:  # documents, the last one cut to fit
        ends = np.minimum(np.cumsum(sample_lengths(tokens, max_length, seed)), tokens)
        return tuple(np.diff(ends[: 1 + int(np.argmax(ends == tokens))], prepend=0).tolist())

    documents, stops = lengths(_SMALLEST_DOCUMENT), lengths(_SMALLEST_MICRO_BATCH)
    # One of 4 to 32 chunks, but not the first, as sharding over 2 to 16 ranks cuts a document.
    chunks = 2 ** random.integers(2, 5, len(stops), endpoint=True)
    pieces = [(stop - max(1, stop // int(of)), stop) for stop, of in zip(stops, chunks, strict=True)]
    tokens = random.integers(max_length // 2, max_length, 2 * count // 3, endpoint=True)
    return documents, pieces, [filled(int(n), seed) for seed, n in enumerate(tokens)]


def _measure(
    settings: ProfileSettings, shard: ModelShape, keys: list[Key], on_progress: Callable[[int, int], None]
) -> dict[Key, Timing]:
    """Seconds of every case over all layers; "linear" and "block" include the "ends" around the blocks."""
    if settings.device.type == "cpu":
        keep_freed_memory()  # as ranks do
    else:
        activate_fast_attention(settings.device)
    threads, rounds = torch.get_num_threads(), _QUICK_ROUNDS if settings.quick else _ROUNDS
    torch.set_num_threads(settings.threads)
    try:
        bench = Workbench(shard, settings.max_length, settings.device, settings.dtype)
        cases = {key: bench.case(*key) for key in keys}
        measured = measure_in_turns(
            {key: case for key, (case, _) in cases.items()}, settings.clock, rounds, on_progress
        )
    except RuntimeError as error:  # an OutOfMemoryError of a GPU, or a plain one of a CPU
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise UserError(
            f"too little memory for {settings.max_length} tokens; lower --max-length or raise --tp"
        ) from None
    finally:
        torch.set_num_threads(threads)
    one = {key: timing / cases[key][1] for key, timing in measured.items()}
    around = {key: one["ends", (sum(key[1]),)] for key in one if key[0] in ("linear", "block")}
    return {key: timing * shard.layers + around.get(key, 0.0) for key, timing in one.items()}


def _profile(settings: ProfileSettings, axes: tuple[Sizes, ...], timings: dict[Key, Timing]) -> WorkloadProfile:
    def measurements(kind: str, sizes: Sizes) -> Measurements:
        forward, backward = np.array([timings[kind, (size,)] for size in sizes]).T.tolist()
        return Measurements(tokens=sizes, forward_seconds=forward, backward_seconds=backward)

    lengths, tokens, queries, keys = axes
    table = np.array([[timings["prefix", (count, size)] for size in keys] for count in queries])
    forward, backward = np.moveaxis(table, -1, 0).tolist()
    prefix = PrefixMeasurements(queries=queries, keys=keys, forward_seconds=forward, backward_seconds=backward)
    return WorkloadProfile(
        machine=_machine(settings),
        versions={"wlb-llm": __version__, "torch": torch.__version__, "python": platform.python_version()},
        dtype=str(settings.dtype).removeprefix("torch."),
        clock=settings.clock.name,
        threads=settings.threads,
        model=settings.shape,
        tp=settings.tp,
        attention=measurements("documents", lengths),
        linear=measurements("linear", tokens),
        prefix_attention=prefix,
    )


def _machine(settings: ProfileSettings) -> str:
    if settings.device.type == "cuda":
        return torch.cuda.get_device_name(settings.device)
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else "")
    return f"{settings.threads} thread{'s' * (settings.threads > 1)} of {named[1] if named else platform.machine()}"


def prediction_errors(workload: Costs, held_out: HeldOut) -> list[dict[str, Any]]:
    """Median and worst relative error of ``workload`` on each kind of work."""
    rows = []
    for shapes, predicted in predictions(workload, held_out).items():
        errors = np.abs(np.asarray(predicted) / [*held_out[shapes].values()] - 1)
        found = {"median": float(np.median(errors)), "worst": float(errors.max())}
        rows.append({"shapes": shapes, "count": len(errors)} | found)
    return rows


def predictions(workload: Costs, held_out: HeldOut) -> dict[str, Any]:
    """Seconds that ``workload`` predicts for each size of ``held_out``."""
    documents, pieces, micro_batches = held_out.values()
    attention = workload.attention_seconds([*documents]), workload.piece_seconds(*np.array([*pieces]).T)
    sums = [float(workload.attention_seconds(d).sum() + workload.linear_seconds(sum(d))) for d in micro_batches]
    return dict(zip(held_out, (*attention, sums), strict=True))
