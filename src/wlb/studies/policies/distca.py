"""DistCA: attention disaggregated onto attention servers, every rank being one.

Source: arXiv 2510.18121 (MLSys '26), sections 4 and 5, its authors' article at hao-ai-lab.github.io/blogs/distca, and
``distca/planner`` of hao-ai-lab/DistCA. All ranks hold equally many tokens, documents one after another; of a document
that several ranks hold, each has a head and a tail, the first rank the outermost. Servers are to attend an equal share
each: those short of it by more than a tolerance take, from those over it, the items whose attention is largest for the
bytes that move, as queries of the end of an item's head and of the start of its tail, so that its depth stays what it
is. Servers that are short of less get nothing, and what nobody takes stays where it is.

In a pipeline all stages run in lockstep, forwards of several micro-batches and then backwards, and a tick's attention
is shared among the ranks of all stages: with those that have no micro-batch while the pipeline fills and drains, or
without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.simulate.fsdp import with_gathers
from wlb.studies.policies.exchange import kv_bytes, query_bytes
from wlb.studies.policies.filling import Integers, lightest, longest_first
from wlb.studies.policies.plan import MovedPlan, Ranks, Tasks, joined
from wlb.studies.policies.pricing import StepPrice, moved_rank_seconds, own_costs, peak_memory, price_moved
from wlb.workload.flops import attended_pairs

TOLERANCE = 0.1  # of a server's share; the published planner is run with 0.05 to 0.15
TILE = 128  # of queries, which a head and a tail together are multiples of


def attention_servers(lengths: Integers, ranks: Ranks, *, idle_stages_serve: bool) -> MovedPlan:
    """``serve`` of as few micro-batches as the capacity allows, even in attention."""
    return serve(even_micro_batches(lengths, ranks), lengths, ranks, idle_stages_serve=idle_stages_serve)


def serve(
    micro_batches: Sequence[Sequence[int]],
    lengths: Integers,
    ranks: Ranks,
    *,
    idle_stages_serve: bool,
    tolerance: float = TOLERANCE,
) -> MovedPlan:
    """Of documents of ``micro_batches``, laid out in the order given.

    Slots are ticks of the pipeline, and ranks are those of all stages, stage after stage.
    """
    pp, of_stage = ranks.job.layout.pp, ranks.count
    ticks = len(micro_batches) + pp - 1
    servers = of_stage * pp
    homes, works = [], []
    pools = np.zeros((servers, ticks), np.int64)
    for tick in range(ticks):
        active = [stage for stage in range(pp) if 0 <= tick - stage < len(micro_batches)]
        laid_out = [
            _laid_out(micro_batches[tick - stage], lengths, of_stage, tick * servers + stage * of_stage)
            for stage in active
        ]
        items = _Items(np.concatenate(laid_out, axis=1), lengths)
        homes.append(items.tasks())
        serving = np.arange(servers)
        if not idle_stages_serve:
            serving = np.concatenate([np.arange(stage * of_stage, (stage + 1) * of_stage) for stage in active])
            pools[:, tick] = 1
            pools[serving, tick] = 0
        _level(items, tick * servers + serving, ranks, tolerance)
        works.append(items.tasks())
    return MovedPlan(lengths, pools, joined(homes), joined(works))


def price_attention_servers(plan: MovedPlan, ranks: Ranks) -> StepPrice:
    """Two half-batches alternate, so that computing hides the exchange; servers keep nothing for the backward."""
    if ranks.job.layout.pp == 1:
        return price_moved(plan, ranks, hidden_by="everything", resent=True)
    job, costs = ranks.job, own_costs(ranks.job)
    seconds, exchanged = moved_rank_seconds(plan, ranks, hidden_by="everything", resent=True)
    stage = np.arange(plan.ranks) // ranks.count
    ticks = [
        np.stack([phase[stage == s, s].max(axis=0) for s in range(job.layout.pp)])
        for phase in (seconds.forward, seconds.backward)
    ]  # (stages, ticks)
    gathered, _ = with_gathers(costs, ticks[0], ticks[1])
    waits = float((gathered - ticks[0])[:, 0].max())
    filling = 2 * (job.layout.pp - 1) * float(costs.transfer(seconds.tokens.max()))
    update = float((costs.rank_reduction + costs.optimizer).max())
    total = waits + filling + sum(float(phase.max(axis=0).sum()) for phase in ticks) + update
    return StepPrice(total, exchanged, peak_memory(ranks, float(seconds.tokens.max()), ranks.count))


def even_micro_batches(lengths: Integers, ranks: Ranks) -> list[list[int]]:
    """Documents of every micro-batch of all ranks: as few as the capacity allows, even in attention."""
    total, most = int(lengths.sum()), ranks.count * ranks.capacity
    count = max(1, -(-total // most))
    order, cost = longest_first(lengths), attended_pairs(lengths).astype(np.float64)
    while True:
        members, left_over = lightest(order, cost, count, lengths, most)
        if not left_over:
            return [documents for documents in members if documents]
        count += 1


def _laid_out(documents: Sequence[int], lengths: Integers, ranks: int, first_lane: int) -> Integers:
    """``documents`` one after another over ``ranks`` ranks of equally many tokens, but for one.

    Columns of lane, document, and the bounds of head and tail; those of a document on one rank meet in its middle.
    """
    total = int(lengths[list(documents)].sum())
    bounds = np.arange(1, ranks + 1) * total // ranks
    columns, rank, laid = [], 0, 0
    for document in documents:
        head, tail = 0, int(lengths[document])
        while head < tail:
            while bounds[rank] <= laid:
                rank += 1
            here = min(tail - head, int(bounds[rank]) - laid)
            first = (here + 1) // 2 if here == lengths[document] else here // 2
            columns.append((first_lane + rank, document, head, head + first, tail - (here - first), tail))
            head, tail, laid = head + first, tail - (here - first), laid + here
    return np.array(columns, np.int64).T


def _level(items: _Items, serving: NDArray[np.int64], ranks: Ranks, tolerance: float) -> None:
    """Give every server, its lane one of ``serving``, that lacks more than the ``tolerance`` an equal share."""
    loads = np.bincount(np.searchsorted(serving, items.lane), items.pairs, len(serving)).astype(np.float64)
    share = float(loads.sum()) / len(serving)
    surplus: NDArray[np.float64] = loads - share
    of_query, of_key = query_bytes(ranks.job), kv_bytes(ranks.job)
    for server in np.argsort(surplus, kind="stable").tolist():
        while -surplus[server] > tolerance * share:
            moved = items.give(server, -float(surplus[server]), surplus, serving, of_query, of_key)
            if moved is None:
                break
            giver, pairs = moved
            surplus[giver] -= pairs
            surplus[server] += pairs


class _Items:
    """A head and a tail of a document each, which a server attends; queries between them may be taken."""

    def __init__(self, columns: Integers, lengths: Integers) -> None:
        self._columns = columns  # lane, document, head's start and stop, tail's start and stop
        self._lengths = lengths

    @property
    def lane(self) -> Integers:
        lanes: Integers = self._columns[0]
        return lanes

    @property
    def pairs(self) -> NDArray[np.float64]:
        _, _, *bounds = self._columns
        head, head_stop, tail, tail_stop = (attended_pairs(bound) for bound in bounds)
        return np.asarray(head_stop - head + tail_stop - tail, np.float64)

    def give(
        self,
        server: int,
        need: float,
        surplus: NDArray[np.float64],
        serving: NDArray[np.int64],
        of_query: float,
        of_key: float,
    ) -> tuple[int, float] | None:
        """Give ``server`` the queries with the most attention for their bytes; the giver, and pairs that moved.

        Bytes are those of the queries and of the keys and values of the whole document; outputs are not counted.
        """
        lane, document, head, head_stop, tail, tail_stop = self._columns
        owner, pairs, length = np.searchsorted(serving, lane), self.pairs, self._lengths[document]
        wanted = np.minimum(np.minimum(need, surplus[owner].clip(min=0.0)), pairs)
        both = np.floor(wanted / (length + 1) / (TILE // 2)).astype(np.int64) * (TILE // 2)  # of head and tail, each
        both = np.minimum(both, np.minimum(head_stop - head, tail_stop - tail))
        whole = wanted >= pairs
        queries = np.where(whole, head_stop - head + tail_stop - tail, 2 * both)
        moved = np.where(whole, pairs, both * (length + 1.0))
        value = np.where((queries > 0) & (surplus[owner] > 0), moved / (queries * of_query + length * of_key), 0.0)
        best = int(value.argmax())
        if value[best] <= 0:
            return None
        giver = int(owner[best])
        if whole[best]:
            self._columns[0, best] = serving[server]
            return giver, float(pairs[best])
        self._cut(best, int(both[best]), int(serving[server]))
        return giver, float(pairs[best] - self.pairs[best])

    def _cut(self, item: int, count: int, lane: int) -> None:
        """Move the last ``count`` queries of the head of ``item`` and the first of its tail to ``lane``."""
        _, document, _, head_stop, tail, _ = self._columns[:, item].tolist()
        taken = np.array([lane, document, head_stop - count, head_stop, tail, tail + count])
        self._columns[3, item] -= count
        self._columns[4, item] += count
        self._columns = np.concatenate([self._columns, taken[:, None]], axis=1)

    def tasks(self) -> Tasks:
        """Heads and tails, of which those that meet are one."""
        lane, document, head, head_stop, tail, tail_stop = self._columns
        meet = head_stop == tail
        start = np.concatenate([head, tail[~meet]])
        stop = np.concatenate([np.where(meet, tail_stop, head_stop), tail_stop[~meet]])
        lanes, documents = (np.concatenate([column, column[~meet]]) for column in (lane, document))
        some = stop > start
        return Tasks(lanes[some], documents[some], start[some], stop[some], np.ones(int(some.sum())))
