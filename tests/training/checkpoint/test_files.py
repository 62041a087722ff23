"""Whatever happens to the files of a checkpoint is noticed, and deleting old ones never deletes the last good one."""

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
from wlb.training.checkpoint.files import (
    HIDDEN,
    MANIFEST,
    clean_up,
    complete_checkpoints,
    find_damage,
    read_manifest,
    set_aside,
)


def test_what_was_written_is_whole(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3)
    assert find_damage(checkpoint, contents=True) is None
    manifest = read_manifest(checkpoint)
    assert (manifest["step"], manifest["model"]) == (3, {"heads": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@settings(deadline=None, max_examples=examples(30))
@given(st.sampled_from([*FILES, MANIFEST]), st.integers(0, 10_000), st.integers(1, 255))
def test_every_flipped_byte_is_noticed(tmp_path_factory, name, position, flip):
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("flipped"), 3)
    content = bytearray((checkpoint / name).read_bytes())
    content[position % len(content)] ^= flip
    (checkpoint / name).write_bytes(content)
    damage = find_damage(checkpoint, contents=True)
    assert damage is not None
    assert name in damage
    assert "\n" not in damage


@in_turn(("name", "contents"), product(FILES, [True, False]))
def test_truncated_and_missing_files_are_noticed_by_their_size(tmp_path, name, contents):
    checkpoint = write_checkpoint(tmp_path, 3)
    size = len(FILES[name])
    os.truncate(checkpoint / name, size - 1)
    assert find_damage(checkpoint, contents=contents) == f"its {name} has {size - 1} bytes instead of {size}"
    (checkpoint / name).unlink()
    assert find_damage(checkpoint, contents=contents) == f"its {name} cannot be read: No such file or directory"
    shutil.rmtree(checkpoint)


def test_a_file_that_a_disk_cannot_read_is_damage(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3)
    (checkpoint / MANIFEST).unlink()
    (checkpoint / MANIFEST).symlink_to("/proc/self/mem")
    assert find_damage(checkpoint, contents=True) == "its content cannot be read: Input/output error"


def test_readers_share_the_files(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3)
    for name in FILES:
        (checkpoint / name).unlink()
    noticed = [find_damage(checkpoint, contents=True, share=(reader, 3)) for reader in range(3)]
    missing = "cannot be read: No such file or directory"
    assert sorted(map(str, noticed)) == sorted(f"its {name} {missing}" for name in FILES)


@in_turn("content", ["", "{", "[]", "null", "\0\0\0", '{"crc32": 4}', '{"step": 3}', "9" * 5000, None])
def test_a_garbage_manifest_is_named(content, tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3)
    (checkpoint / MANIFEST).unlink()
    if content is not None:
        (checkpoint / MANIFEST).write_text(content)
    said = "cannot be read: No such file or directory" if content is None else "is not what was written"
    assert find_damage(checkpoint, contents=False) == f"its {MANIFEST} {said}"
    shutil.rmtree(checkpoint)


def names(directory: Path) -> list[int]:
    return [int(path.name[5:]) for path in complete_checkpoints(directory)]


@pytest.mark.parametrize(("keep", "left"), [(1, [1, 12]), (2, [1, 9, 12]), (3, [1, 3, 9, 12]), (9, [1, 3, 9, 12])])
def test_the_newest_whole_ones_are_kept(tmp_path, keep, left):
    """A file of step 1 is missing, 6 was passed over by the job, and one was being written."""
    one, _, six, *_ = (write_checkpoint(tmp_path, step) for step in (1, 3, 6, 9, 12))
    (one / ".metadata").unlink()
    for _ in range(2):  # also where it was damaged before
        set_aside(six)
        write_checkpoint(tmp_path, 6)
    set_aside(six)
    (tmp_path / f"{HIDDEN}step-00000015").mkdir()
    clean_up(tmp_path, keep)
    assert names(tmp_path) == left
    others = {path.name for path in tmp_path.iterdir()} - {f"step-{step:08d}" for step in left}
    assert others == {"damaged-step-00000006"}


def test_steps_are_in_order_beyond_eight_digits(tmp_path):
    for step in (99_999_999, 100_000_000, 7):
        write_checkpoint(tmp_path, step)
    assert names(tmp_path) == [7, 99_999_999, 100_000_000]


def test_only_names_of_checkpoints_count(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3)
    for other in ("step-final", "step-", f"{HIDDEN}step-00000004", "step-00000003.old"):
        shutil.copytree(checkpoint, tmp_path / other)
    assert complete_checkpoints(tmp_path) == [checkpoint]
