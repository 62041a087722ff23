"""Fit the few prices of whole training steps to steps that others published, and print how far off the rest is.

    .venv/bin/python -m studies.benchmarks.fit_prices [--measured FILE ...] [--evaluations N]

A half of the rows is fitted, chosen by a hash of repository, hardware, model and layout, so that all releases of a
configuration are in one half; the other half only checks. (The prices in force were fitted when each row was hashed by
itself.) So are runs of plain data parallelism, of which every batch's lengths are known; as they have no unknowns,
their errors count four times. The stacks of ``UNFITTED`` only check. Fitted are rates of matrix products by chip
and type, what grouping experts costs, and which part of collectives beside computing shows; nothing is for one row or
repository. Functional runs are left out. In force, kernels that are not fused are by what torch.compile gains in
fms-fsdp, and experts were fitted with all else as it was. Attention and links are fitted to tables of kernels before
(``fit_kernels.py``). Prints every price in force and fitted, and the errors of whole steps by table: predicted over
measured, less one. Without ``--evaluations`` the prices in force are only checked. Takes seconds for that, and a minute
for each evaluation of all prices.
"""

import argparse
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from wlb.job import prices
from wlb.workload import costs, hardware
from wlb_studies.published import stacks, whole_steps
from wlb_studies.published.batches import measured_batch_rows
from wlb_studies.published.metrics import seconds_of_step
from wlb_studies.published.prediction import FUNCTIONAL, ODD, compared
from wlb_studies.published.reading import read_measurements

Value = Callable[[], float]
SOFT = 0.08  # errors beyond which a row counts less than squared: tables hold releases that differ by 40%


class Price(NamedTuple):
    """One fitted number: how to read what is in force, to set another, and where it has to lie."""

    read: Value
    set: Callable[[float], None]
    least: float
    most: float


def of_presets(field: str, names: str, least: float, most: float) -> Price:
    """A field that is the same in several presets."""
    presets = names.split()

    def change(value: float) -> None:
        for name in presets:
            changed: dict[str, Any] = {field: value}
            hardware.HARDWARE[name] = replace(hardware.HARDWARE[name], **changed)

    return Price(lambda: getattr(hardware.HARDWARE[presets[0]], field), change, least, most)


def of_type(dtype: str, rates: dict[str, float], least: float, most: float) -> Price:
    """The rate of a narrow type."""
    return Price(lambda: rates[dtype], partial(rates.__setitem__, dtype), least, most)


def of_kernel(name: str, presets: str) -> Price:
    """The rate of attention kernels on presets of one letter, forward and backward alike."""
    kernels = stacks.KERNELS[presets]

    def change(value: float) -> None:
        kernels[name] = replace(kernels[name], forward_flops=value, backward_flops=value)

    return Price(lambda: kernels[name].forward_flops, change, 5e13, 4e14)


def of_module(module: Any, name: str, least: float, most: float) -> Price:
    return Price(lambda: getattr(module, name), partial(setattr, module, name), least, most)


_HOPPER, _BLACKWELL = "h100 h200", "b200 b300 gb200 gb300"
_ALL = f"a100 {_HOPPER} {_BLACKWELL}"
PRICES = {
    "matrix products, A100": of_presets("gemm_efficiency", "a100", 0.4, 0.9),
    "matrix products, H100": of_presets("gemm_efficiency", _HOPPER, 0.4, 0.9),
    "matrix products, B200": of_presets("gemm_efficiency", "b200 b300", 0.4, 0.9),
    "matrix products, GB200": of_presets("gemm_efficiency", "gb200", 0.4, 0.9),
    "matrix products, GB300": of_presets("gemm_efficiency", "gb300", 0.4, 0.9),
    "FP8 over bf16, H100": of_type("fp8", stacks.HOPPER_RATES, 1.0, 2.0),
    "FP8 by rows over bf16, H100": of_type("fp8-rowwise", stacks.HOPPER_RATES, 0.5, 2.0),
    "FP8 over bf16, B200": of_type("fp8", stacks.BLACKWELL_RATES, 1.0, 2.0),
    "NVFP4 over bf16, B200": of_type("nvfp4", stacks.BLACKWELL_RATES, 1.0, 4.0),
    "Triton's attention, A100": of_kernel("triton", "a"),
    "Triton's attention, H100": of_kernel("triton", "h"),
    "collectives that show": of_presets("exposed", _ALL, 0.0, 1.0),
    "kernels that are not fused": of_module(stacks, "_UNFUSED_PASSES", 1.0, 12.0),
    "columns that grouping costs": of_module(costs, "_EXPERT_COLUMNS", 0.0, 4000.0),
    "tokens that an expert costs": of_module(costs, "_EXPERT_TOKENS", 0.0, 8000.0),
    "biases of experts": of_module(costs, "_EXPERT_BIASES", 0.0, 5.0),
    "async TP that shows": of_module(prices, "_SHOWN_OF_ASYNC_TP", 0.0, 1.0),
}
NOT_FITTED = (FUNCTIONAL, whole_steps.HYBRID, whole_steps.LORA)  # kinds of rows
_CONFIGURATION = ("repo", "hardware", "model", "gpus", "tp", "cp", "pp", "ep")


class Step(NamedTuple):
    """A row, or a run, that can be predicted; ``error`` is the logarithm of predicted over measured seconds."""

    source: str
    kind: str
    checks: bool
    weight: float
    error: Value


def steps(document: dict[str, Any]) -> Iterator[Step]:
    """All that can be predicted of a file of published measurements."""
    for row in document.get("rows", []):
        try:
            measured, kind = seconds_of_step(row), whole_steps.published_step(row).kind
        except ODD:
            continue
        if kind in NOT_FITTED:
            continue
        yield Step(row["repo"], kind, is_checked(row), 1.0, partial(_row_error, row, measured))
    for run in document.get("runs", []):
        if run["config"]["mode"] == "baseline":
            yield Step("hao-ai-lab/DistCA", "plain runs", _checks(run["path"]), 4.0, partial(_run_error, run))


def is_checked(row: dict[str, Any]) -> bool:
    """Whether a row is in the half that only checks."""
    return row["repo"] in whole_steps.UNFITTED or _checks([row.get(name) for name in _CONFIGURATION])


def _checks(what: Any) -> bool:
    return hashlib.md5(json.dumps(what).encode(), usedforsecurity=False).digest()[0] % 2 == 1


def _row_error(row: dict[str, Any], measured: float) -> float:
    return float(np.log(whole_steps.published_step(row).seconds / measured))


def _run_error(run: dict[str, Any]) -> float:
    rows = measured_batch_rows({"runs": [run]})
    ratios = [predicted / measured for measured, predicted in compared(rows)]
    return float(np.mean(np.log(ratios)))


def fit(fitted: list[Step], evaluations: int) -> None:
    """Set the prices that predict ``fitted`` best."""
    start = np.array([price.read() for price in PRICES.values()])

    def errors(values: NDArray[np.float64]) -> NDArray[np.float64]:
        for price, value in zip(PRICES.values(), values, strict=True):
            price.set(float(value))
        return np.array([step.weight * step.error() for step in fitted])

    bounds = [price.least for price in PRICES.values()], [price.most for price in PRICES.values()]
    scale = np.maximum(np.abs(start), 1e-3)
    start = np.clip(start, np.array(bounds[0]) + 1e-6, np.array(bounds[1]) - 1e-6)
    options: dict[str, Any] = {"bounds": bounds, "loss": "soft_l1", "f_scale": SOFT, "x_scale": scale}
    solved = least_squares(errors, start, diff_step=np.full(len(start), 0.02), max_nfev=evaluations, **options)
    errors(solved.x)


def table_of(all_steps: list[Step]) -> Table:
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for step in all_steps:
        kind, half = step.kind.removesuffix(", recomputation assumed"), "checked" if step.checks else "fitted"
        for key in ((step.source, step.kind, half), ("all", kind, half)):
            found[key].append(float(np.expm1(step.error())))
    table = Table("measured by", "steps", "half", "rows", "median error", "median, absolute", "nine in ten within")
    for key, values in sorted(found.items()):
        errors = np.array(values)
        absolute = np.abs(errors)
        figures = (np.median(errors), np.median(absolute), np.quantile(absolute, 0.9))
        table.add_row(*key, str(len(values)), *(f"{figure:+.1%}" for figure in figures))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, nargs="*", help="published measurements; default: the project's own")
    parser.add_argument("--evaluations", type=int, default=0, help="of all prices, while fitting")
    arguments = parser.parse_args()
    documents = [read_measurements(path) for path in arguments.measured or [None]]
    all_steps = [step for document in documents for step in steps(document)]
    in_force = {name: price.read() for name, price in PRICES.items()}
    if arguments.evaluations:
        fit([step for step in all_steps if not step.checks], arguments.evaluations)
    console = Console()
    prices = Table("price", "in force", *(["fitted"] if arguments.evaluations else []))
    for name, price in PRICES.items():
        prices.add_row(name, f"{in_force[name]:.4g}", *([f"{price.read():.4g}"] if arguments.evaluations else []))
    console.print(prices)
    console.print(table_of(all_steps))


if __name__ == "__main__":
    main()
