"""The names that stay: of Python, the command line and configurations. Removing or renaming one breaks users."""

from __future__ import annotations

# Parameters read as in a ``def``, without ``self``; None is what is not called, such as a property. Parameters may be
# added if they are optional.
PUBLISHED: dict[str, str | None] = {
    # docs/reference.md: these change only with a major version.
    "wlb.make_packer": "name, *, micro_batches, context_window, workload, **options",
    "wlb.arrange": "plan, dp, *, assignment=..., order=..., pipeline=...",
    "wlb.balance": (
        "lengths, parts=..., max_tokens=..., equal_size=..., multiple_of=..., *, workload=..., costs=..., ranks=..., "
        "phases=..."
    ),
    "wlb.workload.phases.DocumentPhases": "seconds, memory_tokens=...",
    "wlb.workload.phases.PhasedPrices": "language_model, phases",
    "wlb.Segment": "document, start, length",
    "wlb.MicroBatch": "segments, workload",
    "wlb.MicroBatch.tokens": None,
    "wlb.MicroBatch.lengths": None,
    "wlb.StepPlan": "step, ranks, delay_token_steps=..., longest_delay=...",
    "wlb.StepPlan.micro_batches": None,
    "wlb.StepPlan.segments": None,
    "wlb.StepPlan.tokens": None,
    "wlb.StepPlan.imbalance": None,
    "wlb.StepPlan.to_json": "",
    "wlb.StepPlan.from_json": "data",
    "wlb.make_shard_plan": "document_lengths, cp_size, strategy, *, workload=...",
    "wlb.ShardPlan": "strategy, segment_lengths, pieces",
    "wlb.ShardPlan.cp_size": None,
    "wlb.ShardPlan.tokens": None,
    "wlb.ShardPlan.kv_traffic": None,
    "wlb.ShardPlan.positions": "rank",
    "wlb.ShardPlan.to_json": "",
    "wlb.ShardPlan.from_json": "data",
    "wlb.make_workload": "model=..., hardware=..., tp=..., cp=..., profile=...",
    "wlb.packing.registry.make_packer": "name, *, micro_batches, context_window, workload, **options",
    "wlb.packing.arrange.arrange": "plan, dp, *, assignment=..., order=..., pipeline=...",
    "wlb.sharding.make_shard_plan": "document_lengths, cp_size, strategy, *, workload=...",
    "wlb.attention.context_parallel_attention": "query, key, value, shard_plan, group",
    "wlb.simulate.pipeline_makespan": "schedule, forward, backward, virtual_stages=...",
    "wlb.workload.make_workload": "model=..., hardware=..., tp=..., cp=..., profile=...",
    # What other pages of docs/ show: where one of these moves, its page moves with it.
    "wlb.integrations.batches.PlannedBatchSampler": (
        "lengths, *, context_window, micro_batches, dp=..., cp=..., rank=..., epochs=..., workload=..., group=..., "
        "**settings"
    ),
    "wlb.integrations.batches.PlannedBatchSampler.load_state_dict": "state",
    "wlb.integrations.batches.PlannedBatchSampler.micro_batches_of_steps": "",
    "wlb.integrations.batches.PlannedBatchSampler.set_epoch": "epoch",
    "wlb.integrations.batches.PlannedBatchSampler.state_dict": "",
    "wlb.integrations.batches.PlannedBatchSampler.steps": "state=...",
    "wlb.integrations.checks.BalanceMonitor": "dp=..., cp=..., device=...",
    "wlb.integrations.checks.check_packing": "model, packed, singles, *, tolerance=..., sharded=...",
    "wlb.integrations.huggingface.balanced": (
        "trainer_class, *, context_window, cp=..., sharding=..., monitor=..., check=..., **settings"
    ),
    "wlb.integrations.huggingface.check_batch": "model, batch",
    "wlb.integrations.huggingface.context_parallel_group": "cp",
    "wlb.integrations.huggingface.context_parallel_share": "batch, cp, rank, sharding=..., workload=...",
    "wlb.integrations.huggingface.register_attention": "model=..., *, name=..., group=...",
    "wlb.integrations.document_fields.ids_and_labels": "document, name=...",
    "wlb.integrations.document_fields.token_count": "document, name=...",
    "wlb.integrations.packed.FlatteningCollator": "",
    "wlb.integrations.packed.packed_batches": (
        "documents, *, context_window, micro_batches, dp=..., cp=..., rank=..., epochs=..., sharding=..., "
        "overlong=..., state=..., group=..., **settings"
    ),
    "wlb.integrations.packed.PackedBatch.hf_kwargs": "",
    "wlb.integrations.packed.PackedBatch.loss": "logits, *, summed=...",
    "wlb.integrations.packed.steps_of": "loader, sampler",
    "wlb.attention.segment_attention": "query, key, value, segment_lengths",
    "wlb.job.config.ParallelConfig": "*, dp=..., pp=..., cp=..., tp=..., virtual_pp=..., schedule=...",
    "wlb.documents.lengths.read_lengths": "source",
    "wlb.documents.overlong.split_overlong": "segments, limit, policy=...",
    "wlb.documents.segments.Segment": "document, start, length",
    "wlb.documents.store.reader.TokenStore.open": "*sources",
    "wlb.documents.store.reader.TokenStore.lengths": None,
    "wlb.documents.store.reader.TokenStore.read": "document, start=..., length=...",
    "wlb.documents.store.reader.TokenStore.tokens": None,
    "wlb.documents.store.reader.TokenStore.vocab_size": None,
    "wlb.documents.store.reader.TokenStoreWriter": "prefix, *, vocab_size",
    "wlb.documents.store.reader.TokenStoreWriter.add": "tokens",
    "wlb.documents.synthetic.sample_lengths": "documents, context_window, seed=...",
    "wlb.integrations.megatron.packed_sequences.packed_seq_params": "shard_plan, device=...",
    "wlb.integrations.megatron.packed_sequences.padded_lengths": "lengths, cp_size",
    "wlb.integrations.megatron.scheduler.balanced_steps": (
        "get_forward_backward_func, max_seqlen_per_dp_cp_rank, model=..., hardware=..."
    ),
    "wlb.integrations.megatron.scheduler.register": "model=..., hardware=...",
    "wlb.integrations.verl.reroute_balancing": "",
    "wlb.serving.batching.Chunk": "prompt, start, stop",
    "wlb.serving.batching.Prompt": "number, tokens, done=..., rank=..., rounds=...",
    "wlb.serving.batching.PrefillPlanner": "workload, token_budget, method=..., chunked=...",
    "wlb.serving.batching.PrefillPlanner.plan": "waiting, ranks=...",
    "wlb.schedules.operations.rank_operations": "schedule, pp, micro_batches, virtual_stages=...",
    "wlb.schedules.layout.Layout": "tp=..., cp=..., pp=..., dp=..., virtual_pp=..., schedule=...",
    "wlb.sharding.shard_latency": "plan, costs",
    "wlb.sharding.ShardLatency.imbalance": None,
    "wlb.simulate.simulate": "job, lengths, steps",
    "wlb.simulate.simulated_job": (
        "model, context_window, preset=..., *, hardware=..., micro_batches=..., packing=..., sharding=..., dp=..., "
        "pp=..., **layout"
    ),
    "wlb.simulate.SimulationResult.tokens_per_second": None,
    "wlb.simulate.SimulationResult.mean_step_seconds": None,
    "wlb.simulate.SimulationResult.to_json": "",
    "wlb.profiling.ProfileSettings": "shape, device, dtype, max_length, tp=..., threads=..., quick=...",
    "wlb.profiling.measure_profile": "settings, on_progress=...",
    "wlb.profiling.prediction_errors": "workload, held_out",
    "wlb.training.data.sharded_batch.shard_batch": "batch, shard_plan, rank, multiple_of=...",
    "wlb.workload.HARDWARE": None,
    "wlb.workload.MODEL_SHAPES": None,
    "wlb.workload.model_shape": "name",
    "wlb.workload.ModelShape": (
        "hidden, layers, heads, kv_heads, head_dim, ffn_hidden, vocab_size, sliding_window=..., "
        "full_attention_layers=..., full_attention_every=..., experts=..., latent=..."
    ),
    "wlb.workload.profile.read_profile": "path",
    "wlb.workload.Costs.attention_seconds": "lengths, phase=...",
    "wlb.workload.Costs.document_seconds": "lengths",
    "wlb.workload.Costs.linear_seconds": "tokens, phase=...",
    "wlb.job.memory.layers.MemorySettings": (
        "shape, stage_blocks, parallel, micro_batches, compute_bytes, activation_checkpointing=..., fused_norms=..., "
        "tied_embeddings=..., uneven_shards=..., checkpoint_copy=..."
    ),
    "wlb.job.memory.step.predict_memory": "settings, tokens",
    "wlb.workload.profile.write_profile": "profile, path",
}

PACKER_METHODS = {"plan": "arrivals", "drain": "", "state_dict": "", "load_state_dict": "state"}
PACKERS = ("sequential", "fixed_greedy", "fixed_solver", "variable_length", "makespan")
STRATEGIES = ("per_sequence", "per_document", "adaptive", "hybrid", "elastic")
PRESETS = ("plain-4d", "fixed-4d", "wlb-llm", "best", "elastic")
MODELS = (
    *("tiny", "550m", "7b", "30b", "70b", "llama3-8b", "llama3-70b", "llama3-405b", "qwen2.5-7b", "qwen3-8b"),
    *("mistral-7b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2", "gemma3-12b"),
    *("gemma3-27b", "gpt-oss-20b", "gpt-oss-120b"),
)
HARDWARE = ("a100", "h100", "h200", "b200", "mi300x", "cpu")

COMMANDS = {
    "prepare": "--stdlib --out --check --tokenizer --train-bpe --end-token --text-field --documents --chat "
    "--workers --shard --ray --overwrite --json",
    "check": (
        "--context-window --batch-tokens --gpus --dp --pp --tp --cp --model --hardware --profile --steps --systems "
        "--tokenizer --text-field --documents --chat --json"
    ),
    "serve": "--port --browser --no-browser",
    "compare": (
        "--context-window --micro-batches --dp --pp --tp --cp --model --hardware --profile --methods "
        "--max-length-factor --max-delay --steps --overlong --solver-seconds --plot --json"
    ),
    "prefill": (
        "--token-budget --dp --pp --tp --cp --model --hardware --profile --methods --chunked --whole --load "
        "--lock-step --independent --seed --json"
    ),
    "tune": (
        "--context-window --micro-batches --dp --pp --tp --cp --model --hardware --profile --max-length-factor "
        "--max-token-delay --max-delay --methods --steps --json"
    ),
    "shard": ("--context-window --cp --tp --model --hardware --profile --strategies --samples --seed --plot --json"),
    "profile": "--out --device --model --tp --max-length --dtype --threads --quick --plot --json",
    "simulate": (
        "--lengths --steps --systems --hardware --profile --set --trace --open-trace --search --gpus "
        "--model --context-window --batch-tokens --json"
    ),
    "rivals": ("--gpus --context-window --model --hardware --batch-tokens --policies --steps --plot --json"),
    "reproduce": "--out --lengths --steps --seed --seeds --profile --measured --json",
    "train": "--set --trace --profile --json --dry-run --rank --device --hardware",
    "diagnose": "--json",
    "report": (
        "--out --model --hardware --dp --pp --cp --tp --virtual-pp --schedule --parallel --context-window "
        "--batch-tokens --steps --rivals --before --json"
    ),
    "export": "--out --step --dtype --set --json",
}

SETTINGS = {
    "model": (
        "name pretrained hidden layers heads kv_heads head_dim ffn_hidden vocab_size rope_theta rope_scaling norm_eps "
        "qkv_bias qk_norm tied_embeddings"
    ),
    "data": "store context_window overlong seed shuffle",
    "parallel": "dp pp cp tp virtual_pp schedule",
    "packing": (
        "method micro_batches max_length_factor outlier_thresholds max_delay delay_price lookahead token_spread "
        "early_release window solver_nodes assignment order"
    ),
    "sharding": "strategy",
    "training": (
        "steps dtype device seed learning_rate warmup_steps decay_steps lr_schedule decay_fraction weight_decay betas "
        "gradient_clip activation_checkpointing memory_gib compile threads prefetch non_finite max_skipped "
        "timeout_seconds max_restarts grace_seconds"
    ),
    "evaluation": "store every documents length_buckets",
    "checkpoint": "dir every keep resume allow_changed_data asynchronous",
    "metrics": "dir document_ids tensorboard diagnose_every straggler_factor profile",
}
