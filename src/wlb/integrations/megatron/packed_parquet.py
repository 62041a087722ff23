"""Planned micro-batches as the packed Parquet files that Megatron Bridge trains on.

    steps = PlannedBatchSampler(store.lengths, context_window=8192, micro_batches=8, dp=4).steps()
    write_packed_parquet("train.idx.parquet", store, steps)

A row is a micro-batch: ``input_ids`` (list<int32>), ``seq_start_id`` (list<int32>, where each sequence begins) and
``loss_mask`` (list<int8>), as ``megatron.bridge.data.packing.parquet`` reads them. Bridge trains the n tokens of a
sequence at n - 1 positions: its inputs are all but the last, its labels all but the first, and ``loss_mask[i]`` says
whether the label of position i counts. So a segment that ends before its document does brings the next token along.

Rows are in the order in which Bridge deals them to ranks, with micro_batch_size = 1 and dataloader_type = "batch" or
"single": rank 0's first micro-batch, rank 1's first, ..., rank 0's second. A global batch is dp x micro-batches rows.
With ``max_train_samples`` Bridge shuffles rows; their prices stay alike, but not the steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.packing.plan import MicroBatch, StepPlan

_ROWS_AT_ONCE = 500  # of a row group: Bridge reads and keeps one at a time
_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("seq_start_id", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))]
)


class RowDocuments(Protocol):
    """The part of a token store that rows are made of; ``lengths`` counts all tokens of each document."""

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    def read(self, document: int, start: int = 0, length: int | None = None) -> NDArray[Any]: ...


class PackedRows(NamedTuple):
    """What was written: rows, positions that Bridge trains, and segments of one token, left out: nothing to predict."""

    rows: int
    positions: int
    single_tokens: int


def write_packed_parquet(
    path: str | Path,
    documents: RowDocuments,
    plans: Iterable[StepPlan],
    *,
    trained: Callable[[int], ArrayLike] | None = None,
    multiple_of: int = 1,
    end_token: int | None = None,
) -> PackedRows:
    """Write the micro-batches of ``plans``, a row each, to ``path``; it is there only once it is complete.

    Args:
        path: Ends in ``.idx.parquet``, which is how Bridge recognises packed files.
        documents: The tokens; a ``TokenStore``, or anything with its ``lengths`` and ``read``.
        plans: Steps of equally many micro-batches, for example ``PlannedBatchSampler.steps()``.
        trained: For a document's index, whether each of its tokens is learnt to be predicted; default all. Bridge wants
            ``answer_only_loss = True``, or it makes a mask of its own.
        multiple_of: Positions of a sequence are padded to a multiple of this: ``pad_seq_to_mult`` in Bridge, 2 x CP.
        end_token: What Bridge's tokenizer calls ``eos_id``; it pads, as Bridge takes trailing ones for padding.

    Raises:
        UserError: Another file name, padding without ``end_token``, or a micro-batch with nothing to predict.
    """
    path = Path(path)
    if not path.name.endswith(".idx.parquet"):
        raise UserError(f"Megatron Bridge reads packed files that end in .idx.parquet; rename {path.name}")
    if multiple_of < 1 or (multiple_of > 1 and end_token is None):
        raise UserError(f"multiple_of = {multiple_of} pads; give at least 1, and end_token to pad with")
    rows = _Rows(documents, trained, multiple_of, end_token or 0)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with pq.ParquetWriter(part, _SCHEMA) as writer:
            made = (rows.row(plan.step, m) for plan in plans for slot in zip(*plan.ranks, strict=True) for m in slot)
            while group := list(islice(made, _ROWS_AT_ONCE)):
                writer.write_table(pa.Table.from_pylist(group, _SCHEMA))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return PackedRows(rows.rows, rows.positions, rows.single_tokens)


@dataclass
class _Rows:
    """Makes rows, and counts them."""

    documents: RowDocuments
    trained: Callable[[int], ArrayLike] | None
    multiple_of: int
    end_token: int
    rows: int = 0
    positions: int = 0
    single_tokens: int = 0

    def row(self, step: int, micro_batch: MicroBatch) -> dict[str, NDArray[Any]]:
        made = [sequence for segment in micro_batch.segments if (sequence := self._sequence(segment)) is not None]
        if not made:
            raise UserError(
                f"a micro-batch of step {step} has nothing to predict, and Bridge cannot train an empty row; leave out "
                "documents of a single token"
            )
        tokens, masks = zip(*made, strict=True)
        lengths = np.array([len(sequence) for sequence in tokens])
        self.rows += 1
        self.positions += int((lengths - 1).sum())
        starts = np.cumsum(lengths) - lengths
        return {"input_ids": np.concatenate(tokens), "seq_start_id": starts, "loss_mask": np.concatenate(masks)}

    def _sequence(self, segment: Segment) -> tuple[NDArray[Any], NDArray[np.int8]] | None:
        """Tokens and loss mask of a segment, padded; None if it has but one token and no next."""
        index = segment.document % len(self.documents.lengths)
        stop = min(segment.start + segment.length + 1, int(self.documents.lengths[index]))
        positions = stop - segment.start - 1
        if positions == 0:
            self.single_tokens += 1
            return None
        tokens = np.asarray(self.documents.read(index, segment.start, positions + 1))
        mask = np.ones(positions, np.int8)
        if self.trained is not None:
            mask = np.asarray(self.trained(index)).astype(np.int8)[segment.start + 1 : stop]
        padding = -positions % self.multiple_of
        tokens = np.concatenate([tokens, np.full(padding, self.end_token, tokens.dtype)])
        return tokens, np.concatenate([mask, np.zeros(padding + 1, np.int8)])
