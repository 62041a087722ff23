"""What Hugging Face calls the parameters of a ``Transformer``; the matrices are laid out alike."""

from __future__ import annotations

_OUTSIDE_BLOCKS = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
_INSIDE_BLOCKS = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def hugging_face_name(name: str) -> str:
    """``layers.7.attention.wq.weight`` as ``model.layers.7.self_attn.q_proj.weight``, and so on."""
    if name in _OUTSIDE_BLOCKS:
        return _OUTSIDE_BLOCKS[name]
    _, layer, inside = name.split(".", 2)
    module, _, kind = inside.rpartition(".")
    return f"model.layers.{layer}.{_INSIDE_BLOCKS[module]}.{kind}"
