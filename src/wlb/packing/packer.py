"""What all packers share: taking in arrivals and emitting whole steps without losing a document.

Documents arrive in any chunking. The packer buffers them and plans a step whenever the buffer holds enough for it, so
the same documents give the same plans however they arrive. ``drain`` plans what is left at the end of an epoch.
Everything still waiting is explicit state that survives a round trip through JSON; a packer restored from it continues
exactly as the original would have.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.documents.segments import POLICIES, Segment
from wlb.errors import UserError
from wlb.packing.options import PackingOptions
from wlb.packing.plan import MicroBatch, StageRanks, StepPlan
from wlb.token_count import check_whole, whole_number
from wlb.workload.base import DocumentPrices
from wlb.workload.phases import segment_seconds

Arrival = int | tuple[int, int] | Segment
Table = NDArray[np.int64]  # of segments: document, start, length

_STATE_FORMAT = 1
_LONGEST = 2**48  # tokens of a document that is cut: sums of many fit 64 bits

# Fills a NamedTuple from a row without the keyword handling of its constructor, twice as fast: packers have about a
# microsecond for each document.
_new_tuple = tuple.__new__


class Pending(NamedTuple):
    """A segment that waits to be trained: its tokens, its predicted seconds and the step in which it arrived."""

    length: int
    seconds: float
    arrived: int
    segment: Segment


class Packer(ABC):
    """Turns a stream of documents into ``StepPlan``s of ``micro_batches`` micro-batches each.

    A global batch, the mean size of a step, is ``options.global_batch`` context windows of ``context_window`` tokens;
    by default as many as fill the micro-batches. ``workload`` prices documents, with ``PhasedPrices`` in several
    phases. ``ranks`` run the steps, if they are known. A subclass says how many tokens it waits for and which steps it
    makes of them.
    """

    name: ClassVar[str]
    _cuts_documents: ClassVar[bool] = False  # then documents may have any length

    def __init__(
        self,
        micro_batches: int,
        context_window: int,
        workload: DocumentPrices,
        options: PackingOptions,
        ranks: StageRanks | None = None,
    ) -> None:
        self.micro_batches = check_whole("micro_batches", micro_batches)
        self.context_window = check_whole("context_window", context_window)
        self.workload = workload
        self.options, self.ranks = options, ranks
        windows = self.micro_batches * options.micro_batch_windows
        self.global_batch = options.global_batch or windows
        self.global_batch_tokens = self.global_batch * self.context_window
        if self.global_batch != windows and not options.is_balanced:
            raise UserError(f"global_batch = {self.global_batch} is not the {windows} windows of all micro-batches")
        self.max_tokens = options.max_tokens(self.context_window, self.micro_batches, self.global_batch)  # L_max
        self._step = self._documents_seen = 0
        self._arrived: Table = np.empty((0, 3), np.int64)
        self._arrived_tokens = 0

    def plan(self, arrivals: Iterable[Arrival] | Table) -> list[StepPlan]:
        """Take documents in and return every step that is now complete, in order.

        An arrival is a ``Segment``, a ``(document id, length)`` pair, or a bare length, whose id is then the number
        of arrivals before it. Ids only name documents in the plans: a document that arrives twice is planned twice.
        An array has lengths, shape (documents,), or segments, shape (documents, 3).

        Raises ``UserError``, and takes nothing in, for a length that is no whole number or under 1, a negative id or
        start, and a length over the context window (``wlb.documents.segments`` has policies for those; ``sequential``
        cuts such documents).
        """
        self.take_in(arrivals)
        steps: list[StepPlan] = []
        while complete := self.next_steps():
            steps += complete
        return steps

    def take_in(self, arrivals: Iterable[Arrival] | Table) -> None:
        """Take documents in, as ``plan`` does, but plan nothing until ``next_steps`` is called."""
        table = _table_of(arrivals, self._documents_seen)
        self._check(table)
        self._arrived = np.concatenate([self._arrived, table])
        self._arrived_tokens += int(table[:, 2].sum())
        self._documents_seen += len(table)

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
        return segments_of(self._arrived)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as JSON-serialisable data."""
        return {
            "format": _STATE_FORMAT,
            "method": self.name,
            "step": self._step,
            "documents_seen": self._documents_seen,
            "arrived": self._arrived.tolist(),
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
        self._check(rows_of(self.pending))

    def take_back(self, plans: Sequence[StepPlan]) -> None:
        """Undo the latest ``plans``, in their order: their segments arrive again, ahead of all others."""
        if plans:
            self.begin_with([segment for plan in plans for segment in plan.segments], step=plans[0].step)

    def begin_with(self, segments: Sequence[Segment] | Table, *, step: int) -> None:
        """Let ``segments`` arrive ahead of all others, and number the next step ``step``.

        A packer that has planned nothing can continue the work of another method this way (``held_segments``). Raises
        ``UserError`` for a segment that is too long.
        """
        table = rows_of(segments)
        self._check(table)
        self._step = step
        self._put_back(table)

    def _restore(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._documents_seen = state["documents_seen"]
        self._arrived = rows_of(state["arrived"])
        self._arrived_tokens = int(self._arrived[:, 2].sum())

    @abstractmethod
    def _tokens_wanted(self) -> int:
        """Tokens that must have arrived before the next steps can be planned."""

    @abstractmethod
    def _next_steps(self) -> list[StepPlan]:
        """Plan the next step or steps, consuming at least one arrived segment."""

    @abstractmethod
    def last_steps(self) -> list[StepPlan]:
        """Plan at least one step of what is held, which is not empty, when nothing more arrives."""

    def _put_back(self, table: Table) -> None:
        """Let ``table`` arrive ahead of all others."""
        self._arrived = np.concatenate([table, self._arrived])
        self._arrived_tokens += int(table[:, 2].sum())

    def _check(self, table: Table) -> None:
        longest = _LONGEST if self._cuts_documents else self.context_window
        documents, starts, lengths = table.T
        wrong = np.flatnonzero((lengths < 1) | (lengths > longest) | (starts < 0) | (documents < 0))
        if not len(wrong):
            return
        document, start, length = table[wrong[0]].tolist()
        if document < 0 or start < 0:
            raise UserError(f"document {document} starts at token {start}; ids and starts must be at least 0")
        if length < 1:
            raise UserError(f"document {document} has {length} tokens; at least 1 is needed")
        raise UserError(
            f"document {document} has {length} tokens, over the context window of {self.context_window}; apply "
            f"wlb.documents.segments.split_overlong ({', '.join(POLICIES)}) first, or raise the context window"
        )

    def _take(self, tokens: int) -> Table:
        """Remove arrived segments from the front until they hold at least ``tokens`` tokens."""
        if tokens <= 0:
            return self._arrived[:0]
        ends = np.cumsum(self._arrived[:, 2])
        taken, self._arrived = np.split(self._arrived, [np.searchsorted(ends, tokens) + 1])
        self._arrived_tokens -= int(taken[:, 2].sum())
        return taken

    def _price(self, table: Table, arrived: int) -> list[Pending]:
        if not len(table):
            return []
        seconds = segment_seconds(self.workload, table).tolist()
        rows = zip(table[:, 2].tolist(), seconds, repeat(arrived), segments_of(table), strict=False)
        return [_new_tuple(Pending, row) for row in rows]

    def _emit(self, ranks: Iterable[Iterable[MicroBatch]], waits: Iterable[tuple[int, int]] = ()) -> StepPlan:
        """The plan of the step that trains ``ranks``; ``waits`` are the steps and tokens of documents that waited."""
        waited = [(steps, tokens) for steps, tokens in waits if steps > 0]
        delay = sum([steps * tokens for steps, tokens in waited])
        plan = StepPlan(self._step, tuple(map(tuple, ranks)), delay, max(waited, default=(0, 0))[0])
        self._step += 1
        return plan


def held_segments(state: dict[str, Any]) -> list[Segment]:
    """What a packer of any method held in ``state``: documents held back, oldest first, then arrivals."""
    held_back = sorted([*state.get("carried", ()), *state.get("waiting", ())], key=lambda row: row[3])
    return [Segment(*row[:3]) for row in (*held_back, *state["arrived"])]


def segments_of(table: Table) -> list[Segment]:
    """The rows of ``table`` as segments of plain integers."""
    return [*map(_new_tuple, repeat(Segment), zip(*table.T.tolist(), strict=True))]


def rows_of(segments: Sequence[Sequence[int]] | Table) -> Table:
    """``segments`` as a table."""
    return np.array(segments, np.int64).reshape(-1, 3)


def _table_of(arrivals: Iterable[Arrival] | Table, number: int) -> Table:
    """Arrivals as a table; arrays and lists of only lengths or only segments are converted in one go."""
    if isinstance(arrivals, np.ndarray):
        if arrivals.dtype == np.int64 and arrivals.ndim == 2 and arrivals.shape[1] == 3:
            return arrivals
        arrivals = arrivals.tolist()
    plain = list(arrivals)
    forms = set(map(type, plain))
    if forms == {int}:
        rows: Any = [(document, 0, length) for document, length in enumerate(plain, number)]
    elif forms <= {Segment} and set(map(type, chain.from_iterable(plain))) <= {int}:
        rows = plain
    else:
        rows = [_as_segment(arrival, index) for index, arrival in enumerate(plain, number)]
    try:
        return rows_of(rows)
    except OverflowError:
        largest = max(chain.from_iterable(rows), key=abs)
        raise UserError(f"{largest} does not fit 64 bits; ids, starts and lengths must") from None


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
