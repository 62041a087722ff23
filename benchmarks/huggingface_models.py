"""Which Hugging Face models train packed documents exactly under our attention, and which are refused: measured.

    .venv/bin/python -m benchmarks.huggingface_models [--models Llama,Mistral,..] [--stand-ins] [--out FILE]

Every model is a tiny one of two layers with random weights in float64. Five documents of 5 to 40 tokens, longer than
its windows and chunks of 16, are trained packed, by transformers' own attention and by ours, and over two gloo
processes that share them (cp = 2). The error is that of the gradient against one document at a time by transformers'
own attention; the loss is taken from the scores in float64.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parts import kernel_stand_ins
from benchmarks.parts.measurement import chosen, command, facts, make_parser, show, write
from benchmarks.parts.ranks import on_ranks
from wlb.errors import UserError, require
from wlb.integrations.huggingface import register_attention
from wlb.integrations.packed import FlatteningCollator, packed_batches

Row = dict[str, Any]
CP = 2
EXACT = 1e-7  # some models take parts in float32
SIZES: Row = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
EXPERTS: Row = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT: Row = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MAMBA: Row = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
LINEAR: Row = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LLAMA4: Row = {**EXPERTS, "head_dim": 8, "intermediate_size_mlp": 64}
UNDROPPED: Row = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
LONGROPE: Row = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
DYNAMIC: Row = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
MODELS: dict[str, Row] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": EXPERTS,
    "Mistral": {"sliding_window": 16},
    "Mixtral": EXPERTS,
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 16},
    "Gemma3": {"head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi": {},
    "Phi3": {"sliding_window": 16},
    "GPT2": UNDROPPED,
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 16},
    "Olmoe": EXPERTS,
    "Cohere": {},
    "Cohere2": {"sliding_window": 16, "head_dim": 8},
    "Starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "SmolLM3": {},
    "Granite": {},
    "Glm4": {"head_dim": 8},
    "Glm4Moe": EXPERTS,
    "DeepseekV3": {**EXPERTS, **LATENT},
    "MiniCPM3": LATENT,
    "GptOss": {**EXPERTS, "sliding_window": 16, "head_dim": 8},
    "Llama4": {**LLAMA4, "attention_chunk_size": 16},
    "Llama4 chunks of 64": {**LLAMA4, "attention_chunk_size": 64},
    "Phi3 longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    "Llama dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 32},
    "Phimoe": {**EXPERTS, "sliding_window": 16},
    "StableLm": {},
    "Nemotron": {},
    "DeepseekV32": {**EXPERTS, **LATENT},
    "Bloom": {"n_head": 4},
    "Falcon": {"num_kv_heads": 4},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "Mamba": {},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "Jamba": {**EXPERTS, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
    "Bamba": {**MAMBA, "attn_layer_indices": [1]},
    "Zamba2": {"mamba_headdim": 8, "n_mamba_heads": 8, "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid"]},
    "GraniteMoeHybrid": {
        **EXPERTS,
        **MAMBA,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 32,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "MiniMax": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "RecurrentGemma": {},
    "FalconH1": {**MAMBA, "mamba_d_ssm": 64, "mamba_d_state": 16, "head_dim": 8},
    "NemotronH": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 16,
        "head_dim": 8,
    },
    "Lfm2Moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "OlmoHybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "Qwen3_5": LINEAR,
    "Qwen3_5Moe": {**EXPERTS, **LINEAR},
    "KimiLinear": {**EXPERTS, **LATENT, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
    "BailingHybrid": {**EXPERTS, **LATENT, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
    "DeepseekV4": {**EXPERTS, **LATENT},
    "Lfm3": EXPERTS,
    "Qwen3Next": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
}
RANDOM = np.random.default_rng(0)
DOCUMENTS = [{"input_ids": RANDOM.integers(3, 97, length).tolist()} for length in (40, 5, 23, 31, 17)]


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Try the models asked for, print a table and write it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--stand-ins", action="store_true", help="in place of the kernels of hybrid models")
    parser.add_argument("--models", default=",".join(MODELS), help="which of the table; all of them by default")
    options = parser.parse_args(arguments)
    names = chosen(options.models, [*MODELS], "model")
    rows = on_ranks(CP, rows_of, names, options.stand_ins)[0]
    show("Gradient of packed documents against one document at a time, float64", [*map(verdicts, rows)])
    write(facts("torch", "transformers") | {"models": rows}, options.out)


def rows_of(names: Sequence[str], stand_ins: bool = False) -> list[Row]:
    if stand_ins:
        kernel_stand_ins.install()
    require("transformers", "hf").logging.set_verbosity_error()
    return [row_of(name) for name in names]


def row_of(name: str) -> Row:
    """One model; a number is the error of its gradient, text says why there is none. Both processes call it."""
    model = model_of(name)
    train_singly(model)
    expected = gradient(model)
    batch = FlatteningCollator()(DOCUMENTS)
    row: Row = {"model": name, "transformers": error_of(model, batch, expected)}
    try:
        register_attention(model)
    except UserError as error:
        return row | {"packed": str(error), "shared": str(error)}
    return row | {
        "packed": error_of(model, batch, expected),
        "shared": error_of(model, share_of(DOCUMENTS), expected),
    }


def model_of(name: str) -> Any:
    transformers, family = require("transformers", "hf"), name.partition(" ")[0]
    torch.manual_seed(0)
    named = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = named(**SIZES | MODELS[name])
    config.use_cache = False
    config._experts_implementation = "eager"  # the others need float32
    of_family = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    return of_family(config).double().train()


def share_of(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """This process's share of all documents in one micro-batch, of which each process has a part of each."""
    tokens = sum(len(document["input_ids"]) for document in documents)
    sizes: dict[str, Any] = {"context_window": tokens, "micro_batches": 1, "cp": CP, "sharding": "per_document"}
    return next(packed_batches(documents, **sizes, model="tiny", hardware="cpu")).batches[0].with_labels()


def error_of(model: Any, batch: Mapping[str, Any], expected: Tensor) -> float | str:
    model.zero_grad()
    inputs = dict(batch)
    labels = inputs.pop("labels")[:, 1:]
    try:
        train(model, inputs, labels)
    except (
        UserError,
        ValueError,
        IndexError,
        RuntimeError,
    ) as error:  # transformers and kernels of a share raise others
        return str(error)
    found = gradient(model)
    if "attend" in inputs:
        dist.all_reduce(found)
    return float((found - expected).norm() / expected.norm())


def train(model: Any, inputs: Mapping[str, Any], labels: Tensor) -> None:
    scores = model(**inputs).logits[0, :-1].double()
    torch.nn.functional.cross_entropy(scores, labels[0], reduction="sum").backward()


def train_singly(model: Any) -> None:
    for document in DOCUMENTS:
        ids = torch.tensor([document["input_ids"]])
        train(model, {"input_ids": ids, "use_cache": False}, ids[:, 1:])


def gradient(model: Any) -> Tensor:
    grads = [parameter.grad for parameter in model.parameters()]
    return torch.cat([torch.zeros(0) if grad is None else grad.flatten() for grad in grads]).clone()


def verdict(result: float | str) -> str:
    """As the table says it: exact, refused, or wrong, which none may be under our attention."""
    if isinstance(result, str):
        return f"refused: {' '.join(result.split()[:9])} ..."
    return f"{'exact' if result < EXACT else 'WRONG'}, {result:.0e}"


def verdicts(row: Row) -> dict[str, str]:
    """A row as it is shown."""
    return {
        "model": row["model"],
        "transformers' attention": verdict(row["transformers"]),
        "ours": verdict(row["packed"]),
        f"ours, cp = {CP}": "" if row["shared"] == row["packed"] else verdict(row["shared"]),
    }


if __name__ == "__main__":
    sys.exit(main())
