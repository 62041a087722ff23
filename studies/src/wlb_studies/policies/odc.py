"""ODC: fully sharded data parallelism in which ranks fetch weights on their own and meet only at the end of the step.

Source: ODC (ICLR '26, arXiv 2601.19362), sections 3, 4 and 6.1; sail-sg/odc, ``examples/llm_training/packing.py``
(``DynamicDiffMicro``, in the paper LB-Mini). Shards of weights come point to point from the ranks that own them, and
gradients return the same way. No layer waits for all ranks, so ranks may run different numbers of micro-batches, and
only the compute of each rank over the whole step needs balancing.

Assumed: costs are predicted seconds; no further exchange of documents between parts; groups are as large as a window
needs, as it has no context parallelism; weights cross nodes through each GPU's own adapter; gradients stay whole
through the step; pipeline size 1.
"""

from functools import partial

import numpy as np

from wlb.packing.bins import differenced
from wlb_studies.policies.filling import Integers, power_of_two
from wlb_studies.policies.plan import Group, GroupPlan, Ranks

_karmarkar_karp = partial(differenced, joined_last=True)


def minibatch_balanced(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Divide documents evenly in predicted seconds, and those of each group into as few micro-batches as hold them.

    Karmarkar-Karp does both, into parts of any number of documents. The most expensive micro-batch runs first. Groups
    are as large as a window needs.
    """
    size = power_of_two(ranks.needed(ranks.window))
    cost = ranks.job.costs.document_seconds(lengths)
    groups: list[Group] = []
    for number, documents in enumerate(_karmarkar_karp(cost, ranks.count // size)):
        members = tuple(range(number * size, (number + 1) * size))
        packed = _local(np.array(documents, np.int64), cost, lengths, ranks.capacity * size)
        groups += [Group(slot, members, tuple(part.tolist())) for slot, part in enumerate(packed)]
    return GroupPlan(lengths, tuple(groups), fetches_weights=True)


def _local(documents: Integers, cost: np.ndarray, lengths: Integers, capacity: int) -> list[Integers]:
    count = -(-int(lengths[documents].sum()) // capacity)
    while True:
        parts = [documents[part] for part in _karmarkar_karp(cost[documents], count) if part]
        if all(lengths[part].sum() <= capacity for part in parts):
            return sorted(parts, key=lambda part: -float(cost[part].sum()))
        count += 1
