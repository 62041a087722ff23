"""What a job says about itself before its first step, on rank 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from wlb.config import JobConfig
from wlb.documents.store.reader import TokenStore
from wlb.models.pretrained import tokenizer_warning
from wlb.training.data.loader import StepLoader
from wlb.training.runtime.environment import dense_attention_warning, shared_store_warning

_OVERLONG = {"split": "split", "truncate": "truncated", "drop": "dropped", "error": "refused"}


def greeting(
    config: JobConfig, store: TokenStore, loader: StepLoader, step: int, *, dtype: torch.dtype, device: torch.device
) -> Iterator[str]:
    """Where the job, which has trained ``step`` steps, goes on and on what; then what its user should know."""
    data = loader.epoch_summary
    documents = f"{data.documents:,} documents"
    if data.empty:
        documents += f", {data.empty:,} empty ones passed over"
    if data.overlong:
        documents += f", {data.overlong:,} over {config.data.context_window:,} tokens {_OVERLONG[config.data.overlong]}"
    longest = config.packing.options.most_tokens(config.data.context_window, config.packing.micro_batches)
    yield (
        f"{f'resuming after step {step}' if step else 'starting'} on {config.parallel.world_size} {device.type} "
        f"processes; {documents}; micro-batches of up to {longest:,} tokens"
    )
    if config.training.steps and step >= config.training.steps:
        yield f"wlb: note: all training.steps = {config.training.steps} are done; raise it to train on"
    if loader.changed_data:
        yield f"wlb: warning: continuing on changed data: {loader.changed_data}"
    warnings = (
        dense_attention_warning(dtype, device),
        tokenizer_warning(config.model, store),
        shared_store_warning(),
    )
    yield from filter(None, warnings)
