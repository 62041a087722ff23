"""One failure is told, and it is the one that caused the others."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cases import in_turn
from wlb.errors import UserError
from wlb.training.failures import (
    Ending,
    HungError,
    RankFailure,
    Terminated,
    TrainingError,
    explain_failures,
    recorded_failure,
    report_failure,
)


def failure(status: int, text: str | None = None, time: float = 0.0) -> RankFailure:
    return RankFailure(77, status, text, time)


LOST = failure(1, "RuntimeError: connection closed", time=1)
KILLED = "rank 1 (process 77) was killed by SIGKILL"
HUNG = "no progress for 3 s: rank 2 does not answer"
SAVED = "wlb: terminated after step 7; checkpoint saved"


@in_turn(
    ("failures", "ending"),
    [
        (
            {0: LOST, 1: failure(-signal.SIGKILL, time=2)},
            Ending(KILLED, f"wlb: error: {KILLED}; all ranks were stopped", 1, restart=True),
        ),
        (
            {0: LOST, 1: failure(124, f"wlb: error: {HUNG}", time=2)},
            Ending(HUNG, f"wlb: error: {HUNG}", 124, restart=True),
        ),
        ({0: failure(143, SAVED), 1: failure(143, SAVED)}, Ending(SAVED.removeprefix("wlb: "), "", 143)),
        ({1: failure(143, SAVED)}, Ending(SAVED.removeprefix("wlb: "), SAVED, 143)),
        (
            {0: LOST, 1: failure(2, "wlb: error: correct the config", time=5)},
            Ending("correct the config", "wlb: error: correct the config", 2),
        ),
    ],
)
def test_the_failure_that_caused_the_others_is_told(failures: dict[int, RankFailure], ending: Ending):
    assert explain_failures(failures) == ending


def test_what_ended_a_rank_is_told_with_the_rank():
    ending = explain_failures({0: failure(1, "later", time=9), 3: failure(1, "first", time=4)})
    assert (ending.status, ending.restart) == (1, False)
    assert ending.text.splitlines() == ["first", "wlb: rank 3 failed as above; all ranks were stopped"]
    assert "rank 0 exited with status 7" in explain_failures({0: failure(7)}).text
    unnamed = explain_failures({0: failure(-(signal.SIGRTMIN + 3))})
    assert unnamed.cause.endswith(f"was killed by signal {signal.SIGRTMIN + 3}")
    assert not explain_failures({0: failure(-signal.SIGINT)}).restart  # a user interrupted it


def test_a_record_that_is_missing_or_half_written_is_none(tmp_path):
    path = tmp_path / "rank-0.json"
    assert recorded_failure(77, 1, path).text is None
    path.write_text('{"message": {"mess')
    assert recorded_failure(77, 1, path).text is None


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (UserError("no such store"), 2, "wlb: error: no such store"),
        (TrainingError("loss is nan"), 1, "wlb: error: loss is nan"),
        (HungError("rank 1 does not answer"), 124, "wlb: error: rank 1 does not answer"),
        (ZeroDivisionError("oops"), 1, "ZeroDivisionError: oops"),
    ],
)
def test_a_rank_writes_its_error_for_the_launcher(
    error: Exception, status: int, text: str, tmp_path: Path, monkeypatch, capsys
):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert report_failure(error) == status
    assert json.loads(path.read_text())["message"]["message"] == text  # where torchrun looks for it
    assert recorded_failure(77, status, path) == RankFailure(77, status, text, path.stat().st_mtime)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert report_failure(error) == status
    assert capsys.readouterr().err == text + "\n"


@pytest.mark.parametrize(("rank", "printed"), [("0", "wlb: terminated after step 7\n"), ("1", "")])
def test_the_first_rank_says_itself_that_the_job_was_terminated(rank: str, printed: str, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", rank)
    assert report_failure(Terminated("terminated after step 7")) == 143
    assert capsys.readouterr().err == printed


def test_an_error_that_cannot_be_handed_over_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    assert report_failure(UserError("no such store")) == 2
    assert capsys.readouterr().err == "wlb: error: no such store\n"
