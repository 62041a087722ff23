"""Does one constant of host time serve all stacks? It is fitted to half of the published steps under 1 s.

    .venv/bin/python -m studies.benchmarks.host_constant

The constant is added for each block of a micro-batch on a pipeline rank. Prints the errors, predicted over measured
seconds less one, without and with it: of the half that it is fitted to, of the other half, and of all stacks by the
seconds that a block takes. The halves are those of ``fit_prices``. Takes seconds.
"""

from collections import defaultdict
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from studies.benchmarks.fit_prices import NOT_FITTED, is_checked
from wlb_studies.published.metrics import seconds_of_step
from wlb_studies.published.prediction import ODD
from wlb_studies.published.reading import read_measurements
from wlb_studies.published.whole_steps import published_step

SHORT = 1.0  # seconds of a step
_TRIED = np.linspace(0, 20e-3, 401)  # seconds for a block
_BLOCK = 20e-3  # seconds that tell short blocks from long ones


class Step(NamedTuple):
    """A row: who measured it, its half, and its seconds and blocks of all micro-batches of a pipeline rank."""

    repository: str
    checks: bool
    measured: float
    predicted: float
    blocks: float

    def error(self, constant: float) -> float:
        return (self.predicted + constant * self.blocks) / self.measured - 1


def main() -> None:
    steps = [*map(_step, read_measurements()["rows"])]
    known = [step for step in steps if step is not None]
    short = [step for step in known if step.measured < SHORT and not step.repository.startswith("huggingface/")]
    fitted = [step for step in short if not step.checks]
    constant = min(_TRIED, key=lambda tried: sum(abs(step.error(tried)) for step in fitted))
    table = Table(
        "rows", "number", "median", "absolute", "with it", "absolute", title=f"{1e3 * constant:.2f} ms a block"
    )
    halves = {"under 1 s, fitted": fitted, "under 1 s, the other half": [step for step in short if step.checks]}
    by_stack = defaultdict[str, list[Step]](list)
    for step in known:
        size = "under" if step.measured < _BLOCK * step.blocks else "over"
        by_stack[f"{step.repository}, blocks {size} {1e3 * _BLOCK:.0f} ms"].append(step)
    for name, of in (halves | dict(sorted(by_stack.items()))).items():
        errors = [np.array([step.error(added) for step in of]) for added in (0.0, float(constant))]
        shown = [f"{value:+.1%}" for one in errors for value in (np.median(one), np.median(abs(one)))]
        table.add_row(name, str(len(of)), *shown)
    Console(width=120).print(table)


def _step(row: dict[str, object]) -> Step | None:
    try:
        measured, step = seconds_of_step(row), published_step(row)
    except ODD:
        return None
    if step.kind in NOT_FITTED:
        return None
    blocks = step.job.rank_micro_batches * step.job.shape.layers / step.job.layout.pp
    return Step(str(row["repo"]), is_checked(row), measured, step.seconds, blocks)


if __name__ == "__main__":
    main()
