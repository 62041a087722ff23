"""One failure is told, and it is the one that caused the others."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from wlb.errors import UserError
from wlb.training.failures import TrainingError, explain_failures, report_failure


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


def explain(failures: dict[int, Failure]) -> tuple[str, int]:
    return explain_failures(failures)  # type: ignore[arg-type]  # stands in for ProcessFailure


def test_a_killed_rank_explains_why_others_lost_their_peer():
    text, status = explain(
        {
            0: Failure(1, recorded("RuntimeError: connection closed"), timestamp=1),
            1: Failure(-signal.SIGKILL, SILENT, timestamp=2),
            2: Failure(-signal.SIGTERM, SILENT, timestamp=1),
        }
    )
    assert status == 1
    assert "rank 1 (process 77) was killed by SIGKILL" in text


def test_a_rank_that_had_to_be_killed_is_not_the_cause():
    text, _ = explain(
        {
            0: Failure(1, recorded("RuntimeError: timed out"), timestamp=100),
            1: Failure(-signal.SIGKILL, SILENT, timestamp=130),
        }
    )
    assert text.startswith("RuntimeError: timed out")


def test_a_users_mistake_is_told_in_its_own_words():
    text, status = explain(
        {
            0: Failure(1, recorded("RuntimeError: connection closed")),
            1: Failure(2, recorded("wlb: error: correct the config"), timestamp=5),
        }
    )
    assert (text, status) == ("wlb: error: correct the config", 2)


def test_the_earliest_error_is_told_with_its_rank():
    text, status = explain(
        {0: Failure(1, recorded("later"), timestamp=9), 3: Failure(1, recorded("first"), timestamp=4)}
    )
    assert status == 1
    assert text.splitlines() == ["first", "wlb: rank 3 failed as above; all ranks were stopped"]


def test_a_silent_exit_is_not_passed_over():
    assert "rank 0 ended with exit status 7" in explain({0: Failure(7, SILENT)})[0]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (UserError("no such store"), 2, "wlb: error: no such store"),
        (TrainingError("loss is nan"), 1, "wlb: error: loss is nan"),
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
