"""Simulate whole training steps of published tables.

A row becomes a ``Job`` and the micro-batches of a step, with the layout, precision and recomputation that the row
gives. Its ``stack`` says how its software trains, in the fields of ``Stack``; a row of a repository in ``_STACKS`` may
leave it out. ``lengths`` has the documents of every micro-batch. Without it all documents have the table's sequence
length, so one micro-batch is priced and stands for all. ``stage_blocks`` are the blocks of every pipeline stage; for
the seconds of stages see ``pipeline_stages``.

A row that leaves out something decisive has a reason instead of a prediction. If it does not state recomputation, none
is assumed for stacks that keep weights whole (Megatron and stacks built on it), whether or not that fits; for others,
the cheapest kind that is predicted to fit in GPU memory. A row marked ``functional`` (its source did not tune the run)
has its own kind.
"""

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.job.job import Job
from wlb.job.memory.fit import fits
from wlb.schedules.layout import Layout, Weights
from wlb.sharding import price_shards
from wlb.simulate.costs import JobCosts
from wlb.simulate.job import simulated_job
from wlb.simulate.step import Steps
from wlb.workload import Hardware, ModelShape, hardware_preset
from wlb.workload.base import Checkpointing
from wlb_studies.published.metrics import (
    AUTOMODEL,
    Row,
    micro_batches,
    note_of,
    says,
    seconds_of_step,
    size,
    stated,
    step_tokens,
    trains_adapters,
)
from wlb_studies.published.models import shape_of_row
from wlb_studies.published.prediction import FUNCTIONAL, ODD, Prediction, source_of, why
from wlb_studies.published.stacks import AdapterCosts, StackSoftware, attention_kernel, narrow_rate

HYBRID, LORA = "hybrid, with linear layers", "LoRA"  # to which no price was fitted
# Nor to the rows of these, whose rows came later.
UNFITTED = ("sail-sg/VocabularyParallelism", "InternLM/InternEvo")
Recomputation = Literal["none", "keep_attention", "full"]
_KERNELS = {f"fa{version}": f"FlashAttention-{version}" for version in (2, 3, 4)}
_KERNELS |= {"cudnn": "cuDNN", "triton": "Triton's kernel", "own": "the device's own kernel"}


class Stack(NamedTuple):
    """How a row's software trains.

    ``compiled`` also covers other fused kernels, such as Transformer Engine's. ``weights`` are "gathered" by FSDP in
    every micro-batch, which then also reduces gradients, or "kept" by a distributed optimizer. With ``prefetch`` FSDP
    gathers one block ahead. With ``overlaps_tp`` tensor-parallel collectives overlap with matrix products; with
    ``overlaps_experts`` computing hides the exchange of experts.
    """

    attention: str
    compiled: bool
    weights: Literal["gathered", "kept"]
    prefetch: bool = True
    overlaps_tp: bool = False
    overlaps_experts: bool = False


# Seconds per micro-batch in Hugging Face's Trainer without fused kernels: the constant part of Qwen3 1.7B steps in TRL
# (huggingface/trl, issue 6092, one GPU, 1K to 16K tokens). fms-fsdp and torchtitan show no such constant.
_HOST_SECONDS = 0.12
_LLM_FOUNDRY, _BRIDGE = "mosaicml/llm-foundry", "NVIDIA-NeMo/Megatron-Bridge"
_TORCHTITAN = "pytorch/torchtitan"
_MEGATRON = Stack("cudnn", True, "kept")
# NeMo's recipes overlap tensor-parallel collectives with matrix products (``tp_comm_overlap``).
_NEMO = _MEGATRON._replace(overlaps_tp=True)
_STACKS = {
    _TORCHTITAN: Stack("fa2", True, "gathered"),
    # MPT has no RMSNorm, rotary angles or SwiGLU: torch has one kernel for each of its element-wise operations.
    _LLM_FOUNDRY: Stack("fa2", True, "gathered"),
    AUTOMODEL: Stack("cudnn", True, "gathered", prefetch=False),
    _BRIDGE: _NEMO,
    "NVIDIA/NeMo": _NEMO,
    "yanring/Megatron-MoE-ModelZoo": _MEGATRON,
}
# Other words of tables for kernels: SDPA runs FlashAttention-2, Transformer Engine cuDNN's, and CK is ROCm's own.
_OTHER_WORDS = {"sdpa": "fa2", "flash": "fa2", "flash_attention_2": "fa2", "te": "cudnn", "ck": "own", "aiter": "own"}
_VALUES: dict[str, tuple[Any, ...]] = {"attention": (*_KERNELS, *_OTHER_WORDS), "weights": ("gathered", "kept")}


def stack_of(row: Row) -> Stack:
    """The row's stack: its own fields, over known facts about its repository and its notes.

    Raises ``UserError`` that says what to add or change.
    """
    known, own, note = _STACKS.get(row["repo"]), row.get("stack") or {}, note_of(row)
    if known is None and not {"attention", "compiled", "weights"} <= {*own}:
        raise UserError(
            f"it is unknown how {row['repo']} trains; add a stack to the row, such as "
            '{"attention": "fa2", "compiled": true, "weights": "gathered"}'
        )
    for name, value in own.items():
        if name not in Stack._fields or value not in _VALUES.get(name, (True, False)):
            fields = ", ".join(f"{field}: {_VALUES.get(field, (True, False))}" for field in Stack._fields)
            raise UserError(f"its stack has {name} = {value!r}; a stack has {fields}")
    stack = known or Stack(own["attention"], own["compiled"], own["weights"])
    found = {
        "attention": "triton" if ran_triton(row) else stack.attention,
        "compiled": stack.compiled and not _ran_eagerly(row),
        "prefetch": stack.prefetch or says(note, "prefetch"),
        "overlaps_tp": stack.overlaps_tp or says(note, "async"),
        "overlaps_experts": _overlaps_experts(row),
    }
    merged = found | own
    return stack._replace(**merged | {"attention": _OTHER_WORDS.get(merged["attention"], merged["attention"])})


class SpreadHead(Job):
    """A job whose output head is divided over all stages, without the communication for that; nothing here runs it."""

    @property
    def head_shares(self) -> NDArray[np.float64]:
        return np.full(self.layout.stages, 1 / self.layout.stages)


@dataclass(frozen=True)
class PublishedStep:
    """A step as a row describes it: a job, and its documents by length in tokens.

    ``lengths`` has one micro-batch that stands for all, or all micro-batches, data-parallel rank by rank.
    """

    job: Job
    lengths: tuple[tuple[int, ...], ...]
    kind: str
    assumed: tuple[str, ...] = ()
    trains_adapters: bool = False

    @property
    def seconds(self) -> float:
        """What the simulator predicts."""
        return float(self.steps.seconds[0])

    @property
    def steps(self) -> Steps:
        costs = AdapterCosts(self.job) if self.trains_adapters else JobCosts(self.job)
        count = self.job.rank_micro_batches
        of_rank = min(count, len(self.lengths))
        shards = price_shards(self.lengths, self.job.layout.cp, self.job.sharding.strategy, costs.rank)

        def dealt(column: NDArray[Any]) -> NDArray[Any]:  # over data-parallel ranks, unless they are alike
            ranks = column.reshape(1, -1, of_rank, *column.shape[1:])
            return np.broadcast_to(ranks, (*ranks.shape[:2], count, *ranks.shape[3:]))

        return Steps.of_shards(shards.map(dealt), costs)


def whole_step_row(row: Row) -> Prediction:
    """A prediction or a reason for a row of whole steps."""
    one = described_row(row)
    try:
        for name in ("table", "repo", "commit", "path", "model"):
            stated(row, name)
        one = replace(one, measured_seconds=seconds_of_step(row))
        step = published_step(row)
        missing = _missing(row, step, float(one.measured_seconds or 0))
        one = replace(one, assumed="; ".join(step.assumed) or None, kind=step.kind, missing=missing)
        return replace(one, predicted_seconds=step.seconds)
    except ODD as error:
        return replace(one, reason=why(error))


def _missing(row: Row, step: PublishedStep, seconds: float) -> str:
    """The first thing that the prediction of a row is known to lack."""
    shape = step.job.shape
    known = {
        FUNCTIONAL: row.get("functional"),
        "nothing is fitted to linear layers or an indexer": shape.linear or shape.indexer,
        "nothing is fitted to LoRA": trains_adapters(row),
        "nothing is fitted to the stack": row["repo"] in UNFITTED,
        "documents shorter than the window, not listed": row.get("packed") and row.get("lengths") is None,
        "a step under 1 s": seconds < 1,
        "64K tokens or more over several GPUs": step.job.context_window >= 2**16 and step.job.layout.cp > 1,
        "recomputation, which is not printed": _stated_recomputation(row) is None,
    }
    return next((name for name, found in known.items() if found), "nothing known")


def described_row(row: Row) -> Prediction:
    """What a row is, without measured or predicted seconds."""
    table = str(row.get("table") or "rows of no table") + (f", {FUNCTIONAL}" if row.get("functional") else "")
    return Prediction(table, "", _label(row), source_of(row))


def _label(row: Row) -> str:
    hardware = re.sub(r"[ ,(].*", "", str(row.get("hardware") or ""))
    said = [row.get("model"), hardware, row.get("precision"), f"{row.get('gpus')} GPUs", f"{row.get('seq_len')} tokens"]
    said += [f"{name} {row[name]}" for name in ("tp", "cp", "pp", "ep") if row.get(name) not in (None, 1)]
    return ", ".join(str(part) for part in [*said, row.get("policy"), row.get("note")] if part)


def published_step(row: Row) -> PublishedStep:
    """The step that ``row`` describes; raises ``UserError`` if something is missing."""
    _refuse_what_is_no_plain_step(row)
    stack, shape = stack_of(row), shape_of_row(row)
    if shape.experts is not None:
        size(row, "ep")
    layout, count, lengths, assumed = _layout(row)
    weights = _weights(row, stack)
    software = _software(row, stack, weights)
    job = simulated_job(
        shape,
        max(map(sum, lengths)),  # L_max, by which memory is predicted
        "plain-4d",
        hardware=_hardware(row, stack),
        sharding="per_document",
        software=software,
        micro_batches=count,
        **vars(layout) | {"weights": weights},
    )
    if spreads_head(row):
        job = SpreadHead(**{field.name: getattr(job, field.name) for field in fields(job)})
    assumed += _remarks(row, shape, stack, weights)
    recomputation = _stated_recomputation(row)
    if recomputation is None and (stack.weights == "kept" or software.adapters):
        assumed.append("no recomputation, or only of element-wise operations, whether or not that fits")
    elif recomputation is None:
        held = (replace(_held(job), activation_checkpointing=kind) for kind in get_args(Checkpointing))
        fitting = next(filter(fits, held), None)  # the cheapest
        recomputation = fitting.activation_checkpointing if fitting else "full"
        why = "the cheapest that is predicted to fit" if fitting else "and not even that is predicted to fit"
        assumed.append(f"recomputation: {recomputation}, {why}")
    if recomputation is not None:
        job = replace(job, activation_checkpointing=recomputation)
    return PublishedStep(job, lengths, _kind(row, shape), tuple(assumed), software.adapters)


def _refuse_what_is_no_plain_step(row: Row) -> None:
    if "rollout" in row["metric"]:
        raise UserError("the step includes rollouts")
    if re.search("optimizer[^;,]* on the host", note_of(row)):
        raise UserError("the optimizer runs on the host, which is not simulated")
    if row["repo"] == "hao-ai-lab/DistCA" and row.get("lengths") is None:
        raise UserError("the lengths of its documents are not published")


def ran_triton(row: Row) -> bool:
    """Whether attention used Triton's kernel, judged by the scripts beside llm-foundry's tables.

    ``submit_benchmarks.py`` used it by default until March 2024 (commit 7f0fdae66), and ``sweep.sh`` did not override
    that (b2a43a147). ``sweep.py`` of the large scale (5e85bd62d) asked for it for 13B and 30B, and for
    FlashAttention elsewhere. All are in ``scripts/train/benchmarking``; the tables themselves do not name a kernel.
    """
    at_large_scale = "Large Scale" in row["hardware"]
    return row["repo"] == _LLM_FOUNDRY and (not at_large_scale or row["model"] in ("MPT 13b", "MPT 30b"))


def _layout(row: Row) -> tuple[Layout, int, tuple[tuple[int, ...], ...], list[str]]:
    """Sizes of groups, micro-batches of a data-parallel rank, their document lengths, and the assumptions."""
    tp, cp, pp, gpus = (size(row, name) for name in ("tp", "cp", "pp", "gpus"))
    assumed: list[str] = []
    dp, rest = divmod(gpus, tp * cp * pp)
    if rest or not dp:
        raise UserError(f"{gpus} GPUs are not a multiple of its tp x cp x pp = {tp * cp * pp}")
    if row.get("dp_printed") is not None and size(row, "dp_printed") != dp:
        raise UserError(f"its printed layout is of {tp * cp * pp * row['dp_printed']} GPUs, not of {gpus}")
    sequences, virtual_pp = (1 if row.get(name) is None else size(row, name) for name in ("micro_batch", "vp"))
    batch_of_rank = row["repo"] == _TORCHTITAN and pp > 1  # which it prints
    if batch_of_rank:
        sequences = max(1, sequences // pp)
        virtual_pp = 2 if "Interleaved" in note_of(row) else 1
    ep = 1 if row.get("ep") is None else size(row, "ep")
    schedule = "interleaved_1f1b" if virtual_pp > 1 else "1f1b"
    layout = Layout(tp, cp, pp, dp, virtual_pp, schedule, stage_blocks=_stage_blocks(row), ep=ep)
    listed = micro_batches(row)
    if listed is not None:
        if len(listed) % dp:
            raise UserError(
                f"its lengths have {len(listed)} micro-batches, not a multiple of its {dp} data-parallel ranks"
            )
        return layout, len(listed) // dp, tuple(map(tuple, listed)), assumed
    if row.get("micro_batch") is None:
        assumed.append("micro-batches of one sequence")
    if batch_of_rank:
        assumed.append(f"micro-batches of {sequences} sequences, and {virtual_pp} stages a rank")
    seq_len = size(row, "seq_len")
    of_rank = step_tokens(row) // seq_len // dp
    count, rest = divmod(of_rank, sequences)
    if rest or not count:
        raise UserError(
            f"{of_rank} sequences of a data-parallel rank are not a multiple of its micro-batch, {sequences}"
        )
    return layout, count, ((seq_len,) * sequences,), assumed


def spreads_head(row: Row) -> bool:
    """Whether stages have passes of their own for a part of the head; where they have none, tables print zeros."""
    passes = row.get("vocabulary_pass_us_per_stage")
    return any(passes) if isinstance(passes, list) else passes is not None


def _stage_blocks(row: Row) -> tuple[int, ...] | None:
    stages, layers = size(row, "pp"), shape_of_row(row).layers
    if row.get("stage_blocks") is None:
        if "layers_on_last_stage" in row and row["layers_on_last_stage"] != layers / stages:
            raise UserError("its blocks are unevenly divided, and its stage_blocks are not published")
        return None
    blocks = tuple(row["stage_blocks"])
    if len(blocks) != stages or sum(blocks) != layers or min(blocks) < 0:
        raise UserError(f"its stage_blocks are not {layers} blocks on {stages} stages: {list(blocks)}"[:200])
    return blocks


def _held(job: Job) -> Job:
    """The job for predicting memory: with one micro-batch if gradients are always reduced."""
    if job.layout.pp > 1 or not job.software.syncs_always:
        return job
    return replace(job, packing=job.packing.changed(global_batch=job.layout.dp))


def _weights(row: Row, stack: Stack) -> Weights:
    if row.get("sharding") == "SHARD_GRAD_OP" or size(row, "pp") > 1:  # so do torchtitan and Automodel in a pipeline
        return "kept"
    return "gathered" if row["repo"] == _BRIDGE and row.get("fsdp") else stack.weights


def _software(row: Row, stack: Stack, weights: Weights) -> StackSoftware:
    return StackSoftware(
        prefetch=stack.prefetch,
        syncs_always=weights == "gathered",
        async_tp=stack.overlaps_tp,
        exposed_exchange=0.0 if stack.overlaps_experts else 1.0,
        fused=stack.compiled,
        block_rate=narrow_rate(_preset(row), _precision(row)),
        adapters=trains_adapters(row),
        micro_batch_seconds=_HOST_SECONDS if row["repo"].startswith("huggingface/") and not stack.compiled else 0.0,
    )


# Quoted: 209.5 TFLOP/s in bf16 with float32 sums, 1,792 GB/s, 32 GB (NVIDIA RTX Blackwell white paper, appendix A); two
# GPUs over PCIe 5, 64 GB/s at most. Assumed: its attention is as far under its peak as that of A100.
_A100 = hardware_preset("a100")
_PEAK = 209.5e12
_RTX_5090 = replace(
    _A100,
    peak_flops=_PEAK,
    memory_bandwidth=1792e9,
    memory_bytes=32e9,
    node_bandwidth=50e9,
    attention=replace(
        _A100.attention,
        forward_flops=_A100.attention.forward_flops * _PEAK / _A100.peak_flops,
        backward_flops=_A100.attention.backward_flops * _PEAK / _A100.peak_flops,
    ),
)


def _preset(row: Row) -> str:
    found = re.search("GB300|GB200|B300|B200|H200|H100|A100|MI300X|RTX 5090", stated(row, "hardware").upper())
    if found is None:
        raise UserError(f"its hardware is unknown here: {row['hardware']}")
    return found[0].lower()


def _hardware(row: Row, stack: Stack) -> Hardware:
    """The row's GPU, with its kernels."""
    preset = _preset(row)
    hardware = _RTX_5090 if preset == "rtx 5090" else hardware_preset(preset)
    if "96GB HBM2e" in row["hardware"]:  # quoted: 2.4 TB/s (torchtitan's page, section "Hardware")
        bandwidth = hardware.memory_bandwidth * 2.4 / 3.35
        hardware = replace(hardware, memory_bytes=96e9, memory_bandwidth=bandwidth)
    if "a100_40gb" in row["hardware"]:  # quoted: 1,555 GB/s, beside 2,039 of the preset (NVIDIA A100 data sheet)
        bandwidth = hardware.memory_bandwidth * 1555 / 2039
        hardware = replace(hardware, memory_bytes=40e9, memory_bandwidth=bandwidth)
    if found := re.search(r"([1-9]\d*) x ([1-9]\d*) Gb/s", row["hardware"]):  # adapters of a node
        rates = (int(found[1]) * int(found[2]) / hardware.node_size, 400)  # of a GPU, and of the H100 preset
        bandwidth = hardware_preset("h100").network_bandwidth * rates[0] / rates[1]
        hardware = replace(hardware, network_bandwidth=bandwidth)
    if stack.attention != "own" and preset != "rtx 5090":
        hardware = replace(hardware, attention=attention_kernel(preset, stack.attention))
    if "500 W" in row["hardware"]:
        hardware = hardware.computing_at(
            math.sqrt(500 / 700)
        )  # assumed: compute scales with the root of power, memory does not
    return hardware


def _overlaps_experts(row: Row) -> bool:
    """Whether computing hid the exchange of experts: in Megatron-Bridge since release 26.06, judged by its timings.

    Inside a node, steps of one configuration became 1.35 times as fast in that release, which matches their exchange
    time; across nodes they did not change. A row without a release counts as the newest.
    """
    release = str(row.get("release") or "") or next(iter(re.findall(r"\b2\d\.\d\d\b", row["table"])), "newest")
    return row["repo"] == _BRIDGE and (says(note_of(row), "overlapped") or (release >= "26.06" and _in_a_node(row)))


def _in_a_node(row: Row) -> bool:
    """Whether the ranks that share experts are on one node."""
    return row.get("ep") is None or size(row, "ep") <= hardware_preset(_preset(row)).node_size


def _ran_eagerly(row: Row) -> bool:
    """Whether torchtitan ran without ``torch.compile``: the notes of its first table name everything used."""
    note = note_of(row).lower()
    return row["repo"] == _TORCHTITAN and (note == "fsdp" or ("compile" in note and not says(note, "compile")))


_PRECISIONS: dict[str, Literal["bf16", "fp8", "fp8-rowwise", "nvfp4"]] = {
    "ROWWISE": "fp8-rowwise",
    "FP4": "nvfp4",
    "FP8": "fp8",
    "BF16": "bf16",
    "FP16": "bf16",  # the rates of chips are the same
}


def _precision(row: Row) -> Literal["bf16", "fp8", "fp8-rowwise", "nvfp4"]:
    text = stated(row, "precision").upper()
    for word, precision in _PRECISIONS.items():
        if word in text:
            return precision
    raise UserError(f"precision {row['precision']} is unknown here")


def _stated_recomputation(row: Row) -> Recomputation | None:
    text = str(row.get("recompute") or "").lower()
    if text in ("none", "full"):
        return "none" if text == "none" else "full"
    return "keep_attention" if "selective" in text else None


def _remarks(row: Row, shape: ModelShape, stack: Stack, weights: Weights) -> list[str]:
    """Assumptions about a row besides its layout; for its stack, the usual settings of its repository."""
    own = row.get("stack") or {}
    remarks = [part.strip() for part in note_of(row).split(";") if "not printed" in part]
    if "attention" not in own:
        remarks.append(f"attention by {_KERNELS[stack.attention]}")
    if "compiled" not in own and not says(note_of(row), "compile"):
        remarks.append("kernels compiled, or fused in another way" if stack.compiled else "eager kernels")
    if "weights" not in own and not row.get("fsdp"):
        kept = "kept whole" if weights == "kept" else "gathered by FSDP in every micro-batch"
        remarks.append(f"weights {kept}")
    if "overlaps_tp" not in own and size(row, "tp") > 1 and stack.overlaps_tp and not says(note_of(row), "async"):
        remarks.append("tensor-parallel collectives overlapped")
    if "overlaps_experts" not in own and stack.overlaps_experts and shape.experts is not None:
        remarks.append("the exchange of experts is hidden")
    if "selective" in str(row.get("recompute")):
        remarks.append("selective recomputation is of all but attention")
    if row.get("packed") and row.get("lengths") is None:
        remarks.append("documents as long as the window, although shorter ones were packed")
    if "500 W" in row["hardware"]:
        remarks.append("at 500 of 700 W GPUs compute at the root of that")
    if "MXFP8" in str(row.get("precision")):
        remarks.append("MXFP8 is as fast as FP8")
    if shape.latent is not None and "w/o MTP" not in row["model"]:
        remarks.append("without the layer that predicts one more token")
    if "tokendrop" in row["model"]:
        remarks.append("no tokens are dropped")
    return remarks


def _kind(row: Row, shape: ModelShape) -> str:
    if row.get("functional"):
        return FUNCTIONAL
    if trains_adapters(row):
        return LORA
    if spreads_head(row):
        return "pipeline, head spread over stages: nothing here runs that"
    if row.get("forward_us_per_stage") is not None:
        return "pipeline, head on the last stage"
    if shape.linear is not None:
        return HYBRID
    if shape.experts is not None:
        shared = "" if row.get("ep") in (None, 1) else ", EP inside a node" if _in_a_node(row) else ", EP across nodes"
        return f"mixture of experts{shared}"
    if _precision(row) != "bf16":
        return f"dense, {_precision(row).upper()}"
    return "dense, bf16" if _stated_recomputation(row) else "dense, bf16, recomputation assumed"
