"""Published seconds of pipeline stages: what is predicted for them, and the step that measured stages make."""

import math
from typing import Literal

import pytest

from wlb.errors import UserError
from wlb.workload import Costs, hardware_preset
from wlb_studies.published.models import published_shape
from wlb_studies.published.pipeline_stages import stage_rows
from wlb_studies.published.reading import read_measurements
from wlb_studies.published.whole_steps import published_step

ROW = {
    "table": "t",
    "repo": "sail-sg/VocabularyParallelism",
    "commit": "c",
    "path": "p",
    "hardware": "A100",
    "model": "gpt-4b-64k",
    "precision": "FP16",
    "gpus": 4,
    "pp": 4,
    "tp": 1,
    "cp": 1,
    "seq_len": 2048,
    "micro_batch": 1,
    "global_batch": 16,
    "recompute": "none",
    "metric": "ms/step",
    "value": 1500.0,
    "stack": {"attention": "fa2", "compiled": True, "weights": "kept"},
    "stage_blocks": [10, 10, 10, 2],
    "forward_us_per_stage": [20_000] * 4,
    "backward_us_per_stage": [40_000] * 4,
}


DIRECTIONS: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


def test_stages_are_their_blocks_and_the_last_has_the_head():
    costs = Costs(published_shape("gpt-4b-64k"), hardware_preset("a100"))
    rows = [*stage_rows([ROW, {**ROW, "forward_us_per_stage": None}])]
    assert [one.kind for one in rows[:4]] == [
        "stages of embedding and blocks, forward",
        *["stages of blocks, forward"] * 2,
        "stages of blocks and head, forward",
    ]
    for place, direction in enumerate(DIRECTIONS):
        blocks = costs.piece_seconds(0, 2048, direction) + costs.drain_seconds(2048, direction)
        blocks = blocks + costs.blocks_seconds(2048, direction)
        head = costs.head_seconds(2048, direction)
        expected = [10 / 32 * blocks] * 3 + [2 / 32 * blocks + head]
        stages = rows[4 * place : 4 * place + 4]
        assert [one.predicted_seconds for one in stages] == pytest.approx(expected)
        assert {one.measured_seconds for one in stages} == {(20e-3, 40e-3)[place]}


def test_the_step_of_measured_stages_is_that_of_the_pipeline():
    step = [*stage_rows([ROW])][-1]
    assert (step.kind, step.measured_seconds) == ("steps of measured stages", 1.5)
    full = (16 + 4 - 1) * 60e-3  # of 1F1B
    assert step.predicted_seconds is not None
    assert full < step.predicted_seconds < 1.05 * full


def test_an_even_share_of_a_head_that_is_spread():
    spread = {**ROW, "stage_blocks": [8] * 4, "vocabulary_pass_us_per_stage": [5000] * 4}
    head = Costs(published_shape("gpt-4b-64k"), hardware_preset("a100")).head_seconds(2048)
    passes = [*stage_rows([spread])]
    assert [one.predicted_seconds for one in passes] == pytest.approx([head / 4] * 4)
    assert {one.kind for one in passes} == {"passes of a spread head, as even shares"}
    step = published_step(spread)
    assert step.kind == "pipeline, head spread over stages: nothing here runs that"
    assert step.seconds < published_step({**ROW, "stage_blocks": [8] * 4}).seconds
    assert step.steps.stages.both[0, 0, :, 0] == pytest.approx([step.steps.priced.whole.both[0, 0, 0] / 4] * 4)


def test_a_last_stage_may_have_no_blocks():
    last = published_step({**ROW, "stage_blocks": [11, 11, 10, 0]})
    assert math.isfinite(last.seconds)
    assert last.steps.stages.forward[0, 0, -1, 0] == pytest.approx(last.steps.priced.head.forward[0, 0, 0])


@pytest.mark.parametrize("name", ["forward_us_per_stage", "backward_us_per_stage", "vocabulary_pass_us_per_stage"])
@pytest.mark.parametrize("values", [[1, 2], 3, [1, 2, 3, 0], [1, 2, 3, "4"]])
def test_odd_seconds_of_stages_have_a_reason(name, values):
    (one,) = stage_rows([{**ROW, name: values}])
    assert f"its {name} are not positive microseconds of 4 stages" in str(one.reason)
    assert one.predicted_seconds is None


@pytest.mark.parametrize("blocks", [[8] * 3, [8, 8, 8, 9], [16, 16, 1, -1]])
def test_blocks_that_are_no_stages_are_refused(blocks):
    with pytest.raises(UserError, match="its stage_blocks are not 32 blocks on 4 stages"):
        published_step({**ROW, "stage_blocks": blocks})


def test_measured_stages_make_the_measured_step():
    """The pipeline alone, without prices of stages: docs/validate.md says 0.7%, at most 1.3%."""
    rows = [one for one in stage_rows(read_measurements()["rows"]) if one.kind == "steps of measured stages"]
    assert len(rows) == 16
    for one in rows:
        assert one.predicted_seconds == pytest.approx(one.measured_seconds, rel=0.015)
