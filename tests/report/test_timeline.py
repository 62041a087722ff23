"""What is drawn as lost is what the verdict counts as lost."""

from itertools import islice, pairwise

import numpy as np
import pytest

from tests.report.html.test_charts import parse
from tests.simulate.jobs import documents, job
from wlb.job.planner import StepPlanner
from wlb.report.html.diagrams import pipeline_chart
from wlb.report.html.markup import Caption
from wlb.report.timeline import EXCHANGE, WAITING, Timeline, timeline
from wlb.schedules.operations import HEAD
from wlb.simulate.decide import decide


def drawn_as_lost(line: Timeline) -> float:
    """The share of a step in which the mean rank neither works nor reduces gradients nor updates weights."""
    ranks = np.array([[len(micro_batch.ranks) or 1 for micro_batch in of_dp] for of_dp in line.plan.ranks])
    of_operations = ranks[:, [operation.micro_batch for operation in line.operations]].T
    worked = (line.in_operations["work"] * of_operations).sum() / (line.job.layout.pp * len(line.groups))
    return float(1 - (worked + (line.reduction + line.optimizer).mean()) / line.seconds)


@pytest.mark.parametrize(
    ("preset", "layout"),
    [
        ("plain-4d", {"cp": 4, "dp": 2}),
        ("plain-4d", {"pp": 4, "cp": 2, "dp": 2}),
        ("balanced", {"cp": 2, "dp": 4}),
        ("balanced", {"pp": 2, "cp": 2, "dp": 2}),
    ],
)
def test_drawn_losses_are_those_of_the_verdict(preset, layout):
    """In a pipeline bubbles also hide transfers and weight gathers, which a verdict does not count as lost."""
    simulated = decide(job(preset, **layout), documents())
    for plan in islice(StepPlanner(simulated, documents()).plans(), 3):
        line = timeline(plan, simulated)
        parts = line.in_operations
        assert all((seconds > -1e-12).all() for seconds in parts.values())
        np.testing.assert_allclose(sum(parts.values()), line.ends - line.starts, rtol=1e-9, atol=1e-12)
        drawn = drawn_as_lost(line)
        assert drawn == pytest.approx(line.lost, abs=0.002) if "pp" not in layout else drawn >= line.lost - 0.002


@pytest.mark.usefixtures("kernels_launched_at_once")
def test_waiting_inside_a_micro_batch_is_drawn_as_waiting():
    simulated = decide(job("plain-4d", cp=4, dp=2), documents())
    line = timeline(next(StepPlanner(simulated, documents()).plans()), simulated)
    assert line.in_operations[WAITING].sum() > 0.05 * line.in_operations["work"].sum()
    chart = pipeline_chart(Caption("chart", "A step", "note"), [("plain-4d", line)])
    described = parse(chart).find("desc")
    assert described is not None
    assert (described.text or "").endswith(f"{line.lost:.0%} lost")
    assert EXCHANGE in chart


def test_heads_are_drawn_on_the_ranks_that_run_them():
    dealt = decide(job("balanced", pp=4, dp=2, micro_batches=8, head="dealt"), documents())
    line = timeline(next(StepPlanner(dealt, documents()).plans()), dealt)
    heads = [place for place, one in enumerate(line.operations) if one.kind == HEAD]
    assert len(heads) == dealt.rank_micro_batches
    for pipeline, lists in enumerate(line.plan.operations):
        ranks = {one.micro_batch: rank for rank, mine in enumerate(lists) for one in mine if one.kind == HEAD}
        assert ranks == {line.operations[place].micro_batch: line.pipeline_ranks[place, pipeline] for place in heads}
        for rank in range(4):  # no rank runs two operations at once
            mine = [place for place, of_dp in enumerate(line.pipeline_ranks[:, pipeline]) if of_dp == rank]
            spans = sorted((line.starts[place, pipeline], line.ends[place, pipeline]) for place in mine)
            assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(spans))
    taken = line.ends - line.starts
    assert line.compute[heads].sum(axis=2) == pytest.approx(taken[heads])
