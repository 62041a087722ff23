"""Small models of ``transformers``, documents, and a balanced ``Trainer``; what they come to one document at a time."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers as typed

from wlb.integrations.huggingface import balanced

transformers: Any = typed

RANDOM = np.random.default_rng(0)
DOCUMENTS = [{"input_ids": RANDOM.integers(0, 97, length).tolist()} for length in (300, 5, 87, 120, 33)]
LENGTHS = RANDOM.lognormal(3.2, 0.9, 90).astype(int).clip(4, 128)
DATA = [{"input_ids": RANDOM.integers(0, 97, length).tolist(), "number": n} for n, length in enumerate(LENGTHS)]
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "use_cache": False,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 16},
    "Llama4": {**EXPERTS, "attention_chunk_size": 300, "head_dim": 8, "intermediate_size_mlp": 64},
    "Mixtral": EXPERTS,
    "Qwen3Moe": {**EXPERTS, "moe_intermediate_size": 32},
    "DeepseekV3": {**EXPERTS, **LATENT, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
}


def model(family: str = "Llama", attention: str | None = "sdpa", **settings: Any) -> Any:
    torch.manual_seed(0)
    chosen = SIZES | FAMILIES.get(family, {}) | {"experts_implementation": "eager"} | settings
    named = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = named(**chosen, attn_implementation=attention)
    of_family = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    return of_family(config).double().train()


def gradient(of: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in of.parameters()])


def single_gradient(family: str, documents: list[Any] = DOCUMENTS, **settings: Any) -> torch.Tensor:
    """Of the summed loss, one document at a time, by transformers' own attention."""
    oracle = model(family, **settings)
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        oracle(input_ids=ids, labels=ids, num_items_in_batch=1).loss.backward()
    return gradient(oracle)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def arguments(folder: str, **settings: Any) -> Any:
    usual: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "ddp_backend": "gloo" if dist.is_initialized() else None,
        "optim": "sgd",
    }
    return transformers.TrainingArguments(**usual | settings)


def balanced_trainer(
    folder: Any, of_model: Any = None, documents: Any = DATA, collator: Any = None, **changes: Any
) -> Any:
    """A balanced ``base`` that plans by ``planning``; the other ``changes`` are its arguments."""
    base, planning = changes.pop("base", transformers.Trainer), changes.pop("planning", {})
    trainer_class = balanced(base, **{"context_window": 128} | planning)
    of_model = model() if of_model is None else of_model
    return trainer_class(of_model, arguments(str(folder), **changes), collator, documents)
