"""The configuration of a training job: TOML sections, validated before anything starts.

This is the schema: keys, types, defaults, bounds, and what must fit together. ``wlb.config_file`` reads a file by it.
Nothing here imports torch.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from wlb.token_count import MOST_TOKENS, parse_tokens

_LONGEST_TIMEOUT_SECONDS = 7 * 24 * 3600.0
# What is planned together: four times the 15,360 sequences of a DeepSeek-V3 step (arXiv 2412.19437, section 4.2).
_MOST_MICRO_BATCHES = 65_536

# The systems that WLB-LLM (OSDI '25, section 7.1) compares, and ours: what a preset sets where a job does not. They
# differ in these two sections only. The paper says nothing of dealing to ranks and order; it gets the usual ones.
_AS_PACKED = {"assignment": "arrival", "order": "arrival"}
NO_BOUND = 2**31 - 1  # steps: in the paper a document waits until its queue is full
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "plain-4d": {"packing": {"method": "sequential", **_AS_PACKED}, "sharding": {"strategy": "per_sequence"}},
    "fixed-4d": {
        "packing": {"method": "fixed_greedy", "window": 1, **_AS_PACKED},
        "sharding": {"strategy": "per_document"},
    },
    "wlb-llm": {
        "packing": {"method": "variable_length", "early_release": False, "max_delay": NO_BOUND, **_AS_PACKED},
        "sharding": {"strategy": "adaptive"},
    },
    "best": {},
}


def _check_path(path: object) -> object:
    if isinstance(path, str) and not path.strip():
        raise ValueError("the path is empty; name one, or leave the setting out")  # it would mean the working directory
    if isinstance(path, str) and "\0" in path:
        raise ValueError("no path holds a null character")
    return path


def _tokens(value: object) -> object:
    return parse_tokens(value) if isinstance(value, str) else value


# Strict: true is no number of processes, and no learning rate; a whole number is a Number too. The bounds of integers
# are those of the int32 and int64 that they end up in.
PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
MicroBatches = Annotated[int, Field(ge=1, le=_MOST_MICRO_BATCHES, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
Tokens = Annotated[
    int,
    Field(ge=1, le=MOST_TOKENS, strict=True, json_schema_extra={"format": "tokens"}),
    BeforeValidator(_tokens),  # "128K" and "1M" too
]
Number = Annotated[float, Field(strict=True)]
DecayRate = Annotated[Number, Field(ge=0, lt=1)]
NonEmptyPath = Annotated[Path, BeforeValidator(_check_path)]


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RopeScalingConfig(Section):
    """Rotary positions stretched to a longer context as in Llama 3.1, with the names of its config.json."""

    factor: Number = Field(8.0, ge=1, description="Low frequencies are divided by this")
    low_freq_factor: Number = Field(1.0, gt=0, description="Turns over the original context below which they are")
    high_freq_factor: Number = Field(4.0, gt=0, description="Turns over the original context above which they are kept")
    original_max_position_embeddings: Tokens = Field(8192, description="The original context, in tokens")

    @model_validator(mode="after")
    def _check(self) -> RopeScalingConfig:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor} must be over low_freq_factor = {self.low_freq_factor}"
            )
        return self


class ModelConfig(Section):
    """Which model: a preset name, with any dimension overridden, or the directory of a pretrained one."""

    name: str = Field("tiny", description="Preset: tiny, 550m, 7b, 30b, 70b, llama3-8b, ...")
    pretrained: NonEmptyPath | None = Field(
        None, description="Hugging Face directory that gives the shape (config.json) and the initial weights"
    )
    hidden: PositiveInt | None = Field(None, description="Width of the residual stream")
    layers: PositiveInt | None = Field(None, description="Transformer blocks, over all pipeline stages")
    heads: PositiveInt | None = Field(None, description="Query heads")
    kv_heads: PositiveInt | None = Field(None, description="Key/value heads (grouped-query attention)")
    head_dim: PositiveInt | None = Field(None, description="Width of a head; default: the preset's or hidden / heads")
    ffn_hidden: PositiveInt | None = Field(None, description="Width of the SwiGLU feed-forward layer")
    vocab_size: PositiveInt | None = Field(None, description="Token ids are below this; default: the store's")
    rope_theta: Number = Field(500_000.0, ge=1, description="Base of the rotary position frequencies")
    rope_scaling: RopeScalingConfig | None = Field(None, description="Llama 3.1's scaling of rotary positions")
    norm_eps: Number = Field(1e-5, gt=0, description="Added to the mean square in RMSNorm")
    qkv_bias: bool = Field(False, description="Bias in the query, key and value projections (Qwen2)")
    qk_norm: bool = Field(False, description="RMSNorm of each head's query and key (Qwen3)")
    tied_embeddings: bool = Field(False, description="Output head with the embedding's matrix")

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.pretrained is not None and "name" in self.model_fields_set:
            raise ValueError(
                f"model.name = {self.name!r} and model.pretrained = {str(self.pretrained)!r} both say the shape; "
                "leave one out"
            )
        return self


class DataConfig(Section):
    """Which documents, and what happens to those longer than the context window."""

    store: NonEmptyPath = Field(description="Prefix of the token store (PREFIX.bin and PREFIX.idx)")
    context_window: Tokens = Field(4096, description="Longest run of tokens attention may span")
    overlong: Literal["split", "truncate", "drop", "error"] = Field(
        "split", description="What happens to documents longer than the context window"
    )
    seed: NonNegativeInt = Field(0, description="Seed of the document order")
    shuffle: bool = Field(True, description="Shuffle documents anew in every epoch")


class ParallelConfig(Section):
    """How many processes, along which dimensions; the product is the world size."""

    dp: PositiveInt = Field(1, description="Data-parallel size (FSDP2)")
    pp: PositiveInt = Field(1, description="Pipeline-parallel size")
    cp: PositiveInt = Field(1, description="Context-parallel size")
    tp: PositiveInt = Field(1, description="Tensor-parallel size")
    virtual_pp: PositiveInt = Field(1, description="Model chunks per pipeline rank")
    schedule: Literal["1f1b", "interleaved_1f1b"] = Field("1f1b", description="Pipeline schedule")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    @property
    def stages(self) -> int:
        return self.pp * self.virtual_pp

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        if self.virtual_pp > 1 and self.schedule != "interleaved_1f1b":
            raise ValueError(f"parallel.virtual_pp = {self.virtual_pp} needs parallel.schedule = 'interleaved_1f1b'")
        if self.virtual_pp > 1 and self.pp == 1:
            raise ValueError(f"parallel.virtual_pp = {self.virtual_pp} needs parallel.pp of at least 2")
        return self


class PackingConfig(Section):
    """How documents become micro-batches."""

    method: Literal["sequential", "fixed_greedy", "fixed_solver", "variable_length", "makespan"] = Field(
        "makespan", description="Packer"
    )
    micro_batches: MicroBatches = Field(4, description="Micro-batches of a step, over all data-parallel ranks")
    max_length_factor: Annotated[Number, Field(ge=1, le=1000)] | Literal["auto"] = Field(
        1.5,
        description="L_max, the most tokens of a micro-batch, in context windows (variable_length, makespan); auto is "
        "the most that memory allows, up to 4",
    )
    outlier_thresholds: Literal["auto"] | tuple[Tokens, ...] = Field(
        "auto", description="Lengths from which documents wait in an outlier queue (variable_length)"
    )
    max_delay: NonNegativeInt | None = Field(
        None,
        description="Planning rounds (steps, or windows) after which a waiting document goes first; default: 8 for "
        "makespan, where 0 lets none wait, and 16 for the others",
    )
    delay_price: Number = Field(
        0.05,
        ge=0,
        le=100,
        description="Imbalance that a step of waiting is worth, for a global batch of tokens (makespan)",
    )
    lookahead: Number = Field(
        0.5, ge=0, le=1, description="Part of the next global batch that a step may train early (makespan)"
    )
    token_spread: Number = Field(
        0.75, ge=0, le=1, description="Global batches by which a step may be longer or shorter than one (makespan)"
    )
    early_release: bool = Field(
        True, description="Release a waiting outlier that the step can balance; false is the paper's algorithm"
    )
    window: MicroBatches = Field(
        1, description="Global batches packed together (fixed_*), at most 65536 micro-batches in all"
    )
    solver_nodes: Annotated[int, Field(ge=1, le=100_000, strict=True)] = Field(
        1000, description="Branch-and-bound nodes of one solve (fixed_solver); every rank searches the same ones"
    )
    assignment: Literal["arrival", "balanced"] = Field(
        "balanced", description="How micro-batches are dealt to data-parallel ranks: in turn, or heaviest first"
    )
    order: Literal["arrival", "pipeline", "makespan"] = Field(
        "makespan",
        description="Order of micro-batches inside a rank: as packed, heavy in the middle, or searched for the order "
        "that parallel.schedule runs fastest",
    )

    @property
    def has_length_factor(self) -> bool:
        """Whether micro-batches may be of up to L_max tokens, and not of the context window."""
        return self.method in ("variable_length", "makespan")

    @model_validator(mode="after")
    def _check(self) -> PackingConfig:
        together = self.window * self.micro_batches
        if together > _MOST_MICRO_BATCHES:
            raise ValueError(
                f"packing.window x packing.micro_batches = {together} micro-batches are packed together, over "
                f"{_MOST_MICRO_BATCHES}; lower packing.window"
            )
        if self.outlier_thresholds != "auto" and not _rises(self.outlier_thresholds):
            raise ValueError(f"packing.outlier_thresholds = {list(self.outlier_thresholds)} must rise")
        if self.max_delay == 0 and self.method not in ("makespan", "sequential"):
            raise ValueError(
                f"packing.max_delay = 0 must be at least 1 with packing.method = {self.method!r}; only 'makespan' "
                "takes 0, which lets no document wait"
            )
        return self


class ShardingConfig(Section):
    """How context-parallel ranks share a micro-batch (used when parallel.cp > 1)."""

    strategy: Literal["per_sequence", "per_document", "adaptive", "hybrid"] = Field(
        "hybrid", description="Which context-parallel rank attends for which tokens"
    )


class TrainingConfig(Section):
    """The optimisation run."""

    steps: PositiveInt | None = Field(None, description="Optimizer steps; without it, one epoch")
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = Field(
        "auto", description="Compute type; auto is bfloat16 on CUDA and float32 on CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes CUDA where there is one")
    seed: NonNegativeInt = Field(0, description="Seed of the initial weights")
    learning_rate: Number = Field(3e-4, gt=0, le=100, description="Peak AdamW learning rate")
    warmup_steps: NonNegativeInt = Field(10, description="Steps of linear warm-up")
    decay_steps: PositiveInt | None = Field(
        None, description="Step at which the learning rate has fallen to a tenth; default: steps"
    )
    lr_schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="Learning rate after warm-up: a cosine, a plateau and a decay (WSD), or a plateau"
    )
    decay_fraction: Number = Field(0.2, gt=0, le=1, description="Last part of decay_steps in which wsd decays")
    weight_decay: Number = Field(0.1, ge=0, description="AdamW weight decay, on matrices only")
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.95), description="AdamW moment decay rates")
    gradient_clip: Number = Field(1.0, ge=0, description="Largest global gradient norm; 0 turns clipping off")
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none", description="What blocks compute again in the backward pass: nothing, all but attention, or all"
    )
    memory_gib: Number | None = Field(
        None, gt=0, description="Memory of a process; default: 90% of its GPU, or of its share of the machine's"
    )
    compile: bool = Field(False, description="Run blocks through torch.compile, once for all lengths")
    threads: PositiveInt | None = Field(
        None,
        description="CPU threads per process, no more than the machine has cores; default: OMP_NUM_THREADS, or else "
        "cores / processes",
    )
    prefetch: Annotated[int, Field(ge=1, le=100, strict=True)] = Field(
        2, description="Steps planned and read ahead of training, held in memory"
    )
    non_finite: Literal["stop", "skip"] = Field(
        "stop", description="What happens at a step whose loss or gradient norm is not finite"
    )
    max_skipped: PositiveInt = Field(
        10, description="Steps in a row that non_finite = 'skip' passes over before it stops"
    )
    timeout_seconds: Number = Field(
        300.0, gt=0, le=_LONGEST_TIMEOUT_SECONDS, description="Longest wait in one collective"
    )
    max_restarts: NonNegativeInt = Field(
        3, description="Times wlb train starts a killed or hung job again without a newer checkpoint in between"
    )
    grace_seconds: Number = Field(
        25.0,
        ge=0,
        le=_LONGEST_TIMEOUT_SECONDS,
        description="Time after SIGTERM to finish the step and save it; torchrun and SLURM kill after 30 s by default",
    )


class CheckpointConfig(Section):
    """Where and how often the job saves its state."""

    dir: NonEmptyPath | None = Field(None, description="Directory of checkpoints; none are written without it")
    every: PositiveInt = Field(100, description="Steps between checkpoints")
    keep: PositiveInt = Field(2, description="Newest checkpoints that are kept")
    resume: bool = Field(True, description="Continue from the newest checkpoint in dir, if there is one")
    allow_changed_data: bool = Field(
        False, description="Continue on another token store or with other settings of the document order, on purpose"
    )
    asynchronous: bool = Field(True, description="Write in the background, from a copy in host memory")


class MetricsConfig(Section):
    """What the job writes about itself."""

    dir: NonEmptyPath = Field(Path("runs/default"), description="Directory of steps.jsonl and TensorBoard files")
    document_ids: Literal[False, True, "segments"] = Field(
        False,
        description="List the documents of every step in steps.jsonl; segments lists also every piece that was trained",
    )
    tensorboard: bool = Field(True, description="Write TensorBoard event files")
    diagnose_every: PositiveInt = Field(
        50, description="Steps between diagnoses of imbalance, each over as many; on CUDA also between measurements"
    )
    straggler_factor: Number = Field(
        1.5, gt=1, description="A rank is reported slow when it computes this many times longer than expected of it"
    )
    profile: bool = Field(False, description="Write a torch.profiler trace of steps 3 and 4 of the run, every rank's")


class EvaluationConfig(Section):
    """Whether and how the loss on held-out documents is measured."""

    store: NonEmptyPath | None = Field(None, description="Prefix of a token store of held-out documents")
    every: PositiveInt = Field(100, description="Steps between evaluations; one more follows the last step")
    documents: PositiveInt | None = Field(None, description="Only the first so many documents of the store")
    length_buckets: Literal["auto"] | tuple[Tokens, ...] = Field(
        "auto",
        description="Document lengths that separate the buckets of the loss; auto: 256, 1024, ... up to context_window",
    )

    @model_validator(mode="after")
    def _check(self) -> EvaluationConfig:
        if self.store is None and self.model_fields_set - {"store"}:
            raise ValueError(f"evaluation.{min(self.model_fields_set - {'store'})} needs evaluation.store")
        if self.length_buckets != "auto" and not _rises(self.length_buckets):
            raise ValueError(f"evaluation.length_buckets = {list(self.length_buckets)} must rise")
        return self


def _rises(lengths: tuple[int, ...]) -> bool:
    return all(low < high for low, high in pairwise(lengths))


class JobConfig(Section):
    """All sections of one training job; ``preset`` sets what [packing] and [sharding] leave out."""

    preset: Literal["plain-4d", "fixed-4d", "wlb-llm", "best"] = Field(
        "best", description="System of which [packing] and [sharding] take the settings they leave out"
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
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
        for name, settings in preset.items():
            section = document.get(name, {})
            if isinstance(section, dict):
                document = document | {name: settings | section}
        return document

    @model_validator(mode="after")
    def _check(self) -> JobConfig:
        if self.packing.micro_batches % self.parallel.dp:
            raise ValueError(
                f"packing.micro_batches = {self.packing.micro_batches} counts all data-parallel ranks and must "
                f"be a multiple of parallel.dp = {self.parallel.dp}"
            )
        per_rank = self.packing.micro_batches // self.parallel.dp
        if per_rank < self.parallel.pp:
            raise ValueError(
                f"packing.micro_batches / parallel.dp = {per_rank} cannot fill the parallel.pp = {self.parallel.pp} "
                "pipeline stages; raise packing.micro_batches"
            )
        if self.parallel.virtual_pp > 1 and per_rank % self.parallel.pp:
            raise ValueError(
                f"interleaved 1F1B runs micro-batches in rounds of parallel.pp = {self.parallel.pp}; "
                f"packing.micro_batches / parallel.dp = {per_rank} must be a multiple of it"
            )
        for threshold in self.packing.outlier_thresholds if self.packing.outlier_thresholds != "auto" else ():
            if threshold > self.data.context_window:
                raise ValueError(
                    f"packing.outlier_thresholds has {threshold}, over data.context_window = "
                    f"{self.data.context_window}: no document could reach it"
                )
        return self
