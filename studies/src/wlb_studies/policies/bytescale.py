"""ByteScale: hybrid data parallelism over all ranks of a stage.

Source: ByteScale (SIGCOMM '25, arXiv 2502.21231), sections 4 and 5; no code is published. A document of s tokens gets
ceil(s / C) ranks; best fit packs short documents to C tokens. Ranks run different numbers of micro-batches, because the
loss is normalised by tokens and all ranks form one group.

Assumed: with and without a pipeline; no selective offloading, no hidden states on the host.
"""

import numpy as np

from wlb_studies.policies.filling import Integers, best_fit, longest_first
from wlb_studies.policies.plan import Group, GroupPlan, Ranks


def hybrid_data_parallel(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Deal micro-batches, most expensive first, each to the ranks with the least load so far.

    That order puts micro-batches of similar time beside each other in a pipeline. Ranks wait only for ranks that share
    a document with them.
    """
    cost = ranks.job.costs.document_seconds(lengths)
    order = longest_first(lengths)
    long = [document for document in order if lengths[document] > ranks.capacity]
    packed = best_fit(order[len(long) :], lengths, ranks.capacity)
    units = [(ranks.needed(int(lengths[d])), [d]) for d in long] + [(1, documents) for documents in packed]
    units.sort(key=lambda unit: -float(cost[unit[1]].sum()) / unit[0])
    loads, following = np.zeros(ranks.count), np.zeros(ranks.count, np.int64)
    groups = []
    for size, documents in units:
        members = np.sort(np.argsort(loads, kind="stable")[:size])
        slot = int(following[members].max())
        groups.append(Group(slot, tuple(members.tolist()), tuple(documents)))
        following[members] = slot + 1
        loads[members] = loads[members].max() + float(cost[documents].sum()) / size
    return GroupPlan(lengths, tuple(groups))
