"""The command line as tests run it."""

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

import pytest
import typer

from wlb.cli.app import app
from wlb.cli.app import run as run_application
from wlb.cli.check import estimated
from wlb.simulate.estimate import Estimate


def run(*arguments: object, application: typer.Typer = app) -> CompletedProcess[str]:
    """``wlb ARGUMENTS``, or another application's, in this process."""
    words = [str(application.info.name), *map(str, arguments)]
    out, err = StringIO(), StringIO()
    with (
        mock.patch.object(sys, "argv", words),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as exit_,
    ):
        run_application(application)
    status = exit_.value.code
    assert isinstance(status, int)
    return CompletedProcess(words, status, out.getvalue(), err.getvalue())


def printed(*arguments: object) -> str:
    """What ``wlb ARGUMENTS`` writes to stdout; it succeeds."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed_both(*arguments: object) -> tuple[str, Any]:
    """What ``wlb ARGUMENTS`` writes to stdout and, with ``--json``, the value in it; both of one estimate."""
    found: list[Estimate] = []

    def estimated_once(*given: Any) -> Estimate:
        found[:] = found or [estimated(*given)]
        return found[0]

    with mock.patch("wlb.cli.check.estimated", estimated_once):
        return printed(*arguments), json.loads(printed(*arguments, "--json"))


def refusal(*arguments: object) -> str:
    """The one line that ``wlb ARGUMENTS`` ends with."""
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), arguments
    assert done.stderr.startswith("wlb: error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("wlb: error: ").removesuffix("\n")


@pytest.fixture
def wlb():
    """The same; returns exit status, stdout and stderr."""

    def outcome(*arguments):
        done = run(*arguments)
        return done.returncode, done.stdout, done.stderr

    return outcome
