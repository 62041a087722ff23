"""Models named in published tables: presets and a few others.

Quoted: GPT-3 and Nemotron from NVIDIA/NeMo (``nemo/collections/llm/gpt/model``), MPT from mosaicml/llm-foundry
(``scripts/train/yamls/pretrain``), Nemotron 3 Nano 4B from NVIDIA-NeMo/Megatron-Bridge (``recipes/nemotronh``), GPT 4B
from sail-sg/VocabularyParallelism (``artifact/README.md``), Llama 2, Code Llama, Qwen and Moonlight from their
config.json. A feed-forward network without a gate (GPT-3, MPT, earlier Nemotron) is modelled as SwiGLU with as many
weights, two thirds as wide.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wlb.errors import UserError
from wlb.workload import MODEL_SHAPES, ModelShape
from wlb.workload.flops import gemm_flops_per_token, pair_flops
from wlb.workload.shapes import Experts, LatentAttention, LinearLayer

_TP = 16  # ranks that can share a feed-forward network; its width is rounded to this


def _ungated(hidden: int, layers: int, heads: int, kv_heads: int, ffn_hidden: int, vocab_size: int) -> ModelShape:
    width = _TP * round(2 / 3 * ffn_hidden / _TP)
    return ModelShape(hidden, layers, heads, kv_heads, hidden // heads, width, vocab_size)


def _mpt(hidden: int, layers: int, heads: int) -> ModelShape:
    return _ungated(hidden, layers, heads, heads, 4 * hidden, 50_368)


def _gpt3(hidden: int, layers: int, heads: int) -> ModelShape:
    return _ungated(hidden, layers, heads, heads, 4 * hidden, 51_200)


_SHAPES = MODEL_SHAPES | {
    **{f"gpt-4b-{size}k": _ungated(3072, 32, 24, 24, 12_288, 1000 * size) for size in (32, 64, 128, 256)},
    "gpt3-5b": _gpt3(4096, 24, 32),
    "gpt3-20b": _gpt3(6144, 44, 48),
    "gpt3-175b": _gpt3(12_288, 96, 96),
    "nemotron-8b": _ungated(4096, 32, 32, 32, 16_384, 256_000),
    "nemotron-22b": _ungated(6144, 40, 48, 48, 24_576, 256_000),
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
    "qwen2.5-0.5b-instruct": ModelShape(896, 24, 14, 2, 64, 4864, 151_936),
    "qwen2.5-32b": ModelShape(5120, 64, 40, 8, 128, 27_648, 152_064),
    "qwen3-0.6b": ModelShape(1024, 28, 16, 8, 128, 3072, 151_936),
    "qwen3-1.7b": ModelShape(2048, 28, 16, 8, 128, 6144, 151_936),
    "qwen3-4b": ModelShape(2560, 36, 32, 8, 128, 9728, 151_936),
    "nemotron-3-nano-4b": ModelShape(
        *(3136, 25, 40, 8, 128, 12_544, 131_072),
        pattern="M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
        linear=LinearLayer("mamba2", 96, 8, 128, 80),
        ffn_matrices=2,
    ),
    "moonlight-16b-a3b": ModelShape(
        *(2048, 27, 16, 16, 192, 11_264, 163_840),
        experts=Experts(64, 6, 1408, shared_hidden=2 * 1408, dense_layers=1),
        latent=LatentAttention(q_rank=0, kv_rank=512, rope_dim=64, value_dim=128),
    ),
}
# Names in tables for models with another name here; compared without case, owner, remarks in brackets and "-2-node".
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
    "moonlight-16b": "moonlight-16b-a3b",
    "qwen3-moe-30b": "qwen3-30b-a3b",
    "qwen3-30b": "qwen3-30b-a3b",
    "qwen3-30b3a": "qwen3-30b-a3b",
    "qwen3-235b": "qwen3-235b-a22b",
    "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
    "qwen3.8-27b": "qwen3.5-27b",
    "glm5-2": "glm-5.2",
    "nemotron-3-nano": "nemotron-3-nano-30b-a3b",
    "nemotron-v3-nano-30b": "nemotron-3-nano-30b-a3b",
    "nemotron-3-5-lightning": "nemotron-3-nano-30b-a3b",
    "nemotron-3.5-lightning": "nemotron-3-nano-30b-a3b",
    "nemotron-3-super": "nemotron-3-super-120b-a12b",
    "nemotron-v3-super-120b": "nemotron-3-super-120b-a12b",
}


_GIVEN = ("layers", "hidden", "heads", "ffn", "vocab")  # of a row's shape; below, what it may also say
_MAY_GIVE = ("kv_heads", "head_dim", "tied", "mlp", "norm")
_GATED, _PLAIN = ("swiglu", "geglu"), ("gelu", "relu", "squared_relu")


def shape_of_row(row: Mapping[str, Any]) -> ModelShape:
    """The model of a row: its ``shape``, or else the one that ``model`` names.

    A ``shape`` has ``layers``, ``hidden``, ``heads``, ``ffn`` (width) and ``vocab``, and where they differ from plain
    multi-head attention and SwiGLU, ``kv_heads``, ``head_dim`` and ``mlp``. Raises ``UserError`` for another one.
    """
    given: Any = row.get("shape")
    if given is None:
        return published_shape(row["model"])
    if not isinstance(given, dict) or not {*_GIVEN} <= {*given} <= {*_GIVEN, *_MAY_GIVE}:
        raise UserError(f"its shape has not {', '.join(_GIVEN)}, or more than {', '.join(_MAY_GIVE)}: {given}"[:200])
    for name in (*_GIVEN, "kv_heads", "head_dim"):
        if name in given and not (isinstance(given[name], int) and given[name] > 0):
            raise UserError(f"its shape has {name} = {given[name]!r}, which is no size")
    heads, hidden, mlp = given["heads"], given["hidden"], given.get("mlp", _GATED[0])
    sizes = {"kv_heads": heads, "head_dim": hidden // heads} | given
    layers, kv_heads, head_dim, ffn, vocab = (
        sizes[name] for name in ("layers", "kv_heads", "head_dim", "ffn", "vocab")
    )
    if mlp not in (*_GATED, *_PLAIN):
        raise UserError(f"its shape has mlp = {mlp!r}; choose one of {', '.join((*_GATED, *_PLAIN))}")
    if mlp in _PLAIN:
        return replace(_ungated(hidden, layers, heads, kv_heads, ffn, vocab), head_dim=head_dim)
    return ModelShape(hidden, layers, heads, kv_heads, head_dim, ffn, vocab)


def published_shape(name: str) -> ModelShape:
    """The model that a table calls ``name``; raises ``UserError`` if its shape is unknown."""
    plain = re.sub(r"\(.*?\)", "", name).strip().lower()
    plain = re.sub(r"[\s_]+", "-", plain.rpartition("/")[2])
    plain = re.sub(r"-\d+-nodes?$", "", re.sub(r"^llama-([23])(?=[.-])", r"llama\1", plain))
    try:
        return _SHAPES[_ALIASES.get(plain, plain)]
    except KeyError:
        raise UserError(f"the shape of {name} is unknown here") from None


def model_flops_per_token(shape: ModelShape, tokens: int, *, causal: bool) -> float:
    """Operations that tables count per token of a document of ``tokens``: three times its forward.

    With ``causal`` attention counts half of all query-key pairs, otherwise all pairs.
    """
    pairs = tokens / 2 if causal else tokens
    return 3 * (gemm_flops_per_token(shape) + shape.layers * pair_flops(shape) * pairs)
