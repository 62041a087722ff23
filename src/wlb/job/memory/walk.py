"""Peak memory of one process of a training job, from model, layout and the tokens of its micro-batches.

The prediction walks through a step operation by operation, in the order of the pipeline schedule
(``wlb.schedules.operations``). A forward holds what its backward will read, layer by layer; a backward releases it and
leaves gradients; weights are gathered and freed as FSDP does. Where weights are kept, gradients of all layers are held
to the end of the last backward, and reduced then. The largest sum is the prediction, reported with its parts. How many
micro-batches are in flight, and of which lengths, follows from the walk.

``wlb.job.memory.layers`` has the memory of each layer. Nothing here imports torch.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

from wlb.job.job import Job
from wlb.job.memory.layers import Exchange, LayerMemory, Unit, master_bytes
from wlb.schedules.layout import split_layers
from wlb.schedules.operations import BACKWARD, FORWARD, HEAD, Operation

BATCH_BYTES = 3 * 8  # tokens, labels and positions in int64
_StageState = tuple[frozenset[int], frozenset[int]]  # units with gathered weights, and units with gradients


@dataclass(frozen=True)
class MemoryEstimate:
    """The peak memory of a process: bytes by purpose, on the pipeline rank with the highest peak."""

    pipeline_rank: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {gib(value)}" for name, value in self.parts.items() if value)
        return f"{gib(self.total)} GiB ({parts})"


def gib(number_of_bytes: float) -> str:
    """Bytes in GiB, with three significant digits."""
    return f"{number_of_bytes / 2**30:.3g}"


def predict_memory(job: Job, tokens: Sequence[int], limit: float = math.inf) -> MemoryEstimate:
    """The peak over a step whose micro-batches hold ``tokens`` tokens each, before cp and tp ranks share them.

    ``tokens`` are those of one data-parallel rank. Context-parallel ranks are assumed to exchange as if one document
    filled the micro-batch. The estimate is the first peak over ``limit`` bytes, or else the highest of all ranks.
    """
    estimates = rank_memories(job, [largest_share(job, count) for count in tokens], limit)
    return max(estimates, key=lambda estimate: estimate.total)


def rank_memories(
    job: Job, rows: Sequence[int], limit: float = math.inf, walk: "Walk | None" = None
) -> list[MemoryEstimate]:
    """``predict_rank_memory`` of the ``unlike_ranks``; ends with the first peak over ``limit`` bytes, if any."""
    estimates: list[MemoryEstimate] = []
    walk, operations, batches = walk or Walk(job), job.layout.operations(len(rows)), [(count, None) for count in rows]
    for rank in unlike_ranks(job):
        estimates.append(walk.over(rank, batches, operations[rank], limit))
        if estimates[-1].total > limit:
            break
    return estimates


def unlike_ranks(job: Job) -> list[int]:
    """Pipeline ranks that differ in memory; one of them has the highest peak.

    Among ranks that are alike, the first has the most micro-batches in flight, so the others are left out.
    """
    return sorted({*like_ranks(job)})


def like_ranks(job: Job) -> list[int]:
    """For each pipeline rank the first that has the same blocks in every stage.

    The ranks with the embedding and the output head differ from all others.
    """
    layout, blocks = job.layout, split_layers(job.shape, job.layout)
    first: dict[tuple[Any, ...], int] = {}
    alike = []
    for rank, stages in enumerate(layout.rank_stages):
        kinds = [tuple(map(job.shape.block_kind, blocks[stage])) for stage in stages]
        alike.append(first.setdefault((rank == 0, rank == layout.pp - 1, *kinds), rank))
    return alike


def predict_rank_memory(
    job: Job, rows: Sequence[int], pipeline_rank: int, exchanges: Sequence[Exchange] | None = None
) -> MemoryEstimate:
    """The peak of a rank with ``rows`` tokens of each micro-batch, shared by its tensor-parallel group.

    ``exchanges`` are its exchanges in each; by default the largest that a plan may need.
    """
    batches = [*zip(rows, repeat(None) if exchanges is None else exchanges, strict=False)]
    return Walk(job).over(pipeline_rank, batches, job.layout.operations(len(rows))[pipeline_rank])


def largest_share(job: Job, tokens: int) -> int:
    """The most tokens of a micro-batch that a context-parallel rank holds."""
    return -(-tokens // job.layout.pool_size)


class _WalkedPass(NamedTuple):
    """A forward or backward of a stage: its peak and final change of held memory, and the state it leaves."""

    most_total: float
    most: dict[str, int]
    total: int  # of ``held``
    held: dict[str, int]
    left: _StageState


_Batch = tuple[int, Exchange | None]  # rows and exchange of a micro-batch


class Walk:
    """The step of one pipeline rank after another: bytes held by purpose, and the peak so far.

    Passes of like stages that begin in the same state change memory in the same way, so each kind of pass is walked
    through once.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.blocks = split_layers(job.shape, job.layout)
        self.heads = job.layout.head_stages
        kinds = [(n == 0, n in self.heads, *map(job.shape.block_kind, of)) for n, of in enumerate(self.blocks)]
        self.like = [kinds.index(kind) for kind in kinds]  # the first stage like each
        self.compute, self.master = job.hardware.bytes_per_value, master_bytes(job)
        layout = job.layout
        self.shards = layout.dp_cp  # ranks over which FSDP divides weights
        self.expert_shards = layout.dp_cp // layout.ep_ranks  # those of experts that the rank does not share
        self.frees_weights = not job.layout.keeps_weights  # and gathers them again in every micro-batch
        self.passes: dict[tuple[Any, ...], _WalkedPass] = {}
        self.known: dict[tuple[int, _Batch], tuple[int, list[Unit]]] = {}

    def over(
        self, rank: int, batches: Sequence[_Batch], operations: Sequence[Operation], limit: float = math.inf
    ) -> MemoryEstimate:
        """Walk through a step: forwards, backwards and the optimizer; or until over ``limit`` bytes."""
        self.held: dict[str, int] = defaultdict(int)
        self.total = 0  # of ``held``
        self.most: dict[str, int] = {}
        self.most_total: float = 0
        self.gathered: set[int] = set()  # units of the current stage
        self.with_gradients: set[int] = set()
        self.states: dict[int, _StageState] = {}
        self.batches = batches
        mine = {
            stage: self._ends_and_units(self.like[stage], (1, None))[1] for stage in self.job.layout.rank_stages[rank]
        }
        shard = self._sharded([unit for units in mine.values() for unit in units]) * self.master
        self._add("weights", shard)
        self._add("optimizer", 2 * shard)
        self._add("checkpoint", 3 * shard if self.job.checkpoint_copy else 0)
        self._add("batches", sum(rows for rows, _ in batches) * BATCH_BYTES)
        for stage, units in mine.items():
            self.gathered = set()
            for index, unit in enumerate(() if self.frees_weights else units):  # all at the start of the step
                self._gather(index, unit)
            self.states[stage] = frozenset(self.gathered), frozenset()
        for stage, micro_batch, kind in operations:
            one = self._pass(stage, micro_batch, kind)
            if self.total + one.most_total > self.most_total:
                self.most, self.most_total = _sum(self.held, one.most), self.total + one.most_total
            self.total += one.total
            for name, value in one.held.items():
                self.held[name] += value
            if self.most_total > limit:
                break
        self._note(working=shard)  # of the optimizer
        return MemoryEstimate(rank, {name: value for name, value in self.most.items() if value})

    def _pass(self, stage: int, micro_batch: int, kind: str) -> _WalkedPass:
        last, like = micro_batch == len(self.batches) - 1, self.like[stage]
        key = (like, self.batches[micro_batch], kind, kind == BACKWARD and last, self.states[stage])
        if key not in self.passes:
            so_far = self.held, self.total, self.most, self.most_total
            self.held, self.total, self.most, self.most_total = defaultdict(int), 0, {}, -math.inf
            self.gathered, self.with_gradients = map(set, self.states[stage])
            {FORWARD: self._forward, BACKWARD: self._backward, HEAD: self._head}[kind](like, micro_batch)
            left = frozenset(self.gathered), frozenset(self.with_gradients)
            self.passes[key] = _WalkedPass(self.most_total, self.most, self.total, self.held, left)
            self.held, self.total, self.most, self.most_total = so_far
        self.states[stage] = self.passes[key].left
        return self.passes[key]

    def _ends_and_units(self, stage: int, batch: _Batch) -> tuple[int, list[Unit]]:
        """Memory of a stage beside its layers, and the layers; the same for micro-batches with the same rows."""
        if (stage, batch) not in self.known:
            layers = LayerMemory(self.job, *batch)
            self.known[stage, batch] = (layers.ends(), self._units(stage, layers))
        return self.known[stage, batch]

    def _units(self, stage: int, layers: LayerMemory) -> list[Unit]:
        first = [layers.embedding()] if stage == 0 else []
        last = [layers.head(stage)] if stage in self.heads else []
        if self.job.layout.deals_head:  # run by operations of its own, which hold nothing for later
            last = [replace(head, held=0, forward=0, backward=0, scores=0) for head in last]
        return [*first, *layers.blocks(self.blocks[stage]), *last]

    def _forward(self, stage: int, micro_batch: int) -> None:
        ends, units = self._ends_and_units(stage, self.batches[micro_batch])
        self._add("activations", ends)
        self._gather_root(units)
        for index, unit in enumerate(units):
            self._gather(index, unit)
            self._note(working=unit.forward)
            self._hold(unit, +1)
            if self.frees_weights and not unit.root:
                self._free(index, unit)
        if self.frees_weights:  # also those of the root, as the stage ends
            for index, unit in enumerate(units):
                self._free(index, unit)

    def _backward(self, stage: int, micro_batch: int) -> None:
        ends, units = self._ends_and_units(stage, self.batches[micro_batch])
        last = micro_batch == len(self.batches) - 1
        self._gather_root(units)
        for index, unit in reversed(list(enumerate(units))):
            self._gather(index, unit)
            if self.job.layout.pp == 1 and index and not units[index - 1].root:
                self._gather(index - 1, units[index - 1])  # FSDP gathers one unit ahead
            self._note(working=unit.backward)
            self._hold(unit, -1)
            self._add_gradients(index, unit)
            if self.frees_weights and last and not unit.root:
                self._reduce(index, unit)
        self._add("activations", -ends)
        if last:
            for index, unit in enumerate(units):
                if index in self.with_gradients:
                    self._reduce(index, unit)

    def _head(self, stage: int, micro_batch: int) -> None:
        """Output head and loss of a micro-batch, from its stream to the gradient of that."""
        layers = LayerMemory(self.job, *self.batches[micro_batch])
        unit = layers.head(stage)
        self._note(working=2 * layers.stream + max(unit.forward, unit.held + unit.backward))
        self._add_gradients(len(self._ends_and_units(stage, self.batches[micro_batch])[1]) - 1, unit)

    def _hold(self, unit: Unit, sign: int) -> None:
        self._add("activations", sign * (unit.held - unit.scores - unit.received))
        self._add("received keys and values", sign * unit.received)
        self._add("scores", sign * unit.scores)

    def _gather_root(self, units: Sequence[Unit]) -> None:
        for index, unit in enumerate(units):
            if unit.root:
                self._gather(index, unit)

    def _gather(self, index: int, unit: Unit) -> None:
        if index not in self.gathered:
            self.gathered.add(index)
            self._add("gathered weights", unit.weights * self.compute)
            if self.shards > 1:  # the output of the collective, before it is copied into weights
                self._note(working=unit.weights * self.compute)

    def _free(self, index: int, unit: Unit) -> None:
        if index in self.gathered:
            self.gathered.remove(index)
            self._add("gathered weights", -(unit.weights * self.compute))

    def _add_gradients(self, index: int, unit: Unit) -> None:
        if index not in self.with_gradients:
            self.with_gradients.add(index)
            self._add("gradients", unit.gradient * self.master)
        if self.compute < self.master:  # of this micro-batch, before they are accumulated
            self._note(gradients=unit.gradient * self.compute)

    def _reduce(self, index: int, unit: Unit) -> None:
        """Reduce-scatter gradients over the ranks that share the weights."""
        whole = unit.weights * self.master
        self._free(index, unit)
        self._note(working=whole)
        self.with_gradients.discard(index)
        self._add("gradients", self._sharded([unit]) * self.master - unit.gradient * self.master)

    def _sharded(self, units: Sequence[Unit]) -> int:
        """Elements of the weights of ``units`` that FSDP leaves on this rank."""
        experts = sum(unit.experts for unit in units)
        others = sum(unit.weights for unit in units) - experts
        return -(-others // self.shards) + -(-experts // self.expert_shards)

    def _note(self, working: int = 0, gradients: int = 0) -> None:
        """Record the current memory plus temporary bytes, if that is the peak so far."""
        total = self.total + working + gradients
        if total > self.most_total:
            self.most, self.most_total = _sum(self.held, {"working": working, "gradients": gradients}), total

    def _add(self, name: str, value: int) -> None:
        self.held[name] += value
        self.total += value


def _sum(held: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return held | {name: held.get(name, 0) + value for name, value in more.items()}
