"""ChunkFlow: chunks of equal tokens; only the last chunks of a long document keep their activations.

Source: ChunkFlow (ICML 2025, arXiv 2503.02356), abstract, read: short documents are packed and long ones split into
chunks of one size, scheduled so that memory depends on that size; integrated with 1F1B. Second hand: the chunks of a
document run forward in order, the last K keep their activations, the others run forward again before their backward.

Assumed: the last chunk of a document stays alone; best fit packs short ones; documents with the most tokens go first,
each to the pipeline with the fewest; no interleaved stages, as none are described. K and the size are searched.
"""

import numpy as np

from wlb.job.job import Job
from wlb_studies.policies.filling import Integers, best_fit, lightest, longest_first
from wlb_studies.policies.sliced import SlicedPlan, cut_at

SETTINGS = [{"chunk": part, "keeps": keeps} for part in (8, 4, 16, 32) for keeps in (1, 4, 16)]


def equal_chunks(lengths: Integers, job: Job, chunk: int, keeps: int) -> SlicedPlan:
    """Chunks of 1/``chunk`` window; the last ``keeps`` chunks of a long document keep activations."""
    size = job.context_window // chunk
    order = longest_first(lengths)
    long = [document for document in order if lengths[document] > size]
    sequences = [
        cut_at([document], lengths, [*range(0, int(lengths[document]), size), int(lengths[document])])
        for document in long
    ]
    packed = best_fit(order[len(long) :], lengths, size)
    sequences += [cut_at(documents, lengths, [0, int(lengths[documents].sum())]) for documents in packed]
    tokens = np.array([sum(piece.stop - piece.start for slice_ in one for piece in slice_) for one in sequences])
    members, _ = lightest(range(len(sequences)), tokens, job.layout.dp, tokens, int(tokens.sum()))
    return SlicedPlan(lengths, [[sequences[index] for index in mine] for mine in members], keeps=keeps)
