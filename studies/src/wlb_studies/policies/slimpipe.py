"""SlimPipe: every sequence in equal slices, a multiple of the pipeline's ranks, which share their attention.

Source: SlimPipe (arXiv 2504.14519), abstract, and the description in Megatron-LM PR 3116, read: uniform slices in 1F1B,
so that each rank holds about one micro-batch; other ranks compute part of the attention of later slices (context
exchange), and all ranks share the output head (vocabulary parallelism). Second hand: interleaved stages.

Assumed in its favour: the exchange evens out attention within a sequence and the head over stages at no cost; whole
documents are packed into sequences of at most a window, as for Seq1F1B. ``slimpipe-one-head`` leaves the head on the
last stage, to show what spreading it is worth.
"""

from wlb.job.job import Job
from wlb_studies.policies.filling import Integers
from wlb_studies.policies.sliced import SlicedPlan, cut_at, even_cuts, packed_sequences

SETTINGS = [{"rounds": rounds} for rounds in (1, 2, 4)]


def uniform_slices(lengths: Integers, job: Job, rounds: int, *, spreads_head: bool = True) -> SlicedPlan:
    """Cut sequences of up to a window into ``rounds`` slices for each pipeline rank."""
    sequences = [
        cut_at(documents, lengths, even_cuts(int(lengths[documents].sum()), rounds * job.layout.pp))
        for documents in packed_sequences(lengths, job.context_window)
    ]
    columns = [sequences[column :: job.layout.dp] for column in range(job.layout.dp)]
    return SlicedPlan(lengths, columns, exchanges=True, spreads_head=spreads_head)
