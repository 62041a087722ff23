"""Whatever happens to the files of a checkpoint is noticed, and deleting old ones never deletes the last good one."""

from __future__ import annotations

import json
import os
import shutil
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import in_turn
from tests.limits import examples
from tests.training.checkpoint.fakes import FILES, write_checkpoint
from wlb.errors import UserError
from wlb.training.checkpoint.files import (
    MANIFEST,
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    Progress,
    complete_checkpoints,
    delete_outdated,
    find_damage,
    is_plain_name,
    named_checkpoints,
    read_manifest,
    write_manifest,
)


def test_what_was_written_is_whole(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3)
    assert find_damage(checkpoint, contents=True) is None
    assert read_manifest(checkpoint).progress == Progress(3, {"identity": {"data.seed": 1}})
    assert read_manifest(checkpoint).model == {"heads": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@settings(deadline=None, max_examples=examples(30))
@given(st.sampled_from([*FILES, MANIFEST]), st.integers(0, 10_000), st.integers(1, 255))
def test_every_flipped_byte_is_noticed(tmp_path_factory, name, position, flip):
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("flipped"), 3)
    content = bytearray((checkpoint / name).read_bytes())
    content[position % len(content)] ^= flip
    (checkpoint / name).write_bytes(content)
    try:
        damage = find_damage(checkpoint, contents=True)
    except UserError as error:  # the byte with the format's number
        damage = str(error)
    assert damage is not None
    assert name in damage or "has format" in damage
    assert "\n" not in damage


@in_turn(("name", "contents"), product(FILES, [True, False]))
def test_truncated_and_missing_files_are_noticed_by_their_size(tmp_path, name, contents):
    checkpoint = write_checkpoint(tmp_path, 3)
    size = len(FILES[name])
    os.truncate(checkpoint / name, size - 1)
    assert find_damage(checkpoint, contents=contents) == f"its {name} has {size - 1} bytes instead of {size}"
    (checkpoint / name).unlink()
    assert find_damage(checkpoint, contents=contents) == f"its {name} is missing"
    shutil.rmtree(checkpoint)


@pytest.mark.parametrize("target", ["outside", "nowhere"])
def test_links_are_not_followed(tmp_path, target):
    checkpoint = write_checkpoint(tmp_path, 3)
    (tmp_path / "outside").write_bytes(FILES[".metadata"])
    (checkpoint / ".metadata").unlink()
    (checkpoint / ".metadata").symlink_to(tmp_path / target)
    assert find_damage(checkpoint, contents=True) == "its .metadata cannot be read: Too many levels of symbolic links"
    (tmp_path / "step-00000009").symlink_to(write_checkpoint(tmp_path, 4))
    assert find_damage(tmp_path / "step-00000009", contents=True) == "it is a symbolic link"


def test_readers_share_the_files(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3)
    for name in FILES:
        (checkpoint / name).unlink()
    noticed = [find_damage(checkpoint, contents=True, share=(reader, 3)) for reader in range(3)]
    assert sorted(map(str, noticed)) == sorted(f"its {name} is missing" for name in FILES)


@in_turn("content", ["", "{", "[]", "null", "\0\0\0", '{"format": 4}', '{"step": 3}', "9" * 5000])
def test_a_garbage_manifest_is_named(content, tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3)
    (checkpoint / MANIFEST).write_text(content)
    damage = find_damage(checkpoint, contents=False)
    assert damage in (f"its {MANIFEST} is not a manifest", f"its {MANIFEST} was changed after it was written")


@in_turn("name", [MANIFEST, ".metadata"])
def test_a_file_is_missing_or_none(tmp_path, name):
    checkpoint = write_checkpoint(tmp_path, 3)
    (checkpoint / name).unlink()
    unwritten = "it has no manifest.json, so it was not written or copied to its end"
    expected = unwritten if name == MANIFEST else "its .metadata is missing"
    assert find_damage(checkpoint, contents=False) == expected
    os.mkfifo(checkpoint / name)  # which nobody waits for
    assert find_damage(checkpoint, contents=True) == f"its {name} cannot be read: it is not a regular file"


@in_turn("written", [3, 5, "4", None])
def test_another_version_is_refused_rather_than_passed_over(tmp_path, written):
    checkpoint = write_checkpoint(tmp_path, 3)
    (checkpoint / MANIFEST).write_text(json.dumps({"format": written, "step": 3, "loader": {}}))
    with pytest.raises(UserError, match=rf"step-00000003 has format {written!r}, this version reads 4; continue with"):
        find_damage(checkpoint, contents=False)


@in_turn("name", ["../outside", "/etc/passwd", "..", "", "a/b", "a\\b", "a\0b", 3, None])
def test_names_that_leave_the_checkpoint_are_refused(tmp_path, name):
    assert not is_plain_name(name)
    if isinstance(name, str):
        checkpoint = write_checkpoint(tmp_path, 3)
        write_manifest(checkpoint, Manifest(Progress(3, {}), {}, {name: FileRecord(0, 0)}))
        with pytest.raises(DamagedCheckpoint, match="which is not a file of the checkpoint"):
            read_manifest(checkpoint)


def names(directory: Path) -> list[int]:
    return [int(path.name[5:]) for path in complete_checkpoints(directory)]


@pytest.mark.parametrize(("keep", "left"), [(1, [9, 12]), (2, [3, 6, 9, 12]), (3, [1, 3, 6, 9, 12])])
def test_damaged_ones_do_not_count_and_are_deleted_when_they_are_outdated(tmp_path, keep, left):
    """A file of step 1 is missing; in 6 and 12, which the job passed over, only the contents are damaged."""
    one, three, _, nine, _ = (write_checkpoint(tmp_path, step) for step in (1, 3, 6, 9, 12))
    (one / ".metadata").unlink()
    delete_outdated([one, three, nine], keep)
    assert names(tmp_path) == left


def test_one_of_another_version_is_no_good_one(tmp_path):
    old, new = (write_checkpoint(tmp_path, step) for step in (1, 3))
    (old / MANIFEST).write_text(json.dumps({"format": 2}))
    delete_outdated([old, new], keep=2)
    assert names(tmp_path) == [1, 3]


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path):
    (write_checkpoint(tmp_path, 12) / ".metadata").unlink()
    assert find_damage(write_checkpoint(tmp_path, 12), contents=True) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000012"]


def test_steps_are_in_order_beyond_eight_digits(tmp_path):
    for step in (99_999_999, 100_000_000, 7):
        write_checkpoint(tmp_path, step)
    assert names(tmp_path) == [7, 99_999_999, 100_000_000]


def test_only_names_of_checkpoints_count(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3)
    for other in ("step-final", "step-", ".writing-step-00000004", "step-00000003.old"):
        shutil.copytree(checkpoint, tmp_path / other)
    assert named_checkpoints(tmp_path) == [checkpoint]
