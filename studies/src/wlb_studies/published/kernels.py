"""Published timings of kernels and collectives against their prices.

Attention is priced like a micro-batch: pieces of documents, and the kernel tail at the end. A call timed by itself
also includes the host's launch time, which a training step hides. Collectives use the prices of links. Measurements
without a price in the simulator have a reason.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.errors import UserError
from wlb.workload import Costs, Hardware, ModelShape, hardware_preset, make_workload
from wlb.workload.base import Phase
from wlb.workload.links import group_link, shard_bytes
from wlb_studies.published.distributed_attention import SHAPE, SYSTEMS, TOKENS_OF_A_GPU, packs, stated_flops
from wlb_studies.published.metrics import positive, stated
from wlb_studies.published.prediction import ODD, Prediction, source_of, why

# Overhead of a call in seconds, if a benchmark times calls one by one; estimated by hand from the shortest calls.
# FlashAttention's and Transformer Engine's for cuDNN use GPU events; the last uses the host's clock and includes
# allocating memory for results.
CALL = {"forward": 55e-6, "backward": 80e-6}
CUDNN_CALL = {"forward": 100e-6, "backward": 120e-6}
HOST_CALL = {"forward": 160e-6, "backward": 400e-6}

_H100, _H200 = hardware_preset("h100"), hardware_preset("h200")
_DIRECTIONS: dict[str, Phase] = {"fwd": "forward", "bwd": "backward"}
_KERNELS = {"fa2": ("h100", CALL), "fa3": ("h100-fa3", CALL), "cudnn": ("h100-cudnn", CUDNN_CALL)}
_NO_KERNEL = "the simulator has no price for these attention kernels"
_NO_SYSTEM = "the simulator has no price for this system's exchange of keys and values"
_SWITCHED = "an all-reduce of a whole node runs in its switch, which the simulator has no price for"
_DRAWN = "documents drawn from the distribution that the benchmark draws from"


class _Row(NamedTuple):
    row: str
    measured_seconds: float | None
    predicted_seconds: float | None
    reason: str | None = None
    assumed: str | None = None


def kernel_rows(document: dict[str, Any]) -> list[Prediction]:
    """A prediction or a reason for every measurement in the tables of ``document["kernels"]``."""
    return [
        Prediction(name, "", source=source_of(table) if isinstance(table, dict) else "", **one._asdict())
        for name, table in document.get("kernels", {}).items()
        for one in _of_table(name, table)
    ]


def _of_table(name: str, table: Any) -> Iterator[_Row]:
    try:
        for text in ("repo", "commit", "path", "rows"):
            stated(table, text)
        rows = [*_leaves(table["rows"])] if isinstance(table["rows"], dict) else list(table["rows"])
    except ODD as error:
        yield _Row("", None, None, reason=why(error))
        return
    for index, row in enumerate(rows):
        try:
            found = list(_TABLES.get(name, _unknown)(index, row))
            if not all(
                s is None or 0 < s < math.inf for one in found for s in (one.measured_seconds, one.predicted_seconds)
            ):
                raise UserError("its seconds are not positive")
            yield from found
        except ODD as error:
            yield _Row(f"row {index}", None, None, reason=why(error))


def _leaves(rows: Any, *names: str) -> Iterator[tuple[Any, ...]]:
    """The values of a chart, each with its names."""
    if not isinstance(rows, dict):
        yield (*names, rows)
        return
    for name, inner in rows.items():
        yield from _leaves(inner, *names, name)


def launch_seconds(
    hardware: Hardware, heads: int, starts: ArrayLike, stops: ArrayLike, direction: Phase = "forward"
) -> float:
    """Attention of one layer of ``heads`` x 128: pieces with queries ``starts`` to ``stops``, keys 0 to ``stops``."""
    workload = _one_layer(hardware, heads)
    pieces = workload.piece_seconds(starts, stops, direction)
    return float(pieces.sum() + workload.drain_seconds(np.max(stops), direction))


@lru_cache(maxsize=32)
def _one_layer(hardware: Hardware, heads: int) -> Costs:
    return make_workload(ModelShape(128 * heads, 1, heads, 1, 128, 512 * heads, 32_000), hardware)


class CutLaunch(NamedTuple):
    """One rank of tp x cp: some heads, and the last queries of long documents, so that areas are even."""

    heads: int
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    measured: float  # seconds


def cut_launches(rows: list[dict[str, Any]]) -> list[CutLaunch]:
    """The launches in DistCA's tables of attention forward on H100."""
    found = []
    for row in rows:
        lengths = np.array(row.get("lengths") or _batch(row["batch"]))
        queries = lengths // row["cp"]
        keys = ((1 + 1 / row["cp"]) / 2 * lengths).astype(np.int64)
        measured = positive(row, "ms" if "ms" in row else "real_attn_ms") / 1e3
        found.append(CutLaunch(row.get("hq", 64) // row["tp"], keys - queries, keys, measured))
    return found


def _cut_rows(index: int, row: dict[str, Any]) -> Iterator[_Row]:
    [(heads, starts, stops, measured)] = cut_launches([row])
    predicted = launch_seconds(_H100, heads, starts, stops) + CALL["forward"]
    yield _Row(f"row {index}", measured, predicted, assumed="FlashAttention-2")


def _batch(text: str) -> list[int]:
    """The lengths written as ``[4096] * (8)``."""
    found = re.fullmatch(r"\[(\d+)\](?: \* \((\d+)\))?", text)
    if found is None:
        raise ValueError(f"no lengths in {text!r}")
    return [int(found[1])] * int(found[2] or 1)


def _shards(_: int, row: dict[str, Any]) -> Iterator[_Row]:
    """Heads and tails of a context as pieces of two shards each, half the context and a shard before their end."""
    shard, context = row["cp_shard_len"], row["L"]
    queries, keys = (shard, context) if row["num_seq"] == 1 else (2 * shard, context // 2 + shard)
    stops = np.full(max(1, row["num_seq"] // 2), keys)
    seconds = launch_seconds(_H200, row["num_heads"], stops - queries, stops)
    measured = positive(row, "duration_ms") / 1e3 * 50 / 60  # its script divides the seconds of 60 calls by 50
    yield _Row(f"{shard} tokens", measured, seconds, assumed="H200, FlashAttention-2")


def _both_directions(index: int, row: dict[str, Any]) -> Iterator[_Row]:
    stops = np.full(row["documents"], row["seq_len"])
    for name, direction in _DIRECTIONS.items():
        seconds = launch_seconds(_H200, 32 // row["tp"], 0 * stops, stops, direction)
        measured, predicted = positive(row, f"{name}_ms") / 1e3, seconds + HOST_CALL[direction]
        yield _Row(f"row {index}, {direction}", measured, predicted, assumed="H200, FlashAttention-2")


def _products(index: int, row: dict[str, Any]) -> Iterator[_Row]:
    for name, milliseconds in row.items():
        if "." in name:
            label, measured = f"row {index}, {name.rsplit('.', 1)[1]}", float(milliseconds) / 1e3
            yield _Row(label, measured, None, reason="neither the model nor the GPU is named")


def _in_a_node(_: int, row: dict[str, Any]) -> Iterator[_Row]:
    ranks, size, kind = int(row["ngpu"]), float(row["size_bytes"]), row["op"]
    label, measured = f"{kind}, {ranks} GPUs, {size / 2**20:,.0f} MiB", float(row["t_us_out"]) / 1e6
    if kind == "all_reduce" and ranks == _H200.node_size:
        yield _Row(label, measured, None, reason=_SWITCHED)
        return
    received = shard_bytes(size, ranks) * (2 if kind == "all_reduce" else 1)
    yield _Row(label, measured, float(group_link(_H200, "all_gather", ranks, stride=1).seconds(received)))


def _between_nodes(_: int, row: dict[str, Any]) -> Iterator[_Row]:
    """Two ranks on two nodes, beside seven such pairs; torch copies both results into a list of tensors."""
    link = group_link(_H200, "all_gather", 2, stride=_H200.node_size)
    received = row["mb"] * 2**20
    predicted = float(link.seconds(received)) + 4 * received / _H200.memory_bandwidth
    yield _Row(
        f"{row['mb']:,.0f} MiB", positive(row, "ms") / 1e3, predicted, assumed="H200, an adapter of 400 Gb/s each"
    )


def _bars(_: int, bar: tuple[str, str, str, float]) -> Iterator[_Row]:
    """Convert TFLOP/s of a GPU into seconds of a mean pack."""
    chart, name, size, rate = bar
    what, way = chart.split("_")
    direction, is_kernel = _DIRECTIONS[way], what == "kernel"
    gpus = 1 if is_kernel else int(size)
    total = int(size) * 1024 if is_kernel else gpus * TOKENS_OF_A_GPU
    flops = np.array([stated_flops(lengths, direction) for lengths in packs(total)])
    measured = float(flops.mean()) / (rate * 1e12 * gpus)
    label = f"{chart}, {name}, {total // 1024}K tokens" + (f", {gpus} GPUs" if gpus > 1 else "")
    if name not in (_KERNELS if is_kernel else SYSTEMS):
        yield _Row(label, measured, None, reason=_NO_KERNEL if is_kernel else _NO_SYSTEM)
        return
    price = partial(_kernel, name) if is_kernel else SYSTEMS[name]
    seconds = [price(lengths, gpus, direction) for lengths in packs(total)]
    yield _Row(label, measured, float(flops.mean() / np.mean(flops / seconds)), assumed=_DRAWN)


def _kernel(name: str, lengths: Sequence[int], gpus: int, direction: Phase) -> float:
    hardware, call = _KERNELS[name]
    seconds = launch_seconds(hardware_preset(hardware), SHAPE.heads, np.zeros(len(lengths)), lengths, direction)
    return seconds + call[direction]


def _unknown(index: int, _: Any) -> Iterator[_Row]:
    yield _Row(f"row {index}", None, None, reason="a table that is not known here")


_TABLES: dict[str, Callable[[int, Any], Iterator[_Row]]] = {
    "attn_fwd_h100": _cut_rows,
    "attn_real_mixes_h100": _cut_rows,
    "attn_shard_length": _shards,
    "attn_fwd_bwd": _both_directions,
    "mlp_and_projections": _products,
    "nccl_h200_node": _in_a_node,
    "allgather_2_nodes": _between_nodes,
    "magi_varlen_causal": _bars,
}
