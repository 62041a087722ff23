from __future__ import annotations

import os

from wlb.system import try_lock, usable_cores


def test_cores_are_counted_on_systems_that_cannot_tell(monkeypatch):
    assert usable_cores() >= 1
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_cores() == os.cpu_count()


def test_a_lock_is_held_once_and_freed_by_closing(tmp_path):
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert try_lock(first.fileno())
        assert not try_lock(second.fileno())
        first.close()
        assert try_lock(second.fileno())
