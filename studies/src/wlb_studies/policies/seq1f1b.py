"""Seq1F1B: cut every sequence into the same number of slices and run them in 1F1B.

Source: Seq1F1B (NAACL 2025, arXiv 2406.03488), abstract, and the code of thunlp/Seq1F1B (``schedules.py``,
``sp_utils.py``, ``split_solver.py``), read: k slices of equal tokens or, to even out work, of equal FLOPs of one
document. Slices run backward last in, first out; k - 1 more forwards warm up, also with interleaved stages. A picture
in its repository shows a backward in two parts. Megatron-LM PR 3116, which adopts it, has no packed sequences yet.

Assumed in its favour: best fit packs whole documents into sequences of at most a window, dealt in turn; slices hold
parts of packed documents; a backward in two parts runs as in ZB-H1 wherever nothing is recomputed.
"""

from wlb.job.job import Job
from wlb_studies.policies.filling import Integers
from wlb_studies.policies.sliced import SlicedPlan, cut_at, even_cuts, packed_sequences

SETTINGS = [{"slices": slices, "cut": by} for slices in (4, 2, 8) for by in ("work", "tokens")]


def even_slices(lengths: Integers, job: Job, slices: int, cut: str) -> SlicedPlan:
    """Sequences of up to a window, each cut like a single document of the same length."""
    seconds = job.costs.document_seconds if cut == "work" else None
    sequences = [
        cut_at(documents, lengths, even_cuts(int(lengths[documents].sum()), slices, seconds))
        for documents in packed_sequences(lengths, job.context_window)
    ]
    return SlicedPlan(
        lengths, [sequences[column :: job.layout.dp] for column in range(job.layout.dp)], splits_backward=True
    )
