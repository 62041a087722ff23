"""SlimPack: slices packed evenly, separately for forward and backward.

Source: SlimPack (arXiv 2509.26246), abstract, read: documents are cut into slices, which are assembled into balanced
units that differ between forward and backward; a two-phase solver is guided by a simulator. Second hand: the solver is
an integer program and a search; several pipelines share documents that are too long for one.

Assumed in its favour: units are as even as our own slices (``wlb.packing.slices``), forward by forward seconds and
backward by backward seconds; the i-th backward needs only the i-th forward, wherever its slices ran forward; 1F1B over
slices, also interleaved; simulation finds the number of units. Assumed: if one pipeline is too small for a document,
context-parallel groups hold it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from wlb.errors import UserError
from wlb.job.job import Job
from wlb.packing.plan import PlannedMicroBatch
from wlb.packing.slices import sliced_pipelines
from wlb.workload import Costs
from wlb.workload.base import Direction, Seconds
from wlb_studies.policies.filling import Integers, lightest, longest_first
from wlb_studies.policies.sliced import Column, Piece, Slice, SlicedPlan

SETTINGS = [{"units": rounds} for rounds in (8, 4, 16, 6, 3)]
_LARGE = 2**20  # tokens: at this size the cost per token is constant


@dataclass(frozen=True)
class _OfPass:
    """Prices of documents in forwards or in backwards, on one pipeline."""

    costs: Costs
    phase: Direction
    columns: int = 1

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        once, twice = self.costs.linear_seconds([_LARGE, 2 * _LARGE], self.phase)
        tokens = np.asarray(lengths, np.float64)
        return self.costs.attention_seconds(tokens, self.phase) + float(twice - once) / _LARGE * tokens


def asymmetric_units(lengths: Integers, job: Job, units: int) -> SlicedPlan:
    """Plan ``units`` for each pipeline rank, forward and backward."""
    seconds, dp = job.costs.document_seconds(lengths), job.layout.dp
    of_columns, _ = lightest(longest_first(lengths), seconds, dp, lengths, int(lengths.sum()))
    count = units * job.layout.pp
    forward, backward = (
        [_column(mine, lengths, count, _OfPass(job.costs, phase)) for mine in of_columns]
        for phase in ("forward", "backward")
    )
    return SlicedPlan(lengths, forward, backward=backward)


def _column(documents: Sequence[int], lengths: Integers, count: int, prices: _OfPass) -> Column:
    mine = lengths[list(documents)]
    (planned,), left = sliced_pipelines(mine, 1, count, int(mine.sum()) or 1, prices)
    if left:
        raise UserError(f"{len(left)} documents find no room in {count} units; allow more units")
    sequences: list[list[Slice]] = []
    for unit in planned:
        if not unit.start:
            sequences.append([])
        sequences[-1].append(_slice(unit, documents, mine))
    return sequences


def _slice(unit: PlannedMicroBatch, documents: Sequence[int], lengths: Integers) -> Slice:
    whole = [Piece(documents[index], 0, int(lengths[index])) for index in unit.documents]
    return whole if unit.sliced < 0 else [Piece(documents[unit.sliced], unit.start, unit.stop), *whole]
