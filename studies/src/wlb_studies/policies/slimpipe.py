"""SlimPipe: every sequence in equal slices, a multiple of the pipeline's ranks, which share their attention.

Source: SlimPipe (arXiv 2504.14519), abstract, and what the authors of Megatron-LM PR 3116 write of it, read: uniform
slices in 1F1B, so that about one micro-batch is held; attention of later slices is partly computed on other ranks
(context exchange), and the output head on all ranks (vocabulary parallelism). Second hand: interleaved stages.

Assumed in its favour: the exchange evens out attention inside a sequence and the head over stages, and costs nothing;
documents are packed whole to sequences of at most a window, as for Seq1F1B.
"""

from __future__ import annotations

from wlb.job.job import Job
from wlb_studies.policies.filling import Integers
from wlb_studies.policies.sliced import SlicedPlan, cut_at, even_cuts, packed_sequences

SETTINGS = [{"rounds": rounds} for rounds in (1, 2, 4)]


def uniform_slices(lengths: Integers, job: Job, rounds: int) -> SlicedPlan:
    """Sequences of up to a window in ``rounds`` slices for each pipeline rank."""
    sequences = [
        cut_at(documents, lengths, even_cuts(int(lengths[documents].sum()), rounds * job.layout.pp))
        for documents in packed_sequences(lengths, job.context_window)
    ]
    return SlicedPlan(lengths, [sequences[column :: job.layout.dp] for column in range(job.layout.dp)], exchanges=True)
