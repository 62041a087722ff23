"""A step whose loss is not finite ends the job, names the documents to blame and leaves the weights as they were."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.training.distributed import run_ranks
from tests.training.jobs import VOCABULARY, job, read_steps, trainer_of
from wlb.documents.store.reader import TokenStoreWriter
from wlb.job.config import JobConfig
from wlb.packing.plan import StepPlan
from wlb.training import trainer as trainer_module
from wlb.training.process import TrainingError
from wlb.training.trainer import Trainer

RARE = VOCABULARY - 1  # a token that only this document has
POISONED = 11


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(2)
    with TokenStoreWriter(tmp_path / "store", vocab_size=VOCABULARY) as writer:
        for document in range(24):
            writer.add(np.append(RARE if document == POISONED else 0, rng.integers(0, RARE, 59)))
    return tmp_path


def _weights(trainer: Trainer) -> list[bytes]:
    parameters = (parameter for stage in trainer.model.stages for parameter in stage.parameters())
    return [parameter.to_local().detach().numpy().tobytes() for parameter in parameters]  # type: ignore[attr-defined]


def _train(config: JobConfig) -> tuple[str, set[int]]:
    """Train with an infinite embedding of the rare token; what ended it, and the documents of the step that did."""
    trainer = trainer_of(config)
    with torch.no_grad():
        for name, parameter in (named for stage in trainer.model.stages for named in stage.named_parameters()):
            if "embedding" in name:
                rows = parameter.to_local()  # type: ignore[attr-defined]
                if len(rows) == VOCABULARY or dist.get_rank() == dist.get_world_size() - 1:
                    rows[-1] = math.inf
    plans: list[StepPlan] = []
    train_step = trainer._train_step
    trainer._train_step = lambda loaded: plans.append(loaded.plan) or train_step(loaded)  # type: ignore[method-assign,func-returns-value]
    before, steps = _weights(trainer), trainer.steps()
    try:
        while next(steps):
            before = _weights(trainer)
    except TrainingError as error:
        message = str(error)
    assert _weights(trainer) == before
    return message, {segment.document for segment in plans[-1].segments}


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"pp": 2, "head": "dealt"}, {"cp": 2}])
def test_a_loss_that_is_not_finite_ends_the_job_and_names_the_documents(folder, parallel):
    results = run_ranks(2, _train, job(folder, parallel=parallel, training={"steps": None}))
    assert results[0] == results[1]
    message, trained = results[0]
    (step,) = {int(number) for number in re.findall(r"^step (\d+): loss is nan and gradient norm nan; ", message)}
    assert [row["step"] for row in read_steps(folder)] == [*range(1, step)]
    blamed = {int(document) for document in message.partition("micro-batches of documents ")[2].split(", ")}
    assert POISONED in blamed
    assert blamed < trained


def _train_with_an_infinite_gradient(config: JobConfig) -> None:
    trainer_module.clip_gradients = lambda *_: math.inf  # in this process only
    with pytest.raises(TrainingError, match=r"step 1: loss is 4\.\d+ and gradient norm inf; the loss of every micro-"):
        trainer_of(config).run()


def test_a_gradient_that_is_not_finite_ends_the_job(folder):
    run_ranks(1, _train_with_an_infinite_gradient, job(folder))
