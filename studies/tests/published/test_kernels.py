"""Published kernels, links and distributed attention: what is priced, and that it is near."""

from functools import lru_cache

import numpy as np
import pytest

from wlb.workload import hardware_preset
from wlb_studies.published.distributed_attention import SYSTEMS, TOKENS_OF_A_GPU, packs
from wlb_studies.published.kernels import CALL, kernel_rows
from wlb_studies.published.prediction import Prediction, compared
from wlb_studies.published.reading import read_measurements

SOURCE = {"repo": "someone/something", "commit": "1234", "path": "a.psv"}


@lru_cache(maxsize=1)
def published() -> list[Prediction]:
    return kernel_rows(read_measurements())


def errors(table: str, label: str = "") -> np.ndarray:
    rows = [one for one in published() if one.table == table and one.row.startswith(label)]
    return np.array([predicted / measured - 1 for measured, predicted in compared(rows)])


def of_one(table: str, row: object) -> list[Prediction]:
    return kernel_rows({"kernels": {table: {**SOURCE, "rows": row}}})


def test_every_measurement_has_a_price_or_a_reason():
    assert {one.table for one in published()} == read_measurements()["kernels"].keys()
    for one in published():
        assert (one.predicted_seconds is None) == (one.reason is not None)
        assert one.measured_seconds is not None
        assert one.measured_seconds > 0
    [unknown] = of_one("gemm_tables", [{"ms": 1}])
    assert unknown.predicted_seconds is None
    assert unknown.reason == "a table that is not known here"


def test_a_ranks_share_of_a_launch_by_hand():
    # Two documents on one of 4 context-parallel ranks: the last quarter of 5/8 of each; 8 of 64 heads.
    row = {"tp": 8, "cp": 4, "real_attn_ms": 1.0, "lengths": [4096, 8192]}
    [priced] = of_one("attn_real_mixes_h100", [row])
    h100 = hardware_preset("h100")
    pairs = sum(q * (k - q) + q * (q + 1) / 2 for q, k in ((1024, 2560), (2048, 5120)))
    padding = h100.attention.forward_half_length / 2 * (1024 + 2048)
    drain = h100.attention.drain_tiles * 128 * 5120
    expected = 4 * 128 * (8 * (pairs + padding) + drain) / h100.attention.forward_flops + CALL["forward"]
    assert priced.predicted_seconds == pytest.approx(expected)
    assert priced.measured_seconds == 1e-3


def test_calls_that_a_script_did_not_count_are_taken_out():
    row = {"cp_shard_len": 256, "num_seq": 64, "L": 16_384, "num_heads": 32, "duration_ms": 6.0}
    [priced] = of_one("attn_shard_length", [row])
    assert priced.measured_seconds == pytest.approx(5e-3)


def test_real_mixes_are_priced_within_a_few_percent():
    for half in (errors("attn_real_mixes_h100")[::2], errors("attn_real_mixes_h100")[1::2]):
        assert np.median(np.abs(half)) < 0.03
        assert np.abs(half).max() < 0.15
    assert np.median(np.abs(errors("attn_fwd_h100"))) < 0.06
    assert np.median(np.abs(errors("attn_fwd_bwd"))) < 0.08


def test_bars_of_kernels_and_systems_are_met():
    for name in ("fa2", "fa3", "cudnn"):
        assert np.median(np.abs(errors("magi_varlen_causal", f"kernel_fwd, {name},"))) < 0.12
        assert np.abs(errors("magi_varlen_causal", f"kernel_bwd, {name},")).max() < 0.08
    for chart in ("dist_fwd", "dist_bwd"):
        for name in SYSTEMS:
            found = errors("magi_varlen_causal", f"{chart}, {name},")
            assert len(found) == 4
            assert np.median(np.abs(found)) < 0.2, name
            assert np.abs(found).max() < 0.35, name
    assert not errors("magi_varlen_causal", "dist_fwd, magi_native,").size


def test_links_are_met():
    for run in ("all_gather", "all_reduce", "reduce_scatter"):
        assert np.median(np.abs(errors("nccl_h200_node", run))) < 0.12
    assert np.median(np.abs(errors("allgather_2_nodes"))) < 0.2
    row = {"op": "all_reduce", "ngpu": "8", "size_bytes": "1048576", "t_us_out": "10"}
    [whole_node] = of_one("nccl_h200_node", [row])
    assert whole_node.predicted_seconds is None
    assert "switch" in str(whole_node.reason)


@pytest.mark.parametrize("total", [2048, 65_536, 524_288])
def test_packs_are_full_and_no_document_is_over_a_quarter(total):
    assert len(packs(total)) == 20
    for lengths in packs(total):
        assert sum(lengths) == total
        assert 0 < min(lengths) <= max(lengths) <= total // 4


def test_more_gpus_never_attend_the_same_documents_more_slowly_than_alone():
    [lengths, *_] = packs(8 * TOKENS_OF_A_GPU)
    for name in ("ring_allgather", "hybrid_dcp", "ulysses"):
        few, many = (SYSTEMS[name](lengths, gpus, "forward") for gpus in (2, 8))
        assert many < few, name
