"""A document that makes the loss infinite is named, and does no harm if it is to be skipped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.training.distributed import RankFailure, run_ranks
from tests.training.jobs import VOCABULARY, job, read_steps, train, trainer_of
from wlb.documents.store.reader import TokenStoreWriter
from wlb.job.config import JobConfig, TrainingConfig
from wlb.packing.plan import MicroBatch, Segment, StepPlan
from wlb.training.failures import TrainingError
from wlb.training.non_finite import NonFiniteSteps
from wlb.training.observe import reporter
from wlb.training.trainer import Trainer

RARE = VOCABULARY - 1  # a token that only this document has
POISONED = 11
DOCUMENTS, TOKENS = 24, 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(2)
    with TokenStoreWriter(tmp_path / "store", vocab_size=VOCABULARY) as writer:
        for document in range(DOCUMENTS):
            tokens = rng.integers(0, RARE, TOKENS)
            if document == POISONED:
                tokens[TOKENS // 2] = RARE
            writer.add(tokens)
    return tmp_path


def _train(config: JobConfig) -> tuple[list[tuple[bool, bool]], list[str]]:
    """Train with an infinite embedding of the rare token: if weights and optimizer changed, by step; lines said."""
    said: list[str] = []
    reporter.say = said.append  # type: ignore[assignment]  # in this process only
    trainer = trainer_of(config)
    with torch.no_grad():
        for stage in trainer.model.stages:
            for name, parameter in stage.named_parameters():
                if "embedding" in name:
                    rows = parameter.to_local()  # type: ignore[attr-defined]
                    if len(rows) == VOCABULARY or dist.get_rank() == dist.get_world_size() - 1:
                        rows[-1] = math.inf
    changes = []
    before = _snapshot(trainer)
    for _ in trainer.steps():
        after = _snapshot(trainer)
        changes.append((before[0] != after[0], before[1] != after[1]))
        before = after
    return changes, said


def _snapshot(trainer: Trainer) -> tuple[list[bytes], list[Any]]:
    weights = [
        parameter.to_local().detach().numpy().tobytes()  # type: ignore[attr-defined]
        for stage in trainer.model.stages
        for parameter in stage.parameters()
    ]
    states = [float(state["step"]) for optimizer in trainer.model.optimizers for state in optimizer.state.values()]
    return weights, states


def configure(folder: Path, parallel: dict[str, int], **training: Any) -> JobConfig:
    return job(folder, parallel=parallel, training={"steps": None, **training})


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"cp": 2}])
def test_a_skipped_step_changes_nothing_and_training_goes_on(folder, parallel):
    results = run_ranks(2, _train, configure(folder, parallel, non_finite="skip"))
    rows = read_steps(folder)
    (bad,) = [index for index, row in enumerate(rows) if row.get("skipped")]
    assert POISONED in rows[bad]["document_ids"]
    assert rows[bad]["loss"] is None
    assert all(math.isfinite(row["loss"]) for row in rows if not row.get("skipped"))
    assert sorted(document for row in rows for document in row["document_ids"]) == list(range(DOCUMENTS))
    for changes, _ in results:
        assert changes == [(index != bad, index != bad) for index in range(len(rows))]
    (line,) = [line for _, said in results for line in said if "skipped" in line]
    blamed = line.partition("micro-batches of documents ")[2].partition(";")[0].split(", ")
    assert str(POISONED) in blamed
    assert len(blamed) < len(rows[bad]["document_ids"])


def test_by_default_training_stops_and_names_the_document(folder):
    with pytest.raises(RankFailure, match=r"step \d+: loss is nan .* micro-batches of documents .*\b11\b"):
        run_ranks(2, _train, configure(folder, {"dp": 2}))


PLAN = StepPlan(
    step=0,
    ranks=tuple((MicroBatch((Segment(document, 0, 4),), 1.0),) for document in (5, 6)),
    delay_token_steps=0,
)
GOOD, BAD = torch.tensor(1.0), torch.tensor(math.nan)


def test_what_stops_training_although_steps_are_skipped(monkeypatch):
    monkeypatch.setattr("wlb.training.non_finite.gathered", lambda value: [value])
    steps = NonFiniteSteps(TrainingConfig(non_finite="skip", max_skipped=2), dp_rank=1)
    for step in (1, 2):
        assert "documents 6; its other documents are 5" in str(steps.check(step, math.nan, 1.0, PLAN, [BAD]))
    assert steps.check(3, 1.0, 1.0, PLAN, [GOOD]) is None
    for step in (4, 5):
        assert steps.check(step, math.nan, 1.0, PLAN, [BAD])
    with pytest.raises(TrainingError, match=r"step 6: .* the 2 steps before it \(training.max_skipped\) were skipped"):
        steps.check(6, math.nan, 1.0, PLAN, [BAD])
    stopping = NonFiniteSteps(TrainingConfig(), dp_rank=0)
    with pytest.raises(TrainingError, match=r"gradient norm inf; every micro-batch has a finite loss; .* are 5, 6"):
        stopping.check(1, 2.0, math.inf, PLAN, [GOOD])


def _skip_every_step(config: JobConfig) -> None:
    trainer = trainer_of(config)
    trainer.non_finite.check = lambda *_: "skipped"  # type: ignore[method-assign]
    trainer.run()


def test_a_job_that_has_only_skipped_steps_so_far_continues_from_its_checkpoint(folder):
    checkpoint = {"dir": str(folder / "checkpoints"), "every": 1}
    run_ranks(1, _skip_every_step, job(folder, training={"steps": 1}, checkpoint=checkpoint))
    run_ranks(1, train, job(folder, training={"steps": 2}, checkpoint=checkpoint))
    assert [row["step"] for row in read_steps(folder)] == [1, 2]
