"""A file is the old one or the new one, and a lock belongs to one process at a time."""

import os
from pathlib import Path

import pytest

from wlb.files import open_locked, replace_text


def test_a_lock_is_held_once_and_freed_by_closing(tmp_path):
    first = open_locked(tmp_path / "lock")
    assert first is not None
    assert open_locked(tmp_path / "lock") is None
    os.close(first)
    again = open_locked(tmp_path / "lock")
    assert again is not None
    os.close(again)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_file_that_cannot_be_replaced_stays_what_it_was(tmp_path: Path, monkeypatch, step):
    def full(*_: object) -> None:
        raise OSError("no space")

    path = tmp_path / "file"
    replace_text(path, "old")
    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="no space"):
        replace_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    replace_text(path, "new")
    assert path.read_text() == "new"
