"""The models that published tables name: presets, and a few that are none.

Quoted: GPT-3 and Nemotron from NVIDIA/NeMo (``nemo/collections/llm/gpt/model``), MPT from mosaicml/llm-foundry
(``scripts/train/yamls/pretrain``), Llama 2, Code Llama and Qwen from their config.json. A feed-forward network
without a gate (GPT-3, MPT, Nemotron) stands here as SwiGLU of the same number of weights, two thirds as wide.
"""

from __future__ import annotations

import re

from wlb.errors import UserError
from wlb.workload import MODEL_SHAPES, ModelShape
from wlb.workload.flops import gemm_flops_per_token, pair_flops


def _ungated(hidden: int, layers: int, heads: int, kv_heads: int, ffn_hidden: int, vocab_size: int) -> ModelShape:
    return ModelShape(hidden, layers, heads, kv_heads, hidden // heads, round(2 / 3 * ffn_hidden), vocab_size)


def _mpt(hidden: int, layers: int, heads: int) -> ModelShape:
    return _ungated(hidden, layers, heads, heads, 4 * hidden, 50_368)


def _gpt3(hidden: int, layers: int, heads: int) -> ModelShape:
    return _ungated(hidden, layers, heads, heads, 4 * hidden, 51_200)


_SHAPES = MODEL_SHAPES | {
    "gpt3-5b": _gpt3(4096, 24, 32),
    "gpt3-20b": _gpt3(6144, 44, 48),
    "gpt3-175b": _gpt3(12_288, 96, 96),
    "nemotron-8b": _ungated(4096, 32, 32, 32, 16_384, 256_000),
    "nemotron-340b": _ungated(18_432, 96, 96, 8, 73_728, 256_000),
    "mpt-125m": _mpt(768, 12, 12),
    "mpt-350m": _mpt(1024, 24, 16),
    "mpt-760m": _mpt(1536, 24, 12),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56),
    "mpt-70b": _mpt(8192, 80, 64),
    "llama2-13b": ModelShape(5120, 40, 40, 40, 128, 13_824, 32_000),
    "llama-34b": ModelShape(8192, 48, 64, 8, 128, 22_016, 32_000),
    "qwen2.5-32b": ModelShape(5120, 64, 40, 8, 128, 27_648, 152_064),
}
# What tables call models that have another name here; compared without case, owner, remarks in brackets and "-2-node".
_ALIASES = {
    "llama2-7b": "7b",
    "llama2-70b": "70b",
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
    "deepseekv3": "deepseek-v3",
    "deepseek-v3-671b": "deepseek-v3",
    "deepseek-r1-distill-llama-8b": "llama3-8b",
    "codellama-34b-hf": "llama-34b",
    "qwen3-moe-30b": "qwen3-30b-a3b",
    "qwen3-30b": "qwen3-30b-a3b",
    "qwen3-30b3a": "qwen3-30b-a3b",
    "qwen3-235b": "qwen3-235b-a22b",
}


def published_shape(name: str) -> ModelShape:
    """The model that a table calls ``name``; raises ``UserError`` where its shape is not known here."""
    plain = re.sub(r"\(.*?\)", "", name).strip().lower()
    plain = re.sub(r"[\s_]+", "-", plain.rpartition("/")[2])
    plain = re.sub(r"-\d+-nodes?$", "", plain.replace("llama-3", "llama3"))
    try:
        return _SHAPES[_ALIASES.get(plain, plain)]
    except KeyError:
        raise UserError(f"the shape of {name} is not known here") from None


def model_flops_per_token(shape: ModelShape, tokens: int, *, causal: bool) -> float:
    """Operations that tables count for a token of a document of ``tokens``: three times those of its forward.

    ``causal`` says that attention counts over half of all pairs of query and key, otherwise over all.
    """
    pairs = tokens / 2 if causal else tokens
    return 3 * (gemm_flops_per_token(shape) + shape.layers * pair_flops(shape) * pairs)
