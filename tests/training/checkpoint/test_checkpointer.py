"""A job that was stopped and continued trains exactly what an uninterrupted one trains."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.limits import HUNG_SECONDS
from tests.training.distributed import RankFailure, run_ranks
from tests.training.jobs import job, read_steps, trainer_of, write_store
from wlb.errors import UserError
from wlb.job.config import CheckpointConfig, JobConfig, TrainingConfig
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.training.checkpoint import checkpointer as checkpoint_module
from wlb.training.checkpoint import storage
from wlb.training.checkpoint.checkpointer import Checkpointer
from wlb.training.checkpoint.files import (
    Manifest,
    Progress,
    checkpoint_path,
    complete_checkpoints,
    find_damage,
    start_writing,
    write_manifest,
)
from wlb.training.checkpoint.resuming import agreed_checkpoint, newest_checkpoint
from wlb.training.optimizer import build_optimizer
from wlb.training.preflight import check_job
from wlb.training.runtime.failures import TrainingError
from wlb.workload import ModelShape

DOCUMENTS = 160
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "pp": {"pp": 2},
    "interleaved": {"pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b"},
    "tp": {"tp": 2},
    "cp-tp": {"cp": 2, "tp": 2},
    "three": {"cp": 3},
    "pool": {"dp": 2, "pool": 2},
    "pools": {"dp": 2, "pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b", "pool": 1},
}


def _train(config: JobConfig) -> None:
    trainer_of(config).run()


def _train_aloud(config: JobConfig, said: Path) -> None:
    sys.stderr = said.open("a", encoding="utf-8", buffering=1)
    _train(config)


def configure(
    folder: Path,
    parallel: dict[str, Any],
    micro_batches: int = 4,
    method: str = "makespan",
    *,
    allow_changed_data: bool = False,
    **model: Any,
) -> JobConfig:
    packing = {"method": method}
    if method == "level":
        packing = {"method": "elastic", "grouping": "level"}
    return job(
        folder,
        "best" if method == "makespan" else "elastic",
        model={"layers": 4, "kv_heads": 2, "vocab_size": 68, **model},
        packing={"micro_batches": micro_batches, **packing},
        parallel=parallel,
        data={"context_window": 64},  # so small that a planner takes in the documents of several steps at once
        training={"dtype": "float64", "steps": 4},
        checkpoint={"dir": str(folder / "checkpoints"), "every": 2, "allow_changed_data": allow_changed_data},
    )


def train(config: JobConfig) -> None:
    run_ranks(config.parallel.layout.world_size, _train, config)


class StraightJobs(dict[str, Path]):
    """Folders of uninterrupted jobs of four steps with checkpoints after 2 and 4, made when asked for.

    The key is a layout, and after a space a packing method, where that is not the default; ``elastic`` is the preset,
    and ``level`` is that with level steps.
    """

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder

    def __missing__(self, key: str) -> Path:
        layout, *method = key.split()
        folder = self._make_folder(layout)
        write_store(folder / "store", DOCUMENTS)
        train(configure(folder, LAYOUTS[layout], 4, *method))
        self[key] = folder
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


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "job_name",
    ["dp", exhaustive("pp"), "interleaved", exhaustive("tp"), exhaustive("pool elastic"), "dp level"],
)
def test_resuming_changes_nothing(straight, job_name, tmp_path):
    folder = stopped_after_two(straight[job_name], tmp_path)
    layout, *method = job_name.split()
    train(configure(folder, LAYOUTS[layout], 4, *method))
    expected, actual = read_steps(straight[job_name]), read_steps(folder)
    assert [row["step"] for row in actual] == [1, 2, 3, 4]
    for key in ("document_ids", "loss", "grad_norm", "learning_rate", "tokens", "imbalance_degree"):
        assert [row[key] for row in actual] == [row[key] for row in expected], key


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        exhaustive("pp", "dp"),
        ("dp", "interleaved"),
        exhaustive("interleaved", "pp"),
        exhaustive("tp sequential", "dp sequential"),
        ("pp sequential", "tp sequential"),
        exhaustive("pp sequential", "cp-tp sequential"),
        exhaustive("pool elastic", "tp elastic"),
        exhaustive("pool elastic", "pools elastic"),
        ("pool elastic", "three level"),
        ("dp level", "pools elastic"),
        exhaustive("dp level", "cp-tp level"),
    ],
)
def test_resuming_on_another_layout_trains_the_same(straight, saved, resumed, tmp_path):
    """With other tp or cp documents have other prices; no document changes its step under these packers for that."""
    folder = stopped_after_two(straight[saved], tmp_path)
    layout, *method = resumed.split()
    train(configure(folder, LAYOUTS[layout], 4, *method))
    expected, actual = read_steps(straight[saved]), read_steps(folder)
    assert [row["document_ids"] for row in actual] == [row["document_ids"] for row in expected]
    assert [row["loss"] for row in actual] == pytest.approx([row["loss"] for row in expected], rel=1e-9)
    assert [row["grad_norm"] for row in actual] == pytest.approx([row["grad_norm"] for row in expected], rel=1e-9)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"layers": 2}, "layers 4 -> 2"),
        ({"heads": 1, "kv_heads": 1, "head_dim": 8}, "heads 2 -> 1, kv_heads 2 -> 1;"),
        ({"tied_embeddings": True}, "tied_embeddings false -> true"),
        ({"rope_theta": 100.0}, "rope_theta 500000.0 -> 100.0"),
        ({"rope_scaling": {"factor": 2.0}}, 'rope_scaling null -> {"rope_type": "llama3", "factor": 2.0, '),
        ({"norm_eps": 0.1}, "norm_eps 1e-05 -> 0.1"),
        ({"vocab_size": 70}, "vocab_size 68 -> 70"),
    ],
)
def test_another_model_is_refused_before_anything_starts(straight, model, named):
    config = configure(straight["pp"], LAYOUTS["dp"], **model)
    with pytest.raises(
        UserError, match=rf"step-00000004 holds another model than the configuration: {re.escape(named)}"
    ):
        check_job(config, 1)


def test_ranks_refuse_another_model(straight, tmp_path):
    """Half of it, all of whose tensors are in the checkpoint."""
    folder = stopped_after_two(straight["pp"], tmp_path)
    with pytest.raises(RankFailure, match="step-00000002 holds another model than the configuration: layers 4 -> 2;"):
        train(configure(folder, LAYOUTS["pp"], layers=2))


@pytest.mark.parametrize("steps", [4, 3])
def test_a_finished_job_has_nothing_left_to_do(straight, steps, tmp_path):
    shutil.copytree(straight["dp"], tmp_path, dirs_exist_ok=True)
    config = configure(tmp_path, LAYOUTS["dp"])
    train(config.model_copy(update={"training": config.training.model_copy(update={"steps": steps})}))
    assert read_steps(tmp_path) == read_steps(straight["dp"])


def _settings_after_resuming(config: JobConfig) -> set[tuple[float, tuple[float, float]]]:
    trainer = trainer_of(config)
    (optimizer,) = trainer.model.optimizers
    assert {parameter.dtype for stage in trainer.model.stages for parameter in stage.parameters()} == {torch.float32}
    assert all(state["step"] == 4 for state in optimizer.state.values())
    return {(group["weight_decay"], group["betas"]) for group in optimizer.param_groups}


def test_the_configuration_decides_the_settings_of_training(straight, tmp_path):
    shutil.copytree(straight["pp"], tmp_path, dirs_exist_ok=True)
    config = configure(tmp_path, LAYOUTS["pp"])
    changed = config.training.model_copy(update={"weight_decay": 0.25, "betas": (0.8, 0.9), "dtype": "float32"})
    changed_config = config.model_copy(update={"training": changed})
    for found in run_ranks(2, _settings_after_resuming, changed_config):
        assert found == {(0.25, (0.8, 0.9)), (0.0, (0.8, 0.9))}


def damage(checkpoint: Path, how: str) -> None:
    file = max(checkpoint.glob("*.distcp"))
    if how == "flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        (checkpoint / how).unlink()


# test_files.py damages every file in every way, and test_restarts.py passes over one without its manifest.
@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("flipped", "its __1_0.distcp does not have its checksum"),
        exhaustive("truncated", "its __1_0.distcp has "),
        exhaustive(".metadata", "its .metadata is missing"),
        exhaustive("manifest.json", "it has no manifest.json"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(straight, how, named, tmp_path):
    shutil.copytree(straight["dp"], tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "checkpoints" / "step-00000004", how)
    run_ranks(2, _train_aloud, configure(tmp_path, LAYOUTS["dp"]), tmp_path / "said")
    (warning,) = [line for line in (tmp_path / "said").read_text().splitlines() if "warning: checkpoint" in line]
    assert f"step-00000004 is damaged and not used: {named}" in warning
    for key in ("step", "document_ids", "loss", "grad_norm"):
        assert [row[key] for row in read_steps(tmp_path)] == [row[key] for row in read_steps(straight["dp"])]
    assert find_damage(tmp_path / "checkpoints" / "step-00000004", contents=True) is None


def test_without_a_usable_checkpoint_nothing_starts(straight, tmp_path):
    shutil.copytree(straight["dp"], tmp_path, dirs_exist_ok=True)
    for step, how in ((2, "flipped"), (4, ".metadata")):
        damage(tmp_path / "checkpoints" / f"step-{step:08d}", how)
    with pytest.raises(
        RankFailure, match=r"none of the 2 checkpoints in .* can be used, .* does not have its checksum"
    ):
        train(configure(tmp_path, LAYOUTS["dp"]))
    assert read_steps(tmp_path) == read_steps(straight["dp"])


@pytest.mark.parametrize(
    ("saved", "resumed"), [exhaustive("dp", {"dp": 3}), ("pp", {"dp": 2, "cp": 2}), exhaustive("interleaved", {})]
)
def test_resuming_with_other_micro_batches_trains_every_document_once(straight, saved, resumed, tmp_path):
    folder = stopped_after_two(straight[saved], tmp_path)
    config = configure(folder, resumed, micro_batches=6)
    training = config.training.model_copy(update={"steps": None})  # to the end of the epoch
    train(config.model_copy(update={"training": training}))
    rows = read_steps(folder)
    assert rows[:2] == read_steps(straight[saved])[:2]
    trained = [document for row in rows for document in row["document_ids"]]
    assert len(trained) == len(set(trained))
    assert {document for document in trained if document < DOCUMENTS} == set(range(DOCUMENTS))


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        exhaustive("dp", "pool elastic"),
        exhaustive("pool elastic", "dp"),
        ("dp", "dp level"),
        ("dp level", "pp"),
        exhaustive("dp level", "cp-tp sequential"),
        exhaustive("tp sequential", "three level"),
    ],
)
def test_resuming_under_another_preset_trains_every_document_once(straight, saved, resumed, tmp_path):
    folder = stopped_after_two(straight[saved], tmp_path)
    layout, *method = resumed.split()
    (method,) = method or ("makespan",)
    with pytest.raises(UserError, match=r"was written with packing\.method = '\w+', this job has '\w+'"):
        check_job(configure(folder, LAYOUTS[layout], 4, method), 1)
    config = configure(folder, LAYOUTS[layout], 4, method, allow_changed_data=True)
    training = config.training.model_copy(update={"steps": None})  # to the end of the epoch
    train(config.model_copy(update={"training": training}))
    rows = read_steps(folder)
    assert rows[:2] == read_steps(straight[saved])[:2]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    trained = [document for row in rows for document in row["document_ids"]]
    assert sorted(document for document in trained if document < DOCUMENTS) == list(range(DOCUMENTS))
    assert len(trained) == len(set(trained))


def fake_checkpoint(directory: Path, step: int, complete: bool = True) -> None:
    path = directory / f"step-{step:08d}"
    path.mkdir(parents=True)
    if complete:
        write_manifest(path, Manifest(Progress(step, {"identity": {}}), {}, {}))


def test_the_newest_complete_checkpoint_counts(tmp_path):
    for step in (20, 100):
        fake_checkpoint(tmp_path, step)
    fake_checkpoint(tmp_path, 120, complete=False)
    (tmp_path / ".writing-step-00000140").mkdir()
    newest = newest_checkpoint(CheckpointConfig(dir=tmp_path))
    assert newest is not None
    assert newest.name == "step-00000100"
    assert newest_checkpoint(CheckpointConfig(dir=tmp_path / "none")) is None


def test_a_job_that_may_not_resume_keeps_off_other_checkpoints(tmp_path):
    fake_checkpoint(tmp_path, 20)
    with pytest.raises(UserError, match=r"already holds step-00000020 and checkpoint\.resume is false"):
        newest_checkpoint(CheckpointConfig(dir=tmp_path, resume=False))


def test_only_the_newest_are_kept(tmp_path):
    write_store(tmp_path / "store")
    checkpoint = {"dir": str(tmp_path / "checkpoints"), "every": 1, "keep": 2}
    config = job(tmp_path, training={"steps": 4}, checkpoint=checkpoint)
    (tmp_path / "checkpoints" / ".writing-step-00000009").mkdir(parents=True)  # left by a killed job
    train(config)
    complete = complete_checkpoints(tmp_path / "checkpoints")
    assert [path.name for path in complete] == ["step-00000003", "step-00000004"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [p.name for p in complete]


def _agreement_of(folders: list[Path]) -> str:
    try:
        newest = agreed_checkpoint(CheckpointConfig(dir=folders[dist.get_rank()]))
    except UserError as error:
        return str(error)
    return newest.name if newest else "none"


@pytest.mark.parametrize(("first", "second"), [((10,), ()), exhaustive((), (10,)), exhaustive((10, 20), (10,))])
def test_ranks_that_see_different_checkpoints_stop_together(first, second, tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, steps in zip(folders, (first, second), strict=True):
        for step in steps:
            fake_checkpoint(folder, step)
    one, other = run_ranks(2, _agreement_of, folders)
    for message, folder in ((one, folders[0]), (other, folders[1])):
        assert f"checkpoint.dir {folder} must be shared by all machines" in message
        assert "\n" not in message
    assert run_ranks(2, _agreement_of, folders[:1] * 2) == [f"step-{max(first):08d}" if first else "none"] * 2


def checkpointers(directory: Path, *keep: int) -> tuple[list[Checkpointer], Tensor]:
    """One for each ``checkpoint.keep``, all of the same small model, and one of its weights."""
    config = TransformerConfig(ModelShape(8, 1, 2, 1, 4, 8, 5))
    model = Transformer(config)
    assert model.embedding is not None
    optimizers = [build_optimizer(model, TrainingConfig())]
    made = [Checkpointer(CheckpointConfig(dir=directory, keep=n), config, [model], optimizers, "alone") for n in keep]
    return made, model.embedding.weight


def _save_while_weights_change(directory: Path) -> None:
    """Saves twice with nothing written until weights have changed, and reads both checkpoints back."""
    (checkpointer,), weight = checkpointers(directory, 9)
    checkpointer.save(Progress(1, {}))  # the first one is waited for
    may_write = threading.Event()

    def waiting(checkpoint: Path) -> None:
        assert may_write.wait(HUNG_SECONDS)
        start_writing(checkpoint)

    def restored(step: int) -> Tensor:
        checkpointer.load(checkpoint_path(directory, step))
        return weight.detach().clone()

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(storage, "start_writing", waiting)
        weight.fill_(2.0)
        checkpointer.save(Progress(2, {}))
        weight.fill_(3.0)  # the thread has not begun to write
        assert [path.name for path in complete_checkpoints(directory)] == ["step-00000001"]
        threading.Timer(0.2, may_write.set).start()
        checkpointer.save(Progress(3, {}))  # waits for the one before it
        assert complete_checkpoints(directory)[1].name == "step-00000002"
        weight.fill_(4.0)
        checkpointer.finish()
    assert (restored(2) == 2.0).all()
    assert (restored(3) == 3.0).all()


def test_a_checkpoint_holds_what_was_trained_when_it_was_saved(tmp_path):
    run_ranks(1, _save_while_weights_change, tmp_path / "checkpoints")


def _continue_beside_a_damaged_one(directory: Path) -> tuple[list[str], list[str], list[str]]:
    """Of three checkpoints the newest is damaged; what the next job says when it can write none, and what there is
    before and after it has written."""
    (writing, continuing), _ = checkpointers(directory, 9, 1)
    for step in (1, 2, 6):
        writing.save(Progress(step, {}))
        writing.finish()
    damage(checkpoint_path(directory, 6), "flipped")
    continuing.load(checkpoint_path(directory, 2))
    continuing.delete_outdated()
    before = [path.name for path in complete_checkpoints(directory)]
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "publish", _full_disk)
        patch.setattr(checkpoint_module, "say", said.append)
        continuing.save(Progress(3, {}))
        with pytest.raises(TrainingError, match="No space left"):
            continuing.finish()
    continuing.save(Progress(7, {}))
    continuing.finish()
    return said, before, [path.name for path in complete_checkpoints(directory)]


def _full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_damaged_checkpoint_does_not_count_as_one_to_fall_back_on(tmp_path):
    (((warning,), before, after),) = run_ranks(1, _continue_beside_a_damaged_one, tmp_path)
    assert warning.endswith("the newest one is still step-00000002")
    assert before == ["step-00000002", "step-00000006"]  # keep is 1 now, so there is room before anything is written
    assert after == ["step-00000007"]


def _agreed_with_damage(directory: Path) -> str | None:
    newest = agreed_checkpoint(CheckpointConfig(dir=directory))
    return newest.name if newest else None


def test_ranks_pass_over_what_only_one_of_them_has_read(straight, tmp_path):
    shutil.copytree(straight["dp"] / "checkpoints", tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "step-00000004", "flipped")
    assert run_ranks(3, _agreed_with_damage, tmp_path) == ["step-00000002"] * 3
