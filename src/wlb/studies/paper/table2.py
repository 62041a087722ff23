"""Table 2: how well packing methods balance micro-batches, and how long they take."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any, NamedTuple

from wlb.documents.segments import Segment
from wlb.job.config import NO_BOUND
from wlb.simulate.compare import MethodResult, compare_packer, packer_for
from wlb.simulate.job import named_job
from wlb.studies.experiment import Column, Finding, Report, Settings, Table, grouped_bars
from wlb.studies.paper import paper
from wlb.studies.paper.bench import corpus, cut_by_loader

_STEPS = 400
_SOLVER_STEPS = 24
_SOLVER_SECONDS = 2.0
_JOB = named_job("7b-128k")


class PackingMethod(NamedTuple):
    """``name`` is that of ``wlb.studies.paper.paper.TABLE_2``, or of ``wlb compare`` for ours."""

    shown: str
    name: str


METHODS = (
    PackingMethod("original packing", "sequential"),
    *(PackingMethod(f"fixed-length greedy, {n} global batches", f"fixed_greedy:{n}") for n in (1, 2, 4, 8)),
    *(PackingMethod(f"fixed-length solver, {n} global batches", f"fixed_solver:{n}") for n in (1, 2, 4)),
    *(PackingMethod(f"WLB-LLM, {n} queues", f"variable_length:{n}") for n in (1, 2, 3)),
    PackingMethod("ours: tuned queues, early release", "variable_length:auto"),
    PackingMethod("ours: makespan", "makespan"),
)


def run(settings: Settings) -> Report:
    documents = corpus(settings)
    pieces = cut_by_loader(documents.lengths, _JOB.context_window, settings.seed)
    results: dict[PackingMethod, MethodResult] = {}
    for method in METHODS:
        if method.name.startswith("fixed_solver") and importlib.util.find_spec("scipy") is None:
            continue
        settings.on_progress(method.shown)
        steps = settings.steps or _STEPS
        results[method] = _result(method.name, pieces.tolist(), steps)
    return Report(
        title="Packing methods, 7B-128K, 4 micro-batches (paper: Table 2)",
        documents=documents.source,
        tables=[_table(results)],
        draw=partial(
            grouped_bars,
            title="7B-128K: imbalance degree of a step's micro-batches (1 is perfect)",
            groups=[method.shown.replace(", ", "\n").replace(": ", ":\n") for method in results],
            series={
                "quoted": [_quoted(method)[0] for method in results],
                "simulated": [result.imbalance_degree for result in results.values()],
            },
            label="imbalance degree",
        ),
        findings=_findings({method.name: result for method, result in results.items()}),
        notes=[
            "imbalance: heaviest over mean micro-batch, by the prices packed by; the paper's by measured latency",
            f"planning is measured on this CPU, one thread; the solver stops after {_SOLVER_SECONDS:g} s, and plans "
            f"{_SOLVER_STEPS} steps",
            "WLB-LLM is Algorithm 1 with L_max 1.5 windows; the paper's L_max and thresholds are not published",
            "all methods are simulated in one job, sharded as in best; makespan packs by what sharded documents cost",
            "documents cut at the window by the data loader, for all methods alike",
        ],
    )


def _result(name: str, pieces: list[int], steps: int) -> MethodResult:
    if name.startswith("fixed_solver"):
        steps = min(steps, _SOLVER_STEPS)
    as_published = {"early_release": False, "max_delay": NO_BOUND} if _is_published(name) else {}
    packer = packer_for(name, _JOB, solver_seconds=_SOLVER_SECONDS, **as_published)
    return compare_packer(name, packer, _filling(pieces, steps), _JOB)


def _is_published(name: str) -> bool:
    """Whether ``name`` is Algorithm 1 with queues of fixed thresholds, as the paper evaluates it."""
    return name.startswith("variable_length:") and name != "variable_length:auto"


def _filling(pieces: list[int], steps: int) -> list[Segment]:
    """The first pieces that fill ``steps`` steps; they end with a window, as cut."""
    room = steps * _JOB.global_batch * _JOB.context_window
    documents = []
    for index, length in enumerate(pieces):
        if room <= 0:
            break
        documents.append(Segment(index, 0, length))
        room -= length
    return documents


def _quoted(method: PackingMethod) -> tuple[float | None, float | None]:
    return paper.TABLE_2.get(method.name, (None, None))


def _table(results: dict[PackingMethod, MethodResult]) -> Table:
    rows: list[tuple[Any, ...]] = [
        (
            method.shown,
            _quoted(method)[0],
            result.imbalance_degree,
            _quoted(method)[1],
            result.planning_ms_per_step,
            result.mean_token_delay,
            result.steps,
        )
        for method, result in results.items()
    ]
    return Table(
        "imbalance degree of a step's micro-batches, and planning time of a step",
        (
            Column("method"),
            Column("imbalance", "quoted", ".2f"),
            Column("imbalance", "simulated"),
            Column("planning, ms", "quoted", ",.0f"),
            Column("planning, ms", "measured", ",.2f"),
            Column("token delay, steps", "simulated", ".2f"),
            Column("steps", format=",.0f"),
        ),
        rows,
    )


def _findings(results: dict[str, MethodResult]) -> list[Finding]:
    greedy = [results[f"fixed_greedy:{n}"].imbalance_degree for n in (1, 2, 4, 8)]
    queued = [results[f"variable_length:{n}"] for n in (1, 2, 3)]
    queues = [result.imbalance_degree for result in queued]
    delays = [result.mean_token_delay for result in queued]
    makespan = results["makespan"]
    return [
        Finding(
            "fixed lengths balance better over more global batches",
            greedy == sorted(greedy, reverse=True),
            ", ".join(f"{value:.3f}" for value in greedy),
        ),
        Finding(
            "two queues balance better than one, and nearly as well as three",
            queues[1] < queues[0] and queues[1] - queues[2] < 0.5 * (queues[0] - queues[1]),
            ", ".join(f"{value:.3f}" for value in queues),
        ),
        Finding(
            "WLB-LLM with two queues balances better than fixed lengths within a global batch",
            queues[1] < greedy[0],
            f"{queues[1]:.3f}, {greedy[0]:.3f}",
        ),
        Finding(
            "WLB-LLM with two queues balances at least as well as fixed lengths over eight global batches",
            queues[1] <= greedy[3],
            f"{queues[1]:.3f}, {greedy[3]:.3f}",
        ),
        Finding(
            "ours: makespan balances better than WLB-LLM with any number of queues, and delays less",
            makespan.imbalance_degree < min(queues) and makespan.mean_token_delay < min(delays),
            f"{makespan.imbalance_degree:.3f} at a token delay of {makespan.mean_token_delay:.2f}; least of WLB-LLM "
            f"{min(queues):.3f} and {min(delays):.2f}",
        ),
    ]
