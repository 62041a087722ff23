"""Lengths are read from every kind of batch, as computed and without padding."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cases import in_turn
from wlb.errors import UserError
from wlb.shadow_mode.fields import fields_of, lengths_of

TOKENS = torch.zeros(2, 8, dtype=torch.int64)
ROW = TOKENS[:1]
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
LEFT_PADDED = {"input_ids": TOKENS, "attention_mask": torch.tensor([[0] * 5 + [1] * 3, [1] * 8])}
SHARED = torch.zeros(1, 1, 8, 8)  # a mask of four dimensions says nothing

BATCHES: dict[str, Any] = {
    "cu_seqlens": ({"input_ids": ROW, "cu_seq_lens_q": torch.tensor([0, 3, 8, 8])}, [3, 5], [3, 5]),
    "cu_seqlens before padding": ({"input_ids": ROW, "cu_seqlens": torch.tensor([[0, 3, 6]])}, [3, 3, 2], [3, 3]),
    "lengths": (SimpleNamespace(tokens=ROW[0], segment_lengths=(3, 5)), [3, 5], [3, 5]),
    "positions": ({"input_ids": ROW, "position_ids": PACKED}, [3, 5], [3, 5]),
    "positions, flat": (({"input": ROW[0], "positions": PACKED[0]}, ROW[0]), [3, 5], [3, 5]),
    "positions before padding": (
        {"input_ids": ROW, "position_ids": PACKED, "attention_mask": torch.tensor([[1] * 6 + [0] * 2])},
        *([3, 3, 2], [3, 3]),
    ),
    "positions of all rows": ({"input_ids": TOKENS, "position_ids": torch.arange(8)[None]}, [8, 8], [8, 8]),
    "positions of images": ({"input_ids": TOKENS, "position_ids": torch.zeros(3, 2, 8)}, [8, 8], [8, 8]),
    "padded rows": (LEFT_PADDED, [8, 8], [3, 8]),
    "padded rows with positions": (
        LEFT_PADDED | {"position_ids": torch.tensor([[1] * 5 + [0, 1, 2], [*range(8)]])},
        [8, 8],
        [3, 8],
    ),
    "whole rows": ((TOKENS, TOKENS), [8, 8], [8, 8]),
    "a row that is empty": ({"input_ids": ROW, "attention_mask": 0 * ROW}, [8], []),
    "Megatron-Core": (
        {
            "input_ids": ROW,
            "attention_mask": SHARED,
            "packed_seq_params": SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 8])),
        },
        *([3, 5], [3, 5]),
    ),
}


@in_turn(("batch", "computed", "documents"), BATCHES.values())
def test_lengths_of_every_kind_of_batch(batch: Any, computed: list[int], documents: list[int]):
    found = lengths_of(fields_of(batch))
    assert [lengths.tolist() for lengths in found] == [computed, documents]


def test_a_batch_that_does_not_say_them_is_refused():
    with pytest.raises(UserError, match=r"none of cu_seq_lens_q, .* give lengths, a function of the batch"):
        lengths_of(fields_of({"pixel_values": TOKENS}))
