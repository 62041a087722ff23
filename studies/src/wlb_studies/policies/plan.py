"""What a rival policy decides for one step: which ranks attend which documents, in which micro-batch.

A pipeline stage has dp x cp ranks, each tp GPUs wide. A policy without fixed context-parallel groups shares the step's
documents among them freely. Two kinds of plan describe everything that is priced:

* ``GroupPlan``: in every micro-batch the ranks form groups, and each group shards its documents among its members.
  Groups may differ in size within a micro-batch and between micro-batches.
* ``MovedPlan``: every rank holds its tokens for everything but attention. Any rank of its pool may attend any piece of
  a document.

Documents are indices into ``lengths``, the whole documents of the step. Both kinds attend every document as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from wlb.job.job import Job
from wlb.workload.flops import attended_pairs
from wlb_studies.policies.filling import Integers, even_bins

ExchangeKind = Literal["keys and values", "heads"]
Hidden = Literal["everything", "heads", "attention"]


@dataclass(frozen=True)
class Ranks:
    """The GPUs as a policy sees them: ``job`` has tp, pp and, as dp, all ranks of a stage.

    A rank holds at most ``capacity`` tokens of a micro-batch. If the layout keeps weights all step, as always in a
    pipeline, ranks may run different numbers of micro-batches.
    """

    job: Job
    capacity: int

    @property
    def count(self) -> int:
        return self.job.layout.dp

    @property
    def window(self) -> int:
        return self.job.context_window

    @property
    def micro_batch_multiple(self) -> int:
        """A pipeline's micro-batches must be a multiple of this: pp if a rank has several stages, or 1."""
        return self.job.layout.pp if self.job.layout.virtual_pp > 1 else 1

    def needed(self, length: int) -> int:
        """The fewest ranks that hold a document of ``length`` tokens."""
        return -(-length // self.capacity)


class Group(NamedTuple):
    """``ranks`` that share ``documents`` as micro-batch ``slot``."""

    slot: int
    ranks: tuple[int, ...]
    documents: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """The groups of a step. Before a slot in ``barriers`` all ranks wait for each other.

    ``exchange`` says what members of a group send: keys and values of pieces (ring or gather, as ``sharding`` cuts), or
    queries, keys, values and outputs of all heads (all-to-all between sequences and heads). With ``fetches_weights``
    every rank fetches weights on its own in every micro-batch, so it waits only for its group.
    """

    lengths: Integers
    groups: tuple[Group, ...]
    barriers: frozenset[int] = frozenset()
    sharding: str = "per_document"
    exchange: ExchangeKind = "keys and values"
    fetches_weights: bool = False

    @classmethod
    def of_fixed_groups(
        cls, lengths: Integers, micro_batches: Sequence[Sequence[int]], ranks: Ranks, size: int, **rest: Any
    ) -> Self:
        """Groups of ``size`` ranks; micro-batches (lists of documents) are dealt in turn, and empty ones idle."""
        count = ranks.count // size
        groups = [
            Group(index // count, tuple(range(index % count * size, (index % count + 1) * size)), tuple(documents))
            for index, documents in enumerate(micro_batches)
            if documents
        ]
        return cls(lengths, tuple(groups), **rest)

    @property
    def slots(self) -> int:
        return 1 + max(group.slot for group in self.groups)

    @property
    def trained(self) -> Integers:
        """Lengths of all documents that groups run."""
        return self.lengths[[document for group in self.groups for document in group.documents]]

    def tokens_per_rank(self, ranks: int) -> NDArray[np.float64]:
        """Tokens of every rank in every slot, evenly shared by its group; shape (ranks, slots)."""
        tokens = np.zeros((ranks, self.slots))
        for group in self.groups:
            tokens[list(group.ranks), group.slot] += self.lengths[list(group.documents)].sum() / len(group.ranks)
        return tokens


class Tasks(NamedTuple):
    """Queries ``start`` to ``stop`` of a document, on a lane = slot x ranks + rank, for a ``share`` of the heads."""

    lane: Integers
    document: Integers
    start: Integers
    stop: Integers
    share: NDArray[np.float64]

    def at(self, index: NDArray[Any] | slice) -> Tasks:
        """The tasks that ``index`` selects."""
        lane, document, start, stop, share = self
        return Tasks(lane[index], document[index], start[index], stop[index], share[index])

    @property
    def pairs(self) -> NDArray[np.float64]:
        """Attended query-key pairs of each task, over all heads together."""
        pairs: NDArray[np.float64] = self.share * (attended_pairs(self.stop) - attended_pairs(self.start))
        return pairs


@dataclass(frozen=True, eq=False)
class MovedPlan:
    """Where tokens are (``home``) and where they are attended (``work``), and which ranks make a pool.

    ``pools`` numbers each rank's pool in each slot, shape (ranks, slots); ranks of a pool wait for each other in every
    layer. If ranks span all pipeline stages, slots are ticks in which all stages run in lockstep.

    ``hidden_by`` says what hides the exchange. Everything: two half-batches alternate, so the compute of one hides the
    exchange of the other, except for the first. Heads: some heads are attended while others travel. Attention: moves
    before and after attention are exposed; keys and values travel beside it. With ``reshuffled`` keys and values are
    moved to their queries before attention; otherwise they come from home. With ``resent`` servers keep nothing, so the
    backward sends everything once more.
    """

    lengths: Integers
    pools: Integers
    home: Tasks
    work: Tasks
    hidden_by: Hidden
    reshuffled: bool = False
    resent: bool = False

    @property
    def ranks(self) -> int:
        return len(self.pools)

    @property
    def slots(self) -> int:
        return int(self.pools.shape[1])

    @property
    def trained(self) -> Integers:
        """Lengths of all documents, each once, even if ranks of several stages hold it."""
        return self.lengths[np.unique(self.home.document)]

    @property
    def pool_size(self) -> int:
        """Ranks of the largest pool."""
        return int(np.bincount(self.pools[:, 0]).max())

    def of_ranks(self, lanes: NDArray[Any]) -> NDArray[Any]:
        """A number for every lane, shape (ranks, slots)."""
        return lanes.reshape(self.slots, self.ranks).T

    def by_lane(self, values: NDArray[np.float64], tasks: Tasks) -> NDArray[np.float64]:
        """Sums over ``tasks`` of ``values``, shape (ranks, slots)."""
        return self.of_ranks(np.bincount(tasks.lane, values, self.pools.size).astype(np.float64))


Plan = GroupPlan | MovedPlan


def tasks_of(rows: Sequence[tuple[int, int, int, int, float]]) -> Tasks:
    """Tasks from rows of (lane, document, start, stop, share)."""
    columns = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    lane, document, start, stop = columns[:4].astype(np.int64)
    return Tasks(lane, document, start, stop, columns[4])


def laid_in_a_row(documents: Sequence[int], lengths: Integers, ranks: int, first_lane: int) -> Tasks:
    """``documents`` one after another over ``ranks`` ranks with equal tokens, give or take one."""
    sizes = lengths[list(documents)]
    ends = np.cumsum(sizes)
    bounds = np.arange(1, ranks) * int(ends[-1]) // ranks
    cuts = np.unique(np.concatenate([[0], ends, bounds]))
    left, right = cuts[:-1], cuts[1:]
    index = np.searchsorted(ends, left, side="right")
    rank = np.searchsorted(bounds, left, side="right")
    begin = (ends - sizes)[index]
    return Tasks(
        first_lane + rank,
        np.asarray(documents, np.int64)[index],
        left - begin,
        right - begin,
        np.ones(len(left)),
    )


def even_pools(lengths: Integers, ranks: Ranks, size: int) -> tuple[Integers, list[tuple[int, list[int]]]]:
    """As many pools of ``size`` ranks side by side as there is room for, even in squared lengths.

    Returns the number of every rank's pool, shape (ranks, slots), as in ``MovedPlan``; and for every pool in every slot
    its first lane and its documents.
    """
    beside = ranks.count // size
    members = even_bins(lengths, lengths.astype(np.float64) ** 2, size * ranks.capacity, multiple=beside)
    numbers = np.minimum(np.arange(ranks.count) // size, beside)
    lanes = [index // beside * ranks.count + index % beside * size for index in range(len(members))]
    filled = [(lane, documents) for lane, documents in zip(lanes, members, strict=True) if documents]
    return np.tile(numbers[:, None], len(members) // beside), filled


def joined(tables: Sequence[Tasks]) -> Tasks:
    """The tasks of all ``tables``."""
    return Tasks(*(np.concatenate(columns) for columns in zip(*tables, strict=True)))
