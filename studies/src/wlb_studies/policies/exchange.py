"""Traffic of moved attention and of sequence parallelism over heads, and how far it overlaps with compute.

Bytes are for one layer and one tensor-parallel rank, with values as wide as activations. A query, its gradient and an
output each have ``heads`` x ``head_dim`` values; a key with its value has twice ``kv_heads`` x ``head_dim``.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.job.job import Job
from wlb.sharding.latency import attending_seconds
from wlb.sharding.pieces import Pieces, locality
from wlb.workload.base import Phase
from wlb.workload.links import Link, group_link
from wlb_studies.policies.plan import MovedPlan, Tasks

Array = NDArray[np.float64]

PARTS = 4  # in which Libra's heads, or keys and values, travel while others are attended; assumed


class Moved(NamedTuple):
    """Bytes that each rank receives and sends in a layer, and the part for keys and values; shape (ranks, slots).

    ``keys`` may travel during attention even if everything else must arrive before it.
    """

    received: Array
    sent: Array
    keys: Array


def query_bytes(job: Job) -> float:
    """Bytes of one token's query or output, in one layer on one tensor-parallel rank."""
    return job.shape.heads * job.shape.head_dim / job.layout.tp * job.hardware.bytes_per_value


def kv_bytes(job: Job) -> float:
    """Bytes of one token's key and value."""
    return 2 * job.shape.kv_heads * job.shape.head_dim / job.layout.tp * job.hardware.bytes_per_value


def all_to_all_of_heads(job: Job, tokens: ArrayLike, size: int, nodes: int | None = None) -> tuple[Array, Array]:
    """Sequence parallelism over heads in groups of ``size`` (DeepSpeed-Ulysses, arXiv 2309.14509, section 3).

    For micro-batches of ``tokens`` tokens: the exposed seconds of all layers in one direction, and the bytes that a
    rank receives in a layer. With fewer key and value heads than ranks, several ranks get the same heads.
    """
    count = np.asarray(tokens, np.float64)
    heads = job.shape.heads / job.layout.tp
    kv_heads = max(job.shape.kv_heads / job.layout.tp, float(size))
    values = (2 * heads + 2 * kv_heads) * job.shape.head_dim * job.hardware.bytes_per_value
    received = count / size * values * (size - 1) / size
    link = group_link(job.hardware, "all_to_all", size, job.layout.tp, nodes)
    there_and_back = received / link.bandwidth + 2 * link.latency
    seconds: Array = job.shape.layers * there_and_back
    return seconds, received


def moved_bytes(plan: MovedPlan, job: Job) -> dict[Phase, Moved]:
    """What each direction exchanges."""
    keys_received, keys_sent = _keys_served_at_work(plan) if plan.reshuffled else _keys_from_home(plan)
    queries_received, queries_sent = _queries(plan)
    of_query, of_key = query_bytes(job), kv_bytes(job)
    of_entry = of_query + of_key if plan.reshuffled else of_query  # queries, or also keys and values; outputs back
    received = queries_received * of_entry + queries_sent * of_query + keys_received * of_key
    sent = queries_sent * of_entry + queries_received * of_query + keys_sent * of_key
    keys = np.maximum(keys_received, keys_sent) * of_key
    # Gradients of outputs in, of queries, keys and values back: as much as the forward, the other way.
    backward = Moved(sent + received * plan.resent, received + sent * plan.resent, keys)
    return {"forward": Moved(received, sent, keys), "backward": backward}


def shown_seconds(moved: Moved, attention: Array, rest: Array, plan: MovedPlan, job: Job) -> Array:
    """Seconds that an exchange adds to ranks with the given seconds of attention and of the ``rest``, all layers."""
    wire = moving_seconds(moved, plan, job)
    if plan.hidden_by == "everything":
        busy = attention + rest
        return np.maximum(0.0, wire - busy) + np.minimum(wire, busy) / (2 * job.shape.layers)
    if plan.hidden_by == "heads":
        return _beside(attention, wire)
    link = _pool_link(plan, job)
    keys, entry_and_exit = (
        job.shape.layers * link.seconds(of_one)
        for of_one in (moved.keys, np.maximum(moved.received, moved.sent) - moved.keys)
    )
    return entry_and_exit + _beside(attention, keys)


def moving_seconds(moved: Moved, plan: MovedPlan, job: Job) -> Array:
    """Seconds that links are busy with moved attention, over all layers; shape (ranks, slots)."""
    return job.shape.layers * _pool_link(plan, job).seconds(np.maximum(moved.received, moved.sent))


def _pool_link(plan: MovedPlan, job: Job) -> Link:
    return group_link(job.hardware, "all_to_all", plan.pool_size, stride=job.layout.tp)


def _beside(attention: Array, wire: Array) -> Array:
    parts = np.full(attention.shape[:-1], PARTS)
    return attending_seconds(np.zeros_like(attention), attention, wire, parts) - attention


def _queries(plan: MovedPlan) -> tuple[Array, Array]:
    """Tokens whose queries each rank receives and sends; shape (ranks, slots)."""
    home, work = _moved_documents(plan)
    left, right = _of_one_document(home.document, work.document)
    overlap = np.minimum(home.stop[left], work.stop[right]) - np.maximum(home.start[left], work.start[right])
    moved = np.where(home.lane[left] != work.lane[right], overlap.clip(min=0), 0) * work.share[right]
    return _by_lane(work.lane[right], moved, plan), _by_lane(home.lane[left], moved, plan)


def _keys_from_home(plan: MovedPlan) -> tuple[Array, Array]:
    """Tokens whose keys each rank receives and sends: of each document up to its last query there, for its heads."""
    home, work = _moved_documents(plan)
    places, place = np.unique(work.document * plan.pools.size + work.lane, return_inverse=True)
    document, lane = np.divmod(places, plan.pools.size)
    last = np.zeros(len(places), np.int64)
    np.maximum.at(last, place, work.stop)
    heads = np.minimum(1.0, _largest_share(work, place, len(places)))
    left, right = _of_one_document(home.document, document)
    needed = np.minimum(home.stop[left], last[right]) - home.start[left]
    moved = np.where(home.lane[left] != lane[right], needed.clip(min=0), 0) * heads[right]
    return _by_lane(lane[right], moved, plan), _by_lane(home.lane[left], moved, plan)


def _largest_share(work: Tasks, place: NDArray[np.int64], places: int) -> Array:
    """The heads of a document that each of its lanes (``place``) attends: the most for any of its queries."""
    heads = np.zeros(places)
    most = 1 + int(work.start.max(initial=0))
    queries, index = np.unique(place * most + work.start, return_inverse=True)
    np.maximum.at(heads, queries // most, np.bincount(index, work.share))
    return heads


def _of_one_document(left: NDArray[np.int64], right: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All pairs of places in ``left`` and in ``right``, tables of documents, that have the same document."""
    order = np.argsort(right, kind="stable")
    first, stop = (np.searchsorted(right[order], left, side=side) for side in ("left", "right"))
    counts = stop - first
    index = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return np.repeat(np.arange(len(left)), counts), order[index]


def _by_lane(lane: NDArray[np.int64], values: Array, plan: MovedPlan) -> Array:
    sums: Array = plan.of_ranks(np.bincount(lane, values, plan.pools.size))
    return sums


def _keys_served_at_work(plan: MovedPlan) -> tuple[Array, Array]:
    """Like ``_keys_from_home``, with keys stored beside the queries of their tokens."""
    pieces = Pieces(*plan.work.at(np.lexsort((plan.work.start, plan.work.document)))[:4])
    where = locality(pieces, len(plan.lengths), plan.slots, plan.ranks)
    return where.received.T.astype(np.float64), where.sent.T.astype(np.float64)


def _moved_documents(plan: MovedPlan) -> tuple[Tasks, Tasks]:
    """Home and work of the documents that are attended away from home."""
    pieces, owners = [], []
    for tasks in (plan.home, plan.work):
        pieces.append(np.bincount(tasks.document, minlength=len(plan.lengths)))
        owners.append(np.zeros(len(plan.lengths), np.int64))
        owners[-1][tasks.document] = tasks.lane
    moved = (pieces[0] != 1) | (pieces[1] != 1) | (owners[0] != owners[1])
    return plan.home.at(moved[plan.home.document]), plan.work.at(moved[plan.work.document])
