"""What all packers share: taking in arrivals and emitting whole steps without losing a document.

Documents arrive in any chunking. The packer buffers them and plans a step whenever the buffer holds enough for it, so
the same documents give the same plans however they arrive. ``drain`` plans what is left at the end of an epoch.
Everything still waiting is explicit state that survives a round trip through JSON; a packer restored from it continues
exactly as the original would have.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, count, repeat
from typing import Any, ClassVar, NamedTuple

import numpy as np

from wlb.documents.segments import POLICIES, Segment
from wlb.errors import UserError
from wlb.packing.options import PackingOptions
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.token_count import positive_integer, whole_number
from wlb.workload.base import DocumentPrices
from wlb.workload.phases import PhasedPrices, segment_seconds

Arrival = int | tuple[int, int] | Segment

_STATE_FORMAT = 1

# Fills a NamedTuple from a row without the keyword handling of its constructor, twice as fast: packers have about a
# microsecond for each document.
_new_tuple = tuple.__new__


class Pending(NamedTuple):
    """A segment that waits to be trained: its tokens, its predicted seconds and the step in which it arrived.

    ``held`` counts against L_max: its tokens, plus the memory of its further phases in tokens.
    """

    length: int
    seconds: float
    arrived: int
    segment: Segment
    held: int


class Packer(ABC):
    """Turns a stream of documents into ``StepPlan``s of ``micro_batches`` micro-batches each.

    A global batch is ``micro_batches`` context windows of ``context_window`` tokens, the mean size of a step;
    ``workload`` prices documents, with ``PhasedPrices`` in several phases. A subclass says how many tokens it waits for
    and which steps it makes of them.
    """

    name: ClassVar[str]
    prices_sharding: ClassVar[bool] = False  # whether prices include the cost of sharding a document
    _cuts_documents: ClassVar[bool] = False  # then documents may have any length
    plans_operations: ClassVar[bool] = False  # whether a pipeline runs operation lists planned for each step

    def __init__(
        self, micro_batches: int, context_window: int, workload: DocumentPrices, options: PackingOptions
    ) -> None:
        self.micro_batches = positive_integer("micro_batches", micro_batches)
        self.context_window = positive_integer("context_window", context_window)
        self.workload = workload
        self.phased = workload if isinstance(workload, PhasedPrices) else None
        self.options = options
        self.max_tokens = options.max_tokens(self.context_window, self.micro_batches)  # L_max
        self._step = 0
        self._documents_seen = 0
        self._arrived: deque[Segment] = deque()
        self._arrived_tokens = 0

    @property
    def global_batch_tokens(self) -> int:
        return self.micro_batches * self.context_window

    def plan(self, arrivals: Iterable[Arrival]) -> list[StepPlan]:
        """Take documents in and return every step that is now complete, in order.

        An arrival is a ``Segment``, a ``(document id, length)`` pair, or a bare length, whose id is then the number
        of arrivals before it. Ids only name documents in the plans: a document that arrives twice is planned twice.

        Raises ``UserError``, and takes nothing in, for a length that is no whole number or under 1, a negative id or
        start, and a length over the context window (``wlb.documents.segments`` has policies for those; ``sequential``
        cuts such documents).
        """
        self.take_in(arrivals)
        steps: list[StepPlan] = []
        while complete := self.next_steps():
            steps += complete
        return steps

    def take_in(self, arrivals: Iterable[Arrival]) -> None:
        """Take documents in, as ``plan`` does, but plan nothing until ``next_steps`` is called."""
        plain = arrivals.tolist() if isinstance(arrivals, np.ndarray) else list(arrivals)
        segments = _as_segments(plain, self._documents_seen)
        self._check(segments)
        self._arrived.extend(segments)
        self._arrived_tokens += sum([segment[2] for segment in segments])
        self._documents_seen += len(segments)

    def next_steps(self) -> list[StepPlan]:
        """The next step and the steps planned together with it; empty if too few documents have arrived."""
        return [] if self.tokens_missing else self._next_steps()

    @property
    def tokens_missing(self) -> int:
        """Tokens that must still arrive before ``next_steps`` returns a step."""
        return max(0, self._tokens_wanted() - self._arrived_tokens)

    def drain(self) -> list[StepPlan]:
        """Plan everything still held, in as many steps as needed; the packer is empty afterwards."""
        steps = self.plan(())  # whole steps are left if sizes changed in load_state_dict
        while self.pending:
            steps += self.last_steps()
        return steps

    @property
    def pending(self) -> list[Segment]:
        """Every segment that was taken in and is not yet planned."""
        return list(self._arrived)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as JSON-serialisable data."""
        return {
            "format": _STATE_FORMAT,
            "method": self.name,
            "step": self._step,
            "documents_seen": self._documents_seen,
            "arrived": [list(segment) for segment in self._arrived],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, which may come from a packer of other sizes but not of another method.

        Raises ``UserError`` for a state of another method or format, or with a document that is now too long.
        """
        if state.get("format") != _STATE_FORMAT:
            raise UserError(f"packer state has format {state.get('format')!r}; this version reads {_STATE_FORMAT}")
        if state["method"] != self.name:
            raise UserError(
                f"packer state was saved by {state['method']!r} and cannot continue as {self.name!r}; "
                f"load it into a {state['method']!r} packer"
            )
        self._restore(state)
        self._check(self.pending)

    def take_back(self, plans: Sequence[StepPlan]) -> None:
        """Undo the latest ``plans``, in their order: their segments arrive again, ahead of all others."""
        if plans:
            self.begin_with([segment for plan in plans for segment in plan.segments], step=plans[0].step)

    def begin_with(self, segments: Sequence[Segment], *, step: int) -> None:
        """Let ``segments`` arrive ahead of all others, and number the next step ``step``.

        A packer that has planned nothing can continue the work of another method this way (``held_segments``). Raises
        ``UserError`` for a segment that is too long.
        """
        self._check(segments)
        self._step = step
        self._arrived.extendleft(reversed(segments))
        self._arrived_tokens += sum(segment.length for segment in segments)

    def _restore(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._documents_seen = state["documents_seen"]
        self._arrived = deque(Segment(*segment) for segment in state["arrived"])
        self._arrived_tokens = sum(segment.length for segment in self._arrived)

    @abstractmethod
    def _tokens_wanted(self) -> int:
        """Tokens that must have arrived before the next steps can be planned."""

    @abstractmethod
    def _next_steps(self) -> list[StepPlan]:
        """Plan the next step or steps, consuming at least one arrived segment."""

    @abstractmethod
    def last_steps(self) -> list[StepPlan]:
        """Plan at least one step of what is held, which is not empty, when nothing more arrives."""

    def _check(self, segments: Sequence[Segment]) -> None:
        longest = math.inf if self._cuts_documents else self.context_window
        wrong = [row for row in segments if not 0 < row[2] <= longest or row[1] < 0 or row[0] < 0]
        if not wrong:
            return self._check_held(segments)
        document, start, length = wrong[0]
        if document < 0 or start < 0:
            raise UserError(f"document {document} starts at token {start}; ids and starts must be at least 0")
        if length < 1:
            raise UserError(f"document {document} has {length} tokens; at least 1 is needed")
        raise UserError(
            f"document {document} has {length} tokens, over the context window of {self.context_window}; apply "
            f"wlb.documents.segments.split_overlong ({', '.join(POLICIES)}) first, or raise the context window"
        )

    def _check_held(self, segments: Sequence[Segment]) -> None:
        if not self.phased or not segments or self._cuts_documents:
            return
        held = self.phased.phases.held_tokens(segments)
        largest = int(held.argmax())
        if held[largest] > self.max_tokens:
            document, _, length = segments[largest]
            raise UserError(
                f"document {document} has {length} tokens and memory_tokens = {held[largest] - length}, together over "
                f"the {self.max_tokens} of a micro-batch; raise max_length_factor or the context window"
            )

    def _take(self, tokens: int) -> list[Segment]:
        """Remove arrived segments from the front until they hold at least ``tokens`` tokens."""
        segments: list[Segment] = []
        arrived = self._arrived
        taken = 0
        while taken < tokens and arrived:
            segment = arrived.popleft()
            segments.append(segment)
            taken += segment[2]
        self._arrived_tokens -= taken
        return segments

    def _price(self, segments: Sequence[Segment], arrived: int) -> list[Pending]:
        if not segments:
            return []
        lengths = held = [segment[2] for segment in segments]
        if self.phased:
            seconds = segment_seconds(self.phased, segments).tolist()
            held = self.phased.phases.held_tokens(segments).tolist()
        else:
            seconds = self.workload.document_seconds(lengths).tolist()
        rows = zip(lengths, seconds, repeat(arrived), segments, held, strict=False)
        return [_new_tuple(Pending, row) for row in rows]

    def _emit(self, micro_batches: Iterable[MicroBatch], items: Iterable[Pending] = (), columns: int = 1) -> StepPlan:
        """The plan of the step that trains ``micro_batches``; ``items`` are their documents, which may have waited.

        Micro-batches are already dealt to ``columns`` pipelines, the same number to each.
        """
        step = self._step
        waits = [(step - item[2], item[0]) for item in items if item[2] < step]
        delay = sum([wait * length for wait, length in waits])
        ranks = tuple(micro_batches)
        each = len(ranks) // columns
        dealt = tuple(ranks[first : first + each] for first in range(0, len(ranks), each))
        plan = StepPlan(step, dealt, delay, max(waits, default=(0, 0))[0])
        self._step += 1
        return plan


def held_segments(state: dict[str, Any]) -> list[Segment]:
    """What a packer of any method held in ``state``: documents held back, oldest first, then arrivals."""
    held_back = sorted([*state.get("carried", ()), *state.get("waiting", ())], key=lambda row: row[3])
    return [Segment(*row[:3]) for row in (*held_back, *state["arrived"])]


def _as_segments(arrivals: list[Any], number: int) -> list[Segment]:
    """Arrivals as segments of plain integers; lists of only lengths or only segments are converted in one go."""
    forms = set(map(type, arrivals))
    if forms == {int}:
        return [_new_tuple(Segment, row) for row in zip(count(number), repeat(0), arrivals)]
    if forms <= {Segment} and set(map(type, chain.from_iterable(arrivals))) <= {int}:
        return arrivals
    return [_as_segment(arrival, index) for index, arrival in enumerate(arrivals, number)]


def _as_segment(arrival: Any, index: int) -> Segment:
    """A segment of plain ``int``, so that plans and states stay JSON; takes NumPy integers too."""
    if not isinstance(arrival, Segment):
        arrival = arrival if isinstance(arrival, tuple) else (index, arrival)
        if len(arrival) != 2:
            raise UserError(f"arrival {arrival!r} is not a length, (document, length) pair or Segment")
        arrival = arrival[0], 0, arrival[1]
    document, start, length = arrival
    numbers = [number for value in arrival if (number := whole_number(value)) is not None]
    if len(numbers) < 3:
        raise UserError(
            f"document {document!r} starts at {start!r} and has {length!r} tokens; all three must be whole numbers"
        )
    return Segment(*numbers)
