"""What Megatron Bridge's rules make of the files, against the batches of our own trainer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.training.documents import RandomDocuments
from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.megatron.packed_parquet import write_packed_parquet
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.training.data.batch import IGNORE_LABEL, make_batch

DOCUMENTS = RandomDocuments(np.array([50, 7, 23, 64, 3, 60, 31, 2, 9, 12, 44, 5]), vocab_size=64)


def _as_bridge_reads(row: dict[str, list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, labels, positions and loss mask of a row, by the rules of its ``collate_fn``."""
    bounds = [*row["seq_start_id"], len(row["input_ids"])]
    spans = list(pairwise(bounds))
    tokens, mask = np.array(row["input_ids"]), np.array(row["loss_mask"])
    return (
        np.concatenate([tokens[start : stop - 1] for start, stop in spans]),
        np.concatenate([tokens[start + 1 : stop] for start, stop in spans]),
        np.concatenate([np.arange(stop - start - 1) for start, stop in spans]),
        np.concatenate([mask[start : stop - 1] for start, stop in spans]),
    )


def test_bridge_trains_the_labels_of_our_batches_in_the_order_of_its_sampler(tmp_path: Path):
    sampler = PlannedBatchSampler(DOCUMENTS.lengths, context_window=64, micro_batches=2, dp=2)
    plans = list(sampler.steps())
    written = write_packed_parquet(tmp_path / "train.idx.parquet", DOCUMENTS, plans)
    table = pq.read_table(tmp_path / "train.idx.parquet")
    assert [str(field.type) for field in table.schema] == [
        f"list<element: {kind}>" for kind in ("int32", "int32", "int8")
    ]
    expected = [micro_batch for plan in plans for of_ranks in zip(*plan.ranks, strict=True) for micro_batch in of_ranks]
    assert table.num_rows == written.rows == len(expected)
    for row, micro_batch in zip(table.to_pylist(), expected, strict=True):
        batch = make_batch(micro_batch, DOCUMENTS)
        labelled = batch.labels != IGNORE_LABEL
        inputs, labels, positions, mask = _as_bridge_reads(row)
        assert inputs.tolist() == batch.tokens[labelled].tolist()
        assert labels.tolist() == batch.labels[labelled].tolist()
        assert positions.tolist() == batch.positions[labelled].tolist()
        assert mask.all()
    assert written.positions == sum(DOCUMENTS.lengths - 1)
    assert list(tmp_path.iterdir()) == [tmp_path / "train.idx.parquet"]


def test_a_cut_document_brings_its_next_token_and_padding_is_not_trained(tmp_path: Path):
    first, second = Segment(3, 0, 40), Segment(3, 40, 24)
    plan = StepPlan(0, ((MicroBatch((first,), 1.0), MicroBatch((second,), 1.0)),))
    trained = np.arange(64) >= 50  # an answer of 14 tokens
    file = tmp_path / "cut.idx.parquet"
    write_packed_parquet(file, DOCUMENTS, [plan], trained=lambda _: trained, multiple_of=16, end_token=63)
    tokens = DOCUMENTS.read(3)
    for row, (start, stop) in zip(pq.read_table(file).to_pylist(), [(0, 40), (40, 63)], strict=True):
        inputs, labels, _, mask = _as_bridge_reads(row)
        positions = stop - start
        assert len(inputs) % 16 == 0
        assert inputs[:positions].tolist() == tokens[start:stop].tolist()
        assert labels[:positions].tolist() == tokens[start + 1 : stop + 1].tolist()
        assert mask.tolist() == [*trained[start + 1 : stop + 1], *[0] * (len(inputs) - positions)]
        assert set(inputs[positions + 1 :]) <= {63}


def test_single_tokens_are_counted_and_what_bridge_cannot_read_is_refused(tmp_path: Path):
    documents = RandomDocuments(np.array([1, 5]), vocab_size=64)
    both, alone = (
        MicroBatch(tuple(Segment(d, 0, int(documents.lengths[d])) for d in ids), 1.0) for ids in ((0, 1), (0,))
    )
    file = tmp_path / "train.idx.parquet"
    assert write_packed_parquet(file, documents, [StepPlan(0, ((both,),))]).single_tokens == 1
    with pytest.raises(UserError, match="step 7 has nothing to predict"):
        write_packed_parquet(file, documents, [StepPlan(7, ((alone,),))])
    assert pq.read_table(file).num_rows == 1  # the file that was there
    with pytest.raises(UserError, match=r"rename train.parquet"):
        write_packed_parquet(tmp_path / "train.parquet", documents, [])
    with pytest.raises(UserError, match="end_token"):
        write_packed_parquet(file, documents, [], multiple_of=4)
