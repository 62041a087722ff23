"""Fit the prices of attention kernels to timings that others published, and print how far off every table is.

    .venv/bin/python -m studies.benchmarks.fit_kernels [--measured FILE]

FlashAttention-2's forward (rate, what drains, and a call's own seconds) is fitted to the even launches of DistCA's real
mixes on H100, the rates of other kernels, and half lengths of all backwards, to every other of MagiAttention's bars;
the odd ones only check. Prints what is fitted beside what is in force (``wlb.workload.hardware``, rounded), and errors
of the prices in force by table: predicted over measured seconds, less one. Takes a quarter of a minute.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from wlb.workload import Hardware, hardware_preset
from wlb.workload.base import Phase
from wlb_studies.published.distributed_attention import SHAPE, packs, stated_flops
from wlb_studies.published.kernels import CALL, CUDNN_CALL, cut_launches, kernel_rows, launch_seconds
from wlb_studies.published.reading import read_measurements
from wlb_studies.published.stacks import attention_kernel

SOFT = 0.1  # errors beyond which a launch counts less than squared
Array = NDArray[np.float64]


class Fitted(NamedTuple):
    what: str
    value: float
    in_force: float
    error: float | None = None  # median absolute error where it was only checked


def fit(predict: Callable[[Array], Array], measured: Array, start: Sequence[float]) -> tuple[Array, float]:
    """Factors of ``start`` with least squares of log errors on even measurements, and the median error on odd ones."""
    even = np.arange(len(measured)) % 2 == 0

    def residuals(factors: Array) -> Array:
        return np.asarray(np.log(predict(np.array(start) * factors) / measured)[even])

    found = least_squares(residuals, np.ones(len(start)), bounds=(1e-3, 10.0), loss="soft_l1", f_scale=SOFT)
    values = np.array(start) * found.x
    return values, float(np.median(np.abs(predict(values) / measured - 1)[~even]))


def of_launches(tables: dict[str, Any]) -> Iterator[Fitted]:
    """FlashAttention-2's forward."""
    launches = cut_launches(tables["attn_real_mixes_h100"]["rows"])
    h100 = hardware_preset("h100")
    start = [h100.attention.forward_flops, h100.attention.drain_tiles, CALL["forward"]]

    def predict(values: Array) -> Array:
        rate, drain, call = values.tolist()
        hardware = replace(h100, attention=replace(h100.attention, forward_flops=rate, drain_tiles=drain))
        return np.array([call + launch_seconds(hardware, one.heads, one.starts, one.stops) for one in launches])

    values, error = fit(predict, np.array([one.measured for one in launches]), start)
    names = ("FLOP/s", "drain, tiles", "call, seconds")
    for name, value, in_force in zip(names, values, start, strict=True):
        yield Fitted(f"fa2 forward: {name}", value, in_force, error)


def of_bars(tables: dict[str, Any]) -> Iterator[Fitted]:
    """Rates of each kernel, and the half length of its backward."""
    charts = tables["magi_varlen_causal"]["rows"]
    directions: tuple[Phase, Phase] = ("forward", "backward")
    for direction in directions:
        for name in ("fa2", "fa3", "cudnn"):
            if direction == "forward" and name == "fa2":
                continue  # of which there are launches
            hardware = replace(hardware_preset("h100"), attention=attention_kernel("h100", name))
            call = (CUDNN_CALL if name == "cudnn" else CALL)[direction]
            half = hardware.attention.backward_half_length
            bars = charts["kernel_fwd" if direction == "forward" else "kernel_bwd"][name]
            mixes = [packs(int(size) * 1024) for size in bars]
            flops = [np.array([stated_flops(lengths, direction) for lengths in mix]) for mix in mixes]
            measured = np.array([one.mean() for one in flops]) / np.array([*bars.values()]) / 1e12

            def predict(
                values: Array,
                hardware: Hardware = hardware,
                direction: Phase = direction,
                mixes: list[list[list[int]]] = mixes,
                flops: list[Array] = flops,
                call: float = call,
            ) -> Array:
                rate = float(values[0])
                kernel = hardware.attention
                if direction == "backward":
                    kernel = replace(kernel, backward_flops=rate, backward_half_length=float(values[1]))
                else:
                    kernel = replace(kernel, forward_flops=rate)
                changed = replace(hardware, attention=kernel)
                seconds = [
                    [call + launch_seconds(changed, SHAPE.heads, np.zeros(len(one)), one, direction) for one in mix]
                    for mix in mixes
                ]
                return np.array([f.mean() / np.mean(f / s) for f, s in zip(flops, seconds, strict=True)])

            start = [getattr(hardware.attention, f"{direction}_flops"), half][: 1 + (direction == "backward")]
            values, error = fit(predict, measured, start)
            for what, value, in_force in zip(("FLOP/s", "half length, tokens"), values, start, strict=False):
                yield Fitted(f"{name} {direction}: {what}", value, in_force, error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, help="measurements; default: the project's own")
    document = read_measurements(parser.parse_args().measured)
    console = Console()
    table = Table("price", "fitted", "in force", "median error of what is only checked")
    for one in (*of_launches(document["kernels"]), *of_bars(document["kernels"])):
        table.add_row(one.what, f"{one.value:.3g}", f"{one.in_force:.3g}", f"{one.error:.1%}" if one.error else "")
    console.print(table)
    errors = Table("table", "of it", "rows", "predicted", "even: median", "odd: median", "worst")
    predictions = kernel_rows(document)
    keys = [
        (one.table, "" if one.row.startswith("row") else one.row.rpartition(", ")[0].split(",")[0])
        for one in predictions
    ]
    for key in dict.fromkeys(keys):
        rows = [one for one, other in zip(predictions, keys, strict=True) if other == key]
        priced = [one for one in rows if one.predicted_seconds and one.measured_seconds]
        off = np.array([one.predicted_seconds / one.measured_seconds - 1 for one in priced])  # type: ignore[operator]
        cells = [f"{np.median(np.abs(part)):.1%}" if part.size else "" for part in (off[::2], off[1::2])]
        worst = f"{off[np.abs(off).argmax()]:+.0%}" if off.size else rows[0].reason or ""
        errors.add_row(*key, str(len(rows)), str(len(priced)), *cells, worst)
    console.print(errors)


if __name__ == "__main__":
    main()
