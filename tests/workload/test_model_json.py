"""Shapes from ``config.json``: of every family that is priced, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.errors import UserError
from wlb.workload import MODEL_SHAPES, model_shape
from wlb.workload.model_json import read_shape, shape_of_config
from wlb.workload.shapes import Experts, Indexer, LatentAttention, LinearLayer, ModelShape
from wlb.workload.weights import parameters

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 80,
}
BASE = (64, 4, 4, 2, 32, 96, 80)
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
}
OF_LATENT = LatentAttention(q_rank=48, kv_rank=40, rope_dim=8, value_dim=20)
DEEPSEEK = ModelShape(
    *(64, 4, 4, 4, 24, 96, 80), experts=Experts(8, 2, 24, shared_hidden=48, dense_layers=1), latent=OF_LATENT
)
INDEXED = LATENT | {"index_topk": 16, "index_n_heads": 3, "index_head_dim": 12}
SPARSE = replace(DEEPSEEK, indexer=Indexer(16, 3, 12, layers=4))
DELTA = {
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
KDA = {"head_dim": 12, "num_heads": 5, "short_conv_kernel_size": 4, "full_attn_layers": [3], "kda_layers": [1, 2, 4]}
KIMI = {name: LATENT[name] for name in LATENT if name != "q_lora_rank"} | {
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "linear_attn_config": KDA,
    "pad_token_id": 0,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 20, "mamba_n_groups": 2}
NEMOTRON = {
    "hybrid_override_pattern": "MEM*-",
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "n_groups": 3,
    "ssm_state_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 16,
}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}

HYBRID = ModelShape(*BASE, pattern="M-M-M-*-", linear=LinearLayer("gated_delta", 6, 3, 20, 12), gated_attention=True)

FAMILIES: dict[str, tuple[dict[str, Any], ModelShape]] = {
    "llama": ({}, ModelShape(*BASE)),
    "qwen2": (
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3, "head_dim": 16},
        ModelShape(64, 4, 4, 2, 16, 96, 80, sliding_window=16, full_attention_layers=3),
    ),
    "qwen3": ({}, ModelShape(*BASE)),
    "mistral": ({"sliding_window": 16}, ModelShape(*BASE, sliding_window=16)),
    "mixtral": (LOCAL_EXPERTS, ModelShape(*BASE, experts=Experts(8, 2, 96))),
    "qwen3_moe": (ROUTED | {"mlp_only_layers": [0]}, ModelShape(*BASE, experts=Experts(8, 2, 24, dense_layers=1))),
    "deepseek_v3": (LATENT, DEEPSEEK),
    "gemma3_text": (
        {"sliding_window": 16, "num_hidden_layers": 7},
        ModelShape(64, 7, 4, 2, 32, 96, 80, sliding_window=16, full_attention_every=6),
    ),
    "deepseek_v32": (INDEXED, SPARSE),
    "glm_moe_dsa": (
        INDEXED | {"index_topk_freq": 2, "index_skip_topk_offset": 2},
        replace(SPARSE, indexer=Indexer(16, 3, 12, layers=3)),
    ),
    "qwen3_next": (
        ROUTED | DELTA | {"shared_expert_intermediate_size": 40, "mlp_only_layers": []},
        replace(HYBRID, pattern="MEMEME*E", experts=Experts(8, 2, 24, shared_hidden=40)),
    ),
    "qwen3_5_text": (DELTA | {"full_attention_interval": 2}, replace(HYBRID, pattern="M-*-M-*-")),
    "qwen3_5_moe_text": (
        ROUTED | DELTA | {"shared_expert_intermediate_size": 40, "intermediate_size": None},
        replace(HYBRID, ffn_hidden=48, pattern="MEMEME*E", experts=Experts(8, 2, 24, shared_hidden=40)),
    ),
    "kimi_linear": (
        KIMI,
        replace(
            DEEPSEEK,
            pattern="M-ME*EME",
            experts=Experts(8, 2, 24, shared_hidden=48, dense_layers=1),
            latent=replace(OF_LATENT, q_rank=0),
            linear=LinearLayer("kda", 5, 5, 12, 12),
        ),
    ),
    "nemotron_h": (
        NEMOTRON,
        ModelShape(
            *(64, 3, 4, 2, 32, 96, 80),
            pattern="MEM*-",
            experts=Experts(8, 2, 24, shared_hidden=40, latent=16),
            linear=LinearLayer("mamba2", 6, 3, 20, 12),
            ffn_matrices=2,
        ),
    ),
    "granitemoehybrid": (
        MAMBA
        | {"layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 40, "head_dim": 16}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "mamba_expand": 2},
        ModelShape(
            *(64, 4, 4, 2, 16, 40, 80),
            pattern="ME*EMEME",
            experts=Experts(8, 2, 96, shared_hidden=40),
            linear=LinearLayer("mamba2", 8, 2, 20, 16),
        ),
    ),
    "falcon_h1": (
        MAMBA | {"mamba_d_ssm": 96},
        ModelShape(*BASE, pattern="H-H-H-H-", linear=LinearLayer("mamba2", 8, 2, 20, 12)),
    ),
    "gpt_oss": (
        LOCAL_EXPERTS | {"sliding_window": 16},
        ModelShape(*BASE, sliding_window=16, full_attention_every=2, experts=Experts(8, 2, 96, biased=True)),
    ),
}


def written(directory, document):
    (directory / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return str(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_transformers_builds_it(family, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    more, shape = FAMILIES[family]
    directory = written(tmp_path, {"model_type": family} | SMALL | more)
    assert model_shape(directory) == shape
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not any(part in name for part in ("bias", "shared_expert_gate", "conv1d", "A_log"))
    )
    assert parameters(shape, tied_embeddings=config.tie_word_embeddings) == built
    # transformers writes defaults out, renames keys and lists the type of every layer.
    config.save_pretrained(tmp_path)
    assert model_shape(str(tmp_path / "config.json")) == shape


WINDOWS = {
    "use_sliding_window": st.booleans(),
    "sliding_window": st.none() | st.integers(1, 9),
    "max_window_layers": st.integers(0, 6),
}
ONE_FOR_ALL = ("mixtral", "qwen3_moe")  # whose classes read no layer_types


@st.composite
def windowed(draw: st.DrawFn) -> dict[str, Any]:
    """``config.json`` of a family with windows: keys that agree, that do not, and that are absent."""
    family = draw(st.sampled_from(["mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"]))
    layers = draw(st.integers(1, 6))
    types = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers)
    in_order = types.map(sorted)  # full attention comes first, as Qwen has it
    keys = draw(st.fixed_dictionaries({}, optional=WINDOWS | {"layer_types": st.none() | types | in_order}))
    more = LOCAL_EXPERTS if family in ("mixtral", "gpt_oss") else ROUTED if family == "qwen3_moe" else {}
    return SMALL | more | keys | {"model_type": family, "num_hidden_layers": layers}


@given(windowed())
def test_windows_are_those_of_transformers_for_pricing_and_training(tmp_path_factory, document):
    transformers = pytest.importorskip("transformers")
    config_json = pytest.importorskip("wlb.models.huggingface.config_json", exc_type=ImportError)
    directory = tmp_path_factory.mktemp("model")
    written(directory, document)
    config = transformers.AutoConfig.from_pretrained(directory)
    layers, types = document["num_hidden_layers"], getattr(config, "layer_types", None)
    if types is None or document["model_type"] in ONE_FOR_ALL:
        theirs = [config.sliding_window] * layers
    else:
        theirs = [config.sliding_window if name == "sliding_attention" else None for name in types]
        if config.sliding_window is None and "sliding_attention" in types:  # where theirs fails in the first step
            with pytest.raises(UserError, match="there is no window by sliding_window and use_sliding_window"):
                read_shape(directory)
            return
    blocks_in_order = theirs == sorted(theirs, key=bool)
    shape, refusal = read_or_refused(read_shape, directory)
    assert (shape is None) == ("layer_types does not repeat" in refusal)
    if shape is None:
        assert not blocks_in_order
        return
    kinds = [shape.block_kind(layer).attention for layer in range(layers)]
    assert [shape.sliding_window if kind == "sliding" else None for kind in kinds] == theirs
    if document["model_type"] in ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"):
        trained, refusal = read_or_refused(config_json.read_config, directory)
        if trained is None:
            assert "layer_types" in refusal
            assert not blocks_in_order or document["model_type"] == "mistral"
        else:
            assert trained.shape == shape


def test_a_family_that_is_not_known_is_read_by_its_keys(tmp_path):
    sliding = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
    for keys, shape in (
        ({"use_sliding_window": False, "sliding_window": 16, "layer_types": ["full_attention"] * 4}, ModelShape(*BASE)),
        (sliding, ModelShape(*BASE, sliding_window=16, full_attention_every=2)),
        (ROUTED | {"first_k_dense_replace": 1}, ModelShape(*BASE, experts=Experts(8, 2, 24, dense_layers=1))),
        (INDEXED, SPARSE),
    ):
        assert model_shape(written(tmp_path, SMALL | keys | {"model_type": "of_next_year"})) == shape


@pytest.mark.parametrize("family", ["GPTNeoX", "Phi", "Arcee", "Persimmon", "GPT2", "Bloom", "GPTJ", "Mpt"])
def test_families_without_a_gate_have_two_matrices(family):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 80}
    config = getattr(transformers, f"{family}Config")(**sizes)
    config.update({"intermediate_size": 256} if hasattr(config, "intermediate_size") else {})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    matrices = (each for name, each in model.named_parameters() if each.dim() > 1 and "wpe" not in name)
    shape = shape_of_config(config)
    assert parameters(shape, tied_embeddings=config.tie_word_embeddings) == sum(each.numel() for each in matrices)


def test_in_a_trainer_a_family_that_is_not_priced_is_a_dense_decoder_with_a_warning():
    transformers = pytest.importorskip("transformers")
    sizes = {name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    config = transformers.Lfm2Config(**sizes, num_key_value_heads=2, intermediate_size=96)
    with pytest.warns(UserWarning, match="for a dense decoder, because model_type 'lfm2' is not known, and its"):
        shape = shape_of_config(config)
    assert shape == ModelShape(64, 4, 4, 2, 16, 96, 80)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"index_topk": 16}, "index_topk"),
        (DELTA, "linear_num_value_heads"),
        (MAMBA, "mamba_n_heads"),
        ({"attention_chunk_size": 16}, "attention_chunk_size"),
        (INDEXED | {"index_kpool": 4}, "index_kpool"),
        (ROUTED | {"moe_latent_size": 16, "expert_choice": True}, "expert_choice"),
    ],
)
def test_what_a_family_that_is_not_known_has_more_is_refused_by_name(keys, name, tmp_path):
    directory = written(tmp_path, SMALL | keys | {"model_type": "of_next_year"})
    with pytest.raises(UserError, match=f"'of_next_year' is not known, and its {name} is not priced; choose a preset"):
        model_shape(directory)


def read_or_refused(read: Callable[[Path], Any], directory: Path) -> tuple[Any, str]:
    try:
        return read(directory), ""
    except UserError as refusal:
        return None, str(refusal)


def test_kimi_k2_is_read_as_deepseek(tmp_path):
    assert model_shape(written(tmp_path, {"model_type": "kimi_k2"} | SMALL | LATENT)) == DEEPSEEK


def test_published_keys_of_gemma_have_the_defaults_of_its_class(tmp_path):
    # As google/gemma-3-12b-it has them, of its text part.
    text = {
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    }
    assert model_shape(written(tmp_path, {"model_type": "gemma3", "text_config": text})) == MODEL_SHAPES["gemma3-12b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "kimi_linear"} | KIMI | {"linear_attn_config": {}}, "there is no layer_types; complete it"),
        ({"model_type": "granitemoehybrid", "layer_types": ["conv"] * 4}, "layer_types has 'conv'"),
        ({"model_type": "nemotron_h"} | NEMOTRON | {"hybrid_override_pattern": "ME-"}, "pattern = 'ME-' for 1 layers"),
        ({"model_type": "nemotron_h"} | NEMOTRON | {"ssm_state_size": None}, "there is no ssm_state_size; complete it"),
        ({"model_type": "glm_moe_dsa"} | INDEXED | {"indexer_types": 3}, "indexer_types = 3 does not list 4 layers"),
        ({"model_type": "glm_moe_dsa"} | INDEXED | {"indexer_types": ["full"]}, "does not list 4 layers; correct it"),
        ({"hidden_size": None}, "there is no hidden_size; complete it"),
        ({"head_dim": None, "hidden_size": 63}, "there is no head_dim; complete it"),
        ({"model_type": "qwen2", "num_key_value_heads": None}, "there is no num_key_value_heads; complete it"),
        ({"model_type": []}, r"model_type \[\] is not priced"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 5} | ROUTED, "mlp_only_layers = 5 is not priced"),
        ({"vocab_size": 8.5}, "vocab_size = 8.5 is not a whole number of at least 1"),
        ({"num_key_value_heads": 3}, "heads = 4, not a multiple of kv_heads = 3"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [2]} | ROUTED, r"mlp_only_layers = \[2\] is not priced"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2} | ROUTED, "decoder_sparse_step = 2 is not priced"),
        (
            {"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"] * 2},
            "layer_types does not repeat every 1 layers",
        ),
        (
            {"model_type": "gpt_oss", "layer_types": ["full_attention"] * 3} | LOCAL_EXPERTS,
            "layer_types has 3 types for num_hidden_layers = 4; correct one of them",
        ),
        (
            {"model_type": "gpt_oss", "layer_types": ["chunked_attention"] * 4} | LOCAL_EXPERTS,
            "layer_types has 'chunked_attention', which is not supported",
        ),
    ],
)
def test_what_is_not_priced_is_refused_in_one_line(change, message, tmp_path):
    directory = written(tmp_path, {"model_type": "llama"} | SMALL | change)
    with pytest.raises(UserError, match=message) as caught:
        model_shape(directory)
    assert str(caught.value).startswith(f"{directory}/config.json: ")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"holds no config\.json"):
        model_shape(str(tmp_path.parent))
    with pytest.raises(UserError, match=r"unknown model 'llama9'; did you mean .* or name the directory"):
        model_shape("llama9")
