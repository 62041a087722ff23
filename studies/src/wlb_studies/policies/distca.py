"""DistCA: attention runs on attention servers, and every rank is one.

Source: arXiv 2510.18121 (MLSys '26), sections 4 and 5, its authors' article at hao-ai-lab.github.io/blogs/distca, and
``distca/planner`` of hao-ai-lab/DistCA. All ranks hold equally many tokens, documents one after another. If several
ranks hold a document, each has a head and a tail of it; the first rank has the outermost. Servers aim at equal shares
of attention. A server that lacks more than a tolerance takes items from servers above their share: those with the most
attention for the bytes that move, as queries of the end of an item's head and the start of its tail, so that its depth
stays the same. Servers that lack less take nothing.

In a pipeline all stages run in lockstep, forwards of several micro-batches and then backwards. The ranks of all stages
share the attention of a tick, with or without ranks that have no micro-batch while the pipeline fills and drains.

Assumed: idle stages of a pipeline in lockstep serve (``distca``) or not (``distca-busy``); activations as in 1F1B.
Assumed in its favour: micro-batches even in attention.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.workload.flops import attended_pairs
from wlb_studies.policies.exchange import kv_bytes, query_bytes
from wlb_studies.policies.filling import Integers, even_bins
from wlb_studies.policies.plan import MovedPlan, Ranks, Tasks, joined, laid_in_a_row

TOLERANCE = 0.1  # of a server's share; the published planner is run with 0.05 to 0.15
TILE = 128  # queries; a head and a tail together are a multiple


def attention_servers(lengths: Integers, ranks: Ranks, *, idle_stages_serve: bool) -> MovedPlan:
    """``serve`` with as few micro-batches as the capacity allows, even in attention."""
    return serve(even_micro_batches(lengths, ranks), lengths, ranks, idle_stages_serve=idle_stages_serve)


def serve(
    micro_batches: Sequence[Sequence[int]],
    lengths: Integers,
    ranks: Ranks,
    *,
    idle_stages_serve: bool,
    tolerance: float = TOLERANCE,
) -> MovedPlan:
    """Plan the documents of ``micro_batches``, laid out in the given order.

    Slots are ticks of the pipeline; ranks are the ranks of all stages, stage by stage.
    """
    pp, of_stage = ranks.job.layout.pp, ranks.count
    servers = of_stage * pp
    homes, works = [], []
    pools = np.ones((servers, len(micro_batches) + pp - 1), np.int64)
    for tick in range(pools.shape[1]):
        active = [stage for stage in range(pp) if 0 <= tick - stage < len(micro_batches)]
        laid_out = [
            _laid_out(micro_batches[tick - stage], lengths, of_stage, tick * servers + stage * of_stage)
            for stage in active
        ]
        items = Items(np.concatenate(laid_out, axis=1), lengths, ranks)
        homes.append(items.tasks())
        stages = range(pp) if idle_stages_serve else active
        serving = np.concatenate([stage * of_stage + np.arange(of_stage) for stage in stages])
        pools[serving, tick] = 0
        items.level(tick * servers + serving, tolerance)
        works.append(items.tasks())
    return MovedPlan(lengths, pools, joined(homes), joined(works), hidden_by="everything", resent=True)


def even_micro_batches(lengths: Integers, ranks: Ranks) -> list[list[int]]:
    """Documents of every micro-batch: as few micro-batches as the capacity allows, even in attention."""
    cost = attended_pairs(lengths).astype(np.float64)
    return [members for members in even_bins(lengths, cost, ranks.count * ranks.capacity, multiple=1) if members]


def _laid_out(documents: Sequence[int], lengths: Integers, ranks: int, first_lane: int) -> Integers:
    """``documents`` one after another over ``ranks`` ranks with equal tokens, give or take one.

    Columns: lane, document, bounds of head and tail. If one rank has the whole document, they meet in its middle.
    """
    row = laid_in_a_row(documents, lengths, ranks, first_lane)
    here, length = row.stop - row.start, lengths[row.document]
    in_head = (here + (here == length)) // 2
    before = np.cumsum(in_head) - in_head
    begins = row.start == 0
    head = before - before[begins][np.cumsum(begins) - 1]  # of the document's queries on earlier ranks
    tail_stop = length - (row.start - head)
    return np.stack([row.lane, row.document, head, head + in_head, tail_stop - (here - in_head), tail_stop])


class Items:
    """Items that servers attend: a head and a tail of a document; queries between them may move.

    ``columns`` are lane, document, head's start and stop, and tail's start and stop.
    """

    def __init__(self, columns: Integers, lengths: Integers, ranks: Ranks) -> None:
        self._columns, self._lengths = columns, lengths
        self._query_bytes, self._key_bytes = query_bytes(ranks.job), kv_bytes(ranks.job)

    @property
    def lane(self) -> Integers:
        lanes: Integers = self._columns[0]
        return lanes

    @property
    def pairs(self) -> NDArray[np.float64]:
        head, head_stop, tail, tail_stop = attended_pairs(self._columns[2:])
        return np.asarray(head_stop - head + tail_stop - tail, np.float64)

    def level(self, serving: Integers, tolerance: float) -> None:
        """Fill up every server in ``serving`` (lanes) that lacks more than ``tolerance`` of an equal share."""
        loads = np.bincount(np.searchsorted(serving, self.lane), self.pairs, len(serving)).astype(np.float64)
        share = float(loads.sum()) / len(serving)
        surplus: NDArray[np.float64] = loads - share
        for server in np.argsort(surplus, kind="stable").tolist():
            while -surplus[server] > tolerance * share:
                moved = self.give(server, -float(surplus[server]), surplus, serving)
                if moved is None:
                    break
                giver, pairs = moved
                surplus[giver] -= pairs
                surplus[server] += pairs

    def give(
        self, server: int, need: float, surplus: NDArray[np.float64], serving: Integers
    ) -> tuple[int, float] | None:
        """Give ``server`` the queries with the most attention per byte; returns the giver and the pairs moved.

        Bytes count the queries and the keys and values of the whole document, but not outputs.
        """
        lane, document, head, head_stop, tail, tail_stop = self._columns
        owner, pairs, length = np.searchsorted(serving, lane), self.pairs, self._lengths[document]
        wanted = np.minimum(np.minimum(need, surplus[owner].clip(min=0.0)), pairs)
        both = np.floor(wanted / (length + 1) / (TILE // 2)).astype(np.int64) * (TILE // 2)  # of head and tail, each
        both = np.minimum(both, np.minimum(head_stop - head, tail_stop - tail))
        whole = wanted >= pairs
        queries = np.where(whole, head_stop - head + tail_stop - tail, 2 * both)
        moved = np.where(whole, pairs, both * (length + 1.0))
        cost = queries * self._query_bytes + length * self._key_bytes
        value = np.where((queries > 0) & (surplus[owner] > 0), moved / cost, 0.0)
        best = int(value.argmax())
        if value[best] <= 0:
            return None
        if whole[best]:
            self._columns[0, best] = serving[server]
            return int(owner[best]), float(pairs[best])
        self._cut(best, int(both[best]), int(serving[server]))
        return int(owner[best]), float(pairs[best] - self.pairs[best])

    def _cut(self, item: int, count: int, lane: int) -> None:
        """Move the last ``count`` queries of the head of ``item`` and the first ``count`` of its tail to ``lane``."""
        _, document, _, head_stop, tail, _ = self._columns[:, item].tolist()
        taken = np.array([lane, document, head_stop - count, head_stop, tail, tail + count])
        self._columns[3, item] -= count
        self._columns[4, item] += count
        self._columns = np.concatenate([self._columns, taken[:, None]], axis=1)

    def tasks(self) -> Tasks:
        """Heads and tails as tasks; a head and a tail that meet become one."""
        lane, document, head, head_stop, tail, tail_stop = self._columns
        meet, ones = head_stop == tail, np.ones(len(lane))
        heads = Tasks(lane, document, head, np.where(meet, tail_stop, head_stop), ones)
        both = joined([heads, Tasks(lane, document, tail, tail_stop, ones).at(~meet)])
        return both.at(both.stop > both.start)
