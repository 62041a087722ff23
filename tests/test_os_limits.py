import os

import pytest

from wlb.os_limits import control_group_limits, usable_cores, usable_memory


def test_cores_are_counted_on_systems_that_cannot_tell(monkeypatch):
    assert usable_cores() >= 1
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_cores() == os.cpu_count()


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        ("0::/job/task", {"memory.max": "max", "job/memory.max": "4096", "job/task/memory.max": "8192"}, [8192, 4096]),
        ("5:cpu:/\n4:cpu,memory:/job", {"memory/job/memory.limit_in_bytes": "1024", "memory.max": "1"}, [1024]),
        ("0::/", {}, []),
        ("nonsense", {}, []),
    ],
    ids=["version 2", "version 1", "no limit", "unreadable"],
)
def test_memory_limits_of_control_groups(tmp_path, membership, files, limits):
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text + "\n")
    (tmp_path / "membership").write_text(membership + "\n")
    assert control_group_limits(tmp_path / "membership", tmp_path / "root") == limits
    assert control_group_limits(tmp_path / "absent", tmp_path / "root") == []


def test_memory_is_what_the_machine_has_at_most():
    assert 0 < usable_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
