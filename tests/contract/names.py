"""The names that stay: of Python, the command line and configurations. Removing or renaming one breaks users.

Everything else may change. Parameters read as in a ``def``, without ``self``; None is what is not called, such as a
property. Parameters may be added if they are optional.
"""

PUBLISHED: dict[str, str | None] = {
    "wlb.balance": (
        "lengths, parts=..., max_tokens=..., *, ranks=..., costs=..., workload=..., phases=..., groups=..., "
        "prefixes=..., multiple_of=..., padded=..., max_documents=..., equal_size=..., parts_multiple_of=..., "
        "oversize=..., empty=..."
    ),
    "wlb.make_packer": "name, *, micro_batches, context_window, workload, **options",
    "wlb.arrange": "plan, dp, *, assignment=..., order=..., pipeline=...",
    "wlb.make_shard_plan": "document_lengths, cp_size, strategy, *, workload=...",
    "wlb.make_workload": "model=..., hardware=..., tp=..., cp=..., profile=...",
    "wlb.shadow": "loader_or_model, *, every=..., lengths=..., tensorboard=..., profile=..., model=...",
    "wlb.StepPlan": "step, ranks, delay_token_steps=..., longest_delay=...",
    "wlb.StepPlan.to_json": "",
    "wlb.StepPlan.from_json": "data",
    "wlb.MicroBatch": "segments, workload",
    "wlb.Segment": "document, start, length",
    "wlb.ShardPlan": "strategy, segment_lengths, pieces",
    "wlb.ShardPlan.positions": "rank",
    "wlb.attention.context_parallel_attention": "query, key, value, shard_plan, group",
    "wlb.attention.segment_attention": "query, key, value, segment_lengths",
    "wlb.integrations.packed.packed_batches": (
        "documents, *, context_window, micro_batches, dp=..., cp=..., rank=..., epochs=..., own_lists=..., "
        "sharding=..., overlong=..., state=..., group=..., **settings"
    ),
    "wlb.integrations.packed.packed_loss": "logits, labels, loss_tokens, *, averaged_over",
    "wlb.integrations.packed.FlatteningCollator": "",
    "wlb.integrations.accelerate.balanced_steps": "accelerator, prepared, documents, /, **settings",
    "wlb.integrations.batches.PlannedBatchSampler": (
        "lengths, *, context_window, micro_batches, dp=..., cp=..., rank=..., epochs=..., group=..., **settings"
    ),
    "wlb.integrations.huggingface.balanced": (
        "trainer_class, *, context_window, cp=..., sharding=..., check=..., **settings"
    ),
    "wlb.integrations.huggingface.register_attention": "model=..., *, name=...",
    "wlb.runtime.level_step": "model, batches, loss_fn",
    "wlb.runtime.own_batches": "plan, dp_rank, cp_rank, read",
    "wlb.simulate.simulate": "job, lengths, steps",
    "wlb.simulate.simulated_job": (
        "model, context_window, preset=..., *, hardware=..., micro_batches=..., packing=..., sharding=..., dp=..., "
        "pp=..., **layout"
    ),
    "wlb.simulate.pipeline_makespan": "schedule, forward, backward, virtual_stages=...",
}

PACKER_METHODS = {"plan": "arrivals", "drain": "", "state_dict": "", "load_state_dict": "state"}
PACKERS = ("sequential", "fixed_greedy", "variable_length")  # of the paper; the studies add fixed_solver
STRATEGIES = ("per_sequence", "per_document", "adaptive", "balanced")
PRESETS = ("plain-4d", "fixed-4d", "wlb-llm", "balanced")
MODELS = ("tiny", "550m", "7b", "30b", "70b", "llama3-8b", "llama3-70b")
HARDWARE = ("a100", "h100", "h200", "b200", "mi300x", "cpu")

COMMANDS = {
    "prepare": "--stdlib --out --tokenizer --train-bpe --json",
    "check": "--context-window --batch-tokens --gpus --dp --pp --tp --cp --model --hardware --systems --json",
    "simulate": "--lengths --steps --systems --set --trace --json",
    "profile": "--device --out --json",
    "train": "--set --dry-run --json",
    "report": "--out --json",
    "export": "--out --json",
}

SETTINGS = {
    "model": "name",
    "data": "store context_window overlong seed",
    "parallel": "dp pp cp tp virtual_pp schedule",
    "packing": "method global_batch max_length_factor outlier_thresholds window max_delay",
    "sharding": "strategy",
    "training": "steps dtype device seed learning_rate activation_checkpointing profile",
    "checkpoint": "dir every",
    "metrics": "dir document_ids",
}

# Keys of --json: of check and simulate, of each of their systems, and of a line of steps.jsonl.
VERDICT = "verdict base lost winner speedup speed_at_equal_work systems"
SYSTEM = (
    "system layout steps tokens tokens_per_second mean_step_seconds where token_delay tokens_cv speedup "
    "speed_at_equal_work parts fits"
)
STEP = "step loss grad_norm tokens documents step_seconds tokens_per_second imbalance_degree document_ids"
