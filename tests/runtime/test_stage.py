"""Pipeline stages of any module: micro-batches of different lengths, exact in float64."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.training.distributed import run_ranks
from wlb.runtime.stage import pipeline_order, run_order, variable_length_stage

WIDTH, VOCABULARY, STAGES = 6, 11, 4
STEPS = [[3, 1, 7, 2], [5, 5, 1, 9]]  # tokens of the micro-batches of each step


class Part(nn.Module):
    """A part of somebody's model: rows are mixed along the tokens, so that lengths and order matter."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if number == 0 else None
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY) if number == STAGES - 1 else None
        self.double()

    def forward(self, x: Tensor, scale: float) -> Tensor:
        x = self.embedding(x) if self.embedding else x
        x = x + torch.tanh(self.mix(x)).cumsum(0) * scale
        out: Tensor = self.head(x) if self.head else x
        return out


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, target, reduction="sum") / 30


def micro_batches(lengths: list[int]) -> list[tuple[Tensor, float, Tensor]]:
    ends = [*accumulate(lengths)]
    return [
        (torch.arange(end - n, end) % VOCABULARY, 1 / n, torch.arange(end, end + n) % VOCABULARY)
        for n, end in zip(lengths, ends, strict=True)
    ]


def in_stages(per_rank: int) -> tuple[list[list[float]], dict[int, Any]]:
    """Losses of each step and, after all of them, gradients by stage; nothing zeroes them in between."""
    ranks = dist.get_world_size()
    numbers = range(dist.get_rank(), STAGES if per_rank == 2 else ranks, ranks)
    parts = {number: part_of(number, ranks * per_rank) for number in numbers}
    stages = [
        variable_length_stage(
            part, number, ranks * per_rank, width=WIDTH, device=torch.device("cpu"), dtype=torch.float64
        )
        for number, part in parts.items()
    ]
    order = pipeline_order(stages, len(STEPS[0]), loss_of)
    losses: list[list[float]] = []
    for lengths in STEPS:
        tokens, scales, targets = zip(*micro_batches(lengths), strict=True)
        keywords = [{"scale": scale} for scale in scales]
        losses.append([loss.item() for loss in run_order(order, tokens, lengths, keywords, targets)])
    gradients = {n: [w.grad for w in part.parameters()] for n, part in parts.items()}
    return losses, gradients


def part_of(number: int, stages: int) -> nn.Module:
    """Of ``STAGES`` parts in so many stages: one each, or two in a row."""
    if stages == STAGES:
        return Part(number)
    first, second = Part(2 * number), Part(2 * number + 1)
    return _InARow(first, second)


class _InARow(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, scale: float) -> Tensor:
        out: Tensor = self.second(self.first(x, scale=scale), scale=scale)
        return out


@pytest.mark.parametrize("per_rank", [1, 2])
def test_stages_of_any_module_train_micro_batches_of_any_length(per_rank):
    parts = [Part(number) for number in range(STAGES)]
    expected: list[list[float]] = []
    for lengths in STEPS:
        expected.append([])
        for x, scale, target in micro_batches(lengths):
            for part in parts:
                x = part(x, scale=scale)
            loss = loss_of(x, target)
            loss.backward()
            expected[-1].append(loss.item())
    results = run_ranks(2, in_stages, per_rank)
    assert results[0][0] == [[], []]
    assert results[1][0] == [pytest.approx(losses, rel=1e-13) for losses in expected]
    found = {number: grads for _, gradients in results for number, grads in gradients.items()}
    alone = [[w.grad for w in part.parameters()] for part in parts]
    if per_rank == 1:
        alone = [alone[0] + alone[1], alone[2] + alone[3]]
    for number, gradients in enumerate(alone):
        for ours, theirs in zip(found[number], gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
