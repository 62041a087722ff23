"""Peak memory of one process of a training job, from model, layout and the tokens of its micro-batches.

The prediction walks through a step operation by operation, in the order of the pipeline schedule
(``wlb.schedules.operations``). A forward holds what its backward will read, layer by layer; a backward releases it and
leaves gradients; weights are gathered and freed as FSDP does. Where weights are kept, gradients of all layers are held
to the end of the last backward, and reduced then. The largest sum is the prediction, reported with its parts. How many
micro-batches are in flight, and of which lengths, follows from the walk. ``layers`` has the memory of each layer.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from wlb.job.job import Job
from wlb.job.memory.layers import Exchange, LayerMemory, Unit, master_bytes
from wlb.schedules.layout import split_layers
from wlb.schedules.operations import BACKWARD, FORWARD, HEAD, Operation

BATCH_BYTES = 3 * 8  # tokens, labels and positions in int64
_Batch = tuple[int, Exchange | None]  # rows and exchange of a micro-batch; by default the largest exchange
_Placed = tuple[int, Unit]  # a unit and its place in the stage
_StageState = tuple[frozenset[int], frozenset[int]]  # places of units with gathered weights, and with gradients


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
    estimates = Walk(job).unlike_ranks([largest_share(job, count) for count in tokens], limit)
    return max(estimates, key=lambda estimate: estimate.total)


def largest_share(job: Job, tokens: int) -> int:
    """The most tokens of a micro-batch that a context-parallel rank holds."""
    return -(-tokens // job.layout.pool_size)


class _Tally:
    """Bytes held by purpose, and the peak so far; of a step, or the changes of a pass."""

    def __init__(self) -> None:
        self.held: dict[str, int] = defaultdict(int)
        self.total = 0  # of ``held``
        self.most: dict[str, int] = {}
        self.most_total = -math.inf

    def add(self, name: str, value: int) -> None:
        self.held[name] += value
        self.total += value

    def note(self, working: int = 0, gradients: int = 0) -> None:
        """Record what is held plus temporary bytes, if that is the peak so far."""
        self._rise({"working": working, "gradients": gradients}, working + gradients)

    def follow(self, change: Self) -> None:
        """Go on as a pass does."""
        self._rise(change.most, change.most_total)
        for name, value in change.held.items():
            self.add(name, value)

    def _rise(self, more: dict[str, int], total: float) -> None:
        if self.total + total > self.most_total:
            self.most = self.held | {name: self.held.get(name, 0) + value for name, value in more.items()}
            self.most_total = self.total + total


class Walk:
    """The steps of the pipeline ranks of a job.

    Passes of like stages that begin in the same state change memory in the same way, so each kind of pass is walked
    through once.
    """

    def __init__(self, job: Job) -> None:
        self.job, layout = job, job.layout
        self.blocks = split_layers(job.shape, layout)
        kinds = [(n == 0, n in layout.head_stages, *map(job.shape.block_kind, of)) for n, of in enumerate(self.blocks)]
        self.like = [kinds.index(kind) for kind in kinds]  # the first stage like each
        of_ranks = [(rank == layout.pp - 1, *(self.like[n] for n in of)) for rank, of in enumerate(layout.rank_stages)]
        self.like_ranks = [of_ranks.index(stages) for stages in of_ranks]  # the first like each; the last alone
        self.compute, self.master = job.hardware.bytes_per_value, master_bytes(job)
        self.shards = layout.dp_cp  # ranks over which FSDP divides weights
        self.expert_shards = layout.dp_cp // layout.ep_ranks  # those of experts that the rank does not share
        self.frees_weights = not layout.keeps_weights  # and gathers them again in every micro-batch
        self.passes: dict[tuple[Any, ...], tuple[_Tally, _StageState]] = {}
        self.known: dict[tuple[int, _Batch], tuple[int, list[_Placed]]] = {}

    def unlike_ranks(self, rows: Sequence[int], limit: float = math.inf) -> list[MemoryEstimate]:
        """The peaks of ranks that differ, for ``rows`` of each micro-batch; ends with the first over ``limit`` bytes.

        Among like ranks the first has the most micro-batches in flight, so the others are left out.
        """
        estimates: list[MemoryEstimate] = []
        operations, batches = self.job.layout.operations(len(rows)), [(count, None) for count in rows]
        for rank in sorted({*self.like_ranks}):
            estimates.append(self.over(rank, batches, operations[rank], limit))
            if estimates[-1].total > limit:
                break
        return estimates

    def over(
        self, rank: int, batches: Sequence[_Batch], operations: Sequence[Operation], limit: float = math.inf
    ) -> MemoryEstimate:
        """Walk through the step of a rank: forwards, backwards and the optimizer; or until over ``limit`` bytes."""
        self.tally = step = _Tally()
        self.batches = batches
        mine = {stage: self._layers(self.like[stage], (1, None))[1] for stage in self.job.layout.rank_stages[rank]}
        shard = self._sharded([unit for units in mine.values() for _, unit in units]) * self.master
        step.add("weights", shard)
        step.add("optimizer", 2 * shard)
        step.add("checkpoint", 3 * shard if self.job.checkpoint_copy else 0)
        step.add("batches", sum(rows for rows, _ in batches) * BATCH_BYTES)
        states: dict[int, _StageState] = {}
        for stage, units in mine.items():
            self.gathered: set[int] = set()  # places of units of the current stage
            self._gather(() if self.frees_weights else units)  # all at the start of the step
            states[stage] = frozenset(self.gathered), frozenset()
        for stage, micro_batch, kind in operations:
            change, states[stage] = self._pass(self.like[stage], micro_batch, kind, states[stage])
            step.follow(change)
            if step.most_total > limit:
                break
        step.note(working=shard)  # of the optimizer
        return MemoryEstimate(rank, {name: value for name, value in step.most.items() if value})

    def _pass(self, stage: int, micro_batch: int, kind: str, state: _StageState) -> tuple[_Tally, _StageState]:
        """How a forward, backward or head changes memory, and the state that it leaves."""
        ends_step = kind == BACKWARD and micro_batch == len(self.batches) - 1
        key = stage, self.batches[micro_batch], kind, ends_step, state
        if key not in self.passes:
            self.tally, (self.gathered, self.with_gradients) = _Tally(), map(set, state)
            {FORWARD: self._forward, BACKWARD: self._backward, HEAD: self._head}[kind](stage, micro_batch)
            self.passes[key] = self.tally, (frozenset(self.gathered), frozenset(self.with_gradients))
        return self.passes[key]

    def _layers(self, stage: int, batch: _Batch) -> tuple[int, list[_Placed]]:
        """Memory of a stage beside its layers, and the layers; the same for micro-batches with the same rows."""
        if (stage, batch) not in self.known:
            layers = LayerMemory(self.job, *batch)
            first = [layers.embedding()] if stage == 0 else []
            last = [layers.head(stage)] if stage in self.job.layout.head_stages else []
            if self.job.layout.deals_head:  # run by operations of its own, which hold nothing for later
                last = [replace(head, held=0, forward=0, backward=0, scores=0) for head in last]
            units = [*first, *layers.blocks(self.blocks[stage]), *last]
            self.known[stage, batch] = layers.ends(), [*enumerate(units)]
        return self.known[stage, batch]

    def _forward(self, stage: int, micro_batch: int) -> None:
        ends, units = self._layers(stage, self.batches[micro_batch])
        self.tally.add("activations", ends)
        self._gather(one for one in units if one[1].root)
        for place, unit in units:
            self._gather([(place, unit)])
            self.tally.note(working=unit.forward)
            self._hold(unit, +1)
            if self.frees_weights and not unit.root:
                self._free(place, unit)
        for place, unit in units if self.frees_weights else ():  # also those of the root, as the stage ends
            self._free(place, unit)

    def _backward(self, stage: int, micro_batch: int) -> None:
        ends, units = self._layers(stage, self.batches[micro_batch])
        last = micro_batch == len(self.batches) - 1
        self._gather(one for one in units if one[1].root)
        for place, unit in reversed(units):
            self._gather([(place, unit)])
            if self.job.layout.pp == 1 and place and not units[place - 1][1].root:
                self._gather([units[place - 1]])  # FSDP gathers one unit ahead
            self.tally.note(working=unit.backward)
            self._hold(unit, -1)
            self._add_gradients(place, unit)
            if self.frees_weights and last and not unit.root:
                self._reduce(place, unit)
        self.tally.add("activations", -ends)
        for place, unit in units if last else ():
            if place in self.with_gradients:
                self._reduce(place, unit)

    def _head(self, stage: int, micro_batch: int) -> None:
        """Output head and loss of a micro-batch, from its stream to the gradient of that."""
        layers = LayerMemory(self.job, *self.batches[micro_batch])
        unit = layers.head(stage)
        self.tally.note(working=2 * layers.stream + max(unit.forward, unit.held + unit.backward))
        self._add_gradients(self._layers(stage, self.batches[micro_batch])[1][-1][0], unit)

    def _hold(self, unit: Unit, sign: int) -> None:
        self.tally.add("activations", sign * (unit.held - unit.scores - unit.received))
        self.tally.add("received keys and values", sign * unit.received)
        self.tally.add("scores", sign * unit.scores)

    def _gather(self, units: Iterable[_Placed]) -> None:
        for place, unit in units:
            if place not in self.gathered:
                self.gathered.add(place)
                self.tally.add("gathered weights", unit.weights * self.compute)
                if self.shards > 1:  # the output of the collective, before it is copied into weights
                    self.tally.note(working=unit.weights * self.compute)

    def _free(self, place: int, unit: Unit) -> None:
        if place in self.gathered:
            self.gathered.remove(place)
            self.tally.add("gathered weights", -(unit.weights * self.compute))

    def _add_gradients(self, place: int, unit: Unit) -> None:
        if place not in self.with_gradients:
            self.with_gradients.add(place)
            self.tally.add("gradients", unit.gradient * self.master)
        if self.compute < self.master:  # of this micro-batch, before they are accumulated
            self.tally.note(gradients=unit.gradient * self.compute)

    def _reduce(self, place: int, unit: Unit) -> None:
        """Reduce-scatter gradients over the ranks that share the weights."""
        self._free(place, unit)
        self.tally.note(working=unit.weights * self.master)
        self.with_gradients.discard(place)
        self.tally.add("gradients", self._sharded([unit]) * self.master - unit.gradient * self.master)

    def _sharded(self, units: Sequence[Unit]) -> int:
        """Elements of the weights of ``units`` that FSDP leaves on this rank."""
        experts = sum(unit.experts for unit in units)
        others = sum(unit.weights for unit in units) - experts
        return -(-others // self.shards) + -(-experts // self.expert_shards)
