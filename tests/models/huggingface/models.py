"""Tiny random models of ``transformers``, and ``transformers`` computing in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from wlb.attention import segment_attention
from wlb.models.transformer import Transformer

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 60,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_YARN_BY_LENGTH = _YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.9, "truncate": False}
_QWEN3_MOE = {"head_dim": 20, "moe_intermediate_size": 15, "num_experts": 6, "norm_topk_prob": True}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SIZES, rms_norm_eps=1e-3),
    "llama-3.2": lambda: LlamaConfig(
        **_SIZES, head_dim=12, rope_parameters=_LLAMA3, tie_word_embeddings=True, rms_norm_eps=1e-5
    ),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen2-tied": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=20),
    "llama-biased": lambda: LlamaConfig(**_SIZES, attention_bias=True, rope_parameters=_LINEAR),
    "llama-yarn": lambda: LlamaConfig(**_SIZES, rope_parameters=_YARN),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=24),
    "mistral-v0.3": lambda: MistralConfig(**_SIZES, sliding_window=None),
    "qwen2-window": lambda: Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=10, max_window_layers=1, rope_parameters=_YARN_BY_LENGTH
    ),
    "qwen3-window": lambda: Qwen3Config(
        **_SIZES, head_dim=20, attention_bias=True, use_sliding_window=True, sliding_window=30, max_window_layers=2
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SIZES, **_QWEN3_MOE, num_experts_per_tok=3, mlp_only_layers=[0]),
    "qwen3-moe-window": lambda: Qwen3MoeConfig(
        **_SIZES, **_QWEN3_MOE, num_experts_per_tok=2, attention_bias=True, use_sliding_window=True, sliding_window=20
    ),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=4, sliding_window=24),
    "mixtral-tied": lambda: MixtralConfig(**_SIZES, num_local_experts=4, tie_word_embeddings=True),
}


def save_random_model(name: str, directory: Path, dtype: torch.dtype = torch.float64, **options: Any) -> None:
    """A model in which every parameter, biases and norms too, has random values."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.ndim == 1 else 0.0))
    model.to(dtype).save_pretrained(directory, **options)


@contextmanager
def in_double() -> Iterator[None]:
    """Let ``transformers`` compute in float64 what it computes in float32 for every type: norms and rotary angles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        yield


def load_model(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the others refuse float64
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **eager)
    return model


@torch.no_grad()
def their_scores(model: PreTrainedModel, documents: list[Tensor]) -> Tensor:
    """Scores of every document by itself, one after another: (tokens, vocabulary)."""
    return torch.cat([model(document[None]).logits[0] for document in documents])


@torch.no_grad()
def our_scores(module: Transformer, documents: list[Tensor]) -> Tensor:
    """Scores of the documents packed into one micro-batch."""
    lengths = tuple(map(len, documents))
    positions = torch.cat([torch.arange(length) for length in lengths])
    scores: Tensor = module(torch.cat(documents), positions, partial(segment_attention, segment_lengths=lengths))
    return scores


def two_documents() -> list[Tensor]:
    """90 and 23 tokens: the first is longer than the original context of ``llama-3.2``."""
    random = torch.Generator().manual_seed(1)
    return [torch.randint(60, (length,), generator=random) for length in (90, 23)]
