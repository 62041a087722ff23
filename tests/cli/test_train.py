"""``wlb train``: mistakes it tells in one line before any process starts, and its dry run."""

import inspect
import json
import logging
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cases import in_turn
from tests.cli.conftest import printed, refusal
from tests.training.checkpoint.fakes import write_checkpoint
from tests.training.jobs import VOCABULARY, write_config, write_store
from wlb.job.config import JobConfig
from wlb.job.config_file import load_config
from wlb.models.configured_model import configured_model
from wlb.training.checkpoint.files import model_record
from wlb.training.process import signals_to_end


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("wlb.training.launcher.train_as_rank", _nothing_may_start)
    # Torch's agents ask who calls them; for the lines of source, which they do not look at, all modules are searched.
    monkeypatch.setattr(inspect, "stack", partial(inspect.stack, 0))
    write_store(tmp_path / "store", documents=400)
    handlers = {asked: signal.getsignal(asked) for asked in signals_to_end()}
    yield tmp_path
    logging.disable(logging.NOTSET)
    for asked, handler in handlers.items():
        signal.signal(asked, handler)


def _nothing_may_start(*_: object, **__: object) -> None:
    raise AssertionError("ranks were started")


def error_of(*arguments: object) -> str:
    return refusal("train", *arguments)


@in_turn(
    ("changes", "message"),
    [
        ({"parallel": {"tp": 2}}, "tp = 2 does not divide 2 query heads and 1 key/value heads"),
        ({"data": {"store": "nowhere/store"}}, "nowhere/store"),
        ({"training": {"learning_rate": -1.0}}, "training.learning_rate"),
        (
            {"parallel": {"dp": 3}, "packing": {"method": "sequential"}},
            "packing.global_batch = 4 must be a multiple of parallel.dp = 3",
        ),
        ({"model": {"vocab_size": 66}}, "model.vocab_size = 66 is below the 67 of the token store"),
        ({"model": {"heads": 3}}, "model.hidden = 16 must be a multiple of 2 x model.heads = 6"),
        ({"model": {"kv_heads": 3}}, "heads = 2, not a multiple of kv_heads = 3"),
        ({"parallel": {"pp": 3}}, "2 layers, fewer than the 3 pipeline stages"),
        (
            {"parallel": {"dp": 4, "pp": 2}, "packing": {"method": "sequential"}},
            "packing.global_batch = 4 gives each rank 1 micro-batches",
        ),
        ({"data": {"overlong": "error", "context_window": 64}}, "over context_window = 64"),
        ({"training": {"device": "cuda"}}, "need a GPU each"),
    ],
)
def test_a_bad_configuration(folder: Path, changes: dict[str, dict[str, Any]], message: str, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert message in error_of(write_config(folder, **changes))


def test_a_bad_override_and_a_missing_configuration(folder):
    config = write_config(folder)
    assert "stepz" in error_of(config, "--set", "training.stepz=3")
    assert "not of the form" in error_of(config, "--set", "steps=3")
    assert "missing.toml does not exist" in error_of(folder / "missing.toml")


@in_turn("mode", [[], ["--dry-run"]])
def test_a_configuration_is_checked_before_torch_is_imported(folder, monkeypatch, mode):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "missing.toml does not exist" in error_of(folder / "missing.toml", *mode)
    assert "training.stepz is not a setting" in error_of(write_config(folder), "--set", "training.stepz=3", *mode)
    assert "torch is not installed" in error_of(write_config(folder), *mode)


def test_a_store_without_a_vocabulary(folder):
    (folder / "store.json").unlink()
    assert "does not give the size of its vocabulary; set model.vocab_size" in error_of(write_config(folder))


@pytest.mark.parametrize("section", ["checkpoint", "metrics"])
def test_a_directory_that_cannot_be_written(folder, section):
    (folder / "file").touch()
    assert f"{section}.dir" in error_of(write_config(folder, **{section: {"dir": str(folder / "file" / "inside")}}))


def test_checkpoints_of_another_job(folder):
    config = write_config(folder, checkpoint={"dir": str(folder / "checkpoints")})
    model = model_record(configured_model(load_config(config).model, VOCABULARY))
    write_checkpoint(folder / "checkpoints", 10, model=model)
    assert "the state was saved with token store = None and this run has" in error_of(config)


def test_a_trace_is_a_setting(wlb, monkeypatch):
    asked: list[JobConfig] = []

    def launch(config: JobConfig, **_: object) -> int:
        asked.append(config)
        return 0

    monkeypatch.setattr("wlb.training.launcher.launch", launch)
    wlb("train", CONFIG, "--set", "training.steps=4", "--trace")
    assert [(config.training.steps, config.metrics.profile) for config in asked] == [(4, True)]


CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tiny.toml"
TRIED = ("train", CONFIG, "--dry-run", "--hardware", "h100")


def test_a_job_without_its_store_is_tried_on_synthetic_documents(wlb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = wlb(*TRIED, "--set", "training.steps=3", "--json")
    shown = json.loads(out)
    assert status == 1
    assert shown["problems"] == [
        "token store index runs/data/stdlib.idx does not exist; make the store with wlb prepare"
    ]
    assert (shown["data"], shown["speedup"]) == ("synthetic", None)
    assert shown["first_steps"]["steps"] == 3
    assert sum(shown["worst_step"].values()) == shown["worst_step_bytes"] < shown["memory_limit_bytes"]
    assert not list(tmp_path.iterdir())


def test_a_job_that_would_start_is_predicted(tmp_path):
    write_store(tmp_path / "store")
    config = write_config(tmp_path, parallel={"pp": 2})
    out = printed("train", config, "--dry-run")
    assert "planned on its token store" in out
    simulated = printed("simulate", config, "--set", "parallel.pp=2", "--hardware", "cpu", "--json")
    (row,) = (row for row in json.loads(simulated)["systems"] if row["system"] == "as configured")
    assert f"simulated: {row['speedup']:.2f}x the tokens per second of plain-4d" in out
    assert "first 4 steps, simulated: " in out
    assert not (tmp_path / "metrics").exists()


def test_documents_that_do_not_fill_a_step_are_said_and_no_problem(tmp_path):
    write_store(tmp_path / "store", documents=3)
    out = printed("train", write_config(tmp_path), "--dry-run")
    assert "not simulated: the documents have" in out


def test_unknown_hardware_is_refused_in_a_line():
    assert "unknown hardware 'foo'; choose from" in refusal("train", CONFIG, "--dry-run", "--hardware", "foo")
