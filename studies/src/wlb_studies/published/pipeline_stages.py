"""Predict the seconds of pipeline stages that tables publish beside whole steps.

Such a row has ``forward_us_per_stage`` and ``backward_us_per_stage``: microseconds of a micro-batch on every stage.
They are compared with the simulator's, and the measured step with the one that the simulator's pipeline makes of the
measured stages.

If the head is divided over all stages, which nothing here runs, every stage has passes for its part of the head,
forward and backward together. Their microseconds, ``vocabulary_pass_us_per_stage``, are compared with an even share of
the head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from wlb.errors import UserError
from wlb.schedules.timing import pipeline_times
from wlb_studies.published.metrics import Row, is_positive, size
from wlb_studies.published.prediction import ODD, Prediction, why
from wlb_studies.published.whole_steps import PublishedStep, published_step, spreads_head, whole_step_row


def stage_rows(rows: Sequence[Row]) -> Iterator[Prediction]:
    """For each of ``rows`` with seconds of stages: a prediction for every stage, then for the step; or a reason."""
    for row in rows:
        if row.get("forward_us_per_stage") is None:
            continue
        whole = whole_step_row(row)
        one = replace(whole, table=f"{whole.table}, stages", predicted_seconds=None, reason=None, missing=None)
        one = replace(one, measured_seconds=None)
        try:
            step = published_step(row)
            if spreads_head(row):
                found = [*_passes(row, step, one)]
            else:
                found = [*_stages(row, step, one), _step(row, step, replace(whole, table=one.table, missing=None))]
            yield from found
        except ODD as error:
            yield replace(one, reason=why(error))


def _stages(row: Row, step: PublishedStep, one: Prediction) -> Iterator[Prediction]:
    holds = ["blocks"] * step.job.layout.stages
    holds[0], holds[-1] = "embedding and blocks", "blocks and head"
    for name, seconds in zip(("forward", "backward"), step.steps.stages, strict=True):
        measured = _measured(row, f"{name}_us_per_stage")
        for stage, (theirs, ours) in enumerate(zip(measured, seconds[0, 0, :, 0].tolist(), strict=True)):
            kind = f"stages of {holds[stage]}, {name}"
            label = f"{one.row}, stage {stage}, {name}"
            yield replace(one, row=label, measured_seconds=theirs, predicted_seconds=ours, kind=kind)


def _step(row: Row, step: PublishedStep, whole: Prediction) -> Prediction:
    """The step of the measured stages, with the simulator's transfers and optimizer."""
    job, count = step.job, step.job.rank_micro_batches
    stages = (np.array(_measured(row, name)) for name in ("forward_us_per_stage", "backward_us_per_stage"))
    forward, backward = (np.broadcast_to(seconds[:, None], (1, 1, len(seconds), count)) for seconds in stages)
    transfer = job.transfer_seconds(size(row, "seq_len"))
    ends = pipeline_times(job.layout.operations(count), forward, backward, transfer=transfer).rank_ends
    seconds = float((ends[:, 0, 0] + step.steps.costs.optimizer).max())
    return replace(
        whole, row=f"{whole.row}, measured stages", predicted_seconds=seconds, kind="steps of measured stages"
    )


def _passes(row: Row, step: PublishedStep, one: Prediction) -> Iterator[Prediction]:
    shares = step.job.head_shares * step.steps.priced.head.both[0, 0, 0]
    measured = _measured(row, "vocabulary_pass_us_per_stage")
    for stage, (theirs, ours) in enumerate(zip(measured, shares.tolist(), strict=True)):
        label = f"{one.row}, stage {stage}, vocabulary"
        kind = "passes of a spread head, as even shares"
        yield replace(one, row=label, measured_seconds=theirs, predicted_seconds=ours, kind=kind)


def _measured(row: Row, name: str) -> list[float]:
    values, stages = row.get(name), size(row, "pp")
    if not isinstance(values, list) or len(values) != stages or not all(map(is_positive, values)):
        raise UserError(f"its {name} are not positive microseconds of {stages} stages: {values}"[:200])
    return [value / 1e6 for value in values]
