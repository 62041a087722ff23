"""The configuration of a training job: TOML sections, validated before anything starts.

The schema has keys, types, defaults, bounds, and rules across settings; ``Job`` checks what a layout can run.
``config_file`` reads a file into it.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from wlb.documents.order import DataConfig
from wlb.documents.store.files import StoreSetting
from wlb.errors import UserError, check_known
from wlb.packing.arrange import Assignment, Order
from wlb.packing.options import METHODS, PackingOptions
from wlb.packing.packer import Packer
from wlb.packing.plan import StageRanks
from wlb.packing.registry import PACKERS
from wlb.schedules.layout import Head, Layout, Weights
from wlb.schedules.operations import SCHEDULES
from wlb.settings import (
    MOST_MICRO_BATCHES,
    MicroBatchCount,
    NonEmptyPath,
    NonNegativeInt,
    Number,
    PositiveInt,
    Section,
    Tokens,
    one_of,
)
from wlb.sharding import STRATEGIES
from wlb.workload.base import Checkpointing, DocumentPrices

_WEEK = 7 * 24 * 3600.0  # seconds

# The settings of each preset, which apply unless the job sets its own: the systems that WLB-LLM (OSDI '25, section 7.1)
# compares, and ours. They differ in these two sections only. The paper does not say how micro-batches are dealt to
# ranks and ordered, so its systems get the usual ways.
_AS_PACKED = {"assignment": "arrival", "order": "arrival"}
NO_BOUND = 2**31 - 1  # steps: in the paper a document waits until its queue is full
# The first two are today's stacks for packed documents: plain-4d, the paper's baseline, shards as torch and torchtitan
# do; Megatron-Core and Transformer Engine shard each document of a packed sequence by itself.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "plain-4d": {"packing": {"method": "sequential", **_AS_PACKED}, "sharding": {"strategy": "per_sequence"}},
    "per-document-4d": {"packing": {"method": "sequential", **_AS_PACKED}, "sharding": {"strategy": "per_document"}},
    "fixed-4d": {
        "packing": {"method": "fixed_greedy", "window": 1, **_AS_PACKED},
        "sharding": {"strategy": "per_document"},
    },
    "wlb-llm": {
        "packing": {"method": "variable_length", "max_delay": NO_BOUND, **_AS_PACKED},
        "sharding": {"strategy": "adaptive"},
    },
    "balanced": {"packing": {"method": "balanced"}, "sharding": {"strategy": "balanced"}},
}


def with_preset(preset: Mapping[str, dict[str, Any]], name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Section ``name`` as ``given``, completed from ``preset``; with another method, the preset gives no options."""
    settings = preset.get(name, {})
    if given.get("method", settings.get("method")) != settings.get("method"):
        settings = {key: value for key, value in settings.items() if key in _AS_PACKED}
    return settings | given


DecayRate = Annotated[Number, Field(ge=0, lt=1)]

# The settings that each rope_type requires; they have no default in config.json of Hugging Face:
# llama3: frequencies with under low_freq_factor turns over the original context are divided by factor, frequencies with
# over high_freq_factor turns are kept, and the others are interpolated by their turns.
# linear: all frequencies are divided (arXiv 2306.15595). yarn: frequencies with at least beta_fast turns are kept,
# frequencies with at most beta_slow turns are divided, with a ramp between them (arXiv 2309.00071, section 3).
ROPE_REQUIRED = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate")}


class RopeScalingConfig(Section):
    """Rotary positions stretched to a longer context; names and meanings as in config.json of Hugging Face."""

    rope_type: Literal["llama3", "linear", "yarn"] = Field(
        "llama3", description="Llama 3.1's, position interpolation, or YaRN"
    )
    factor: Number = Field(8.0, ge=1, description="Ratio of the contexts")
    low_freq_factor: Number = Field(1.0, gt=0, description="With llama3")
    high_freq_factor: Number = Field(4.0, gt=0, description="With llama3")
    original_max_position_embeddings: Tokens = Field(8192, description="Not with linear")
    beta_fast: Number = Field(32.0, ge=1e-6, le=1e6, description="With yarn")
    beta_slow: Number = Field(1.0, ge=1e-6, le=1e6, description="With yarn")
    attention_factor: Number | None = Field(None, gt=0, description="With yarn; default: 0.1 ln(factor) + 1")
    truncate: bool = Field(True, description="With yarn")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in sorted(self.model_fields_set - self.in_effect.keys()):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} has no effect with rope_type = {self.rope_type!r}; leave it out")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast = {self.beta_fast} must be over beta_slow = {self.beta_slow}")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor} must be over low_freq_factor = {self.low_freq_factor}"
            )
        return self

    @property
    def in_effect(self) -> dict[str, Any]:
        """The settings that ``rope_type`` reads, as in ``config.json``."""
        names = ("rope_type", *ROPE_REQUIRED[self.rope_type], *_OPTIONAL.get(self.rope_type, ()))
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class ModelConfig(Section):
    """The model: a preset, whose dimensions you may override, or a pretrained one."""

    name: str = Field("tiny", description="Preset, or Hugging Face directory, for the shape")
    pretrained: NonEmptyPath | None = Field(None, description="Hugging Face directory, for shape and weights")
    hidden: PositiveInt | None = Field(None, description="Width of the residual stream")
    layers: PositiveInt | None = Field(None, description="Transformer blocks")
    heads: PositiveInt | None = Field(None, description="Query heads")
    kv_heads: PositiveInt | None = Field(None, description="Key/value heads")
    head_dim: PositiveInt | None = Field(None, description="Width of a head; default: the preset's, or hidden / heads")
    ffn_hidden: PositiveInt | None = Field(None, description="Width of the feed-forward layer")
    experts: PositiveInt | None = Field(None, description="Experts of a block; default: the preset's")
    experts_per_token: PositiveInt | None = Field(None, description="Experts that a token is sent to")
    expert_hidden: PositiveInt | None = Field(None, description="Width of an expert")
    shared_expert_hidden: NonNegativeInt | None = Field(None, description="Width of the expert of all tokens")
    first_dense_layers: NonNegativeInt | None = Field(None, description="Number of first layers without experts")
    router: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="Scores of experts; with sigmoid (DeepSeek-V3) a bias evens out their load"
    )
    vocab_size: PositiveInt | None = Field(None, description="Number of token ids; default: the store's")
    rope_theta: Number = Field(500_000.0, gt=1, description="Base of the rotary frequencies")
    rope_scaling: RopeScalingConfig | None = Field(None, description="Scaling of rotary positions")
    norm_eps: Number = Field(1e-5, gt=0, description="Epsilon of RMSNorm")
    qkv_bias: bool = Field(False, description="Bias of the query, key and value projections")
    o_bias: bool = Field(False, description="Bias of the attention output projection")
    sliding_window: Tokens | None = Field(None, description="Tokens that attention looks back; default: all")
    full_attention_layers: PositiveInt | None = Field(None, description="Number of first layers without sliding_window")
    qk_norm: bool = Field(False, description="RMSNorm on each head's query and key")
    tied_embeddings: bool = Field(False, description="Tie output head and embedding")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pretrained is not None and "name" in self.model_fields_set:
            raise ValueError(
                f"model.name = {self.name!r} and model.pretrained = {str(self.pretrained)!r} both set the shape; "
                "leave one out"
            )
        return self


class LayoutConfig(Section):
    """How many processes in each dimension; their product is the world size."""

    dp: PositiveInt = Field(1, description='Data-parallel size (FSDP2); "auto" follows from the number of processes')
    pp: PositiveInt = Field(1, description="Pipeline-parallel size")
    cp: PositiveInt = Field(1, description="Context-parallel size")
    tp: PositiveInt = Field(1, description="Tensor-parallel size")
    ep: PositiveInt = Field(1, description="Expert-parallel size: GPUs that share a block's experts")
    virtual_pp: PositiveInt = Field(1, description="Pipeline stages per pipeline rank")
    schedule: Annotated[str, *one_of(SCHEDULES)] = Field(
        "auto", description="planned: an order per step; auto: that with preset balanced, else (interleaved) 1F1B"
    )
    weights: Weights = Field(
        "auto", description="Kept for the step or, without a pipeline, gathered for each pass (FSDP2); auto: by memory"
    )
    head: Head = Field(
        "auto",
        description="Output head of a pipeline: on the last stage, or dealt to ranks by micro-batches; auto simulates "
        "both with preset balanced",
    )

    @property
    def layout(self) -> Layout:
        sizes = self.model_dump(include={field.name for field in fields(Layout)})
        return Layout(**sizes | {"pool": None} if sizes.get("pool") == "auto" else sizes)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.virtual_pp > 1 and self.schedule == "1f1b":
            raise ValueError(f"virtual_pp = {self.virtual_pp} cannot run schedule = '1f1b'; leave schedule out")
        if self.virtual_pp > 1 and self.pp == 1:
            raise ValueError(f"virtual_pp = {self.virtual_pp} needs pp of at least 2")
        _ = self.layout  # checks weights and head
        return self


class ParallelConfig(LayoutConfig):
    """How many processes in each dimension; their product is the world size."""

    pool: PositiveInt | Literal["auto"] = Field(
        "auto", description="Ranks in a pool, a divisor of dp x cp (method balanced only); auto simulates"
    )


class BaselineConfig(LayoutConfig):
    """Layout of plain-4d in comparisons; default: the job's own."""

    dp: PositiveInt = Field(1, description="Data-parallel size")
    activation_checkpointing: Checkpointing = Field("none", description="As in [training]")
    micro_batch_windows: MicroBatchCount = Field(1, description="As in [packing]")


class PackingConfig(PackingOptions):
    """How documents become micro-batches. A packer refuses options of other packers."""

    global_batch: MicroBatchCount = Field(4, description="Context windows of a step, over all ranks")
    assignment: Assignment = Field(
        "balanced", description="Deal micro-batches to dp ranks in turn, or heaviest first to the lightest rank"
    )
    order: Order = Field(
        "fastest", description="In a rank: as packed, heavy in the middle, or what parallel.schedule runs fastest"
    )

    def in_use(self) -> dict[str, Any]:
        """The settings as JSON, without options that the packer does not read."""
        common = {"method", "global_batch", "assignment", "order"}
        return self.model_dump(mode="json", include=common | METHODS[self.method].keys())

    def packer(
        self, micro_batches: int, context_window: int, workload: DocumentPrices, ranks: StageRanks | None = None
    ) -> Packer:
        """The packer that this section describes, of ``micro_batches`` a step over all ranks."""
        return PACKERS[self.method](micro_batches, context_window, workload, self, ranks)

    def check_dealt(self, dp: int) -> None:
        """Raise ``UserError`` unless all ``dp`` ranks get equally many micro-batches."""
        together = dp * self.micro_batch_windows
        if self.global_batch % together:
            least = self.global_batch + together - self.global_batch % together
            sizes = "parallel.dp" if self.micro_batch_windows == 1 else "parallel.dp x packing.micro_batch_windows"
            given = f"packing.global_batch = {self.global_batch}"
            raise UserError(f"{given} must be a multiple of {sizes} = {together}, such as {least}")

    @model_validator(mode="after")
    def _check(self) -> Self:
        together = self.window * self.global_batch
        if together > MOST_MICRO_BATCHES:
            raise ValueError(
                f"packing.window x packing.global_batch = {together} windows are packed together, over "
                f"{MOST_MICRO_BATCHES}; lower packing.window"
            )
        return self


class ShardingConfig(Section):
    """How context-parallel ranks share a micro-batch (if parallel.cp is over 1)."""

    strategy: Annotated[str, AfterValidator(partial(check_known, "sharding strategy", known=STRATEGIES))] = Field(
        "balanced",
        description="How to divide a micro-batch among context-parallel ranks",
        json_schema_extra={"enum": [*STRATEGIES]},
    )


class TrainingConfig(Section):
    """Optimizer, numerics, memory and time-outs."""

    steps: PositiveInt | None = Field(None, description="Optimizer steps; default: one epoch")
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = Field(
        "auto", description="Compute type; auto is bfloat16 on CUDA and float32 on CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is CUDA if there is a GPU")
    seed: NonNegativeInt = Field(0, description="Seed of the initial weights")
    learning_rate: Number = Field(3e-4, gt=0, le=100, description="Peak AdamW learning rate")
    warmup_steps: NonNegativeInt = Field(10, description="Steps of linear warm-up")
    lr_schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="After warm-up: cosine decay, a plateau with a final decay, or a plateau"
    )
    weight_decay: Number = Field(0.1, ge=0, description="AdamW weight decay, on matrices only")
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.95), description="AdamW moment decay rates")
    gradient_clip: Number = Field(1.0, ge=0, description="Largest global gradient norm; 0 clips nothing")
    activation_checkpointing: Checkpointing = Field(
        "none", description="What the backward pass recomputes: nothing, all but attention, or all"
    )
    profile: NonEmptyPath | None = Field(None, description="Profile of wlb profile, the same on all machines")
    calibrate: NonNegativeInt = Field(0, description="Steps between updates of level steps' measured costs; 0: never")
    memory_gib: Number | None = Field(
        None, gt=0, description="Limit of a process; default: 90% of its GPU less 4 GiB, or of its share of the machine"
    )
    balance_loss: Number = Field(
        0.01, ge=0, description="Weight of the routers' balance loss, over the step with the loads of the last one"
    )
    router_z_loss: Number = Field(0.0, ge=0, description="Weight of the routers' z-loss")
    router_bias_rate: Number = Field(0.001, ge=0, description="Change of the biases of sigmoid routers in a step")
    deterministic: bool = Field(False, description="Only kernels that give the same bits in every run; slower")
    compile: bool = Field(False, description="Run blocks through torch.compile")
    async_tp: bool = Field(False, description="Overlap collectives of tp in compiled blocks, on CUDA; not yet measured")
    threads: PositiveInt | None = Field(
        None, description="CPU threads per process; default: OMP_NUM_THREADS, else cores / processes"
    )
    timeout_seconds: Number = Field(300.0, gt=0, le=_WEEK, description="Longest wait in a collective")
    grace_seconds: Number = Field(25.0, ge=0, le=_WEEK, description="Time to finish and save the step after SIGTERM")


class CheckpointConfig(Section):
    """Where and how often to save the job."""

    dir: NonEmptyPath | None = Field(None, description="Directory; without it, no checkpoints")
    every: PositiveInt = Field(100, description="Steps between checkpoints")
    keep: PositiveInt = Field(2, description="Number of newest checkpoints to keep")
    resume: bool = Field(True, description="Continue from the newest checkpoint in dir")


class MetricsConfig(Section):
    """What the job records about itself."""

    dir: NonEmptyPath = Field(Path("runs/default"), description="Directory for steps.jsonl and TensorBoard files")
    document_ids: Literal[False, True, "segments"] = Field(
        False, description="List each step's documents, or also their segments, in steps.jsonl"
    )
    tensorboard: bool = Field(True, description="Write TensorBoard event files")
    profile: bool = Field(False, description="Trace steps 3 and 4 with torch.profiler")


class EvaluationConfig(Section):
    """When to measure the loss on held-out documents."""

    store: StoreSetting | None = Field(None, description="Held-out token store, named as in data.store")
    every: PositiveInt = Field(100, description="Steps between evaluations; one more follows the last step")
    documents: PositiveInt | None = Field(None, description="Score only the first N documents; default: all")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.store is None and self.model_fields_set - {"store"}:
            raise ValueError(f"evaluation.{min(self.model_fields_set - {'store'})} needs evaluation.store")
        return self


class JobConfig(Section):
    """All sections of one training job; ``preset`` sets what [packing] and [sharding] leave out."""

    preset: Annotated[str, *one_of(PRESETS)] = Field(
        "balanced",
        description="Sets what [packing] and [sharding] leave out. With another packing.method, packer options keep "
        "their own defaults",
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    baseline: BaselineConfig | None = None
    packing: PackingConfig = PackingConfig()
    sharding: ShardingConfig = ShardingConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, document: Any) -> Any:
        name = document.get("preset") if isinstance(document, dict) else None
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
        for name in preset:
            section = document.get(name, {})
            if isinstance(section, dict):
                document = document | {name: with_preset(preset, name, section)}
        return document

    @model_validator(mode="after")
    def _check(self) -> Self:
        thresholds, window = self.packing.outlier_thresholds, self.data.context_window
        if thresholds and thresholds[-1] > window:
            raise ValueError(
                f"packing.outlier_thresholds has {thresholds[-1]}, over data.context_window = {window}: no document "
                "could reach it"
            )
        processes = self.parallel.layout.world_size
        if self.baseline is not None and self.baseline.layout.world_size != processes:
            raise ValueError(
                f"[baseline] is a job of {self.baseline.layout.world_size} processes and [parallel] of {processes}; "
                "give both the same number, or leave [baseline] out"
            )
        if self.packing.is_balanced:
            return self
        self.packing.check_dealt(self.parallel.dp)
        if self.parallel.pool != "auto":
            raise ValueError(
                f"parallel.pool = {self.parallel.pool} is for packing.method = 'balanced', not "
                f"{self.packing.method!r}; leave it out"
            )
        each = self.packing.global_batch // (self.parallel.dp * self.packing.micro_batch_windows)
        if each < self.parallel.pp:  # a simulated job may have fewer, but torch's schedules refuse
            raise ValueError(
                f"packing.global_batch = {self.packing.global_batch} gives each rank {each} micro-batches, which "
                f"cannot fill the parallel.pp = {self.parallel.pp} pipeline stages; raise it"
            )
        return self
