"""One failure is told, once, and in one line where that is enough."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.cases import in_turn
from wlb.errors import UserError
from wlb.training import process
from wlb.training.process import Ending, HungError, Terminated, TrainingError, ending_of, leave


class Left(Exception):
    """Stands for the end of the process."""


def left_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    """The status with which a process leaves."""

    def end(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr(process.os, "_exit", end)
    try:
        raise error
    except type(error):
        with pytest.raises(Left) as left:
            leave(error)
    return int(left.value.args[0])


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (UserError("no such store: x"), Ending("wlb: error: no such store: x", 2)),
        (TrainingError("loss is nan"), Ending("wlb: error: loss is nan", 1)),
        (HungError("rank 1 does not answer"), Ending("wlb: error: rank 1 does not answer", 124, restart=True)),
    ],
)
def test_a_rank_hands_its_error_to_the_launcher_or_prints_it(
    error: Exception, ending: Ending, tmp_path: Path, monkeypatch, capsys
):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert left_with(error, monkeypatch) == ending.status
    assert capsys.readouterr().err == ""
    assert ending_of(3, ProcessFailure(3, 77, ending.status, str(path))) == ending
    for elsewhere in (tmp_path / "gone" / "error.json", ""):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(elsewhere))
        assert left_with(error, monkeypatch) == ending.status
        assert capsys.readouterr().err == f"{ending.text}\n"


def test_a_bug_is_told_with_its_traceback(tmp_path, monkeypatch, capsys):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert left_with(ZeroDivisionError("oops"), monkeypatch) == 1
    text, status, restart = ending_of(3, ProcessFailure(3, 77, 1, str(path)))
    assert text.startswith("Traceback (most recent call last):")
    assert text.splitlines()[-2:] == ["ZeroDivisionError: oops", "wlb: rank 3 failed as above"]
    assert (status, restart) == (1, False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert left_with(ZeroDivisionError("oops"), monkeypatch) == 1
    assert capsys.readouterr().err.endswith("ZeroDivisionError: oops\n")


@in_turn(
    ("status", "text", "restart"),
    [
        (-signal.SIGKILL, "rank 1 (process 77) was killed by SIGKILL", True),
        (-(signal.SIGRTMIN + 3), f"rank 1 (process 77) was killed by signal {signal.SIGRTMIN + 3}", True),
        (7, "rank 1 exited with status 7 and no error message", False),
    ],
)
def test_a_rank_that_left_no_message_is_named(status: int, text: str, restart: bool):
    failure = ProcessFailure(1, 77, status, os.devnull + "/none")
    assert ending_of(1, failure) == Ending(f"wlb: error: {text}", 1, restart)


@pytest.mark.parametrize(("rank", "printed"), [("0", "wlb: terminated after step 7\n"), ("1", "")])
def test_the_first_rank_says_itself_that_the_job_was_terminated(rank: str, printed: str, tmp_path, monkeypatch, capsys):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", rank)
    assert left_with(Terminated("terminated after step 7"), monkeypatch) == 143
    assert capsys.readouterr().err == printed
    assert ending_of(0, ProcessFailure(0, 77, 143, str(path))) == Ending("", 143)


def test_a_rank_whose_launcher_has_left_says_nothing(tmp_path, monkeypatch, capsys):
    """The launcher was asked to end while it started this rank, has said so, and has taken its folder with it."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert left_with(RuntimeError("failed to recv, got 0 bytes"), monkeypatch) == 143
    assert capsys.readouterr().err == ""
