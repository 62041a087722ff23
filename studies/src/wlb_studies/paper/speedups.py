"""Table 1 and Figure 12: the paper's eight jobs under its systems and ours, and its job on 8,192 GPUs.

Each system runs in its own fastest layout, on the same GPUs and with the same global batch. A second table keeps the
paper's layouts. Planned operation lists, whose backward is split, are public knowledge (zero bubble: arXiv 2401.10241),
so the paper's systems may use them too. A finished job is written to ``OUT/speedups/``: an interrupted run continues.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from wlb.simulate import SimulationResult
from wlb_studies.experiment import Column, Finding, Report, Settings, Table, Value, bars_of, stored
from wlb_studies.paper import paper
from wlb_studies.paper.bench import ASSUMED, SCHEDULE, Bench, Documents, corpus
from wlb_studies.paper.jobs import ALL_JOBS, LARGEST, PAPER_JOBS
from wlb_studies.policies.layouts import layout_of

_STEPS = 200  # with fewer steps, tokens/s favour systems in which many long documents still wait at the end
_LARGEST_STEPS = 16  # each has 16 times as many documents
JOBS = tuple(PAPER_JOBS)
PLAIN, WLB, OURS = "plain-4d", "wlb-llm", "balanced"
_EITHER = ("auto", "planned")
# Preset and schedules of each system; the faster schedule counts.
OWN: dict[str, tuple[str, Sequence[str]]] = {
    PLAIN: (PLAIN, ("auto",)),
    f"{PLAIN}, lists": (PLAIN, _EITHER),
    "per-document-4d": ("per-document-4d", ("auto",)),
    "fixed-4d": ("fixed-4d", ("auto",)),
    WLB: (WLB, ("auto",)),
    f"{WLB}, lists": (WLB, _EITHER),
    OURS: (OURS, ("auto",)),
}
# Preset and settings in the paper's layout.
FIXED: dict[str, tuple[str, dict[str, Any]]] = {
    f"{PLAIN}, lists": (PLAIN, {"schedule": "planned"}),
    "per-document-4d": ("per-document-4d", {}),
    "fixed-4d": ("fixed-4d", {}),
    WLB: (WLB, {}),
    f"{WLB}, lists": (WLB, {"schedule": "planned"}),
    f"{OURS} without lists": (OURS, SCHEDULE),
    f"{OURS}, whole documents": (OURS, {"packing": {"grouping": "even"}}),
    OURS: (OURS, {}),
}
Rows = dict[str, dict[str, float]]  # speedups of each job, by system


def run(settings: Settings) -> Report:
    documents = corpus(settings)
    systems = ", ".join([*OWN, *FIXED])
    found = {name: partial(_job, name, documents, settings) for name in JOBS}
    jobs = {name: stored(settings, f"speedups/{name}", find, systems=systems) for name, find in found.items()}
    own, fixed, layouts = ({name: found[part] for name, found in jobs.items()} for part in range(3))
    of_largest = stored(settings, f"speedups/{LARGEST}", partial(_largest, documents, settings), systems=systems)
    searched = Table(
        "each system in its own fastest layout: speedup over plain-4d in its fastest",
        (
            *(Column("job"), Column("GPUs", format=",.0f"), *(Column(name, "simulated", ".2f") for name in OWN)),
            *(Column(f"layout of {name}") for name in (PLAIN, OURS)),
        ),
        _lines(own, {name: _gpus(name) for name in own}, layouts),
    )
    largest = Table(
        f"{LARGEST}, {_gpus(LARGEST):,} GPUs, each system in its own fastest layout ({OURS}: of those with tp 8)",
        (Column("system"), Column("speedup", "simulated", ".2f"), Column("its fastest layout")),
        of_largest,
    )
    kept = Table(
        "in the layouts of the paper: tp, cp, pp and dp, two stages per pipeline rank, no recomputation, any memory",
        (
            *(Column("job"), Column("tp,cp,pp,dp"), *(Column(name, "simulated", ".2f") for name in FIXED)),
            Column("WLB-LLM", "quoted", ".2f"),
        ),
        _lines(fixed, {name: paper.sizes(PAPER_JOBS[name].layout) for name in fixed}, _QUOTED),
    )
    return Report(
        title="Speedups over Plain-4D in tokens per second (paper: Table 1, Figure 12)",
        documents=documents.source,
        tables=[searched, largest, kept],
        draw=bars_of(
            searched,
            {
                name: 2 + place
                for place, name in enumerate(OWN)
                if name in (f"{PLAIN}, lists", WLB, f"{WLB}, lists", OURS)
            },
            title="tokens per second over Plain-4D, each in its own fastest layout, simulated",
            label="speedup over Plain-4D",
        ),
        findings=findings(own, fixed),
        notes=[
            ASSUMED,
            "documents cut at the window by the data loader, for all systems alike",
            "lists: planned operation lists with a split backward, where they are faster; only pipelines have them",
            "the paper prints the value of only one job, 7B-128K",
        ],
    )


def _job(name: str, documents: Documents, settings: Settings) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Speedups in own layouts and in the paper's, and the own layouts of Plain-4D and of ours."""
    bench = Bench(PAPER_JOBS[name], documents, settings.steps or _STEPS, settings)
    settings.on_progress(f"{name}, in its layout")
    fixed = {system: bench.speedup(bench.run(preset, **said)) for system, (preset, said) in FIXED.items()}
    found = _own(bench, settings, name)
    own = {system: found[system].speedup(found[PLAIN]) for system in OWN}
    return own, fixed, [_layout(found[system]) for system in (PLAIN, OURS)]


def _own(bench: Bench, settings: Settings, job: str, **ours: int) -> dict[str, SimulationResult]:
    """Every system in its own fastest layout; ours with the given sizes."""
    found = {}
    for system, (preset, schedules) in OWN.items():
        settings.on_progress(f"{job}, {system} in its fastest layout")
        found[system] = bench.fastest(preset, schedules, **(ours if system == OURS else {}))
    return found


def _layout(result: SimulationResult) -> str:
    return f"{layout_of(result.job)}, {result.job.activation_checkpointing}"


def _largest(documents: Documents, settings: Settings) -> list[tuple[Value, ...]]:
    """At equal work, which is tokens here: systems train the same pieces, but long ones still wait at the end."""
    bench = Bench(ALL_JOBS[LARGEST], documents, settings.steps or _LARGEST_STEPS, settings)
    found = _own(bench, settings, LARGEST, tp=8)
    return [(name, one.speed_at_equal_work(found[PLAIN]), _layout(one)) for name, one in found.items()]


_QUOTED = {"7b-128k": [paper.BREAKDOWN["WLB-LLM"]], "mean": [paper.WLB_LLM_SPEEDUP]} | {
    f"mean {window // 1024}K": [value] for window, value in paper.WLB_LLM_SPEEDUP_BY_WINDOW.items()
}


def _gpus(job: str) -> int:
    return ALL_JOBS[job].layout.world_size


def _lines(rows: Rows, before: Mapping[str, Value], after: Mapping[str, Sequence[Value]]) -> list[tuple[Value, ...]]:
    """Each job's speedups, their median and mean, and the mean for each window, between other columns."""
    of_window = _by("context_window", rows)
    means = {"mean": rows.values()} | {f"mean {int(window) // 1024}K": found for window, found in of_window.items()}
    median = np.median([[*row.values()] for row in rows.values()], axis=0).tolist()
    speedups = {name: [*row.values()] for name, row in rows.items()} | {"median": median}
    speedups |= {name: [*_mean(found).values()] for name, found in means.items()}
    none = [None] * len(next(iter(after.values())))
    return [(name, before.get(name), *row, *after.get(name, none)) for name, row in speedups.items()]


def findings(own: Rows, fixed: Rows) -> list[Finding]:
    """The paper's findings (sections 7.2 and 7.3) in its layouts, and ours in each system's own."""
    models, windows = (
        {value: _mean(of_value)[WLB] for value, of_value in _by(size, fixed).items()}
        for size in ("model", "context_window")
    )
    mean, best = _mean(fixed.values()), f"{WLB}, lists"
    slower = [f"{name} {row[OURS] / row[best]:.3f}" for name, row in own.items() if row[OURS] <= row[best]]
    return [
        Finding(
            "larger models gain less",
            all(larger < smaller for smaller, larger in pairwise(models.values())),
            ", ".join(f"{model} {value:.3f}" for model, value in models.items()),
        ),
        Finding(
            "longer windows gain more",
            all(longer > shorter for shorter, longer in pairwise(windows.values())),
            ", ".join(f"{int(window) // 1024}K {value:.3f}" for window, value in windows.items()),
        ),
        Finding(
            f"balancing within fixed lengths gains little (paper: {paper.FIXED_4D_SPEEDUP})",
            mean["fixed-4d"] < 1 + (mean[WLB] - 1) / 2,
            f"fixed-4d {mean['fixed-4d']:.3f}, {WLB} {mean[WLB]:.3f}",
        ),
        Finding(
            f"ours: each in its own layout, {OURS} gains more than {best}, on every job",
            not slower,
            ", ".join(slower) if slower else f"{len(own)} jobs",
        ),
    ]


def _mean(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found = [*rows]
    return {system: float(np.mean([row[system] for row in found])) for system in found[0]}


def _by(size: str, rows: Rows) -> dict[str | int, list[dict[str, float]]]:
    """The rows of the jobs with each value of ``size``, in order; windows ascend."""
    jobs: dict[str | int, list[dict[str, float]]] = {}
    for name, row in rows.items():
        jobs.setdefault(getattr(PAPER_JOBS[name], size), []).append(row)
    return jobs
