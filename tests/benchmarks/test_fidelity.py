"""The benchmark of the simulator measures CPU seconds along the critical path, of ranks that keep their memory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.training.distributed import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECONDS = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4)


def _module(name: str) -> Any:
    sys.path[:0] = [str(BENCHMARKS)]
    return importlib.import_module(name)


@pytest.fixture(autouse=True)
def _path() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before
    for name in [*sys.modules]:  # other benchmarks' folders have parts, too
        if name == "parts" or name.startswith("parts."):
            del sys.modules[name]


def _notes(seconds: list[list[int]], *, meeting: bool) -> list[list[Any]]:
    """Every rank computes so many seconds between meetings of all."""
    note = _module("parts.training.critical_path").Note
    ranks = range(len(seconds))
    notes: list[list[Any]] = []
    for of_rank in seconds:
        notes.append([])
        for number, end in enumerate(np.cumsum(of_rank).tolist()):
            notes[-1].append(note(str(number), (), end))
            if meeting:
                notes[-1].append(note(str(number), tuple(ranks), end))
    return notes


@given(SECONDS)
def test_ranks_wait_for_the_slowest_wherever_they_meet(seconds: list[list[int]]) -> None:
    path = _module("parts.training.critical_path")
    assert path.step_seconds(_notes(seconds, meeting=True)) == np.max(seconds, axis=0).sum()
    assert path.step_seconds(_notes(seconds, meeting=False)) == np.sum(seconds, axis=1).max()


def test_computing_hides_a_message_that_was_started_early() -> None:
    path = _module("parts.training.critical_path")
    sender = [path.Note("m", (), 2.0), path.Note("end", (), 10.0)]
    busy = [path.Note("m", (0,), 5.0), path.Note("end", (), 6.0)]
    idle = [path.Note("m", (0,), 1.0), path.Note("end", (), 2.0)]
    assert path.step_seconds([sender, busy]) == 10.0
    assert path.step_seconds([sender[:1], busy]) == 6.0
    assert path.step_seconds([sender[:1], idle]) == 3.0  # 2 until the message is there, and 1 of its own
    with pytest.raises(ValueError, match="not started"):
        path.step_seconds([[], idle])


def test_the_median_is_taken_between_messages() -> None:
    path = _module("parts.training.critical_path")
    repetitions = [
        [path.Note("a", (), a), path.Note("end", (), a + b)] for a, b in ((1.0, 9.0), (2.0, 3.0), (7.0, 4.0))
    ]
    assert path.typical(repetitions) == [path.Note("a", (), 2.0), path.Note("end", (), 6.0)]
    with pytest.raises(ValueError, match="differ"):
        path.typical([*repetitions, repetitions[0][:1]])


def test_predicted_and_measured_speeds_are_compared_at_equal_work() -> None:
    turns = _module("parts.training.turns")
    base = turns.Trained("dp", "plain-4d", [4.0, 4.0], [5.0, 5.0], work=8.0, in_repetitions=[8.0])
    same = turns.Trained("dp", "best", [6.0], [7.5], work=9.0, in_repetitions=[6.0])
    assert (same.measured_speed(base), same.predicted_speed(base), same.apart(base)) == pytest.approx((1.5, 1.5, 0.0))
    assert same.speeds_in_repetitions(base) == [1.5]
    slower = turns.Trained("dp", "best", [6.0], [10.0], work=9.0, in_repetitions=[6.0])
    assert slower.apart(base) == pytest.approx(-0.25)


def _exchange() -> tuple[list[Any], list[float]]:
    notebook = _module("parts.training.critical_path").Notebook()
    notebook.begin()
    rank, values = dist.get_rank(), torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(values)
    rows = torch.empty(4)
    dist.all_gather(list(rows.split(2)), values + rank, dist.group.WORLD, async_op=True).wait()
    received = torch.empty(1)
    operations = [dist.P2POp(dist.irecv, received, 0)] if rank else [dist.P2POp(dist.isend, rows[:1], 1)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [(note.message, note.needs) for note in notebook.end()], [*rows.tolist(), *received[:rank].tolist()]


def test_processes_note_the_same_messages_and_still_exchange_them() -> None:
    (first, rows), (second, others) = run_ranks(2, _exchange)
    assert rows == others[:4] == [1.0, 1.0, 2.0, 2.0]
    assert others[4:] == [1.0]
    both = [("all_reduce [0, 1] 1", ()), ("all_reduce [0, 1] 1", (0, 1))]
    both += [("all_gather [0, 1] 1", ()), ("all_gather [0, 1] 1", (0, 1))]
    assert first == [*both, ("0 to 1 1", ()), ("end", ())]
    assert second == [*both, ("0 to 1 1", (0,)), ("end", ())]
