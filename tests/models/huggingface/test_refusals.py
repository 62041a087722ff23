"""What we would compute wrongly, or cannot read, is refused by name."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cases import in_turn
from tests.models.huggingface.models import save_random_model
from wlb.errors import UserError
from wlb.models.huggingface.config_json import _trained, read_config, to_config_json
from wlb.models.huggingface.weights import EMBEDDING, HEAD, PretrainedWeights
from wlb.workload.shapes import Experts

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LONG = {"original_max_position_embeddings": 8192}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_random_model("llama", tmp_path, torch.float32)
    return tmp_path


def _change(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


QWEN3_MOE = {"model_type": "qwen3_moe", "norm_topk_prob": True}
MISTRAL = {"model_type": "mistral", "layer_types": ["chunked_attention"]}
FULL_IN_THE_MIDDLE = {
    "model_type": "qwen2",
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


@in_turn(
    ("changes", "said"),
    [
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' is not supported; choose a model of llama, mistral, qwen2, "),
        ({"model_type": "qwen3_moe"}, "norm_topk_prob = false is not supported, only true"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not priced"),
        (QWEN3_MOE | {"mlp_only_layers": [1]}, "mlp_only_layers = [1] is not priced; only the first layers may be "),
        ({"model_type": "mixtral"}, "there is no num_local_experts; complete it"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.01}, "router_jitter_noise = 0.01 is not supported, only 0"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        (MISTRAL, "layer_types has 'chunked_attention'"),
        (FULL_IN_THE_MIDDLE, "layer_types is supported where full_attention comes first"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supported, only None"),
        ({"attention_dropout": 0.5}, "attention_dropout = 0.5 is not supported, only 0"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps = -1e-05 is not a finite number of at least 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' is neither true nor false"),
        ({"hidden_size": 32.7}, "hidden_size = 32.7 is not a whole number of at least 1"),
        ({"vocab_size": True}, "vocab_size = True is not a whole number of at least 1"),
        ({"num_hidden_layers": 10**6}, "layers = 1000000; it must be at most 10000"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 is not a whole number of at least 1"),
        ({"head_dim": 3}, "head_dim = 3, which is odd"),
        ({"head_dim": None, "hidden_size": 34}, "hidden_size = 34 is not a multiple of num_attention_heads = 4"),
        ({"num_key_value_heads": 3}, "heads = 4, not a multiple of kv_heads = 3"),
    ],
)
def test_a_configuration_we_do_not_compute_is_named(model: Path, changes: dict[str, Any], said: str) -> None:
    _check_refusal(model, changes, said)


@in_turn(
    ("rotary", "said"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "'yarn' has no original_max_position_embeddings"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic'"),
        ({"rope_type": "llama3"}, "has no factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
        ({"full_attention": {"rope_theta": 5.0}}, "full_attention is not supported"),
        ({"rope_type": "default", "type": "linear"}, "rope_type is given twice, as 'default' and"),
        (LLAMA3 | {"factor": 0}, "factor = 0: must be greater than or equal to 1"),
        (LLAMA3 | {"low_freq_factor": 5.0}, "must be over low_freq_factor = 5.0"),
        (LLAMA3 | {"factor": True}, "factor = True: must be a number"),
        ({"rope_theta": 0}, "rope_theta = 0.0 is not a base of rotary frequencies; give"),
        ({"rope_theta": -5.0}, "rope_theta = -5.0 is not a finite number"),
        (YARN | LONG | {"rope_theta": 1.001}, "has no ramp over the frequencies of rope_theta = 1.001"),
        (YARN | {"beta_slow": 20.0, "truncate": False}, "beta_slow = 20 and an original context of 64 tokens has no"),
        (YARN | {"beta_fast": 1e308}, "beta_fast = 1e+308: must be less than"),
        (YARN | {"factor": math.nan}, "factor = nan: must be a finite number"),
        (YARN | {"truncate": 0}, "truncate = 0: must be true or false"),
        (YARN | {"original_max_position_embeddings": "1K"}, "embeddings = '1K' is not a whole number"),
        (YARN | {"mscale": 0.7}, "mscale"),
    ],
)
def test_rotary_settings_we_do_not_compute_are_named(model: Path, rotary: dict[str, Any], said: str) -> None:
    _check_refusal(model, {"rope_parameters": rotary}, said)


def _check_refusal(model: Path, changes: dict[str, Any], said: str) -> None:
    path = model / "config.json"
    written = path.read_text()
    _change(model, **changes)
    with pytest.raises(UserError, match=r"config\.json") as caught:
        read_config(model)
    assert said in str(caught.value)
    path.write_text(written)  # for the next case


def test_old_and_new_spelling_of_rotary_settings_mean_the_same(model: Path) -> None:
    _change(model, rope_parameters={"rope_theta": 77.0} | LLAMA3)
    new = read_config(model)
    _change(model, rope_parameters=None, rope_theta=77.0, rope_scaling=LLAMA3)
    assert read_config(model) == new
    assert new.rope_theta == 77.0
    assert new.rope_scaling is not None
    _change(model, rope_parameters={"rope_theta": 5.0}, rope_theta=7.0, rope_scaling=None)
    with pytest.raises(UserError, match=r"rope_theta is given twice, as 7\.0 and as 5\.0"):
        read_config(model)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        read_config(tmp_path)
    with pytest.raises(UserError, match=r"holds no weights; save the model as safetensors"):
        PretrainedWeights(tmp_path)


def test_tensors_that_are_missing_unexpected_or_of_another_shape_are_named(model: Path) -> None:
    config, file = read_config(model), model / "model.safetensors"
    tensors = load_file(file)

    def check(changed: dict[str, torch.Tensor]) -> None:
        save_file(changed, file)
        PretrainedWeights(model).check(config)

    check(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    norm = "model.layers.1.input_layernorm.weight"
    with pytest.raises(UserError, match=f"lacks {norm}"):
        check({name: tensor for name, tensor in tensors.items() if name != norm})
    with pytest.raises(UserError, match=r"has unexpected a, b, c and 1 more"):
        check(tensors | {name: torch.ones(1) for name in "abcd"})
    with pytest.raises(UserError, match=rf"{norm} of type torch.float32 and shape \(31,\), but .* asks for \(32,\)"):
        check(tensors | {norm: torch.ones(31)})
    with pytest.raises(UserError, match=rf"{norm} of type torch.int8 and .* one of torch.float64, .*; save the model"):
        check(tensors | {norm: torch.ones(32, dtype=torch.int8)})
    with pytest.raises(UserError, match=r"lacks lm_head.weight"):
        check({name: tensor for name, tensor in tensors.items() if name != HEAD})


def test_experts_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    save_random_model("mixtral", tmp_path, torch.float32)
    config, file = read_config(tmp_path), tmp_path / "model.safetensors"
    tensors, expert = load_file(file), "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    save_file(tensors | {expert: torch.ones(48, 32)}, file)
    with pytest.raises(
        UserError, match=rf"has {expert} of type torch.float32 and shape \(48, 32\), but .* \(32, 48\),"
    ):
        PretrainedWeights(tmp_path).check(config)
    save_file({name: tensor for name, tensor in tensors.items() if name != expert}, file)
    with pytest.raises(UserError, match=f"lacks {expert}; its config.json describes another model"):
        PretrainedWeights(tmp_path).check(config)


def test_a_head_beside_tied_embeddings_is_their_copy_or_refused(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    _change(model, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"has a lm_head.weight that differs .* set model.tied_embeddings = false"):
        PretrainedWeights(model).check(read_config(model))
    PretrainedWeights(model).check(replace(read_config(model), tied_embeddings=False))
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, file)
    PretrainedWeights(model).check(read_config(model))


def test_files_that_are_damaged_missing_or_of_another_format(model: Path) -> None:
    file, index, config = model / "model.safetensors", model / "model.safetensors.index.json", read_config(model)
    names = dict.fromkeys(load_file(file), "model.safetensors")
    index.write_text(json.dumps({"weight_map": names}))
    save_file({"layers.0.attention.wq.weight": torch.ones(1)}, model / "consolidated.safetensors")  # as of Mistral
    PretrainedWeights(model).check(config)
    content = file.read_bytes()
    file.rename(model / "model.bin")
    save_file({HEAD: torch.ones(1)}, model / "model-2.safetensors")
    with pytest.raises(UserError, match=r"lacks model.embed_tokens.weight, .* another model, or files are missing"):
        PretrainedWeights(model).check(config)
    for damaged, written in ((file, content[:1000]), (index, b"{}"), (index, b"[]"), (index, b"{")):
        damaged.write_bytes(written)
        with pytest.raises(UserError, match=r"weights in .* cannot be read \(.*\); download them again"):
            PretrainedWeights(model)


def test_a_model_that_no_family_computes_is_not_exported(model: Path) -> None:
    config = read_config(model)
    windowed = replace(config.shape, sliding_window=8, full_attention_layers=1)
    for parts, named in (
        ({"qkv_bias": True, "qk_norm": True}, "qkv_bias, model.qk_norm"),
        ({"o_bias": True}, "o_bias"),
        ({"shape": windowed}, "sliding_window, model.full_attention_layers"),
    ):
        with pytest.raises(UserError, match=f"no Hugging Face family combines model.{named}"):
            to_config_json(replace(config, **parts), longest=1, dtype="float32")


def test_a_mixture_that_no_family_computes_is_not_exported(model: Path) -> None:
    dense = read_config(model)

    def family(**parts: Any) -> str:
        experts = Experts(8, 2, 16, **{name: parts.pop(name) for name in vars(Experts(1, 1, 1)) & parts.keys()})
        config = replace(dense, shape=replace(dense.shape, experts=experts), **parts)
        return str(to_config_json(config, longest=1, dtype="float32")["model_type"])

    assert family() == "mixtral"
    document = to_config_json(
        replace(dense, shape=replace(dense.shape, experts=Experts(8, 2, 16))), longest=1, dtype="float32"
    )
    assert _trained({key: value for key, value in document.items() if key != "rope_theta"}).rope_theta == 1e6
    assert family(qk_norm=True, dense_layers=1) == "qwen3_moe"
    for parts, named in (
        ({"router": "sigmoid"}, "experts, model.router"),
        ({"qk_norm": True, "shared_hidden": 16}, "qk_norm, model.experts, model.shared_expert_hidden"),
        ({"dense_layers": 1}, "experts, model.first_dense_layers"),
        ({"qkv_bias": True}, "qkv_bias, model.experts"),
    ):
        with pytest.raises(UserError, match=f"no Hugging Face family combines model.{named}; train without one"):
            family(**parts)
