"""The demo: CPU seconds along the critical path, what is printed and drawn of them, and a tiny run."""

import sys
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import demo
from benchmarks.parts.training import side_by_side
from tests.training.distributed import run_ranks
from tests.training.processes import ranks
from wlb.documents.segments import Segment
from wlb.documents.store.reader import TokenStoreWriter
from wlb.packing.plan import MicroBatch

SECONDS = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4)
CHECKED = {
    "verdict": "plain-4d loses 40% of GPU time: all of it waits.",
    "config": '[model]\nname = "7b"',
    "systems": [{"gpus": 64, "layout": {"tp": 2, "cp": 4, "pp": 2, "dp": 4}}],
}


LOADS = {"load_at_start": 0.5, "load_at_end": 2.0}


def _notes(seconds: list[list[int]], *, meeting: bool) -> list[list[Any]]:
    """Every rank computes so many seconds between meetings of all."""
    ranks = range(len(seconds))
    notes: list[list[Any]] = []
    for of_rank in seconds:
        notes.append([])
        for number, end in enumerate(np.cumsum(of_rank).tolist()):
            notes[-1].append(side_by_side.Note(str(number), (), end))
            if meeting:
                notes[-1].append(side_by_side.Note(str(number), tuple(ranks), end))
    return notes


@given(SECONDS)
def test_ranks_wait_for_the_slowest_wherever_they_meet(seconds: list[list[int]]) -> None:
    assert side_by_side.step_seconds(_notes(seconds, meeting=True)) == np.max(seconds, axis=0).sum()
    assert side_by_side.step_seconds(_notes(seconds, meeting=False)) == np.sum(seconds, axis=1).max()


def test_computing_hides_a_message_that_was_started_early() -> None:
    sender = [side_by_side.Note("m", (), 2.0), side_by_side.Note("end", (), 10.0)]
    busy = [side_by_side.Note("m", (0,), 5.0), side_by_side.Note("end", (), 6.0)]
    idle = [side_by_side.Note("m", (0,), 1.0), side_by_side.Note("end", (), 2.0)]
    assert side_by_side.step_seconds([sender, busy]) == 10.0
    assert side_by_side.step_seconds([sender[:1], busy]) == 6.0
    assert side_by_side.step_seconds([sender[:1], idle]) == 3.0  # 2 until the message is there, and 1 of its own
    with pytest.raises(ValueError, match="not started"):
        side_by_side.step_seconds([[], idle])


def test_the_lower_median_is_taken_between_messages() -> None:
    repetitions = [
        [side_by_side.Note("a", (), a), side_by_side.Note("end", (), a + b)]
        for a, b in ((1.0, 9.0), (2.0, 3.0), (7.0, 4.0))
    ]
    assert side_by_side.typical(repetitions) == [side_by_side.Note("a", (), 2.0), side_by_side.Note("end", (), 6.0)]
    of_two = side_by_side.typical(repetitions[:2])  # the smaller
    assert of_two == [side_by_side.Note("a", (), 1.0), side_by_side.Note("end", (), 4.0)]
    with pytest.raises(ValueError, match="differ"):
        side_by_side.typical([*repetitions, repetitions[0][:1]])


def _exchange() -> tuple[list[Any], list[float]]:
    notebook = side_by_side.Notebook()
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


def _step(*ranks: float) -> list[list[Any]]:
    """A micro-batch of so many CPU seconds on each rank, half a second of everything else, and a meeting."""
    note = side_by_side.Note
    return [
        [
            note(f"{side_by_side.BEGIN} 0", (), 0.25),
            note(f"{side_by_side.END} 0", (), 0.25 + seconds),
            note("m", (), 0.5 + seconds),
            note("m", tuple(range(len(ranks))), 0.5 + seconds),
            note("end", (), 0.5 + seconds),
        ]
        for seconds in ranks
    ]


def _measured(preset: str, repeated: list[list[list[list[Any]]]], clock: list[list[float]]) -> Any:
    batches = [MicroBatch((Segment(0, 0, 4),), 1.0), MicroBatch((Segment(1, 0, 7), Segment(2, 0, 3)), 1.0)]
    plan: Any = SimpleNamespace(ranks=[[batch] for batch in batches])
    return demo.Measured(preset, [plan] * len(clock[0]), repeated, clock)


def test_what_is_printed_and_drawn_follows_from_the_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    steps = [_step(3.5, 1.5), _step(0.5, 2.5)], [_step(2.5, 2.5), _step(1.5, 2.0)]
    base = _measured("plain-4d", [steps[0], [_step(7.0, 1.5), _step(0.5, 2.5)]], [[5.0, 5.0], [5.0, 4.0]])
    ours = _measured("balanced", [[_step(2.5, 5.0), steps[1][1]], steps[1]], [[3.0, 3.0], [4.0, 3.0]])
    demo.show_measured(base, ours, 16_384, LOADS)
    demo.show_simulated(CHECKED)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if "x " in line}
    assert rows["plain-4d"] == ["3.500", "1.40", "1.00x", "4.500", "1.00x"]  # (4 + 3) / 2, over (3 + 2) / 2
    assert rows["balanced"] == ["2.750", "1.05", "1.27x", "3.000", "1.50x"]  # 7 / 5.5, and 9 / 6 by the clock
    text = " ".join(printed.split())
    assert "(0.88 to 1.91) (1.29 to 1.67)" in text  # 7 / 8 to 10.5 / 5.5; 9 / 7 to 10 / 6
    assert "even ranks would give 1.40x in CPU seconds; balanced reaches 91% of that" in text
    assert "one micro-batch differed by 0% (median), at most by 100%. Load average: 0.5 before training" in text
    assert "The clock means little here: it ran 1.3 times" in text
    assert f"simulated: 64 GPUs, each system in its own fastest layout {CHECKED['verdict']}" in text
    faster = _measured(
        "balanced", [[_step(1.0, 1.0), _step(1.0, 1.0)]], [[1.5, 1.5]]
    )  # than the same work of the other
    demo.show_measured(_measured("plain-4d", [steps[0]], [[3.5, 3.5]]), faster, 16_384, LOADS)
    text = " ".join(capsys.readouterr().out.split())
    assert "means little" not in text
    assert "even ranks would give 2.33x in CPU seconds; balanced reaches 100% of that" in text
    demo.draw(base, ours, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size < 200_000


def test_bars_are_what_a_rank_computes_and_the_rest_is_waiting():
    notes = _step(3.5, 1.5)
    times = side_by_side.played(notes)
    slow, fast = ([tuple(bar) for bar in demo.bars(*each)] for each in zip(notes, times, strict=True))
    assert slow == [(0.0, 0.25, None), (0.25, 3.75, 0), (3.75, 4.0, None)]
    assert fast == [(0.0, 0.25, None), (0.25, 1.75, 0), (1.75, 2.0, None)]
    assert [rank[-1] for rank in times] == [4.0, 4.0]


def test_documents_come_in_an_order_that_is_as_uneven_as_usual():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1.5, 400).astype(np.int64) + 1, 3000)
    pieces = demo.usual_order(lengths, 1024, 5)
    assert sum(piece.length for piece in pieces) == lengths.sum()
    assert len({(piece.document, piece.start) for piece in pieces}) == len(pieces)
    tokens = np.array([piece.length for piece in pieces])
    window = (tokens.cumsum() - tokens) // 1024
    seconds = 1 + demo.ATTENTION * np.bincount(window, (tokens / 1024) ** 2)
    steps = seconds[: len(seconds) // 2 * 2].reshape(-1, 2)
    uneven = [float(part.max(axis=1).sum() / part.mean(axis=1).sum()) for part in (steps[1:5], steps)]
    assert uneven[0] == pytest.approx(uneven[1], abs=0.05)


def _forked(command: list[str], *, stderr: Any, **_: Any) -> CompletedProcess[str]:
    """What the demo has torchrun do, with ranks that need not import torch."""
    torchrun, script = command[1:6], command[6:]
    assert torchrun == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with ranks(2, *script, LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="as under torchrun") as both:
        stderr.writelines(rank.communicate()[1] for rank in both)
    return CompletedProcess(command, max(abs(rank.returncode or 0) for rank in both))


def test_a_tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1.2, 60).astype(int) + 2, 1500)
    with TokenStoreWriter(tmp_path / f"corpus-{demo.VOCABULARY}", vocab_size=demo.VOCABULARY) as writer:
        for length in [*lengths.tolist(), 1500, 1500]:
            writer.add(np.ones(length, dtype=np.int64))
    monkeypatch.setattr(demo, "check", lambda: CHECKED)
    monkeypatch.setattr(side_by_side, "subprocess", Mock(run=_forked))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path), "--steps", "3", "--window", "512"])
    demo.main()
    printed = capsys.readouterr().out
    assert "measured: 2 steps of 2 x 512 tokens" in printed
    assert str(CHECKED["verdict"]) in printed
    assert (tmp_path / "demo.png").stat().st_size
