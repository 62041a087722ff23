"""A job that was stopped and continued trains exactly what an uninterrupted one trains."""

import errno
import itertools
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem

from tests.cases import in_turn
from tests.limits import HUNG_SECONDS
from tests.training import jobs
from tests.training.checkpoint.fakes import damage
from tests.training.distributed import RankFailure, run_ranks
from tests.training.jobs import job, read_steps, trainer_of, write_store
from wlb.errors import UserError
from wlb.job.config import CheckpointConfig, JobConfig, TrainingConfig
from wlb.job.planner import StepPlanner
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.training.checkpoint import checkpointer as checkpoint_module
from wlb.training.checkpoint import files
from wlb.training.checkpoint.checkpointer import Checkpointer
from wlb.training.checkpoint.files import newest_checkpoint
from wlb.training.optimizer import build_optimizer
from wlb.training.preflight import check_job
from wlb.training.process import TrainingError
from wlb.workload import ModelShape

DOCUMENTS = 160
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dp": {"dp": 2},
    "dp3": {"dp": 3},
    "pp": {"pp": 2},
    "interleaved": {"pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b"},
    "dealt": {"pp": 2, "head": "dealt"},
    "tp": {"tp": 2},
    "cp-tp": {"cp": 2, "tp": 2},
    "dp-cp": {"dp": 2, "cp": 2},
    "three": {"cp": 3},
    "pool": {"dp": 2, "pool": 2},
    "pools": {"dp": 2, "pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b", "pool": 1},
}
LONG = 1024  # a window of several tiles of slices
GROUPED: dict[str, dict[str, Any]] = {
    "level": {"grouping": "level"},
    "slices": {"grouping": "slices", "rank_micro_batches": 8},
    "whole": {"grouping": "even", "rank_micro_batches": 3},
}
END = {"steps": None}  # of the epoch


def configure(folder: Path, key: str, **changes: dict[str, Any]) -> JobConfig:
    """A job of four steps with checkpoints after 2 and 4.

    ``key`` is its layout, and after a space its packing method or ``GROUPED``, where that is not the default.
    """
    layout, _, method = key.partition(" ")
    window = LONG if method in ("slices", "whole") else 64
    packing = GROUPED.get(method, {"method": method or "balanced"})
    sections: dict[str, dict[str, Any]] = {
        "model": {"layers": 4, "kv_heads": 2, "vocab_size": 68},
        "packing": {"global_batch": 4, **packing},
        "parallel": LAYOUTS[layout],
        "data": {"context_window": window},  # so small that a planner takes in the documents of several steps at once
        "training": {"dtype": "float64", "steps": 4},
        "checkpoint": {"dir": str(folder / "checkpoints"), "every": 2},
    }
    for name, section in changes.items():
        sections[name] = sections[name] | section
    return job(folder, **sections)


def train(config: JobConfig) -> None:
    run_ranks(config.parallel.layout.world_size, jobs.train, config)


class StraightJobs(dict[str, Path]):
    """Folders of uninterrupted jobs by their key, made when asked for."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder

    def __missing__(self, key: str) -> Path:
        folder = self[key] = self._make_folder(key.replace(" ", "-"))
        write_store(folder / "store", DOCUMENTS, longest=8 * LONG if key.endswith("slices") else 256)
        train(configure(folder, key))
        return folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> StraightJobs:
    return StraightJobs(tmp_path_factory.mktemp)


def stopped_after_two(folder: Path, copy: Path) -> Path:
    """As a kill in step 4 leaves it: metrics of three steps, the checkpoint of two."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    metrics = copy / "metrics" / "steps.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    return copy


def columns(folder: Path, *names: str) -> list[list[Any]]:
    return [[row[name] for row in read_steps(folder)] for name in names]


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


# Interleaved stages resume in the next test, "dp level" as "pools balanced".
@pytest.mark.parametrize(
    "key",
    ["dp", *map(exhaustive, ("pp", "interleaved", "tp", "pool balanced")), "dp level", "pp slices"],
)
def test_resuming_changes_nothing(straight, key, tmp_path):
    train(configure(stopped_after_two(straight[key], tmp_path), key))
    names = ("step", "document_ids", "loss", "grad_norm", "learning_rate", "tokens", "imbalance_degree")
    assert columns(tmp_path, *names) == columns(straight[key], *names)
    assert columns(tmp_path, "step") == [[1, 2, 3, 4]]
    if key == "pp slices":
        checked = check_job(configure(tmp_path, key), 2)
        plans = islice(StepPlanner(checked.job, checked.store.stored_lengths).plans(), 4)
        assert sum(part.earlier > 0 for plan in plans for part in plan.micro_batches) > 1


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        exhaustive("pp", "dp"),
        exhaustive("dp", "interleaved"),  # the last but one resumes pools that are interleaved
        exhaustive("interleaved", "pp"),
        exhaustive("tp sequential", "dp sequential"),
        ("pp sequential", "tp sequential"),
        exhaustive("pp sequential", "cp-tp sequential"),
        exhaustive("pool balanced", "tp balanced"),
        exhaustive("pool balanced", "pools balanced"),
        ("pool balanced", "three level"),
        ("dp level", "pools balanced"),
        ("pp slices", "alone whole"),
        ("pp slices", "dealt slices"),
        exhaustive("dealt", "interleaved"),  # test_export reads such a checkpoint as a whole model
        exhaustive("dp level", "cp-tp level"),
    ],
)
def test_resuming_on_another_layout_trains_the_same(straight, saved, resumed, tmp_path):
    """With other tp or cp documents have other prices; no document changes its step under these packers for that."""
    train(configure(stopped_after_two(straight[saved], tmp_path), resumed))
    assert columns(tmp_path, "document_ids") == columns(straight[saved], "document_ids")
    for name in ("loss", "grad_norm"):
        assert columns(tmp_path, name)[0] == pytest.approx(columns(straight[saved], name)[0], rel=1e-9)


@pytest.mark.parametrize(
    ("saved", "resumed", "changes"),
    [
        exhaustive("pp", "dp-cp", {"packing": {"global_batch": 6}}),
        ("dp", "dp3", {"packing": {"global_batch": 6}}),
        exhaustive("interleaved", "alone", {"packing": {"global_batch": 6}}),
    ],
)
def test_resuming_a_job_that_was_changed_trains_every_document_once(straight, saved, resumed, changes, tmp_path):
    folder = stopped_after_two(straight[saved], tmp_path)
    train(configure(folder, resumed, training=END, **changes))
    rows = read_steps(folder)
    assert rows[:2] == read_steps(straight[saved])[:2]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    trained = [document for row in rows for document in row["document_ids"]]
    assert sorted(document for document in trained if document < DOCUMENTS) == list(range(DOCUMENTS))
    assert len(trained) == len(set(trained))


def test_another_preset_is_refused_before_anything_starts(straight):
    with pytest.raises(UserError, match=r"was saved with packing\.method = 'balanced' and this run has 'sequential'"):
        check_job(configure(straight["dp"], "dp", packing={"method": "sequential"}), 1)


@in_turn(
    ("model", "named"),
    [
        ({"layers": 2}, "layers 4 -> 2"),
        ({"heads": 1, "kv_heads": 1, "head_dim": 8}, "heads 2 -> 1, kv_heads 2 -> 1;"),
        ({"rope_scaling": {"factor": 2.0}}, 'rope_scaling null -> {"rope_type": "llama3", "factor": 2.0, '),
    ],
)
def test_another_model_is_refused_before_anything_starts(straight, model, named):
    message = rf"step-00000004 holds another model than the configuration: {re.escape(named)}"
    with pytest.raises(UserError, match=message):
        check_job(configure(straight["dp"], "pp", model=model), 1)


def test_ranks_refuse_another_model(straight, tmp_path):
    """Half of it, all of whose tensors are in the checkpoint."""
    folder = stopped_after_two(straight["dp"], tmp_path)
    with pytest.raises(RankFailure, match="step-00000002 holds another model than the configuration: layers 4 -> 2;"):
        train(configure(folder, "pp", model={"layers": 2}))


@pytest.mark.parametrize("steps", [4, 3])
def test_a_finished_job_has_nothing_left_to_do(straight, steps, tmp_path):
    shutil.copytree(straight["dp"], tmp_path, dirs_exist_ok=True)
    train(configure(tmp_path, "dp", training={"steps": steps}))
    assert read_steps(tmp_path) == read_steps(straight["dp"])


def _settings_after_resuming(config: JobConfig) -> set[tuple[float, tuple[float, float]]]:
    trainer = trainer_of(config)
    (optimizer,) = trainer.model.optimizers
    assert {parameter.dtype for stage in trainer.model.stages for parameter in stage.parameters()} == {torch.float32}
    assert all(state["step"] == 4 for state in optimizer.state.values())
    return {(group["weight_decay"], group["betas"]) for group in optimizer.param_groups}


def test_the_configuration_decides_the_settings_of_training(straight, tmp_path):
    shutil.copytree(straight["dp"], tmp_path, dirs_exist_ok=True)
    changed = {"weight_decay": 0.25, "betas": (0.8, 0.9), "dtype": "float32"}
    for found in run_ranks(2, _settings_after_resuming, configure(tmp_path, "pp", training=changed)):
        assert found == {(0.25, (0.8, 0.9)), (0.0, (0.8, 0.9))}


def _train_aloud(config: JobConfig, said: Path) -> None:
    sys.stderr = said.open("a", encoding="utf-8", buffering=1)
    jobs.train(config)


def garble(checkpoint: Path) -> None:
    """Zeros in place of tensors, with the checksum of zeros: only reading finds out."""
    file = checkpoint / "__1_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    manifest = files.read_manifest(checkpoint)
    checkpoint.rename(files.hidden_path(checkpoint))
    sums = files.sums_of(files.hidden_path(checkpoint), manifest["files"])
    files.publish(checkpoint, manifest | {"files": sums})


# test_files.py damages every file in every way.
@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("flipped", "its __1_0.distcp does not have its checksum"),
        exhaustive("truncated", "its __1_0.distcp has "),
        exhaustive(".metadata", "its .metadata cannot be read"),
        exhaustive("manifest.json", "its manifest.json cannot be read"),
        ("garbled", "UnpicklingError: Weights only load failed"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(straight, how, named, tmp_path):
    shutil.copytree(straight["dp"], tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoints" / "step-00000004"
    if how == "garbled":
        garble(newest)
    else:
        damage(newest, how)
    run_ranks(2, _train_aloud, configure(tmp_path, "dp"), tmp_path / "said")
    (warning,) = [line for line in (tmp_path / "said").read_text().splitlines() if "warning: checkpoint" in line]
    assert f"step-00000004 is damaged and not used: {named}" in warning
    names = ("step", "document_ids", "loss", "grad_norm")
    assert columns(tmp_path, *names) == columns(straight["dp"], *names)
    assert files.find_damage(newest, contents=True) is None
    assert newest.with_name("damaged-step-00000004").is_dir()


def test_without_a_usable_checkpoint_nothing_starts(straight, tmp_path):
    shutil.copytree(straight["dp"], tmp_path, dirs_exist_ok=True)
    for step, how in ((2, "flipped"), (4, ".metadata")):
        damage(tmp_path / "checkpoints" / f"step-{step:08d}", how)
    message = r"all 2 checkpoints in .* are damaged, .* does not have its checksum"
    with pytest.raises(RankFailure, match=message):
        train(configure(tmp_path, "dp"))
    assert read_steps(tmp_path) == read_steps(straight["dp"])


def _train_and_be_killed(config: JobConfig, where: str, rank: int, call: int) -> None:
    owner = FileSystem if where == "rename" else files
    function, calls = getattr(owner, where), itertools.count(1)

    def killing(*arguments: Any) -> Any:
        if dist.get_rank() == rank and next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    setattr(owner, where, killing)
    jobs.train(config)


# test_restarts.py kills ranks of real jobs at random moments.
@pytest.mark.parametrize(
    ("where", "rank", "call", "newest"),
    [
        ("sums_of", 1, 1, 2),  # rank 1 has written its file
        exhaustive("rename", 0, 1, 2),  # .metadata has yet to get its name, between the one above and the one below
        ("publish", 0, 1, 2),  # .metadata has it
        ("clean_up", 0, 2, 4),  # at the end of the job; the first call is before it saves
    ],
)
def test_a_kill_while_a_checkpoint_is_written_changes_nothing(straight, where, rank, call, newest, tmp_path):
    config = configure(stopped_after_two(straight["dp"], tmp_path), "dp")
    with pytest.raises(RankFailure):
        run_ranks(2, _train_and_be_killed, config, where, rank, call)
    directory = tmp_path / "checkpoints"
    assert newest_checkpoint(config.checkpoint) == files.checkpoint_path(directory, newest)
    train(config)
    names = ("step", "document_ids", "loss", "grad_norm", "learning_rate", "tokens")
    assert columns(tmp_path, *names) == columns(straight["dp"], *names)
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000002", "step-00000004"]


def checkpointers(directory: Path, *keep: int) -> tuple[list[Checkpointer], Tensor]:
    """One for each ``checkpoint.keep``, all of the same small model, and one of its weights."""
    config = TransformerConfig(ModelShape(8, 1, 2, 1, 4, 8, 5))
    model = Transformer(config)
    assert model.embedding is not None
    optimizers = [build_optimizer(model, TrainingConfig())]
    made = [Checkpointer(CheckpointConfig(dir=directory, keep=n), config, [model], optimizers) for n in keep]
    return made, model.embedding.weight


def _save_while_weights_change(directory: Path) -> None:
    """Saves twice with nothing written until weights have changed, and reads both checkpoints back."""
    (checkpointer,), weight = checkpointers(directory, 9)
    checkpointer.save(1, {})  # the first one is waited for
    may_write, write_data = threading.Event(), checkpoint_module._Writer.write_data

    def waiting(*arguments: Any) -> Any:
        assert may_write.wait(HUNG_SECONDS)
        return write_data(*arguments)

    def restored(step: int) -> Tensor:
        checkpointer.load([files.checkpoint_path(directory, step)])
        return weight.detach().clone()

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(checkpoint_module._Writer, "write_data", waiting)
        patch.setattr(checkpoint_module, "_CHECK_SECONDS", 0.01)  # ranks check on each other meanwhile
        weight.fill_(2.0)
        checkpointer.save(2, {})
        weight.fill_(3.0)  # nothing is written yet
        assert [path.name for path in files.complete_checkpoints(directory)] == ["step-00000001"]
        threading.Timer(0.2, may_write.set).start()
        checkpointer.save(3, {})  # waits for the one before it
        assert files.complete_checkpoints(directory)[1].name == "step-00000002"
        weight.fill_(4.0)
        checkpointer.finish()
    assert (restored(2) == 2.0).all()
    assert (restored(3) == 3.0).all()


def test_a_checkpoint_holds_what_was_trained_when_it_was_saved(tmp_path):
    run_ranks(2, _save_while_weights_change, tmp_path / "checkpoints")


def _continue_beside_a_damaged_one(directory: Path) -> tuple[list[str], list[str], list[str]]:
    """Of three checkpoints the newest is damaged; what the next job says when it can write none, and what there is
    before and after it has written."""
    (writing, continuing), _ = checkpointers(directory, 9, 1)
    for step in (1, 2, 6):
        writing.save(step, {})
        writing.finish()
    damage(files.checkpoint_path(directory, 6), "flipped")
    continuing.load(files.complete_checkpoints(directory))
    files.hidden_path(files.checkpoint_path(directory, 9)).mkdir()  # left by a killed job
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "publish", _full_disk)
        patch.setattr(checkpoint_module, "tell", said.append)
        continuing.save(3, {})
        before = sorted(path.name for path in directory.iterdir() if not path.name.startswith(files.HIDDEN))
        with pytest.raises(TrainingError, match="No space left"):
            continuing.finish()
    continuing.save(7, {})
    continuing.finish()
    return said, before, sorted(path.name for path in directory.iterdir())


def _full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_damaged_checkpoint_does_not_count_as_one_to_fall_back_on(tmp_path):
    (((warning,), before, after),) = run_ranks(1, _continue_beside_a_damaged_one, tmp_path)
    assert warning.endswith("the newest one is still step-00000002")
    assert before == ["damaged-step-00000006", "step-00000002"]  # keep is 1 now: there is room before it writes
    assert after == ["damaged-step-00000006", "step-00000007"]
