"""Training goes on where nobody reads what it says."""

from __future__ import annotations

import io
import os
import sys

import pytest

from tests.training.terminal import Terminal
from wlb.training.console import flush, meanwhile, say, show_meanwhile


def test_what_shows_while_one_waits_leaves_no_trace_on_a_terminal_and_none_at_all_in_a_log(
    monkeypatch: pytest.MonkeyPatch,
):
    def shown(stream: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(RuntimeError), meanwhile("checking"):
            raise RuntimeError
        show_meanwhile("starting")
        say("step 1")
        return stream.getvalue()

    erase = "\r\x1b[K"
    assert shown(Terminal()) == f"{erase}checking{erase}{erase}starting{erase}step 1\n"
    assert shown(io.StringIO()) == "step 1\n"


def test_lines_are_lost_where_the_reader_has_ended(monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)
        print("a summary")
        say("step 1")
        flush()
        assert os.readlink(f"/proc/self/fd/{writer}") == os.devnull


def test_a_log_on_a_full_disk_goes_on_when_there_is_room(monkeypatch: pytest.MonkeyPatch):
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        say("step 1")
        assert os.readlink(f"/proc/self/fd/{stream.fileno()}") == "/dev/full"
        reader, writer = os.pipe()
        os.dup2(writer, stream.fileno())
        os.close(writer)
        say("step 2")
    with os.fdopen(reader) as lines:
        assert lines.read() == "step 1\nstep 2\n"


def test_streams_that_were_closed_before_the_start_are_passed_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    say("nobody reads this")
    show_meanwhile("nor this")
    flush()
