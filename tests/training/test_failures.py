"""One failure is told, and it is the one that caused the others."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from wlb.errors import UserError
from wlb.training.failures import (
    Ending,
    HungError,
    Terminated,
    TrainingError,
    explain_failures,
    report_failure,
)


@dataclass
class Failure:
    """What ``explain_failures`` looks at in torch's ``ProcessFailure``."""

    exitcode: int
    error_file_data: dict[str, Any]
    timestamp: int = 0
    pid: int = 77


SILENT = {"message": "<NONE>"}


def recorded(text: str) -> dict[str, Any]:
    return {"message": {"message": text}}


def explain(failures: dict[int, Failure]) -> Ending:
    return explain_failures(failures)  # type: ignore[arg-type]  # stands in for ProcessFailure


def test_a_killed_rank_explains_why_others_lost_their_peer():
    ending = explain(
        {
            0: Failure(1, recorded("RuntimeError: connection closed"), timestamp=1),
            1: Failure(-signal.SIGKILL, SILENT, timestamp=2),
            2: Failure(-signal.SIGTERM, SILENT, timestamp=1),
        }
    )
    assert ending == Ending(
        cause="rank 1 (process 77) was killed by SIGKILL",
        text="wlb: error: rank 1 (process 77) was killed by SIGKILL; all ranks were stopped",
        status=1,
        restart=True,
    )


def test_a_hung_job_is_told_by_the_rank_that_found_out_and_may_start_again():
    ending = explain(
        {
            0: Failure(1, recorded("RuntimeError: connection closed"), timestamp=1),
            1: Failure(124, recorded("wlb: error: no progress for 3 s: rank 2 does not answer"), timestamp=2),
            2: Failure(-signal.SIGKILL, SILENT, timestamp=31),
        }
    )
    assert ending.cause == "no progress for 3 s: rank 2 does not answer"
    assert ending.text == f"wlb: error: {ending.cause}"
    assert (ending.status, ending.restart) == (124, True)


def test_a_signal_without_a_name_is_told_by_its_number():
    assert explain({0: Failure(-(signal.SIGRTMIN + 3), SILENT)}).cause.endswith(
        f"was killed by signal {signal.SIGRTMIN + 3}"
    )


@pytest.mark.parametrize("signalled", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_a_user_stopped_is_not_started_again(signalled):
    assert not explain({0: Failure(-signalled, SILENT)}).restart


def test_a_terminated_job_is_told_once_and_not_started_again():
    words = recorded("wlb: terminated after step 7; checkpoint saved")
    assert explain({0: Failure(143, words), 1: Failure(143, words)}) == Ending(
        "terminated after step 7; checkpoint saved", "", 143
    )
    assert explain({1: Failure(143, words)}).text == "wlb: terminated after step 7; checkpoint saved"


def test_a_rank_that_had_to_be_killed_is_not_the_cause():
    ending = explain(
        {
            0: Failure(1, recorded("RuntimeError: timed out"), timestamp=100),
            1: Failure(-signal.SIGKILL, SILENT, timestamp=130),
        }
    )
    assert ending.text.startswith("RuntimeError: timed out")
    assert not ending.restart


def test_a_users_mistake_is_told_in_its_own_words():
    ending = explain(
        {
            0: Failure(1, recorded("RuntimeError: connection closed")),
            1: Failure(2, recorded("wlb: error: correct the config"), timestamp=5),
        }
    )
    assert ending == Ending("correct the config", "wlb: error: correct the config", 2)


def test_the_earliest_error_is_told_with_its_rank():
    ending = explain({0: Failure(1, recorded("later"), timestamp=9), 3: Failure(1, recorded("first"), timestamp=4)})
    assert (ending.status, ending.restart) == (1, False)
    assert ending.text.splitlines() == ["first", "wlb: rank 3 failed as above; all ranks were stopped"]


def test_a_silent_exit_is_not_passed_over():
    assert "rank 0 ended with exit status 7" in explain({0: Failure(7, SILENT)}).text


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
    assert json.loads(path.read_text())["message"]["message"] == text
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert report_failure(error) == status
    assert capsys.readouterr().err == text + "\n"


@pytest.mark.parametrize(("rank", "printed"), [("0", "wlb: terminated after step 7\n"), ("1", "")])
def test_the_first_rank_says_itself_that_the_job_was_terminated(rank: str, printed: str, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", rank)
    assert report_failure(Terminated("terminated after step 7")) == 143
    assert capsys.readouterr().err == printed
