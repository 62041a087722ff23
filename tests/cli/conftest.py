"""The command line as tests run it."""

from __future__ import annotations

import sys

import pytest

from wlb.cli.app import main


@pytest.fixture
def wlb(monkeypatch, capsys):
    """Runs the command line in this process; returns its exit status, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["wlb", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code, *capsys.readouterr()

    return run
