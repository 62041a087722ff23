"""verl and slime: Karmarkar-Karp over data-parallel ranks and micro-batches, for steps that must be trained whole.

Source: verl-project/verl, ``verl/utils/seqlen_balancing.py`` and its trainers' ``balance_batch``; THUDM/slime,
``slime/utils/dp_schedule.py``. A reinforcement-learning step must train its own samples, so no document may wait.
Groups are fixed; a micro-batch holds at most a group's token cap, and all ranks run equally many.

Assumed: if a balanced micro-batch exceeds the token cap, all ranks run more micro-batches.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.packing.bins import differenced
from wlb.workload.flops import attention_flops, linear_flops
from wlb_studies.policies.filling import Integers, first_fit, lightest, power_of_two
from wlb_studies.policies.plan import Group, GroupPlan, Ranks

_karmarkar_karp = partial(differenced, joined_last=True)
_TOKEN_COST = 24_576  # relative to a squared token: 6 x the hidden size of 4,096, for every model


def karmarkar_karp_twice(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """verl: first over ranks, with equally many documents on each, then over a rank's micro-batches.

    A document of s tokens costs 24,576 s + s^2. A rank's heaviest micro-batch runs in the middle and the lightest ones
    at both ends, where a pipeline fills and drains. verl does not check the cap; if a balanced micro-batch exceeds it
    here, all ranks run more.
    """
    size = power_of_two(ranks.needed(ranks.window))
    groups, most = ranks.count // size, ranks.capacity * size
    cost = _TOKEN_COST * lengths.astype(np.float64) + lengths.astype(np.float64) ** 2
    of_ranks = [np.array(part, np.int64) for part in _karmarkar_karp(cost, groups, equal_size=True)]
    fewest = min(len(documents) for documents in of_ranks)
    multiple = ranks.micro_batch_multiple
    count = -(-max(-(-int(lengths[documents].sum()) // most) for documents in of_ranks) // multiple) * multiple
    while count <= fewest:
        parts = [[documents[part] for part in _karmarkar_karp(cost[documents], count)] for documents in of_ranks]
        if all(lengths[part].sum() <= most for of_rank in parts for part in of_rank):
            return _of_ranks(lengths, [_light_ends(of_rank, cost) for of_rank in parts], size)
        count += multiple
    raise UserError(
        f"{len(lengths)} documents do not fill {count} micro-batches of {most} tokens on each of {groups} "
        "data-parallel ranks; use a larger global batch"
    )


def _light_ends(micro_batches: list[NDArray[np.int64]], cost: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    falling = sorted(micro_batches, key=lambda part: (float(cost[part].sum()), int(part.min())), reverse=True)
    return falling[::2][::-1] + falling[1::2]


def packed_then_dealt(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """slime: first fit over all documents of the step, then Karmarkar-Karp of micro-batches over ranks.

    If their number is not a multiple of the ranks (with interleaved stages, of ranks x pp), the micro-batches with the
    most tokens are halved, longest document first to the half with fewer tokens. A micro-batch costs its FLOPs, and
    every rank gets equally many.
    """
    size = power_of_two(ranks.needed(ranks.window))
    groups = ranks.count // size
    packed = first_fit(range(len(lengths)), lengths, ranks.capacity * size)
    multiple = groups * ranks.micro_batch_multiple
    while len(packed) % multiple:
        tokens, index = max((int(lengths[part].sum()) * (len(part) > 1), i) for i, part in enumerate(packed))
        if not tokens:
            raise UserError(
                f"{len(lengths)} documents cannot fill a multiple of {multiple} micro-batches; give more in a step"
            )
        descending = sorted(packed[index], key=lambda document: -lengths[document])
        (packed[index], other), _ = lightest(descending, lengths.astype(np.float64), 2, lengths, tokens)
        packed.append(other)
    shape = ranks.job.shape
    flops = attention_flops(shape, lengths) + linear_flops(shape, lengths)
    dealt = _karmarkar_karp([float(flops[part].sum()) for part in packed], groups, equal_size=True)
    return _of_ranks(lengths, [[packed[index] for index in sorted(of_rank)] for of_rank in dealt], size)


def _of_ranks(lengths: Integers, micro_batches: Sequence[Sequence[Sequence[int] | Integers]], size: int) -> GroupPlan:
    """The micro-batches of every data-parallel rank; each rank is a group of ``size``."""
    return GroupPlan(
        lengths,
        tuple(
            Group(slot, tuple(range(rank * size, (rank + 1) * size)), tuple(int(document) for document in documents))
            for rank, of_rank in enumerate(micro_batches)
            for slot, documents in enumerate(of_rank)
        ),
    )
