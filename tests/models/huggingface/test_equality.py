"""Both ways, our scores are those of ``transformers``, document for document."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.models.huggingface.models import (
    CONFIGS,
    in_double,
    load_model,
    our_scores,
    save_random_model,
    their_scores,
    two_documents,
)
from wlb.errors import UserError
from wlb.models.huggingface.config_json import read_config
from wlb.models.huggingface.weights import PretrainedWeights
from wlb.models.transformer import Transformer
from wlb.training.checkpoint.export import export_model
from wlb.workload.model_json import read_config_json

# Written with YaRN's defaults, with a length of its own, and as Llama, which computes the same.
SAID_OTHERWISE = ("llama-yarn", "qwen2-window", "mistral-v0.3")


def _ours(directory: Path, dtype: torch.dtype) -> Transformer:
    config = read_config(directory)
    module = Transformer(config).to(dtype)
    weights = PretrainedWeights(directory)
    weights.check(config)
    weights.load(module)
    return module


def _export(module: Transformer, out: Path, dtype: torch.dtype) -> None:
    tensors = {name: parameter.detach().to(dtype) for name, parameter in module.named_parameters()}
    export_model(module.config, tensors, out, longest=512, companions={}, more_config={})


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_transformers_both_ways(name: str, tmp_path: Path) -> None:
    documents = two_documents()
    save_random_model(name, tmp_path / "theirs")
    module = _ours(tmp_path / "theirs", torch.float64)
    _export(module, tmp_path / "ours", torch.float64)
    ours = our_scores(module, documents)
    with in_double():
        models = [load_model(tmp_path / side, torch.float64) for side in ("theirs", "ours")]
        theirs, exported = (their_scores(of_side, documents) for of_side in models)
    assert ours.std() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours, exported, rtol=1e-9, atol=1e-9)
    assert read_config(tmp_path / "ours") == read_config(tmp_path / "theirs")
    given, written = (of_side.config.to_dict() for of_side in models)
    not_ours = {"_name_or_path", "bos_token_id", "eos_token_id", "dtype", "transformers_version", "head_dim"}
    for key in given.keys() - not_ours if name not in SAID_OTHERWISE else ():
        assert written[key] == given[key], key


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "qwen3-moe", "mixtral"])
def test_weights_spread_over_files_are_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random_model(name, tmp_path / "many", torch.bfloat16, max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    module = _ours(tmp_path / "many", torch.float32)
    monkeypatch.setattr("wlb.training.checkpoint.export._LARGEST_FILE", 10_000)
    _export(module, tmp_path / "ours", torch.bfloat16)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(p.numel() * 2 for p in module.parameters())
    again = _ours(tmp_path / "ours", torch.float32)
    for mine, back in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, back)  # bfloat16 to float32 and back loses nothing
    saved = load_model(tmp_path / "ours", torch.bfloat16).state_dict()
    for key, tensor in load_model(tmp_path / "many", torch.bfloat16).state_dict().items():
        assert torch.equal(tensor, saved[key])


def test_a_tied_checkpoint_can_be_trained_untied(tmp_path: Path) -> None:
    save_random_model("qwen2-tied", tmp_path)
    config = replace(read_config(tmp_path), tied_embeddings=False)
    weights = PretrainedWeights(tmp_path)
    weights.check(config)
    module = Transformer(config)
    weights.load(module)
    parameters = dict(module.named_parameters())
    assert torch.equal(parameters["embedding.weight"], parameters["head.output.weight"])


def test_a_directory_is_never_overwritten_nor_left_unfinished(tmp_path: Path, monkeypatch) -> None:
    save_random_model("llama", tmp_path / "theirs", torch.float32)
    module = _ours(tmp_path / "theirs", torch.float32)
    with pytest.raises(ValueError, match="exists and is not overwritten"):
        _export(module, tmp_path / "theirs", torch.float32)

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.distributed.checkpoint.save", fail)
    with pytest.raises(KeyboardInterrupt):
        _export(module, tmp_path / "out", torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    monkeypatch.undo()
    with pytest.raises(UserError, match="cannot be written: File exists"):
        _export(module, tmp_path / "theirs" / "config.json" / "out", torch.float32)


def test_weights_say_what_they_are_and_can_be_read_by_others(tmp_path: Path) -> None:
    save_random_model("llama", tmp_path / "theirs", torch.float32)
    _export(_ours(tmp_path / "theirs", torch.float32), tmp_path / "ours", torch.float32)
    with safe_open(tmp_path / "ours" / "model-00001-of-00001.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
    assert read_config_json(tmp_path / "ours")["torch_dtype"] == "float32"
    assert len({path.stat().st_mode for path in (tmp_path / "ours").iterdir()}) == 1
