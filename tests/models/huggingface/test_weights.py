"""Jobs that start from a Hugging Face directory: what they take from it, in every layout, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.models.huggingface.models import load_model, save_random_model, their_scores
from tests.models.huggingface.ranks import weights_in
from tests.training.distributed import run_ranks
from tests.training.jobs import job, read_steps, train, write_store
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.models.huggingface.config_json import read_config
from wlb.models.huggingface.weights import PretrainedWeights
from wlb.models.transformer import Transformer
from wlb.schedules.layout import Layout
from wlb.training.environment import trained_model
from wlb.training.preflight import check_job

LAYOUTS: dict[str, dict[str, Any]] = {
    "llama-3.2": {"pp": 2, "tp": 2},
    "qwen3": {"dp": 2, "tp": 2},
    "qwen3-moe": {"dp": 2, "cp": 2, "ep": 2},  # cuts an expert in two unequal parts
    "qwen3-moe-window": {"dp": 4},
    "mixtral": {"pp": 2, "tp": 2, "ep": 2},
}


@pytest.fixture(autouse=True)
def store(tmp_path: Path) -> TokenStore:
    """Eight short documents with the vocabulary of the random models."""
    random = torch.Generator().manual_seed(2)
    with TokenStoreWriter(tmp_path / "store", vocab_size=60) as writer:
        for length in (5, 40, 17, 1, 64, 30, 9, 26):
            writer.add(torch.randint(60, (length,), generator=random).numpy())
    return TokenStore.open(tmp_path / "store")


def _job(folder: Path, **changes: dict[str, Any]) -> JobConfig:
    changes["model"] = {"pretrained": str(folder / "model"), **changes.get("model", {})}
    sections = job(folder, **{**changes, "model": {}}).model_dump(mode="json", exclude_unset=True)
    return JobConfig.model_validate(sections | {"model": changes["model"]})


def test_every_rank_holds_its_part_of_the_files(tmp_path: Path) -> None:
    for name in LAYOUTS:
        save_random_model(name, tmp_path / name, torch.bfloat16, max_shard_size="10KB")
    directories = [tmp_path / name for name in LAYOUTS]
    by_rank = run_ranks(4, weights_in, directories, [Layout(**layout) for layout in LAYOUTS.values()])
    for directory, ranks in zip(directories, zip(*by_rank, strict=True), strict=True):
        whole = Transformer(read_config(directory))
        PretrainedWeights(directory).load(whole)
        expected = {name: weight.detach() for name, weight in whole.named_parameters()}
        assert {name for held in ranks for name in held} == expected.keys()
        for held in ranks:
            assert all(torch.equal(weight, expected[name]) for name, weight in held.items())


@pytest.mark.parametrize(("name", "parallel"), [("qwen3", {}), ("mixtral", {"cp": 2, "ep": 2})])
def test_the_first_loss_is_that_of_transformers(
    name: str, parallel: dict[str, int], tmp_path: Path, store: TokenStore
) -> None:
    save_random_model(name, tmp_path / "model", torch.float32)
    config = _job(
        tmp_path, parallel=parallel, training={"steps": None, "dtype": "float32"}, packing={"global_batch": 1}
    )
    run_ranks(parallel.get("cp", 1), train, config)
    rows = read_steps(tmp_path)
    model, total, labels = load_model(tmp_path / "model", torch.float32), 0.0, 0
    for document in rows[0]["document_ids"]:
        tokens = torch.from_numpy(store.read(document).astype("int64"))
        scores = their_scores(model, [tokens])
        total += F.cross_entropy(scores[:-1], tokens[1:], reduction="sum").item()
        labels += len(tokens) - 1
    assert rows[0]["loss"] == pytest.approx(total / labels, rel=1e-5)
    assert rows[0]["tokens"] == labels + len(rows[0]["document_ids"])


def test_the_model_is_the_files_with_rotary_settings_and_untying_of_the_job(tmp_path: Path, store: TokenStore) -> None:
    save_random_model("llama-3.2", tmp_path / "model", torch.float32)
    config = _job(tmp_path, model={"rope_theta": 5e6, "layers": 3, "tied_embeddings": False})
    model = trained_model(config, store)
    pretrained = read_config(tmp_path / "model")
    assert model.shape == pretrained.shape
    assert (model.rope_theta, model.tied_embeddings) == (5e6, False)
    assert (model.norm_eps, model.rope_scaling) == (pretrained.norm_eps, pretrained.rope_scaling)
    PretrainedWeights(tmp_path / "model").check(model)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama", {"layers": 4}, r"model.layers = 4, but .*model has 3"),
        ("llama", {"qk_norm": True}, r"model.qk_norm = True, but .*model has False"),
        ("llama", {"vocab_size": 99}, r"model.vocab_size = 99, but .*model has 60"),
        ("llama", {"tied_embeddings": True}, "has a head of its own"),
        ("llama", {"experts": 4}, r"model.experts = 4, but .*model has None"),
        ("mixtral", {"experts": 8}, r"model.experts = 8, but .*model has 4"),
        ("mixtral", {"router": "sigmoid"}, r"model.router = sigmoid, but .*model has softmax"),
    ],
)
def test_settings_that_the_weights_do_not_have_are_refused(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_random_model(name, tmp_path / "model", torch.float32)
    with pytest.raises(UserError, match=said):
        check_job(_job(tmp_path, model=changes), 1)


def test_a_preset_beside_pretrained_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="both set the shape"):
        _job(tmp_path, model={"name": "7b"})


def test_a_store_of_another_vocabulary_or_foreign_weights_stop_a_job_before_it_starts(tmp_path: Path) -> None:
    save_random_model("llama", tmp_path / "model", torch.float32)
    check_job(_job(tmp_path), 1)
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {"visual.weight": torch.ones(1)}, file)
    with pytest.raises(UserError, match=r"has unexpected visual\.weight"):
        check_job(_job(tmp_path), 1)
    write_store(tmp_path / "other")
    with pytest.raises(UserError, match="vocabulary of 60, below the 67"):
        check_job(_job(tmp_path, data={"store": str(tmp_path / "other")}), 1)
    (tmp_path / "model" / "config.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match=r"model_type None is not supported"):
        check_job(_job(tmp_path), 1)
