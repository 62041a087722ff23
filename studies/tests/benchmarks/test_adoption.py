"""The benchmark of other stacks trains as they do and as the examples do, on two processes."""

import importlib.util
import json
from pathlib import Path

import pytest

from studies.benchmarks.adoption import critical_path, rows_of
from tests.programs import finished


# ``test_shadow.py`` trains through the same functions, and ``tests/test_stack_pages.py`` runs the loops.
@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_small_run_trains_in_every_way(tmp_path: Path):
    out = tmp_path / "adoption.json"
    small = ["--stacks", "own_lists", "--turns", "1", "--documents", "32", "--context-window", "512"]
    done = finished("-m", "studies.benchmarks.adoption", *small, "--out", out)
    assert done.returncode == 0, done.stderr
    rows, equal = json.loads(out.read_text())["rows"], ["random", "best fit", "equal numbers"]
    assert [row["way"] for row in rows] == [f"{way}, weights gathered" for way in equal] + [*equal, "own lists"]
    assert all(row["seconds"] > 0 for row in rows)
    assert "own lists" in done.stdout


def test_ranks_wait_for_each_other_where_they_share_a_micro_batch_and_nowhere_else():
    both = (0, 1)
    assert critical_path([[((), 1.0), ((), 2.0)], [((), 2.5)]]) == 3.0
    assert critical_path([[(both, 1.0), ((), 2.0)], [((), 1.5), (both, 2.0)]]) == 5.5


def test_a_micro_batch_counts_with_the_smaller_of_two_measurements():
    def rank(*turns: list[float]) -> dict[str, object]:
        return {"turns": [[[((), seconds) for seconds in turn]] for turn in turns], "work": 1.0}

    first = {"random": rank([4.0, 2.0], [4.0, 3.0]), "balanced": rank([2.0, 1.0], [2.0, 1.0])}
    second = {"random": rank([2.0], [2.0]), "balanced": rank([4.0], [3.0])}
    random, balanced = rows_of("torch_loop", [first, second])
    assert (random["seconds"], balanced["seconds"]) == (6.0, 3.0)
    assert (balanced["speed"], balanced["least"], balanced["most"]) == (2.0, 1.5, 7 / 3)
    assert (balanced["median_difference"], random["worst_difference"]) == (0.0, 0.5)
