"""Rows of published tables as simulated steps: units, models, layouts, and what has no prediction."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, lists

from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.job.configured_shape import check_divisible
from wlb.job.job import Job
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.simulate import simulate_steps
from wlb.workload import Costs, hardware_preset
from wlb.workload.weights import parameters
from wlb_studies.published.metrics import seconds_of_step
from wlb_studies.published.models import model_flops_per_token, published_shape
from wlb_studies.published.reading import read_measurements
from wlb_studies.published.stacks import StackSoftware
from wlb_studies.published.whole_steps import UNFITTED, published_step, ran_triton, whole_step_row

ROW = {
    "table": "torchtitan T1",
    "repo": "pytorch/torchtitan",
    "commit": "c",
    "path": "p",
    "hardware": "H100",
    "model": "llama3.1-8b",
    "gpus": 16,
    "seq_len": 8192,
    "micro_batch": 2,
    "global_batch": 16,
    "precision": "BF16",
    "recompute": "full",
    "tp": 2,
    "cp": 1,
    "pp": 1,
    "metric": "tokens/s/GPU",
    "value": 4096,
}
SHAPE = {"layers": 32, "hidden": 4096, "ffn": 11_008, "heads": 32, "vocab": 32_000}


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 16 * 8192 / (16 * 4096)),
        ({"global_batch": None}, 8 * 2 * 8192 / (16 * 4096)),  # 8 data-parallel ranks of 2 sequences
        ({"metric": "ms/step, mean over batches", "value": 1500}, 1.5),
        ({"metric": "seconds/step", "value": 18.9}, 18.9),
        # 32 layers; of 4096 x (4096 + 1024 + 1024 + 4096 + 3 x 14336) weights, and 4096 x 128256 of the output head
        (
            {"metric": "model TFLOP/s/GPU", "value": 400, "repo": "NVIDIA/NeMo"},
            8192 * (6 * (32 * 4096 * 53_248 + 4096 * 128_256) + 32 * 12 * 8192 * 4096) / 400e12,
        ),
        (
            {"metric": "model TFLOP/s/GPU", "value": 400, "repo": "yanring/Megatron-MoE-ModelZoo"},
            8192 * (6 * (32 * 4096 * 53_248 + 4096 * 128_256) + 32 * 6 * 8192 * 4096) / 400e12,
        ),
    ],
)
def test_every_metric_is_converted_to_seconds_of_a_step(changes, seconds):
    assert seconds_of_step({**ROW, **changes}) == pytest.approx(seconds)


# Releases that print both units count 27.2, 30.3 or 32.6 GFLOP for one of its tokens.
_OSS = {"metric": "model TFLOP/s/GPU", "value": 400, "repo": "NVIDIA-NeMo/Megatron-Bridge", "model": "GPT OSS 120B"}


@pytest.mark.parametrize("changes", [{"metric": "loss"}, {"value": 0}, {"gpus": None}, {"seq_len": "8K"}, _OSS])
def test_what_cannot_be_converted_is_refused(changes):
    with pytest.raises(UserError):
        seconds_of_step({**ROW, **changes})


def test_operations_are_counted_as_tables_do_that_print_both_units():
    """Model TFLOP/s over tokens/s is what a table counts for a token; of dense models it is ours."""
    compared = 0
    for row in read_measurements()["rows"]:
        counted = row.get("model_tflops_per_gpu")
        if row["metric"] != "tokens/s/GPU" or not counted or row.get("kind", "").startswith("LoRA"):
            continue
        if row.get("packed"):  # shorter documents, whose attention is counted
            continue
        try:
            shape = published_shape(row["model"])
        except UserError:
            continue
        if shape.experts is None:
            ours = model_flops_per_token(shape, row["seq_len"], causal=not row["repo"].startswith("NVIDIA/NeMo"))
            assert counted * 1e12 / row["value"] == pytest.approx(ours, rel=0.025), row
            compared += 1
    assert compared > 40


def test_networks_without_a_gate_keep_their_number_of_weights():
    mpt = published_shape("MPT 3b")  # 32 layers of 12 x 2560^2, and a tied embedding of 50368 x 2560
    assert parameters(mpt, tied_embeddings=True) == pytest.approx(32 * 12 * 2560**2 + 50_368 * 2560, rel=1e-3)


def test_names_are_read_as_tables_write_them():
    same = published_shape("llama3-70b")
    for name in (
        "LLAMA3_70B",
        "Llama 3 70B",
        "Llama-3.1-70B",
        "Llama3 70B 2-node",
        "Llama3 70B 4-node",
        "llama3.1-70b",
    ):
        assert published_shape(name) == same
    assert published_shape("Qwen3-235B") == published_shape("Qwen3_235B_a22B (tokendrop)")
    assert published_shape("Qwen3-30B") == published_shape("Qwen3-30B3A") == published_shape("qwen3-30b-a3b")
    assert published_shape("DeepSeekV3 (w/o MTP)") == published_shape("DeepSeek V3 671B")
    with pytest.raises(UserError, match="Nemotron_3_Ultra is unknown"):
        published_shape("Nemotron_3_Ultra")


@pytest.mark.parametrize("name", ["llama-34b", "Nemotron-8B", "Nemotron-22B", "Moonlight 16B", "GPT3-20B"])
def test_models_of_tables_are_known_and_can_be_divided(name):
    shape = published_shape(name)
    for tp in (2, 4, 8):
        check_divisible(shape, tp)
        assert Costs(shape, hardware_preset("h100"), tp).shape == shape  # its heads too


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen3-0.6B", 0.60, 0.60),
        ("Qwen3-1.7B", 1.72, 1.72),
        ("Qwen3-4B", 4.02, 4.02),
        ("Moonlight-16B-A3B", 16.0, 2.9),
    ],
)
def test_models_of_tables_have_as_many_weights_as_their_cards_say(name, billions, active):
    shape, tied = published_shape(name), name.startswith("Qwen3")
    assert parameters(shape, tied_embeddings=tied) == pytest.approx(billions * 1e9, rel=0.01)
    assert parameters(shape, active=True, tied_embeddings=tied) == pytest.approx(active * 1e9, rel=0.05)


STACK = {"attention": "fa3", "compiled": False, "weights": "kept", "prefetch": False, "overlaps_tp": True}


def software_of(job: Job) -> StackSoftware:
    software = job.software
    assert isinstance(software, StackSoftware)
    return software


def test_a_row_says_how_its_software_trains():
    unknown = published_step({**ROW, "repo": "nobody/nothing", "stack": STACK})
    software, hardware = software_of(unknown.job), unknown.job.hardware
    assert (unknown.job.layout.weights, software.prefetch, software.async_tp) == ("kept", False, True)
    assert hardware.attention == hardware_preset("h100-fa3").attention
    assert not any(one.startswith(("attention", "eager", "weights", "tensor")) for one in unknown.assumed)


def test_what_a_row_says_of_its_stack_goes_before_what_is_known_of_its_repository():
    known = published_step({**ROW, "stack": {"attention": "cudnn", "compiled": False}}).job
    assert known.hardware == hardware_preset("h100-cudnn")
    assert software_of(known) == replace(software_of(published_step(ROW).job), fused=False)
    note = {**ROW, "note": "FSDP"}  # of a run without torch.compile
    assert published_step({**note, "stack": {"compiled": True}}).job == published_step(ROW).job


@given(lengths=lists(lists(integers(1, 20_000), min_size=1, max_size=4), min_size=8, max_size=8))
@settings(max_examples=20, deadline=None)
def test_lengths_are_the_documents_of_the_micro_batches_of_a_step(lengths):
    step = published_step({**ROW, "tp": 4, "seq_len": None, "global_batch": None, "lengths": lengths})
    assert (step.job.layout.dp, step.job.rank_micro_batches) == (4, 2)
    packed = [MicroBatch(tuple(Segment(place, 0, length) for place, length in enumerate(one)), 0.0) for one in lengths]
    plan = StepPlan(0, tuple(tuple(packed[rank : rank + 2]) for rank in range(0, 8, 2)))
    assert step.seconds == pytest.approx(float(simulate_steps([plan], step.job).seconds[0]))


def test_equal_lengths_are_what_a_sequence_length_says():
    row = {**ROW, "global_batch": 32, "note": "FSDP"}
    listed = {**row, "lengths": [[8192, 8192]] * 16}
    assert published_step(listed).seconds == pytest.approx(published_step(row).seconds)
    assert seconds_of_step(listed) == pytest.approx(seconds_of_step(row))
    one = {**row, "gpus": 2, "global_batch": 2}
    assert published_step({**one, "lengths": [8192, 8192]}).seconds == pytest.approx(published_step(one).seconds)


# Compiled and not, in tokens/s/GPU: foundation-model-stack/fms-fsdp, README.md.
@pytest.mark.parametrize("model", ["llama2-7b", "llama2-13b", "llama2-70b"])
@pytest.mark.parametrize("hardware", ["a100_80gb", "h100_80gb"])
def test_kernels_that_are_not_fused_cost_what_they_measure(model, hardware):
    rows = [
        row
        for row in read_measurements()["rows"]
        if row["repo"].endswith("fms-fsdp") and row["model"] == model and row["hardware"].startswith(hardware)
    ]
    compiled, eager = sorted(rows, key=lambda row: -row["stack"]["compiled"])
    measured = compiled["value"] / eager["value"]
    predicted = published_step(eager).seconds / published_step(compiled).seconds
    assert predicted == pytest.approx(measured, abs=0.08)


@pytest.mark.parametrize(
    ("changes", "hidden"),
    [
        ({"table": "megatron_bridge 26.04.01 NeMo Container"}, False),
        ({"table": "megatron_bridge 26.06 NeMo Container"}, True),
        ({"table": "megatron_bridge 26.04 NeMo Container", "release": "26.08"}, True),
        ({"stack": {"overlaps_experts": False}}, False),
        ({}, True),  # the newest
        ({"repo": "yanring/Megatron-MoE-ModelZoo"}, False),
    ],
)
def test_a_release_decides_whether_the_exchange_of_experts_is_hidden(changes, hidden):
    row = {**ROW, "repo": "NVIDIA-NeMo/Megatron-Bridge", "model": "qwen3-30b-a3b", "ep": 8, "micro_batch": 1, **changes}
    step = published_step(row)
    assert (software_of(step.job).exposed_exchange == 0) is hidden
    assert ("the exchange of experts is hidden" in step.assumed) is hidden


def test_the_host_of_hugging_faces_trainer_takes_time_for_every_micro_batch():
    row = {**ROW, "repo": "huggingface/trl", "stack": STACK | {"overlaps_tp": False}, "recompute": "none"}
    one, two = (published_step({**row, "global_batch": size}) for size in (16, 32))
    assert software_of(one.job).micro_batch_seconds > 0.1
    assert two.seconds - one.seconds > 0.1


def test_functional_runs_are_of_a_table_and_a_kind_of_their_own():
    tuned, functional = (whole_step_row({**ROW, "functional": value}) for value in (False, True))
    assert functional.predicted_seconds == tuned.predicted_seconds
    assert (functional.kind, functional.table) == ("functional runs", "torchtitan T1, functional runs")
    assert functional.kind != tuned.kind


def test_a_row_is_the_step_that_its_documents_make():
    step = published_step({**ROW, "global_batch": 32, "note": "FSDP"})
    job = step.job
    assert (job.layout.tp, job.layout.dp, job.rank_micro_batches, step.lengths) == (2, 8, 2, ((8192, 8192),))
    documents = MicroBatch((Segment(0, 0, 8192), Segment(1, 0, 8192)), 0.0)
    plan = StepPlan(0, ((documents,) * 2,) * 8)
    assert step.seconds == pytest.approx(float(simulate_steps([plan], job).seconds[0]))


def test_pipelines_are_those_of_the_row():
    row = {**ROW, "repo": "NVIDIA-NeMo/Megatron-Bridge", "model": "LLAMA3_70B", "gpus": 64, "global_batch": 128}
    step = published_step({**row, "tp": 4, "pp": 4, "cp": 2, "vp": 5, "micro_batch": 1, "recompute": "none"})
    assert (step.job.layout.virtual_pp, step.job.layout.schedule, step.job.rank_micro_batches) == (
        5,
        "interleaved_1f1b",
        64,
    )
    local = {"model": "llama3.1-405b", "gpus": 512, "tp": 8, "pp": 8, "micro_batch": 32, "global_batch": 256}
    step = published_step({**ROW, **local, "note": "Interleaved 1F1B, AsyncTP"})
    assert (step.job.rank_micro_batches, len(step.lengths[0]), step.job.layout.virtual_pp) == (8, 4, 2)
    assert "micro-batches of 4 sequences, and 2 stages a rank" in step.assumed


def test_weights_are_kept_in_a_pipeline_and_so_it_says():
    gathered, kept = (published_step({**ROW, "pp": pp, "micro_batch": 2 * pp}) for pp in (1, 2))
    assert "weights gathered by FSDP in every micro-batch" in gathered.assumed
    assert "weights kept whole" in kept.assumed
    assert (gathered.job.layout.weights, kept.job.layout.weights) == ("gathered", "kept")


def test_recomputation_that_is_not_stated_is_the_cheapest_that_fits():
    row = {**ROW, "recompute": "in the recipe, not printed", "gpus": 8, "tp": 1, "global_batch": 16}
    step = published_step(row)
    assert step.job.activation_checkpointing == "keep_attention"
    assert step.assumed[-1] == "recomputation: keep_attention, the cheapest that is predicted to fit"
    assert step.kind == "dense, bf16, recomputation assumed"
    assert published_step({**row, "hardware": "B200"}).job.activation_checkpointing == "none"


def test_what_a_note_denies_was_not_used():
    said, denied = (
        published_step({**ROW, "note": note}).job for note in ("AsyncTP, compile", "no AsyncTP, exploration, no LoRA")
    )
    assert (software_of(said).async_tp, software_of(denied).async_tp) == (True, False)
    eager = published_step({**ROW, "note": "FSDP"}).job
    assert published_step({**ROW, "note": "FSDP without torch.compile"}).job == eager
    assert not software_of(eager).fused
    assert software_of(said).fused
    assert software_of(denied).fused


def test_what_a_row_does_not_state_is_assumed_by_name():
    row = {**ROW, "repo": "NVIDIA-NeMo/Megatron-Bridge", "recompute": "not printed", "micro_batch": 1}
    assumed = published_step(row).assumed
    assert {"attention by cuDNN", "weights kept whole", "tensor-parallel collectives overlapped"} <= {*assumed}
    assert any(one.startswith("no recomputation") for one in assumed)
    assert "tensor-parallel collectives overlapped" not in published_step({**row, "tp": 1}).assumed
    stated = {"note": "compile", "fsdp": 8, "recompute": "full", "tp": 1, "micro_batch": 1}
    assert published_step({**ROW, **stated}).assumed == ("attention by FlashAttention-2",)


def test_the_kernel_is_that_of_the_scripts_beside_a_table():
    large = {**ROW, "repo": "mosaicml/llm-foundry", "hardware": "h100_80gb (Large Scale, >= 128 GPUs)"}
    ran = {size: ran_triton({**large, "model": f"MPT {size}"}) for size in ("7b", "13b", "30b", "70b")}
    assert ran == {"7b": False, "13b": True, "30b": True, "70b": False}
    assert ran_triton({**large, "model": "MPT 7b", "hardware": "a100_80gb"})
    assert not ran_triton(ROW)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": None}, "its tp is not published"),
        ({"tp": 3}, "not a multiple of its tp"),
        ({"dp_printed": 2}, "its printed layout is of 4 GPUs, not of 16"),
        ({"global_batch": 24}, "not a multiple of its micro-batch"),
        ({"model": "Nemotron_3_Ultra"}, "shape of Nemotron_3_Ultra is unknown"),
        ({"repo": "nobody/nothing"}, "it is unknown how nobody/nothing trains; add a stack to the row"),
        ({"stack": {"attention": "fa9"}}, "its stack has attention = 'fa9'; a stack has attention: ('fa2', "),
        ({"stack": {"compild": True}}, "its stack has compild = True"),
        ({"lengths": [[8192, "8K"]]}, "its lengths are not lists of positive tokens"),
        ({"lengths": [[8192]] * 12}, "its lengths have 12 micro-batches, not a multiple of its 8 data-parallel ranks"),
        ({"hardware": "TPU"}, "hardware is unknown"),
        ({"precision": None}, "its precision is not published"),
        ({"precision": "int4"}, "precision int4 is unknown"),
        ({"shape": {"layers": 32}}, "its shape has not layers, hidden, heads, ffn, vocab"),
        ({"shape": SHAPE | {"experts": 8}}, "or more than kv_heads, head_dim, tied, mlp, norm"),
        ({"shape": SHAPE | {"heads": "32"}}, "its shape has heads = '32', which is no size"),
        ({"shape": SHAPE | {"mlp": "cubic"}}, "its shape has mlp = 'cubic'; choose one of swiglu, "),
        ({"layers_on_last_stage": None}, "its blocks are unevenly divided, and its stage_blocks are not published"),
        ({"metric": "seconds/step (rollout + train)"}, "includes rollouts"),
        ({"repo": "hao-ai-lab/DistCA", "metric": "ms/step"}, "lengths of its documents are not published"),
        ({"model": "GPT OSS 120B"}, "its ep is not published"),
        ({"repo": "NVIDIA/NeMo", "tp": 1, "pp": 16, "vp": 3}, "fewer than the 48 pipeline stages"),
    ],
)
def test_a_row_that_cannot_be_simulated_says_why(changes, reason):
    one = whole_step_row({**ROW, **changes})
    assert one.predicted_seconds is None
    assert reason in str(one.reason)


def test_a_row_may_give_its_shape():
    named = published_step({**ROW, "model": "llama2-7b"}).job
    assert published_step({**ROW, "model": "of nobody", "shape": SHAPE}).job.shape == named.shape
    plain = published_step({**ROW, "shape": SHAPE | {"mlp": "gelu", "ffn": 16_384, "kv_heads": 8}}).job.shape
    assert (plain.kv_heads, plain.ffn_hidden) == (8, 10_928)  # two thirds


def test_seconds_beside_a_metric_of_another_count():
    assert seconds_of_step({**ROW, "metric": "TFLOP/s/GPU by its own count", "seconds_per_step": 3.5}) == 3.5


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "LoRA Performance"},
        {"repo": "NVIDIA-NeMo/Automodel", "note": "TE + triton"},
        {"note": "FSDP, LoRA rank 16"},
    ],
)
def test_adapters_need_no_weight_gradients(changes):
    """Forward as in full training; of the backward's products half, no reduction, no optimizer."""
    row = {**ROW, "gpus": 8, "tp": 1, "recompute": "none"}
    full, adapters = published_step(row), published_step({**row, **changes})
    assert adapters.kind == "LoRA"
    assert software_of(adapters.job).adapters
    if "repo" in changes:
        return
    costs, less = full.steps.costs, adapters.steps.costs
    assert (less.block_reduction, less.rank_reduction.max(), less.optimizer.max()) == (0, 0, 0)
    assert costs.optimizer.max() > 0
    forward, backward = costs.rank.phase_rates("forward"), costs.rank.phase_rates("backward")
    assert less.rank.phase_rates("forward") == forward
    found = less.rank.phase_rates("backward")
    assert found.block_products == pytest.approx(forward.block_products)
    assert found.head_products == pytest.approx(forward.head_products)
    assert backward.block_token - found.block_token == pytest.approx(forward.block_products)
    assert found.pair == backward.pair
    assert adapters.seconds < 0.8 * full.seconds


def test_tables_count_two_thirds_of_the_operations_of_adapters():
    row = {**ROW, "repo": "NVIDIA/NeMo", "metric": "model TFLOP/s/GPU", "value": 400}
    assert seconds_of_step({**row, "note": "LoRA"}) == pytest.approx(2 / 3 * seconds_of_step(row))


def test_the_adapters_of_a_node_that_a_row_prints():
    quarter = published_step({**ROW, "hardware": "H100, 4 x 200 Gb/s a node"}).job.hardware
    assert quarter.network_bandwidth == pytest.approx(hardware_preset("h100").network_bandwidth / 4)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, "nothing known"),
        ({"functional": True}, "functional runs"),
        ({"kind": "LoRA"}, "nothing is fitted to LoRA"),
        ({"value": 40_000}, "a step under 1 s"),
        ({"recompute": None}, "recomputation, which is not printed"),
        ({"seq_len": 65_536, "cp": 2, "tp": 4, "micro_batch": 1}, "64K tokens or more over several GPUs"),
        ({"packed": True}, "documents shorter than the window, not listed"),
        ({"packed": True, "lengths": [[8192, 8192]] * 8, "seq_len": None}, "nothing known"),
        (
            {"repo": UNFITTED[0], "stack": {"attention": "fa2", "compiled": True, "weights": "kept"}},
            "nothing is fitted to the stack",
        ),
    ],
)
def test_the_first_thing_that_a_prediction_lacks(changes, missing):
    assert whole_step_row({**ROW, **changes}).missing == missing


def test_what_is_no_seconds_has_no_measurement_either():
    one = whole_step_row({**ROW, "metric": "loss"})
    assert (one.measured_seconds, one.predicted_seconds, one.reason) == (None, None, "loss is not a metric of a step")
