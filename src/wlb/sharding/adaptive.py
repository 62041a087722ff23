"""Adaptive sharding: whichever of per-sequence and per-document is predicted to be faster (WLB-LLM, section 5.3).

Per-document sharding balances the ranks, but cuts short documents into chunks that waste the attention kernel's tiles;
per-sequence sharding does the opposite. Which one wins is decided for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.latency import Candidate, priced
from wlb.sharding.per_document import per_document_pieces
from wlb.sharding.per_sequence import per_sequence_pieces
from wlb.sharding.plan import Table
from wlb.workload.base import Workload


def adaptive_pieces(lengths: NDArray[np.int64], cp_size: int, workload: Workload) -> tuple[Table, ...]:
    """Per-document sharding, unless per-sequence sharding makes the group faster."""
    choices = adaptive_choices(lengths, cp_size)
    return fastest(priced(choices, [len(lengths)] * len(choices), workload)).pieces


def adaptive_choices(lengths: NDArray[np.int64], cp_size: int) -> list[tuple[Table, ...]]:
    """The plans that ``adaptive_pieces`` chooses from."""
    return [per_document_pieces(lengths, cp_size), per_sequence_pieces(lengths, cp_size)]


def fastest(candidates: Sequence[Candidate]) -> Candidate:
    """The first of those whose group is fastest."""
    return min(candidates, key=lambda candidate: candidate.slowest_seconds)
