"""The command line as tests run it."""

from __future__ import annotations

import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from subprocess import CompletedProcess
from unittest import mock

import pytest

from wlb.cli.app import main


def run(*arguments: object) -> CompletedProcess[str]:
    """``wlb ARGUMENTS`` in this process."""
    words = ["wlb", *map(str, arguments)]
    out, err = StringIO(), StringIO()
    with (
        mock.patch.object(sys, "argv", words),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as exit_,
    ):
        main()
    status = exit_.value.code
    assert isinstance(status, int)
    return CompletedProcess(words, status, out.getvalue(), err.getvalue())


@pytest.fixture
def wlb():
    """The same; returns exit status, stdout and stderr."""

    def outcome(*arguments):
        done = run(*arguments)
        return done.returncode, done.stdout, done.stderr

    return outcome
