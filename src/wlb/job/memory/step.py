"""Peak memory of one process of a training job, from model, layout and the tokens of its micro-batches.

A step is walked through operation by operation, in the order of the pipeline schedule (``wlb.schedules.operations``):
a forward pass holds what its backward pass will read, layer by layer, a backward pass releases it and leaves gradients,
and weights are gathered and freed where FSDP does so. The largest sum on the way is the prediction, and what it is made
of is reported with it. How many micro-batches are in flight, and of which lengths, follows from the walk.

What each layer holds is in ``wlb.job.memory.layers``. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, NamedTuple

from wlb.job.memory.layers import Exchange, LayerMemory, MemorySettings, Unit
from wlb.schedules.operations import Operation, round_size

# Of a device or machine; the rest is for what is not predicted: the driver, libraries, fragments, other processes.
USABLE_SHARE = 0.9
_BATCH_BYTES = 3 * 8  # tokens, labels and positions in int64
_StageState = tuple[frozenset[int], frozenset[int]]  # units whose weights are gathered, and that have gradients
EVEN_ROUNDS = 4  # of pp micro-batches: filling the pipeline, all gradients allocated, one more, emptying it


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that a process may hold, and where that comes from."""

    number_of_bytes: float
    origin: str


def limit_of_gpu(memory_bytes: float) -> MemoryLimit:
    """What a process may hold that has a GPU of ``memory_bytes`` to itself."""
    return MemoryLimit(USABLE_SHARE * memory_bytes, f"{USABLE_SHARE:.0%} of a GPU")


@dataclass(frozen=True)
class MemoryEstimate:
    """The most that a process holds at once: bytes by purpose, on the pipeline rank that holds most."""

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


def predict_memory(settings: MemorySettings, tokens: Sequence[int], limit: float = math.inf) -> MemoryEstimate:
    """The peak over a step whose micro-batches hold ``tokens`` tokens each, before they are shared by cp and tp ranks.

    Context-parallel ranks are taken to exchange as many tokens as one document over the whole micro-batch needs. The
    estimate is that of the first pipeline rank over ``limit`` bytes, or of the one that holds most where none is.
    """
    if len(tokens) != settings.micro_batches:
        raise ValueError(f"{len(tokens)} token counts were given for {settings.micro_batches} micro-batches")
    rows = [_largest_share(settings, count) for count in tokens]
    estimates = []
    for rank in range(settings.parallel.pp):
        estimates.append(predict_rank_memory(settings, rows, rank))
        if estimates[-1].total > limit:
            return estimates[-1]
    return max(estimates, key=lambda estimate: estimate.total)


def predict_rank_memory(
    settings: MemorySettings, rows: Sequence[int], pipeline_rank: int, exchanges: Sequence[Exchange] | None = None
) -> MemoryEstimate:
    """The peak of a rank that holds ``rows`` tokens of each micro-batch, shared by its tensor-parallel group.

    ``exchanges`` are what it exchanges in each; without them, the most that a plan may ask for.
    """
    operations = settings.parallel.operations(settings.micro_batches)
    batches = [*zip(rows, repeat(None) if exchanges is None else exchanges, strict=False)]
    return _Walk(settings, pipeline_rank, batches).over(operations[pipeline_rank])


def predict_even_step(settings: MemorySettings, tokens: int, limit: float = math.inf) -> MemoryEstimate:
    """``predict_memory`` of a step whose micro-batches hold ``tokens`` tokens each, at once however many they are.

    A full pipeline of equal micro-batches holds the same round after round, but for their token ids.
    """
    walked = min(settings.micro_batches, EVEN_ROUNDS * round_size(settings.parallel.pp, settings.micro_batches))
    more = (settings.micro_batches - walked) * _largest_share(settings, tokens) * _BATCH_BYTES
    estimate = predict_memory(replace(settings, micro_batches=walked), [tokens] * walked, limit - more)
    return replace(estimate, parts=estimate.parts | {"batches": estimate.parts["batches"] + more})


def _largest_share(settings: MemorySettings, tokens: int) -> int:
    """Of the tokens of a micro-batch, those of the context-parallel rank that holds most."""
    cp = settings.parallel.cp
    return math.ceil(tokens * (settings.uneven_shards / cp)) if cp > 1 else tokens


class _WalkedPass(NamedTuple):
    """A forward or backward of a stage: what it adds to what is held, at most and in the end; and what it leaves."""

    most_total: float
    most: dict[str, int]
    held: dict[str, int]
    left: _StageState


@dataclass
class _Walk:
    """One pipeline rank's step: what is held, by purpose, and the most so far.

    Passes of a stage that begin alike change what is held alike, so each kind of pass is walked through once.
    """

    settings: MemorySettings
    rank: int
    batches: Sequence[tuple[int, Exchange | None]]  # of every micro-batch: rows, and what is exchanged
    held: dict[str, int] = field(default_factory=dict)
    total: int = 0  # of ``held``
    most: dict[str, int] = field(default_factory=dict)
    most_total: float = 0
    gathered: set[int] = field(default_factory=set)  # units of the stage at hand
    with_gradients: set[int] = field(default_factory=set)
    states: dict[int, _StageState] = field(default_factory=dict)
    passes: dict[tuple[Any, ...], _WalkedPass] = field(default_factory=dict)
    known: dict[tuple[Any, ...], tuple[int, list[Unit]]] = field(default_factory=dict)

    def over(self, operations: Sequence[Operation]) -> MemoryEstimate:
        """Walk through a step: forwards and backwards, then the optimizer."""
        parallel = self.settings.parallel
        mine = {stage: self._units(stage, LayerMemory(self.settings, 1)) for stage in parallel.rank_stages[self.rank]}
        weights = sum(unit.weights for units in mine.values() for unit in units)
        shard = -(-weights // self.shards) * self.settings.master_bytes
        self._add("weights", shard)
        self._add("optimizer", 2 * shard)
        self._add("checkpoint", 3 * shard if self.settings.checkpoint_copy else 0)
        self._add("batches", sum(rows for rows, _ in self.batches) * _BATCH_BYTES)
        for stage, units in mine.items():
            self.gathered = set()
            for index, unit in enumerate(() if self.frees_weights else units):  # all from the start of the step on
                self._gather(index, unit)
            self.states[stage] = frozenset(self.gathered), frozenset()
        for stage, micro_batch, backward in operations:
            self._pass(stage, micro_batch, backward=backward)
        self._note(working=shard)  # the optimizer's own
        return MemoryEstimate(self.rank, {name: value for name, value in self.most.items() if value})

    @property
    def shards(self) -> int:
        """Ranks over which FSDP divides weights."""
        return self.settings.parallel.dp * self.settings.parallel.cp

    @property
    def frees_weights(self) -> bool:
        """Whether weights are gathered again in every micro-batch."""
        return self.settings.parallel.pp == 1 and not self.settings.keeps_weights

    def _pass(self, stage: int, micro_batch: int, *, backward: bool) -> None:
        last = micro_batch == self.settings.micro_batches - 1
        key = (stage, self.batches[micro_batch], backward, backward and last, self.states[stage])
        walked = self.passes.get(key)
        if walked is None:
            so_far = self.held, self.total, self.most, self.most_total
            self.held, self.total, self.most, self.most_total = {}, 0, {}, -math.inf
            self.gathered, self.with_gradients = map(set, self.states[stage])
            if backward:
                self._backward(stage, micro_batch)
            else:
                self._forward(stage, micro_batch)
            left = frozenset(self.gathered), frozenset(self.with_gradients)
            walked = self.passes[key] = _WalkedPass(self.most_total, self.most, self.held, left)
            self.held, self.total, self.most, self.most_total = so_far
        if self.total + walked.most_total > self.most_total:
            self.most, self.most_total = _sum(self.held, walked.most), self.total + walked.most_total
        for name, value in walked.held.items():
            self._add(name, value)
        self.states[stage] = walked.left

    def _ends_and_units(self, stage: int, micro_batch: int) -> tuple[int, list[Unit]]:
        """What a stage keeps beside its layers, and these; micro-batches of as many rows have the same."""
        key = stage, self.batches[micro_batch]
        if key not in self.known:
            layers = LayerMemory(self.settings, *self.batches[micro_batch])
            self.known[key] = (layers.ends(), self._units(stage, layers))
        return self.known[key]

    def _units(self, stage: int, layers: LayerMemory) -> list[Unit]:
        settings = self.settings
        start = sum(settings.stage_blocks[:stage])
        units = layers.blocks(range(start, start + settings.stage_blocks[stage]))
        first = [layers.embedding()] if stage == 0 else []
        last = [layers.head()] if stage == len(settings.stage_blocks) - 1 else []
        return [*first, *units, *last]

    def _forward(self, stage: int, micro_batch: int) -> None:
        ends, units = self._ends_and_units(stage, micro_batch)
        self._add("activations", ends)
        self._gather_root(units)
        for index, unit in enumerate(units):
            self._gather(index, unit)
            self._note(working=unit.forward)
            self._hold(unit, +1)
            if self.frees_weights and not unit.root:
                self._free(index, unit)
        if self.frees_weights:  # those of the root too, now that the stage ends
            for index, unit in enumerate(units):
                self._free(index, unit)

    def _backward(self, stage: int, micro_batch: int) -> None:
        ends, units = self._ends_and_units(stage, micro_batch)
        last = micro_batch == self.settings.micro_batches - 1
        alone = self.settings.parallel.pp == 1
        self._gather_root(units)
        for index, unit in reversed(list(enumerate(units))):
            self._gather(index, unit)
            if alone and index and not units[index - 1].root:
                self._gather(index - 1, units[index - 1])  # FSDP gathers one unit ahead
            self._note(working=unit.backward)
            self._hold(unit, -1)
            self._add_gradients(index, unit)
            if alone and last and not unit.root:
                self._reduce(index, unit)
        self._add("activations", -ends)
        if last:
            for index, unit in enumerate(units):
                if index in self.with_gradients:
                    self._reduce(index, unit)

    def _hold(self, unit: Unit, sign: int) -> None:
        self._add("activations", sign * (unit.held - unit.scores - unit.received))
        self._add("received keys and values", sign * unit.received)
        self._add("scores", sign * unit.scores)

    def _gather_root(self, units: Sequence[Unit]) -> None:
        for index, unit in enumerate(units):
            if unit.root:
                self._gather(index, unit)

    def _gather(self, index: int, unit: Unit) -> None:
        if index in self.gathered:
            return
        self.gathered.add(index)
        self._add("gathered weights", unit.weights * self.settings.compute_bytes)
        if self.shards > 1:  # what the collective wrote, before it is cut into weights
            self._note(working=unit.weights * self.settings.compute_bytes)

    def _free(self, index: int, unit: Unit) -> None:
        if index in self.gathered:
            self.gathered.remove(index)
            self._add("gathered weights", -(unit.weights * self.settings.compute_bytes))

    def _add_gradients(self, index: int, unit: Unit) -> None:
        if index not in self.with_gradients:
            self.with_gradients.add(index)
            self._add("gradients", unit.gradient * self.settings.master_bytes)
        if self.settings.compute_bytes < self.settings.master_bytes:  # this micro-batch's, before they are added
            self._note(gradients=unit.gradient * self.settings.compute_bytes)

    def _reduce(self, index: int, unit: Unit) -> None:
        """Sum gradients over the ranks that share the weights, and keep this rank's shard."""
        whole = unit.weights * self.settings.master_bytes
        self._free(index, unit)
        self._note(working=whole)
        self.with_gradients.discard(index)
        self._add("gradients", -(-whole // self.shards) - unit.gradient * self.settings.master_bytes)

    def _note(self, working: int = 0, gradients: int = 0) -> None:
        """Remember what is held now with what is there for a moment, if that is the most so far."""
        total = self.total + working + gradients
        if total > self.most_total:
            self.most, self.most_total = _sum(self.held, {"working": working, "gradients": gradients}), total

    def _add(self, name: str, value: int) -> None:
        self.held[name] = self.held.get(name, 0) + value
        self.total += value


def _sum(held: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return held | {name: held.get(name, 0) + value for name, value in more.items()}
