"""The sharding benchmark counts what everyone's ranks attend, and gives torch's balancers what they ask for."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from studies.benchmarks import sharding


def test_block_mask_is_what_flex_attention_makes():
    lengths = np.array([300, 128, 1, 83, 512])
    documents = torch.from_numpy(np.repeat(np.arange(5), lengths))

    def causal(batch, head, query, key):
        return (documents[query] == documents[key]) & (query >= key)

    made = create_block_mask(causal, None, None, len(documents), len(documents), device="cpu")
    assert made.full_kv_num_blocks is not None
    expected = made.kv_num_blocks + made.full_kv_num_blocks
    ours = sharding.block_mask(lengths)
    assert ours.kv_num_blocks.tolist() == expected.tolist()


def test_area_is_counted_query_by_query():
    assert sharding.attended_area(np.array([3, 4]), np.array([0, 2, 3, 6])) == 1 + 3 + 1 + 4


def test_small_run_writes_what_it_prints(tmp_path: Path):
    out = tmp_path / "sharding.json"
    small = ["--lengths", "synthetic:500:128K:0", "--samples", "4", "--cp", "2", "4", "--turns", "1"]
    assert sharding.main([*small, "--out", str(out)]) == 0
    for cp_rows in json.loads(out.read_text())["cp"].values():
        rows = {row["method"]: row for row in cp_rows}
        assert rows["per_document"]["attention_imbalance"] <= 1.002
        assert rows["torch _HeadTail"]["attention_imbalance"] == pytest.approx(
            rows["per_sequence"]["attention_imbalance"]
        )
        assert rows["torch _PerDocumentHeadTail"]["padding"] > 0
        assert rows["balanced"]["kv_gather_fraction"] < 1 == rows["torch _PTRR"]["kv_gather_fraction"]
        assert all(row["planning_ms"] > 0 for row in cp_rows)
    assert str(tmp_path) not in out.read_text(), "results name no paths"
