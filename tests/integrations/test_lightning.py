"""The loss for Lightning counts the labelled tokens of the trainer's step, and undoes what Lightning divides by."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.training.distributed import run_ranks
from wlb.errors import UserError
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.document_fields import ids_and_labels
from wlb.integrations.lightning import LightningLoss
from wlb.integrations.packed import FlatteningCollator

RANDOM = np.random.default_rng(0)
LENGTHS = [20, 3, 9, 14, 7, 30, 11, 5, 17, 2, 26]
SIZES: dict[str, Any] = {"context_window": 32, "model": "tiny"}
WHOLE = [{"input_ids": RANDOM.integers(0, 19, length).tolist()} for length in LENGTHS]
MASKED = [document | {"loss_mask": RANDOM.integers(0, 2, len(document["input_ids"]))} for document in WHOLE]

# On two processes the last step has more micro-batches than are accumulated.
LEFT_OVER = [{"input_ids": RANDOM.integers(0, 19, length).tolist()} for length in (21, 25, 13, 16, 32, 26, 32, 13)]


def one_at_a_time(documents: Sequence[Any], weight: torch.Tensor) -> torch.Tensor:
    """The gradient of the mean loss of all labelled tokens of ``documents``."""
    labelled, total = 0, torch.zeros((), dtype=torch.float64)
    for document in documents:
        ids, labels = map(torch.from_numpy, ids_and_labels(document))
        total = total + torch.nn.functional.cross_entropy(weight[ids[:-1]], labels[1:], reduction="sum")
        labelled += int((labels[1:] != -100).sum())
    (gradient,) = torch.autograd.grad(total / labelled, weight)
    return gradient


def steps_as_lightning_runs_them(
    documents: list[Any], with_dataset: bool, accumulated: int = 2
) -> list[tuple[torch.Tensor, list[int]]]:
    """Of every step: the gradient as Lightning and DDP average it, and the documents of this rank."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    lengths = [len(document["input_ids"]) for document in documents]
    sampler = PlannedBatchSampler(lengths, **SIZES, micro_batches=accumulated, dp=ranks, rank=rank, epochs=2)
    if documents is LEFT_OVER and ranks > 1:
        assert sampler.micro_batches_of_steps()[-1] == 3
    loss = LightningLoss(sampler, accumulated, documents) if with_dataset else LightningLoss(sampler, accumulated)
    torch.manual_seed(0)
    weight = torch.randn(19, 19, dtype=torch.float64, requires_grad=True)
    steps: list[tuple[torch.Tensor, list[int]]] = []
    batches = list(sampler)
    for first in range(0, len(batches), accumulated):
        weight.grad = torch.zeros_like(weight)
        for indices in batches[first : first + accumulated]:
            batch = FlatteningCollator()([documents[index] for index in indices])
            labels = torch.cat([batch["labels"][0, 1:], torch.tensor([-100])])
            (loss(weight[batch["input_ids"][0]], labels, len(steps)) / accumulated).backward()
        if ranks > 1:
            dist.all_reduce(weight.grad)
        steps.append((weight.grad / ranks, [index for of in batches[first : first + accumulated] for index in of]))
    return steps


CASES = [(WHOLE, False), (WHOLE, True), (MASKED, True), (LEFT_OVER, False), (LEFT_OVER, True)]


def _all_cases() -> list[list[tuple[torch.Tensor, list[int]]]]:
    return [steps_as_lightning_runs_them(*case) for case in CASES]


def test_a_step_trains_its_documents_one_at_a_time():
    weight = torch.randn(19, 19, generator=torch.manual_seed(0), dtype=torch.float64, requires_grad=True)
    for of_ranks in ([_all_cases()], run_ranks(2, _all_cases)):
        for (documents, _), *of_case in zip(CASES, *of_ranks, strict=True):
            for step in zip(*of_case, strict=True):
                trained = [documents[index] for _, indices in step for index in indices]
                for gradient, _ in step:
                    torch.testing.assert_close(gradient, one_at_a_time(trained, weight), rtol=1e-12, atol=1e-12)


def test_steps_may_begin_anywhere_and_end_with_the_pass():
    sampler = PlannedBatchSampler(LENGTHS, **SIZES, micro_batches=2, epochs=2)
    loss = LightningLoss(sampler, accumulate_grad_batches=2)
    plans = list(sampler.steps())
    assert len(plans[-1].ranks[0]) == 1  # the last step may have fewer micro-batches
    for step in (1, 0, len(plans) - 1):  # a resumed trainer begins anywhere
        for micro_batch in plans[step].ranks[0]:
            labelled = micro_batch.tokens - len(micro_batch.segments)
            logits, labels = torch.zeros(labelled, 10), torch.ones(labelled, dtype=torch.int64)
            expected = 2 * np.log(10) * labelled / (plans[step].tokens - len(list(plans[step].segments)))
            assert float(loss(logits, labels, step)) == pytest.approx(expected)
    with pytest.raises(UserError, match="max_epochs=1"):
        loss(logits, labels, len(plans))


def test_what_the_sampler_did_not_plan_is_refused():
    def sampler(lengths: list[int] = LENGTHS, **settings: Any) -> PlannedBatchSampler:
        return PlannedBatchSampler(lengths, **SIZES | {"micro_batches": 2} | settings)

    with pytest.raises(UserError, match="accumulate_grad_batches = 4, but the sampler plans 2 micro-batches"):
        LightningLoss(sampler(), 4)
    with pytest.raises(UserError, match="lets cp = 2 processes share"):
        LightningLoss(sampler(cp=2), 2)
    logits, labels = torch.zeros(7, 10), torch.ones(7, dtype=torch.int64)
    with pytest.raises(UserError, match=r"a micro-batch of step 0 has 7 labelled tokens, by the sampler's plan \d+"):
        LightningLoss(sampler(), 2)(logits, labels, 0)  # masked, or of another sampler
    with pytest.raises(UserError, match="process 0 of 1 trains with the sampler of rank = 1 of dp = 2"):
        LightningLoss(sampler(dp=2, rank=1), 2)(logits, labels, 0)
    with pytest.raises(UserError, match=r"document \d+ has \d+ tokens, and \d+ for the sampler"):
        LightningLoss(sampler(), 2, WHOLE[::-1])(logits, labels, 0)


def test_a_loss_refuses_the_batches_of_another_sampler_and_masks_that_it_was_not_told_of():
    sampler, other = (PlannedBatchSampler(LENGTHS, **SIZES, micro_batches=2, epochs=2, seed=seed) for seed in (0, 1))
    for documents, batches in ((WHOLE, other), (MASKED, sampler)):
        loss = LightningLoss(sampler, 2)
        first = [documents[index] for index in next(iter(batches))]
        labels = FlatteningCollator()(first)["labels"][0]
        with pytest.raises(UserError, match="give LightningLoss the sampler of the train loader and"):
            loss(torch.zeros(len(labels), 19), labels, 0)


@pytest.mark.parametrize("stateful", [False, True])
def test_a_loader_that_begins_anew_in_a_resumed_run_is_refused(stateful: bool):
    """Documents are equally long, so that the number of labels gives nothing away."""
    sampler = PlannedBatchSampler([8] * 64, **SIZES, micro_batches=2)
    batches = iter(sampler)
    for _ in range(4):
        next(batches)
    state = batches.state_dict()
    loss = LightningLoss(sampler, accumulate_grad_batches=2)
    resumed = iter(sampler)
    if stateful:
        resumed.load_state_dict(state)
    documents = [{"input_ids": [index % 19] * 8} for index in range(64)]
    labels = FlatteningCollator()([documents[index] for index in next(resumed)])["labels"][0]
    if stateful:
        loss(torch.zeros(len(labels), 19), labels, 2)
    else:
        with pytest.raises(UserError, match=r"in step 2, plan 2 of the sampler, and its loader yields plan 0; resume"):
            loss(torch.zeros(len(labels), 19), labels, 2)


def test_a_step_of_fewer_micro_batches_before_the_last_is_refused():
    planned = PlannedBatchSampler(LENGTHS, **SIZES, micro_batches=2, epochs=2)
    sampler: Any = SimpleNamespace(
        job=planned.job, rank=None, steps=lambda: reversed(list(planned.steps())), follow=planned.follow
    )
    with pytest.raises(UserError, match="documents for only 1 of its 2 micro-batches, and Lightning would go on"):
        LightningLoss(sampler, 2)(torch.zeros(1, 10), torch.zeros(1, dtype=torch.int64), 0)
