"""A trained checkpoint becomes a model that ``transformers`` scores as the job did, with its tokenizer."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from tests.models.huggingface.models import load_model, save_random_model, their_scores
from tests.training.checkpoint.fakes import damage
from tests.training.distributed import run_ranks
from tests.training.jobs import train, write_config
from wlb.cli import app
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.job.config_file import load_config

VOCABULARY = 60


def _store(prefix: Path, seed: int) -> TokenStore:
    random = torch.Generator().manual_seed(seed)
    with TokenStoreWriter(prefix, vocab_size=VOCABULARY) as writer:
        for length in (5, 40, 17, 1, 64, 30, 9, 26) * 4:
            writer.add(torch.randint(VOCABULARY, (length,), generator=random).numpy())
    return TokenStore.open(prefix)


def _job(folder: Path, **changes: Any) -> Path:
    sections: dict[str, Any] = {
        "checkpoint": {"dir": str(folder / "checkpoints"), "every": 2},
        "training": {"steps": 3, "dtype": "float32", "learning_rate": 0.01},
        **changes,
    }
    return write_config(folder, **sections)


def _wlb(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["wlb", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        app.main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("name", "parallel"), [("llama-3.2", {"pp": 2, "head": "dealt"}), ("qwen3-moe", {"dp": 2, "ep": 2})]
)
def test_transformers_finds_the_loss_that_the_job_found(
    name: str, parallel: dict[str, Any], tmp_path: Path, capsys, monkeypatch
) -> None:
    """From pretrained weights and back: two stages, each with a head and the embedding tied to it; divided experts."""
    model = tmp_path / "model"
    save_random_model(name, model, torch.bfloat16)
    for file in ("generation_config.json", "tokenizer.json"):
        (model / file).write_text(json.dumps({"of": file}))
    _store(tmp_path / "store", seed=0)
    held_out = _store(tmp_path / "held_out", seed=1)
    config = _job(
        tmp_path,
        parallel=parallel,
        evaluation={"store": str(tmp_path / "held_out")},
        data={"context_window": 64, "store": str(tmp_path / "store")},
    )
    # A preset and pretrained weights exclude each other: [model] has but one key.
    section = f"[model]\npretrained = {json.dumps(str(model))}\n["
    config.write_text(re.sub(r"\[model\].*?\n\[", section, config.read_text(), flags=re.S))
    run_ranks(2, train, load_config(config))
    assert _wlb(monkeypatch, "export", config, "--out", tmp_path / "out", "--dtype", "float32", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["step"], answer["dtype"]) == (3, "float32")
    assert answer["tokenizer_files"] == ["tokenizer.json"]
    trained, total, labels = load_model(tmp_path / "out", torch.float32), 0.0, 0
    assert answer["parameters"] == sum(parameter.numel() for parameter in trained.parameters())
    for document in range(len(held_out)):
        tokens = torch.from_numpy(held_out.read(document).astype("int64"))
        scores = their_scores(trained, [tokens])
        total += F.cross_entropy(scores[:-1], tokens[1:], reduction="sum").item()
        labels += len(tokens) - 1
    (*_, last) = (tmp_path / "metrics" / "evaluation.jsonl").read_text().splitlines()
    assert json.loads(last)["loss"] == pytest.approx(total / labels, rel=1e-5)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"of": "generation_config.json"}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["eos_token_id"], settings["max_position_embeddings"]) == (2, 512)
    capsys.readouterr()
    if name == "llama-3.2":
        _check_refusals(config, tmp_path, capsys, monkeypatch)


def _check_refusals(config: Path, folder: Path, capsys, monkeypatch) -> None:
    def said(*arguments: object) -> str:
        assert _wlb(monkeypatch, "export", config, *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return str(line)

    assert "exists and is not overwritten" in said("--out", folder / "out")
    new = ("--out", folder / "new")
    assert "holds no checkpoint of step 1; choose one of 2, 3" in said(*new, "--step", 1)
    assert "holds no checkpoint" in said(*new, "--set", f"checkpoint.dir={folder}")
    assert "another model than the configuration: tied_embeddings true -> false;" in said(
        *new, "--set", "model.tied_embeddings=false"
    )
    newest = folder / "checkpoints" / "step-00000003"
    damage(newest, "flipped")
    assert re.search(r"is damaged: .* checksum; choose another --step, of 2", said(*new))
    damage(newest, ".metadata")  # as a job that deletes it meanwhile
    assert re.search(r"is damaged: .* cannot be read: .*; choose another --step, of 2", said(*new))
    assert not (folder / "new").exists()
    assert _wlb(monkeypatch, "export", config, *new, "--step", 2) == 0
    assert "step 2, " in capsys.readouterr().out
    shutil.rmtree(newest)
    damage(folder / "checkpoints" / "step-00000002", "flipped")
    assert re.search(r"is damaged: .* checksum; there is no other", said("--out", folder / "newer"))


def test_the_tokenizer_that_was_trained_for_the_store_comes_along(tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a rose is a rose is a rose. " * 20)
    assert _wlb(monkeypatch, "prepare", tmp_path / "text", "--out", tmp_path / "store", "--train-bpe", 260) == 0
    config = _job(tmp_path, data={"context_window": 64}, training={"steps": 1}, packing={"global_batch": 1})
    run_ranks(1, train, load_config(config))
    assert _wlb(monkeypatch, "export", config, "--out", tmp_path / "out") == 0
    assert "tokenizer: tokenizer.json, tokenizer_config.json" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    store = TokenStore.open(tmp_path / "store")
    assert tokenizer("a rose is")["input_ids"] == store.read(0)[: len(tokenizer("a rose is")["input_ids"])].tolist()
    model = load_model(tmp_path / "out", torch.bfloat16)
    assert model.config.eos_token_id == tokenizer.eos_token_id == store.read(0)[-1]
    assert next(model.parameters()).dtype == torch.bfloat16
