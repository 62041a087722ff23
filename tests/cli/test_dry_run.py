"""``wlb train --dry-run``."""

from __future__ import annotations

import json
from pathlib import Path

from tests.training.jobs import write_config, write_store
from wlb.training.dry_run.traffic import STAGES

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tiny.toml"
TRIED = ("train", CONFIG, "--dry-run", "--device", "cuda")


def test_a_job_without_its_store_is_tried_on_synthetic_documents(wlb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = wlb(*TRIED, "--set", "model.layers=2", "--rank", "1", "--json")
    shown = json.loads(out)
    assert status == 1
    assert shown["problems"] == [
        "token store index runs/data/stdlib.idx does not exist; make the store with wlb prepare"
    ]
    assert (shown["data"], shown["speed_at_equal_work"]) == ("synthetic", None)
    (rank,) = shown["ranks"]
    assert rank["place"] == {"pp": 1, "dp": 0, "cp": 0, "tp": 0}
    assert rank["traffic"][STAGES]["run"] == rank["traffic"][STAGES]["predicted"] > 0
    assert not list(tmp_path.iterdir())


def test_a_job_that_would_start_is_shown_rank_by_rank(wlb, tmp_path):
    write_store(tmp_path / "store")
    config = write_config(tmp_path, parallel={"pp": 2})
    status, out, _ = wlb("train", config, "--dry-run", "--rank", "all")
    assert status == 0
    assert "planned on its token store" in out
    simulated = wlb("simulate", config, "--set", "parallel.pp=2", "--hardware", "cpu", "--json")[1]
    (row,) = (row for row in json.loads(simulated)["systems"] if row["system"] == "as configured")
    assert f"over plain-4d: {row['speed_at_equal_work']:.2f}x; wlb simulate says why" in out
    assert "rank 0 (pp 0, dp 0, cp 0, tp 0): first stage" in out
    assert "rank 1 (pp 1, dp 0, cp 0, tp 0): last stage" in out
    assert not (tmp_path / "metrics").exists()


def test_wrong_options_are_refused_in_a_line(wlb):
    for wrong, remedy in (
        (("--rank", "first"), "give a number, or all"),
        (("--rank", "１"), "give a number, or all"),
        (("--device", "tpu"), "choose cpu or cuda"),
        (("--hardware", "foo"), "unknown hardware 'foo'; choose from"),
        (("--hardware", "foo", "--device", "cpu"), "unknown hardware 'foo'; choose from"),
        (("--hardware", "h100", "--device", "cpu"), "--hardware h100 has no effect on a job of --device cpu"),
        (("--hardware", "cpu"), "--hardware cpu has no effect on a job of --device cuda"),
    ):
        status, _, err = wlb(*TRIED, *wrong)
        assert status == 2
        assert remedy in err
