"""Pipeline stages of any module: micro-batches of different lengths in any order, exact in float64."""

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.schedules.by_chance import operations_by_chance
from tests.training.distributed import run_ranks
from wlb.errors import UserError
from wlb.runtime.stage import Pipeline, PlannedStage, pipeline, run_order
from wlb.schedules.critical_path import dealt_head_lists
from wlb.schedules.operations import BACKWARD, HEAD, INPUT, WEIGHT, Operation, RankOperations, rank_operations

WIDTH, VOCABULARY, STAGES = 6, 11, 8
STEPS = [[3, 1, 7, 2], [5, 5, 1, 9], [4, 2, 2, 6]]  # tokens of the micro-batches of each step


class Part(nn.Module):
    """A part of somebody's model: rows are mixed along the tokens, so that lengths and order matter."""

    def __init__(self, number: int, *, head: bool = True) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if number == 0 else None
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if head and number == STAGES - 1 else None
        self.recomputed = number % 3 == 1
        self.double()

    def forward(self, x: Tensor, scale: float) -> Tensor:
        x = self.embedding(x) if self.embedding else x
        x = checkpoint(self._mixed, x, scale, use_reentrant=False) if self.recomputed else self._mixed(x, scale)
        out: Tensor = self.head(x) if self.head else x
        return out

    def _mixed(self, x: Tensor, scale: float) -> Tensor:
        return x + torch.tanh(self.mix(self.norm(x))).cumsum(0) * scale


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, target, reduction="sum") / 30


def micro_batches(lengths: list[int]) -> list[tuple[Tensor, float, Tensor]]:
    ends = [*accumulate(lengths)]
    return [
        (torch.arange(end - n, end) % VOCABULARY, 1 / n, torch.arange(end, end + n) % VOCABULARY)
        for n, end in zip(lengths, ends, strict=True)
    ]


class InARow(nn.Module):
    """Some parts; the last of all has a head unless ``deals_head``, of which a copy may be beside the parts."""

    def __init__(self, numbers: range, *, deals_head: bool = False, holds_head: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(number, head=not deals_head) for number in numbers)
        self.head = Part(STAGES - 1).head if holds_head else None

    def forward(self, x: Tensor, scale: float) -> Tensor:
        for part in self.parts:
            x = part(x, scale=scale)
        return x


def orders(per_rank: int, replica: int, deals_head: bool) -> list[RankOperations]:
    """Of each step: by chance, in its named schedule, by chance."""
    seeds = (10 * per_rank + step + 100 * replica for step in (0, 2))
    first, last = (operations_by_chance(seed, 2, per_rank, 4, deals_head=deals_head) for seed in seeds)
    named = rank_operations("interleaved_1f1b", 2, 4, per_rank)
    return [first, dealt_head_lists(named) if deals_head else named, last]


def pipeline_of(
    rank: int,
    per_rank: int,
    group: dist.ProcessGroup | None = None,
    *,
    micro_batches: int = 4,
    deals_head: bool = False,
) -> Pipeline:
    """Of two ranks, with stages of equally many parts."""
    parts = STAGES // (2 * per_rank)
    stages = [
        PlannedStage(
            InARow(
                range(number * parts, (number + 1) * parts),
                deals_head=deals_head,
                holds_head=deals_head and number == rank,
            ),
            number,
            2 * per_rank,
            width=WIDTH,
            device=torch.device("cpu"),
            dtype=torch.float64,
            group=group,
        )
        for number in range(rank, 2 * per_rank, 2)
    ]

    def loss_of_stream(x: Tensor, target: Tensor) -> Tensor:
        return loss_of(stages[0].submod.get_submodule("head")(x), target)

    return pipeline(stages, micro_batches, loss_of_stream if deals_head else loss_of, deals_head=deals_head)


def in_stages(replicas: int, deals_head: bool) -> list[tuple[list[list[float]], dict[str, Tensor]]]:
    """By stages on a rank: losses of each step and, after all of them, gradients; nothing zeroes them in between.

    Replicas run the same micro-batches in orders of their own, and weights are sharded over them. The gradient of a
    dealt head is that of the micro-batches whose head ran here.
    """
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("dp", "pp"))
    replica, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    results = []
    for per_rank in (1, 2, 4):
        order = pipeline_of(rank, per_rank, mesh.get_group("pp"), deals_head=deals_head)
        of_blocks = order.stages[:per_rank]
        for stage in of_blocks if replicas > 1 else ():
            for part in (*stage.submod.get_submodule("parts").children(), stage.submod):
                fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
        losses: list[list[float]] = []
        for lengths, operations in zip(STEPS, orders(per_rank, replica, deals_head), strict=True):
            tokens, scales, targets = zip(*micro_batches(lengths), strict=True)
            keywords = [{"scale": scale} for scale in scales]
            losses.append([loss.item() for loss in run_order(order, operations, tokens, lengths, keywords, targets)])
        gradients = {}
        for stage in of_blocks:
            for name, weight in stage.submod.named_parameters():
                grad = weight.grad
                grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
                assert grad is not None
                if name == "head.weight":
                    gradients[name] = grad
                    continue
                _, number, rest = name.split(".", 2)
                first = stage.stage_index * STAGES // stage.stages
                gradients[f"parts.{first + int(number)}.{rest}"] = grad
        results.append((losses, gradients))
    return results


def alone() -> tuple[list[list[float]], dict[str, Tensor]]:
    whole = InARow(range(STAGES))
    losses: list[list[float]] = []
    for lengths in STEPS:
        losses.append([])
        for x, scale, target in micro_batches(lengths):
            loss = loss_of(whole(x, scale=scale), target)
            loss.backward()
            losses[-1].append(loss.item())
    return losses, {name: weight.grad for name, weight in whole.named_parameters() if weight.grad is not None}


# Four processes repeat with sharded weights what two prove, and those that deal the head run what others do.
@pytest.mark.parametrize(
    ("replicas", "deals_head"), [(1, False), pytest.param(2, False, marks=pytest.mark.exhaustive), (1, True), (2, True)]
)
def test_stages_of_any_module_run_micro_batches_of_any_length_in_any_order(replicas, deals_head):
    losses, gradients = alone()
    results = run_ranks(2 * replicas, in_stages, replicas, deals_head)
    for first, last in zip(results[-2], results[-1], strict=True):
        if deals_head:
            copies = [of_rank[1].pop("head.weight") for of_rank in (first, last)]
            last[1][f"parts.{STAGES - 1}.head.weight"] = copies[0] + copies[1]
        else:
            assert first[0] == [[]] * len(STEPS)
        for here, there, exact in zip(first[0], last[0], losses, strict=True):
            both = [of_rank for of_rank in (here, there) if of_rank]  # zero where the other ran the head
            assert [sum(of_both) for of_both in zip(*both, strict=True)] == pytest.approx(exact, rel=1e-13)
        found = first[1] | last[1]
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


def _fewer_micro_batches_than_ranks() -> list[float]:
    (tokens, scale, target), *_ = micro_batches([5])
    order = pipeline_of(dist.get_rank(), 1, micro_batches=1)
    losses = run_order(order, rank_operations("1f1b", 2, 1), [tokens], [5], [{"scale": scale}], [target])
    return [loss.item() for loss in losses]


def test_a_pipeline_runs_fewer_micro_batches_than_it_has_ranks():
    assert len(run_ranks(2, _fewer_micro_batches_than_ranks)[1]) == 1


def _refused() -> list[str]:
    order, dealing = (pipeline_of(dist.get_rank(), 1, deals_head=deals_head) for deals_head in (False, True))
    first, last = named = rank_operations("1f1b", 2, 4)
    in_two = tuple(tuple(op._replace(kind=kind) for op in ops for kind in _kinds(op)) for ops in named)
    dealt = dealt_head_lists(named)
    moved = [
        tuple(tuple(op._replace(stage=op.stage + by) if op.kind == HEAD else op for op in ops) for ops in dealt)
        for by in (1, 2)
    ]
    wrong: list[RankOperations] = []
    wrong += (first[:-1], last), (first, (*last, last[-1])), (last, first), (first, last[::-1]), (first, in_two[1][:-1])
    wrong += rank_operations("1f1b", 2, 5), dealt, in_two, (first,)
    cases = [*((order, operations) for operations in wrong), *((dealing, of) for of in (named, *moved, dealt))]
    order.stages[0].submod = dealing.stages[0].submod = DistributedDataParallel(nn.Linear(1, 1))
    found = []
    for pipe, operations in cases:
        with pytest.raises(UserError) as error:
            run_order(pipe, operations, [torch.zeros(1)] * 4, [1] * 4, [{}] * 4, [None] * 4)
        found.append(str(error.value))
    return found


def _kinds(operation: Operation) -> str:
    return INPUT + WEIGHT if operation.kind == BACKWARD else operation.kind


def test_operations_that_would_lose_gradients_are_refused_on_all_ranks():
    first, last = run_ranks(2, _refused)
    assert first == last
    heads = "[(2, 0), (2, 1), (2, 2), (2, 3)]"
    places = ["(0, 3)]", "(1, 3)]", "[(0, 0), (0, 1)", "[(1, 0)", "(1, 3)]", "(0, 4), (1, 4)", "(2, 3)]"]
    of_dealt = [f"{heads} are wrong", "a head (H) of each", "are wrong", "use fully_shard"]
    for message, part in zip(first, [*places, "use fully_shard", "each of 2 ranks", *of_dealt], strict=True):
        assert part in message, first
