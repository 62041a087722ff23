"""Table 2: how well packing methods balance micro-batches, and how long they take."""

import numpy as np

from wlb.documents.segments import Segment
from wlb.job.config import NO_BOUND
from wlb.terminal import number_of
from wlb_studies.experiment import Column, Finding, Report, Settings, Table, Value, bars_of
from wlb_studies.packing import MethodResult, compare_packer, packer_for
from wlb_studies.paper import paper
from wlb_studies.paper.bench import corpus, cut_by_loader
from wlb_studies.paper.jobs import PAPER_JOBS

_STEPS = 400
_SOLVER_STEPS = 24
_SOLVER_SECONDS = 2.0
_JOB = PAPER_JOBS["7b-128k"].under("balanced")


# By name in ``wlb_studies.paper.paper.TABLE_2``; ours by name in ``wlb-studies packing``.
METHODS = {
    "sequential": "original packing",
    **{f"fixed_greedy:{n}": f"fixed-length greedy, {number_of(n, 'global batch')}" for n in (1, 2, 4, 8)},
    **{f"fixed_solver:{n}": f"fixed-length solver, {number_of(n, 'global batch')}" for n in (1, 2, 4)},
    **{f"variable_length:{n}": f"WLB-LLM, {number_of(n, 'queue')}" for n in (1, 2, 3)},
    "balanced": "ours: no document waits",
}


def run(settings: Settings) -> Report:
    documents = corpus(settings)
    pieces = cut_by_loader(documents.lengths, _JOB.context_window, settings.seed)
    results: dict[str, MethodResult] = {}
    for name, shown in METHODS.items():
        settings.on_progress(shown)
        results[name] = _result(name, pieces.tolist(), settings.steps or _STEPS)
    table = _table(results)
    return Report(
        title="Packing methods, 7B-128K, 4 micro-batches (paper: Table 2)",
        documents=documents.source,
        tables=[table],
        draw=bars_of(
            table,
            {"quoted": 1, "simulated": 2},
            title="7B-128K: imbalance degree of a step's micro-batches (1 is perfect)",
            label="imbalance degree",
        ),
        findings=_findings(results),
        notes=[
            "imbalance: heaviest over mean micro-batch, by the packer's prices; the paper uses measured latency",
            f"planning is measured in CPU time; the solver stops after {_SOLVER_SECONDS:g} s, and plans "
            f"{_SOLVER_STEPS} steps",
            "WLB-LLM is Algorithm 1 with L_max 1.5 windows; the paper's L_max and thresholds are not published",
            "all methods are simulated in one job, sharded as in balanced, with prices of sharded documents",
            "documents cut at the window by the data loader, for all methods alike",
        ],
    )


def _result(name: str, pieces: list[int], steps: int) -> MethodResult:
    if name.startswith("fixed_solver"):
        steps = min(steps, _SOLVER_STEPS)
    delay = NO_BOUND if name.startswith("variable_length") else None  # as in the paper
    packer = packer_for(name, _JOB, solver_seconds=_SOLVER_SECONDS, max_delay=delay)
    # The first pieces that fill the steps; they end with a window, as cut.
    filling = int(np.searchsorted(np.cumsum(pieces), steps * _JOB.global_batch * _JOB.context_window)) + 1
    return compare_packer(
        name, packer, [Segment(index, 0, length) for index, length in enumerate(pieces[:filling])], _JOB
    )


def _table(results: dict[str, MethodResult]) -> Table:
    columns = (
        Column("method"),
        Column("imbalance", "quoted", ".2f"),
        Column("imbalance", "simulated"),
        Column("planning, ms", "quoted", ",.0f"),
        Column("planning, ms", "measured", ",.2f"),
        Column("token delay, steps", "simulated", ".2f"),
        Column("steps", format=",.0f"),
    )
    rows: list[tuple[Value, ...]] = []
    for name, result in results.items():
        imbalance, milliseconds = paper.TABLE_2.get(name, (None, None))
        planning = (milliseconds, result.planning_ms_per_step)
        rows.append(
            (METHODS[name], imbalance, result.imbalance_degree, *planning, result.mean_token_delay, result.steps)
        )
    return Table("imbalance degree of a step's micro-batches, and planning time of a step", columns, rows)


def _findings(results: dict[str, MethodResult]) -> list[Finding]:
    greedy = [results[f"fixed_greedy:{n}"].imbalance_degree for n in (1, 2, 4, 8)]
    queues = [results[f"variable_length:{n}"].imbalance_degree for n in (1, 2, 3)]
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
    ]
