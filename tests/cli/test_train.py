"""Mistakes that ``wlb train`` tells in one line, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.jobs import VOCABULARY, write_config, write_store
from wlb.cli import app
from wlb.job.config_file import load_config
from wlb.models.configured_model import configured_model
from wlb.training.checkpoint.files import Manifest, Progress, write_manifest
from wlb.training.checkpoint.resuming import model_record


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("wlb.training.launcher._start", _nothing_may_start)
    write_store(tmp_path / "store", documents=400)
    return tmp_path


def _nothing_may_start(*_: object, **__: object) -> None:
    raise AssertionError("processes were started")


def error_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["wlb", "train", *arguments])
    with pytest.raises(SystemExit) as stopped:
        app.main()
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert out == ""
    (line,) = err.splitlines()
    prefix = "wlb: error: "
    assert line.startswith(prefix)
    return line.removeprefix(prefix)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"tp": 2}}, "tp = 2 does not divide 2 query heads and 1 key/value heads"),
        ({"data": {"store": "nowhere/store"}}, "nowhere/store"),
        ({"training": {"learning_rate": -1.0}}, "training.learning_rate"),
        ({"parallel": {"dp": 3}}, "packing.micro_batches = 4 counts all data-parallel ranks"),
        ({"model": {"vocab_size": 66}}, "model.vocab_size = 66 is below the 67 of the token store"),
        ({"model": {"heads": 3}}, "model.hidden = 16 must be a multiple of 2 x model.heads = 6"),
        ({"model": {"kv_heads": 3}}, "heads = 2, not a multiple of kv_heads = 3"),
        ({"parallel": {"pp": 3}}, "2 layers, fewer than the 3 pipeline stages"),
        ({"parallel": {"dp": 2, "pp": 4}}, "packing.micro_batches / parallel.dp = 2 cannot fill"),
        ({"data": {"overlong": "error", "context_window": 64}}, "over data.context_window = 64"),
        ({"training": {"device": "cuda"}}, "need a GPU each"),
    ],
)
def test_a_bad_configuration(folder: Path, changes: dict[str, dict[str, Any]], message: str, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert message in error_of(capsys, monkeypatch, str(write_config(folder, **changes)))


def test_a_bad_override(folder, capsys, monkeypatch):
    config = str(write_config(folder))
    assert "stepz" in error_of(capsys, monkeypatch, config, "--set", "training.stepz=3")
    assert "not of the form" in error_of(capsys, monkeypatch, config, "--set", "steps=3")


def test_a_missing_configuration(folder, capsys, monkeypatch):
    assert "missing.toml does not exist" in error_of(capsys, monkeypatch, str(folder / "missing.toml"))


def test_a_store_without_a_vocabulary(folder, capsys, monkeypatch):
    (folder / "store.json").unlink()
    assert "does not say how large its vocabulary is; set model.vocab_size" in error_of(
        capsys, monkeypatch, str(write_config(folder))
    )


@pytest.mark.parametrize("section", ["checkpoint", "metrics"])
def test_a_directory_that_cannot_be_written(folder, section, capsys, monkeypatch):
    (folder / "file").touch()
    config = write_config(folder, **{section: {"dir": str(folder / "file" / "inside")}})
    assert f"{section}.dir" in error_of(capsys, monkeypatch, str(config))


def test_checkpoints_of_another_job(folder, capsys, monkeypatch):
    other = folder / "checkpoints" / "step-00000010"
    other.mkdir(parents=True)
    config = str(write_config(folder, checkpoint={"dir": str(folder / "checkpoints")}))
    model = model_record(configured_model(load_config(Path(config)).model, VOCABULARY))
    write_manifest(other, Manifest(Progress(10, {"identity": {}}), model, {}))
    assert "written with token store = None, this job has" in error_of(capsys, monkeypatch, config)
    checkpoint = {"dir": str(folder / "checkpoints"), "resume": False}
    assert "already holds step-00000010" in error_of(
        capsys, monkeypatch, str(write_config(folder, checkpoint=checkpoint))
    )
