"""The traffic of moved attention and of sequence parallelism over heads, and how far it overlaps with compute.

Bytes are those of one layer and one tensor-parallel rank, of values as wide as activations. A query, a gradient of one
and an output have ``heads`` x ``head_dim`` values, a key with its value twice ``kv_heads`` x ``head_dim``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.sharding.latency import RankSeconds, attending_seconds
from wlb.sharding.pieces import Pieces, locality
from wlb.simulate.costs import Direction
from wlb.simulate.job import SimulatedJob
from wlb.studies.policies.plan import MovedPlan, Tasks
from wlb.workload.links import Link, group_link

Array = NDArray[np.float64]

HEAD_CHUNKS = 4  # in which Libra's heads travel while others are attended; assumed


class Moved(NamedTuple):
    """Bytes that each rank receives and sends in a layer, and of these the keys and values; shape (ranks, slots).

    ``keys`` may travel beside attention even where the rest has to be there before it.
    """

    received: Array
    sent: Array
    keys: Array


def query_bytes(job: SimulatedJob) -> float:
    """Of one token's query, or output, in one layer on one tensor-parallel rank."""
    return job.shape.heads * job.shape.head_dim / job.layout.tp * job.hardware.bytes_per_value


def kv_bytes(job: SimulatedJob) -> float:
    """Of one token's key and value."""
    return 2 * job.shape.kv_heads * job.shape.head_dim / job.layout.tp * job.hardware.bytes_per_value


def all_to_all_of_heads(job: SimulatedJob, tokens: ArrayLike, size: int) -> tuple[Array, Array]:
    """Sequence parallelism over heads in groups of ``size`` (DeepSpeed-Ulysses, arXiv 2309.14509, section 3).

    Of micro-batches of ``tokens`` tokens: the seconds of all layers in one direction, which nothing hides, and the
    bytes that a rank receives in a layer. Where heads of keys and values are fewer than ranks, several ranks get the
    same.
    """
    count = np.asarray(tokens, np.float64)
    heads = job.shape.heads / job.layout.tp
    kv_heads = max(job.shape.kv_heads / job.layout.tp, float(size))
    values = (2 * heads + 2 * kv_heads) * job.shape.head_dim * job.hardware.bytes_per_value
    received = count / size * values * (size - 1) / size
    link = group_link(job.hardware, "all_to_all", size, stride=job.layout.tp)
    there_and_back = received / link.bandwidth + 2 * link.latency
    seconds: Array = job.shape.layers * there_and_back
    return seconds, received


def moved_bytes(plan: MovedPlan, job: SimulatedJob, *, resent: bool) -> dict[Direction, Moved]:
    """What each direction exchanges. ``resent``: servers keep nothing, so the backward brings everything once more."""
    keys_received, keys_sent = _keys_served_at_work(plan) if plan.reshuffled else _keys_from_home(plan)
    queries_received, queries_sent = _queries(plan)
    of_query, of_key = query_bytes(job), kv_bytes(job)
    if plan.reshuffled:  # queries, keys and values in, outputs back; keys then travel between those who attend
        received = queries_received * (of_query + of_key) + queries_sent * of_query + keys_received * of_key
        sent = queries_sent * (of_query + of_key) + queries_received * of_query + keys_sent * of_key
    else:
        received = (queries_received + queries_sent) * of_query + keys_received * of_key
        sent = (queries_received + queries_sent) * of_query + keys_sent * of_key
    keys = np.maximum(keys_received, keys_sent) * of_key
    forward = Moved(received, sent, keys)
    # Gradients of outputs in, of queries, keys and values back: as much as the forward, the other way.
    backward = Moved(sent + received * resent, received + sent * resent, keys)
    return {"forward": forward, "backward": backward}


def moved_seconds(moved: Moved, attention: Array, rest: Array, pool: int, job: SimulatedJob, hidden_by: str) -> Array:
    """What an exchange adds to ranks that attend and compute the ``rest`` for so many seconds of all layers.

    ``hidden_by`` everything: two half-batches alternate, so all that one computes hides what the other sends, but for
    the first half's (DistCA). By heads: chunks of heads are attended while others travel (Libra). By attention: what is
    moved before and after attention shows, keys and values travel beside it (FCP).
    """
    wire = moving_seconds(moved, pool, job)
    if hidden_by == "everything":
        busy = attention + rest
        return np.maximum(0.0, wire - busy) + np.minimum(wire, busy) / (2 * job.shape.layers)
    if hidden_by == "heads":
        return _beside(attention, wire, HEAD_CHUNKS)
    keys = job.shape.layers * _pool_link(pool, job).seconds(moved.keys)
    entry_and_exit = job.shape.layers * _pool_link(pool, job).seconds(
        np.maximum(moved.received, moved.sent) - moved.keys
    )
    return entry_and_exit + _beside(attention, keys, HEAD_CHUNKS)


def moving_seconds(moved: Moved, pool: int, job: SimulatedJob) -> Array:
    """For how long the links of ranks in pools of ``pool`` carry what is moved, in all layers; shape (ranks, slots)."""
    return job.shape.layers * _pool_link(pool, job).seconds(np.maximum(moved.received, moved.sent))


def _pool_link(pool: int, job: SimulatedJob) -> Link:
    return group_link(job.hardware, "all_to_all", pool, stride=job.layout.tp)


def _beside(attention: Array, wire: Array, parts: int) -> Array:
    ranks = RankSeconds(np.zeros_like(attention), attention, np.zeros_like(attention))
    count = np.full(attention.shape[:-1], parts)
    return attending_seconds(ranks, wire, count) - attention


def _queries(plan: MovedPlan) -> tuple[Array, Array]:
    """Tokens whose queries each rank receives, and sends; shape (ranks, slots)."""
    received, sent = np.zeros(plan.pools.size), np.zeros(plan.pools.size)
    for home, work in _moved_documents(plan):
        overlap = np.minimum(home.stop[:, None], work.stop) - np.maximum(home.start[:, None], work.start)
        moved = np.where(home.lane[:, None] != work.lane, overlap.clip(min=0), 0) * work.share
        np.add.at(sent, home.lane, moved.sum(axis=1))
        np.add.at(received, work.lane, moved.sum(axis=0))
    return _of_ranks(plan, received), _of_ranks(plan, sent)


def _keys_from_home(plan: MovedPlan) -> tuple[Array, Array]:
    """Tokens whose keys each rank receives, and sends: of every document up to its last query there, for its heads."""
    received, sent = np.zeros(plan.pools.size), np.zeros(plan.pools.size)
    for home, work in _moved_documents(plan):
        lanes, place = np.unique(work.lane, return_inverse=True)
        last = np.zeros(len(lanes), np.int64)
        np.maximum.at(last, place, work.stop)
        heads = np.minimum(1.0, _largest_share(work, place, len(lanes)))
        needed = np.minimum(home.stop[:, None], last) - home.start[:, None]
        moved = np.where(home.lane[:, None] != lanes, needed.clip(min=0), 0) * heads
        np.add.at(sent, home.lane, moved.sum(axis=1))
        np.add.at(received, lanes, moved.sum(axis=0))
    return _of_ranks(plan, received), _of_ranks(plan, sent)


def _largest_share(work: Tasks, place: NDArray[np.int64], lanes: int) -> Array:
    """The heads of a document that each lane attends: the most that it attends of any query."""
    heads = np.zeros(lanes)
    rows = np.stack([place, work.start], axis=1)
    queries, index = np.unique(rows, axis=0, return_inverse=True)
    np.maximum.at(heads, queries[:, 0], np.bincount(index.ravel(), work.share))
    return heads


def _keys_served_at_work(plan: MovedPlan) -> tuple[Array, Array]:
    """As ``_keys_from_home``, where keys lie with the queries of their tokens."""
    work = plan.work
    order = np.lexsort((work.start, work.document))
    pieces = Pieces(*(column[order] for column in work[:4]))
    where = locality(pieces, len(plan.lengths), plan.slots, plan.ranks)
    return where.received.T.astype(np.float64), where.sent.T.astype(np.float64)


def _moved_documents(plan: MovedPlan) -> list[tuple[Tasks, Tasks]]:
    """Home and work of every document that is not attended where all of it lies."""
    home, work = (_by_document(tasks, len(plan.lengths)) for tasks in (plan.home, plan.work))
    return [
        (here, there)
        for here, there in zip(home, work, strict=True)
        if len(here.lane) != 1 or len(there.lane) != 1 or here.lane[0] != there.lane[0]
    ]


def _by_document(tasks: Tasks, documents: int) -> list[Tasks]:
    order = np.argsort(tasks.document, kind="stable")
    bounds = np.searchsorted(tasks.document[order], np.arange(documents + 1))
    lane, document, start, stop, share = tasks
    ordered = Tasks(lane[order], document[order], start[order], stop[order], share[order])
    return [_between(ordered, first, last) for first, last in pairwise(bounds.tolist())]


def _between(tasks: Tasks, start: int, stop: int) -> Tasks:
    lane, document, begin, end, share = tasks
    return Tasks(lane[start:stop], document[start:stop], begin[start:stop], end[start:stop], share[start:stop])


def _of_ranks(plan: MovedPlan, lanes: Array) -> Array:
    return lanes.reshape(plan.slots, plan.ranks).T
