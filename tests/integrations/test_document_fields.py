"""What is trained of a document: masks and padding are honoured, and nothing that a model could use is lost."""

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wlb.errors import UserError
from wlb.integrations.document_fields import LOSS_MASKS, ids_and_labels, token_count
from wlb.integrations.packed import FlatteningCollator, packed_batches

IDS = [5, 6, 7, 8]


@given(st.data())
def test_a_token_is_learnt_that_all_masks_and_labels_let_and_padding_is_cut(data: st.DataObject):
    left, tokens, right = data.draw(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 3)))
    size = left + tokens + right
    bits = st.lists(st.integers(0, 1), min_size=size, max_size=size)
    ids = np.arange(100, 100 + size)
    document: dict[str, Any] = {"input_ids": ids, "length": tokens, "text": "abc", "number": 3}
    learnt = np.ones(size, bool)
    for name in (*LOSS_MASKS, "labels"):
        if data.draw(st.booleans()):
            flags = np.array(data.draw(bits), bool)
            document[name] = np.where(flags, ids, -100) if name == "labels" else flags.tolist()
            learnt &= flags
    padded = left + right > 0 or data.draw(st.booleans())
    if padded:
        document["attention_mask"] = [0] * left + [1] * tokens + [0] * right
    found, labels = ids_and_labels(document)
    kept = slice(left, left + tokens)
    assert found.tolist() == ids[kept].tolist()
    assert labels.tolist() == np.where(learnt, ids, -100)[kept].tolist()
    assert token_count(document) == tokens


@pytest.mark.parametrize(
    "document",
    [IDS, np.array(IDS, np.uint16), torch.tensor(IDS), {"input_ids": torch.tensor(IDS)}, UserDict({"input_ids": IDS})],
)
def test_all_kinds_of_documents_are_read(document: Any):
    ids, labels = ids_and_labels(document)
    assert ids.tolist() == labels.tolist() == IDS
    assert ids.dtype == labels.dtype == np.int64


def test_text_numbers_and_absent_fields_are_passed_over():
    extra = {"text": "abc", "number": 1, "score": np.float32(0.5), "label": torch.tensor(1), "labels": None}
    messages = [{"role": "user", "content": "abc", "weight": 1}]
    document = {"input_ids": IDS, "attention_mask": None, "messages": messages, "tools": [], "position_ids": range(4)}
    assert ids_and_labels(document | extra)[1].tolist() == IDS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pixel_values": torch.zeros(3, 8, 8)}, "has pixel_values, which packing would lose"),
        ({"image": {"bytes": b"png", "path": None}}, "has image,"),
        ({"seq_lengths": np.array([2, 2])}, "has seq_lengths"),
        ({"labels": [1]}, "4 input_ids and 1 labels"),
        ({"labels": [6, 7, 8, -100]}, "labels shifted to the next token; give the label of a token at its own place"),
        ({"labels": [-100, -100, 8, 0]}, "labels shifted to the next token"),
        ({"labels": [-1, -100, 2, 3]}, "-1 in labels; give token ids, and -100"),
        ({"input_ids": [1, -1, 2, 3]}, "-1 in input_ids; give token ids"),
        ({"completion_mask": [0, 1, 2, 1]}, "completion_mask with the value 2"),
        ({"attention_mask": [1, 1, 2, 2]}, "attention_mask with the value 2"),
        ({"attention_mask": [1, 0, 1, 1]}, "zeros between its tokens"),
        ({"attention_mask": [0, 0, 0, 0]}, "has no tokens"),
        ({"position_ids": [0, 1, 0, 1]}, "position_ids that do not count from 0"),
        ({"labels": [0.5, 1.0, 2.0, 3.0]}, "labels of type float64"),
        ({"input_ids": [IDS]}, r"input_ids of shape \(1, 4\)"),
        ({"input_ids": [[1, 2], [3]]}, "rows of different lengths in input_ids"),
        ({"input_ids": []}, "has no tokens"),
        ({"input_ids": None, "text": "abc"}, "has no input_ids, only text; tokenise"),
    ],
)
def test_what_would_be_lost_or_learnt_wrongly_is_refused(fields: dict[str, Any], message: str):
    document = {"input_ids": IDS} | fields
    with pytest.raises(UserError, match=message):
        FlatteningCollator()([document])
    with pytest.raises(UserError, match=f"document 1 .*({message}|0 tokens)|document 1 has 0 tokens"):
        next(packed_batches([IDS, document], context_window=8, micro_batches=1, model="tiny"))
