"""Checkpoints are read as data: nothing in them is executed, and no file outside them is opened."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from tests.cases import in_turn
from wlb.errors import UserError
from wlb.training.checkpoint.files import Progress, find_damage
from wlb.training.checkpoint.storage import ChecksummedWriter, ConfinedReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {
    "weights": torch.arange(12, dtype=torch.float64).reshape(3, 4),
    "half": torch.full((5,), 0.1, dtype=torch.bfloat16),
    "step": torch.tensor(7.0),
    "rng": torch.get_rng_state(),
}


class Executes:
    """Pickles to a call of ``os.mkdir``."""

    def __init__(self, proof: Path) -> None:
        self.proof = str(proof)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.proof,)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step-00000003"
    dcp.save(dict(STATE), storage_writer=ChecksummedWriter(path, Progress(3, {}), {}), no_dist=True)
    return path


def load(path: Path) -> dict[str, torch.Tensor]:
    state = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    dcp.load(state, storage_reader=ConfinedReader(path), no_dist=True)
    return state


def metadata_of(path: Path) -> Metadata:
    return ConfinedReader(path).read_metadata()


def test_what_was_written_is_read(checkpoint):
    assert find_damage(checkpoint, contents=True) is None
    assert sorted(path.name for path in checkpoint.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json"]
    for name, tensor in load(checkpoint).items():
        assert tensor.dtype == STATE[name].dtype
        assert torch.equal(tensor, STATE[name])


def test_metadata_do_not_say_where_they_were_written(checkpoint):
    assert str(checkpoint.parent).encode() not in (checkpoint / ".metadata").read_bytes()


@in_turn("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_execute_nothing(checkpoint, tmp_path, protocol):
    proof = tmp_path / f"executed by {protocol}"
    content = pickle.dumps(Executes(proof), protocol)
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata: it asks for (posix|nt|os)\.mkdir; remove it"):
        metadata_of(checkpoint)
    with pytest.raises((UserError, CheckpointException)):
        load(checkpoint)
    assert not proof.exists()
    pickle.loads(content)  # the test could fail
    assert proof.exists()


@in_turn("name", ["os.system", "torch.load", "torch.Tensor", "Metadata.__init__", "builtins.eval"])
def test_only_the_classes_of_metadata_are_loaded(checkpoint, name):
    module, _, attribute = name.rpartition(".")
    if module == "Metadata":
        module, attribute = "torch.distributed.checkpoint.metadata", name
    opcodes = b"\x80\x04" + pickle.SHORT_BINUNICODE + bytes([len(module)]) + module.encode()
    opcodes += pickle.SHORT_BINUNICODE + bytes([len(attribute)]) + attribute.encode() + pickle.STACK_GLOBAL + b"."
    (checkpoint / ".metadata").write_bytes(opcodes)
    with pytest.raises(UserError, match=f"it asks for {module}.{attribute}"):
        metadata_of(checkpoint)


def test_tensors_execute_nothing(checkpoint, tmp_path):
    """The file of tensors, with a pickle of ours in place of a tensor's."""
    proof = tmp_path / "executed"
    file = io.BytesIO()
    torch.save(Executes(proof), file)
    metadata = metadata_of(checkpoint)
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(file.getvalue())
    metadata.storage_meta = None
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    (checkpoint / "__0_0.distcp").write_bytes(file.getvalue())
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        load(checkpoint)
    assert not proof.exists()
    file.seek(0)
    torch.load(file, weights_only=False)
    assert proof.exists()


def test_entries_that_are_unpickled_without_restriction_are_refused(checkpoint):
    metadata = metadata_of(checkpoint)
    metadata.storage_meta = None
    metadata.state_dict_metadata["weights"] = BytesStorageMetadata()
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"it asks for .*BytesStorageMetadata"):
        metadata_of(checkpoint)


def test_paths_stay_inside(checkpoint):
    metadata = metadata_of(checkpoint)
    metadata.storage_meta = None
    for path in ("../outside", "/etc/hostname", "..", "", "below/file"):
        next(iter(metadata.storage_data.values())).relative_path = path
        (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(UserError, match=r"lies in '.*', outside the checkpoint"):
            metadata_of(checkpoint)


def test_garbage_is_refused_in_one_line(checkpoint):
    written = (checkpoint / ".metadata").read_bytes()
    truncated = [written[:-cut] for cut in (1, 10, 100, 500)]
    for content in (b"", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(Metadata), *truncated):
        (checkpoint / ".metadata").write_bytes(content)
        with pytest.raises(UserError, match="was not written by this program") as error:
            metadata_of(checkpoint)
        assert "\n" not in str(error.value)
