"""Pictures of results, drawn with Matplotlib into PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from wlb.errors import UserError, require

if TYPE_CHECKING:
    from wlb.packing.plan import StepPlan
    from wlb.simulate.compare import MethodResult

_BALANCED, _IMBALANCED = "#1b7f5c", "#b8bfc7"


def plot_comparison(results: Sequence[MethodResult], path: Path, *, title: str) -> None:
    """One row a method: imbalance degree, pipeline cost as packed and arranged, token delay."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 1.2 + 0.45 * len(results)), sharey=True)
    names = [result.method for result in results]
    colours = [_BALANCED if name.startswith("variable") else _IMBALANCED for name in names]
    packed = [r.pipeline_cost for r in results]
    arranged = [r.pipeline_cost_arranged for r in results]
    imbalance = [r.imbalance_degree for r in results]
    delay = [r.mean_token_delay for r in results]
    columns = (
        ("imbalance degree (1 is perfect)", imbalance, 1.0, [f"{value:.3f}" for value in imbalance]),
        (
            "simulated pipeline cost: as packed, ◆ arranged",
            packed,
            1.0,
            [f"{before:.3f}, {after:.3f}" for before, after in zip(packed, arranged, strict=True)],
        ),
        ("mean token delay (steps)", delay, 0.0, [f"{value:.2f}" for value in delay]),
    )
    for axis, (label, values, origin, texts) in zip(axes, columns, strict=True):
        bars = axis.barh(names, [value - origin for value in values], left=origin, color=colours)
        axis.bar_label(bars, texts, padding=6)
        reach = max(max(values) - origin, 0.01)
        axis.set_xlim(
            min(origin, *arranged, *packed) - 0.02 * reach if values is packed else origin, origin + 1.4 * reach
        )
        axis.set_title(label, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].scatter(arranged, names, marker="D", s=24, color="black", zorder=3)
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    save(figure, path)


class MeasuredJob(Protocol):
    """What ``plot_demo`` needs to know of a job."""

    @property
    def name(self) -> str: ...
    @property
    def plans(self) -> list[StepPlan]: ...
    @property
    def tokens_per_second(self) -> float: ...
    @property
    def busy(self) -> float: ...


def plot_demo(jobs: Sequence[MeasuredJob], path: Path) -> None:
    """Micro-batch workloads of every step of each job, and the jobs' measured speed relative to the first."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        1, len(jobs) + 1, figsize=(13, 4), width_ratios=[*[1.0 for _ in jobs], 0.8], constrained_layout=True
    )
    colours = [_IMBALANCED, _BALANCED]
    tallest = 0.0
    for axis, job, colour in zip(axes, jobs, colours, strict=False):
        position = 0
        for plan in job.plans:
            workloads = [1e3 * micro_batch.workload for micro_batch in plan.micro_batches]
            mean = sum(workloads) / len(workloads)
            axis.bar(range(position, position + len(workloads)), workloads, width=1.0, color=colour)
            axis.hlines(mean, position - 0.5, position + len(workloads) - 0.5, color="black", linewidth=1)
            tallest = max(tallest, *workloads)
            position += len(workloads) + 2
        axis.set_title(f"{job.name}: predicted milliseconds of every micro-batch", fontsize=10)
        axis.set_xticks([])
        axis.set_xlabel("micro-batches, step by step (line: mean of the step)")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[: len(jobs)]:
        axis.set_ylim(0, 1.05 * tallest)
    base = jobs[0]
    for offset, (job, colour) in enumerate(zip(jobs, colours, strict=False)):
        ratios = [job.tokens_per_second / base.tokens_per_second, job.busy / base.busy]
        places = [group + 0.4 * offset for group in range(len(ratios))]
        bars = axes[-1].bar(places, ratios, width=0.36, color=colour, label=job.name)
        axes[-1].bar_label(bars, [f"{ratio:.2f}x" for ratio in ratios], padding=2)
    axes[-1].set_xticks([0.2, 1.2], ["tokens/s", "at equal work"])
    axes[-1].set_title("measured speed over plain-4D", fontsize=10)
    axes[-1].set_ylim(0, 1.45)
    axes[-1].legend(frameon=False, loc="upper left", ncols=2)
    axes[-1].spines[["top", "right"]].set_visible(False)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write ``figure`` to ``path``, or say in one line why that is not possible."""
    try:
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise UserError(f"picture {path} cannot be written: {error}") from error
    finally:
        _pyplot().close(figure)


def _pyplot() -> Any:
    require("matplotlib", "plot").use("Agg")
    return require("matplotlib.pyplot", "plot")
