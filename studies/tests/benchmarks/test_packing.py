"""The packing benchmark runs without its peers, loses no document, and writes what it prints."""

import json
from pathlib import Path

import pytest

from studies.benchmarks import packing

WINDOW = 4096


def test_a_small_run_packs_every_document_by_every_method(tmp_path: Path):
    out = tmp_path / "results" / "packing.json"
    small = ["--lengths", f"synthetic:6000:{WINDOW}:0", "--context-window", str(WINDOW), "--turns", "1"]
    assert packing.main([*small, "--out", str(out)]) == 0
    rows = {row["method"]: row for row in json.loads(out.read_text())["methods"]}
    assert set(packing.OURS) < set(rows)
    assert any("next fit" in name for name in rows)
    assert all(row["every_document_whole"] for row in rows.values())
    assert rows["fixed_greedy, 1 global batch"]["longest_micro_batch_tokens"] <= WINDOW
    assert rows["balanced"]["mean_token_delay"] == rows["sequential (plain-4D)"]["mean_token_delay"] == 0
    assert str(tmp_path) not in out.read_text(), "results name no paths"


def test_a_global_batch_is_the_longest_run_that_fits():
    documents = [packing.Segment(number, 0, length) for number, length in enumerate([3, 4, 1, 8, 2, 2])]
    batches = packing.global_batches(documents, 8)
    assert [[document.length for document in batch] for batch in batches] == [[3, 4, 1], [8], [2, 2]]


def test_missing_lengths_are_one_line(capsys: pytest.CaptureFixture[str]):
    assert packing.main(["--lengths", "absent.json"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "absent.json does not exist" in printed
