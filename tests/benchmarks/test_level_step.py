"""The benchmark of level steps runs every way on all of its lists."""

import json

from benchmarks import level_step


def test_every_way_is_measured(tmp_path):
    out = tmp_path / "level.json"
    assert level_step.main(["--seconds", "0.01", "--turns", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["lists"] for row in rows} == {*level_step.LISTS}
    assert len({row["way"] for row in rows}) == 3
