"""DistCA: attention disaggregated onto attention servers, every rank being one.

Source: arXiv 2510.18121 (MLSys '26), sections 4 and 5, its authors' article at hao-ai-lab.github.io/blogs/distca, and
``distca/planner`` of hao-ai-lab/DistCA. All ranks hold equally many tokens, documents one after another. Servers are to
attend an equal share each: those short of it by more than a tolerance take, from those over it, the items whose
attention is largest for the bytes that move, as a head and a tail of a piece so that its depth stays what it is.

In a pipeline all stages run in lockstep, forwards of several micro-batches and then backwards, and a tick's attention
is shared among the ranks of all stages: with those that have no micro-batch while the pipeline fills and drains, or
without.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wlb.rivals.exchange import kv_bytes, query_bytes
from wlb.rivals.filling import Integers, lightest, longest_first
from wlb.rivals.plan import MovedPlan, Ranks, Tasks, joined, laid_in_a_row
from wlb.rivals.pricing import (
    StepPrice,
    group_costs,
    moved_rank_seconds,
    peak_memory,
    price_moved,
)
from wlb.simulate.fsdp import with_gathers
from wlb.workload.flops import attended_pairs

TOLERANCE = 0.1  # of a server's share; the published planner is run with 0.05 to 0.15
TILE = 128  # of queries, which heads and tails are multiples of


def attention_servers(lengths: Integers, ranks: Ranks, *, idle_stages_serve: bool) -> MovedPlan:
    """A plan whose slots are ticks of the pipeline and whose ranks are those of all stages, stage after stage."""
    pp, of_stage = ranks.job.pp, ranks.count
    micro_batches = even_micro_batches(lengths, ranks)
    ticks = len(micro_batches) + pp - 1
    servers = of_stage * pp
    homes, works = [], []
    pools = np.zeros((servers, ticks), np.int64)
    for tick in range(ticks):
        active = [stage for stage in range(pp) if 0 <= tick - stage < len(micro_batches)]
        home = joined(
            [
                laid_in_a_row(micro_batches[tick - stage], lengths, of_stage, tick * servers + stage * of_stage)
                for stage in active
            ]
        )
        serving = np.arange(servers)
        if not idle_stages_serve:
            serving = np.concatenate([np.arange(stage * of_stage, (stage + 1) * of_stage) for stage in active])
            pools[:, tick] = 1
            pools[serving, tick] = 0
        homes.append(home)
        works.append(_served(home, tick * servers + serving, ranks))
    return MovedPlan(lengths, pools, joined(homes), joined(works))


def price_attention_servers(plan: MovedPlan, ranks: Ranks) -> StepPrice:
    """Two half-batches alternate, so that computing hides the exchange; servers keep nothing for the backward."""
    if ranks.job.pp == 1:
        return price_moved(plan, ranks, hidden_by="everything", resent=True)
    job, costs = ranks.job, group_costs(ranks.job, 0, "per_document")
    seconds, exchanged = moved_rank_seconds(plan, ranks, hidden_by="everything", resent=True)
    stage = np.arange(plan.ranks) // ranks.count
    ticks = [
        np.stack([phase[stage == s, s].max(axis=0) for s in range(job.pp)])
        for phase in (seconds.forward, seconds.backward)
    ]  # (stages, ticks)
    gathered, _ = with_gathers(costs, ticks[0], ticks[1])
    waits = float((gathered - ticks[0])[:, 0].max())
    filling = 2 * (job.pp - 1) * float(costs.transfer(seconds.tokens.max()))
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


def _served(home: Tasks, serving: NDArray[np.int64], ranks: Ranks) -> Tasks:
    """The tasks of every server, its lane one of ``serving``, within the tolerance of an equal share."""
    items = _Items(home)
    loads = np.bincount(np.searchsorted(serving, home.lane), home.pairs, len(serving)).astype(np.float64)
    share = float(loads.sum()) / len(serving)
    surplus: NDArray[np.float64] = loads - share
    of_query, of_key = 2 * query_bytes(ranks.job), kv_bytes(ranks.job)
    within = TOLERANCE * share
    for server in np.argsort(surplus, kind="stable").tolist():
        while -surplus[server] > within or (surplus[server] < 0 and surplus.max() > within):
            moved = items.give(server, -float(surplus[server]), surplus, serving, of_query, of_key)
            if moved is None:
                break
            giver, pairs = moved
            surplus[giver] -= pairs
            surplus[server] += pairs
    return items.tasks()


class _Items:
    """Pieces of documents that servers attend; heads and tails may be taken from them."""

    def __init__(self, home: Tasks) -> None:
        room = 2 * len(home.lane)
        self._count = len(home.lane)
        self._columns = np.zeros((4, room), np.int64)  # lane, document, start, stop
        self._columns[:, : self._count] = np.stack(home[:4])

    def give(
        self,
        server: int,
        need: float,
        surplus: NDArray[np.float64],
        serving: NDArray[np.int64],
        of_query: float,
        of_key: float,
    ) -> tuple[int, float] | None:
        """Give ``server`` the queries with the most attention for their bytes; the giver, and pairs that moved."""
        lane, _, start, stop = self._columns[:, : self._count]
        owner = np.searchsorted(serving, lane)
        pairs = (attended_pairs(stop) - attended_pairs(start)).astype(np.float64)
        depth = pairs / np.maximum(stop - start, 1)
        wanted = np.minimum(np.minimum(need, surplus[owner]), pairs)
        tiles = np.floor(wanted / np.maximum(depth, 1e-9) / (2 * TILE)).astype(np.int64)
        queries = np.where(wanted >= pairs, stop - start, 2 * TILE * tiles)
        value = np.where(
            (queries > 0) & (surplus[owner] > 0), queries * depth / (queries * of_query + stop * of_key + 1e-9), 0.0
        )
        best = int(value.argmax())
        if value[best] <= 0:
            return None
        giver, taken = int(owner[best]), float(queries[best] * depth[best])
        if queries[best] == stop[best] - start[best]:
            self._columns[0, best] = serving[server]
        else:
            self._cut(best, int(queries[best]) // 2, int(serving[server]))
        return giver, taken

    def _cut(self, item: int, half: int, lane: int) -> None:
        """Move the first and the last ``half`` queries of ``item`` to ``lane``."""
        if self._count + 2 > self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        _, document, start, stop = self._columns[:, item].tolist()
        self._columns[:, self._count] = lane, document, start, start + half
        self._columns[:, self._count + 1] = lane, document, stop - half, stop
        self._columns[2:, item] = start + half, stop - half
        self._count += 2

    def tasks(self) -> Tasks:
        columns = self._columns[:, : self._count]
        columns = columns[:, columns[3] > columns[2]]
        lane, document, start, stop = columns
        return Tasks(lane, document, start, stop, np.ones(len(lane)))
