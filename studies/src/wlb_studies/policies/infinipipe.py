"""InfiniPipe: long documents in slices of equal time, tails and short documents packed to as much.

Source: InfiniPipe (arXiv 2509.21275), abstract, read: it splits long sequences and packs short ones to even work, and
each stage checkpoints some of its chunks, chosen together with the schedule. Second hand: slices of equal seconds and
unequal tokens; tails and short documents by best fit; 1F1B, longest document first.

Assumed in its favour: each document goes to the pipeline with the least work; each rank recomputes exactly what its
memory needs; simulation finds the number of chunks. Assumed: no interleaved stages; a chunk has at most one tail.
"""

from itertools import pairwise

import numpy as np

from wlb.job.job import Job
from wlb_studies.policies.filling import Integers, lightest, longest_first
from wlb_studies.policies.sliced import TILE, Column, Piece, Slice, SlicedPlan

SETTINGS = [{"chunks": rounds} for rounds in (8, 4, 16, 6, 3)]


def equal_seconds(lengths: Integers, job: Job, chunks: int) -> SlicedPlan:
    """Make about ``chunks`` chunks for each pipeline rank."""
    seconds, dp = job.costs.document_seconds(lengths), job.layout.dp
    of_columns, _ = lightest(longest_first(lengths), seconds, dp, lengths, int(lengths.sum()))
    most = float(seconds.sum()) / (dp * chunks * job.layout.pp)
    return SlicedPlan(lengths, [_column(mine, lengths, job, most) for mine in of_columns])


def _column(documents: list[int], lengths: Integers, job: Job, most: float) -> Column:
    """Chunks of about ``most`` seconds; chunks of long documents come first."""
    prices = job.costs.document_seconds
    sequences: list[list[Slice]] = []
    rooms: list[tuple[float, list[Piece]]] = []
    for document in documents:  # longest first
        length = int(lengths[document])
        seconds = float(prices(length))
        if seconds <= most:
            fitting = [room for room in rooms if room[0] >= seconds]
            left, chunk = min(fitting, key=lambda room: room[0], default=(most, []))
            if fitting:
                rooms.remove((left, chunk))
            else:
                sequences.append([chunk])
            chunk.append(Piece(document, 0, length))
            rooms.append((left - seconds, chunk))
            continue
        tiles = np.append(np.arange(0, length, TILE), length)
        work = prices(tiles)
        ends = tiles[np.searchsorted(work, np.arange(most, seconds, most), side="right") - 1].tolist()
        cuts = [*dict.fromkeys([0, *ends, length])]
        pieces = [[Piece(document, first, last)] for first, last in pairwise(cuts)]
        sequences.append([*pieces])
        rooms.append((most - float(prices(length) - prices(cuts[-2])), pieces[-1]))
    return sequences
