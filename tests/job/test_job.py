"""One job answers alike whoever asks, and in the type and on the schedule that it really runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wlb.errors import UserError
from wlb.job.config import JobConfig, PackingConfig
from wlb.job.job import Job, MemoryLimit, limit_of_gpu
from wlb.job.memory.fit import too_large
from wlb.schedules.layout import Layout
from wlb.workload import ModelShape, hardware_preset
from wlb.workload.shapes import Experts

WINDOW = 32_768


def spec(hardware: str = "h100", **sections: Any) -> Job:
    data = {"store": "corpus", "context_window": WINDOW}
    model = {"name": "7b"}
    return Job.from_config(JobConfig.model_validate({"data": data, "model": model} | sections), hardware)


@pytest.mark.parametrize("method", ["balanced", "fixed_greedy"])
def test_documents_are_priced_in_the_type_that_the_job_computes_in(method):
    sections: dict[str, Any] = {"packing": {"method": method}, "parallel": {"tp": 2, "cp": 4}}
    half, whole = (spec(training={"dtype": dtype}, **sections) for dtype in ("bfloat16", "float32"))
    assert half == spec(**sections)  # what "auto" is on a GPU
    dearer = [
        whole.packing_prices.document_seconds(tokens) / half.packing_prices.document_seconds(tokens)
        for tokens in (1024, WINDOW)
    ]
    assert all(2 < ratio < 989 / 67 + 1e-6 for ratio in dearer)  # between bytes on links and arithmetic
    assert whole.hardware.bytes_per_value == 4
    assert spec("cpu", training={"dtype": "float64"}).hardware.bytes_per_value == 8


def test_overlapped_collectives_cost_what_other_stacks_show_and_need_compiled_blocks_on_the_gpus_of_a_node():
    training = {"compile": True, "async_tp": True}
    waiting, overlapped = (spec(parallel={"tp": 8}, training=one).costs for one in ({"compile": True}, training))
    assert overlapped.tp_seconds([0, 4096]) == pytest.approx(0.6 * waiting.tp_seconds([0, 4096]))
    assert replace(overlapped, exposed_tp=1.0) == waiting
    cases: tuple[tuple[str, int, dict[str, Any], str], ...] = (
        ("h100", 1, training, r"parallel.tp of 2 to 8 \(a node\), not cuda, compile = true, tp = 1; change"),
        ("h100", 16, training, "not cuda, compile = true, tp = 16"),
        ("h100", 8, {"async_tp": True}, "not cuda, compile = false, tp = 8"),
        ("cpu", 8, training, "needs CUDA, .*, not cpu, compile = true, tp = 8"),
    )
    for hardware, tp, settings, message in cases:
        with pytest.raises(UserError, match=message):
            spec(hardware, parallel={"tp": tp}, training=settings)


def test_a_job_that_is_too_large_says_what_it_needs_and_what_would_help():
    job = spec(parallel={"tp": 8, "pp": 4}, packing={"max_length_factor": 2.0})
    assert too_large(replace(job, limit=MemoryLimit(1e15, "a dream"))) is None
    job = replace(job, limit=limit_of_gpu(28e9))
    problem = str(too_large(job))
    for part in (
        f"with micro-batches of {2 * WINDOW} tokens a process needs up to",
        "19.5 GiB of 90% of a GPU less 4 GiB for NCCL",
    ):
        assert part in problem
    assert 'set training.activation_checkpointing = "full"' in problem
    assert too_large(replace(job, activation_checkpointing="full")) is None
    undecided = spec(packing={"method": "balanced"}, parallel={"tp": 8, "pp": 4, "cp": 2})
    pools = undecided.with_pools("even", 2, 4)
    problem = str(too_large(replace(pools, limit=MemoryLimit(1e9, "it"))))
    assert "raise packing.rank_micro_batches, lower data.context_window" in problem
    with pytest.raises(UserError, match="tp = 3 does not divide"):
        replace(job, layout=replace(job.layout, tp=3))


def test_a_model_that_cannot_be_divided_is_refused():
    shape = ModelShape(hidden=14, layers=5, heads=4, kv_heads=2, head_dim=4, ffn_hidden=22, vocab_size=12)
    layout = Layout(pp=2, tp=2, virtual_pp=2, schedule="interleaved_1f1b")
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"heads": 6, "kv_heads": 3}, "tp = 2 does not divide 6 query heads and 3 key/value heads"),
        ({"ffn_hidden": 21}, "ffn_hidden = 21 cannot be split over tp = 2"),
        ({"vocab_size": 13}, r"vocab_size = 13 .* or a vocab_size of 14"),
        ({"experts": Experts(7, 2, 32)}, r"experts\.count = 7 cannot be split over tp = 2"),
        ({"layers": 3}, "model has 3 layers, fewer than the 4 pipeline stages"),
    )
    for changes, message in cases:
        with pytest.raises(UserError, match=message):
            Job(replace(shape, **changes), hardware_preset("h100"), PackingConfig(), layout=layout)


def test_a_pretrained_model_is_described_by_its_configuration(tmp_path: Path):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    document = {"model_type": "llama", "vocab_size": 320, "tie_word_embeddings": True, **shape}
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = JobConfig.model_validate({"data": {"store": "corpus"}, "model": {"pretrained": str(tmp_path)}})
    job = Job.from_config(config, vocab_size=300)
    assert (job.shape.layers, job.shape.vocab_size, job.tied_embeddings) == (2, 320, True)
