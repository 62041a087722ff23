"""The sharding benchmark counts what everyone's ranks attend, and gives torch's balancers what they ask for."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.programs import finished

REPOSITORY = Path(__file__).parents[2]
BENCHMARK = REPOSITORY / "benchmarks" / "sharding.py"


def test_block_mask_is_what_flex_attention_makes(benchmark):
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = np.array([300, 128, 1, 83, 512])
    document = np.repeat(np.arange(5), lengths)

    def causal(batch, head, query, key):
        import torch

        documents = torch.from_numpy(document)
        return (documents[query] == documents[key]) & (query >= key)

    made = create_block_mask(causal, None, None, len(document), len(document), device="cpu")
    assert made.full_kv_num_blocks is not None
    expected = made.kv_num_blocks + made.full_kv_num_blocks
    ours = benchmark.block_mask(lengths)
    assert ours.kv_num_blocks.tolist() == expected.tolist()


def test_area_is_counted_query_by_query(benchmark):
    assert benchmark.attended_area(np.array([3, 4]), np.array([0, 2, 3, 6])) == 1 + 3 + 1 + 4


def test_small_run_writes_what_it_prints(tmp_path):
    out = tmp_path / "sharding.json"
    small = ["--documents", "500", "--samples", "4", "--cp", "2", "4", "--turns", "1", "--out", str(out)]
    done = finished(BENCHMARK, *small)
    assert done.returncode == 0, done.stderr
    for cp_rows in json.loads(out.read_text())["cp"].values():
        rows = {row["method"]: row for row in cp_rows}
        assert rows["per_document"]["attention_imbalance"] <= 1.002
        assert rows["torch _HeadTail"]["attention_imbalance"] == pytest.approx(
            rows["per_sequence"]["attention_imbalance"]
        )
        assert rows["torch _PerDocumentHeadTail"]["padding"] > 0
        assert rows["hybrid"]["kv_gather_fraction"] < 1 == rows["torch _PTRR"]["kv_gather_fraction"]
        assert all(row["planning_ms"] > 0 for row in cp_rows)
    assert str(tmp_path) not in out.read_text(), "results name no paths"
