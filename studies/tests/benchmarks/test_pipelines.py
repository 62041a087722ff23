"""The benchmark of pipelines compares every system on the same documents, none of them short of memory."""

import json
from pathlib import Path

from studies.benchmarks.pipelines import main


def test_a_small_run_compares_every_system(tmp_path: Path):
    out = tmp_path / "pipelines.json"
    assert main(["--jobs", "550m-64k", "--draws", "1", "--steps", "2", "--out", str(out)]) == 0
    rows = {row["system"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["plain-4d"]["speed"] == 1
    assert rows["balanced"]["speed"] > 1
    assert rows["balanced, stages free"]["speed"] >= rows["balanced"]["speed"]
    assert all(0 < row["of_ideal"] < 1 <= row["over_bound"] for row in rows.values())
    assert rows["balanced"]["delay"] == 0
