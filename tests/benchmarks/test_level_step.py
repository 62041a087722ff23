"""The benchmark of level steps runs every way on all of its lists."""

import json

from benchmarks import level_step
from tests.programs import finished


def test_every_way_is_measured(tmp_path):
    out = tmp_path / "level.json"
    done = finished("-m", "benchmarks.level_step", "--seconds", "0.01", "--turns", "1", "--out", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {row["lists"] for row in rows} == {*level_step.LISTS}
    assert len({row["way"] for row in rows}) == 3
