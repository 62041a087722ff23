"""Training goes on where nobody reads what it says."""

import errno
import io
import os
import sys

import pytest

from wlb.terminal import tell, write
from wlb.training.process import flush


def test_lines_are_lost_where_the_reader_has_ended(monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)
        print("a summary")
        tell("step 1")
        flush()
        assert os.readlink(f"/proc/self/fd/{writer}") == os.devnull


def test_a_log_on_a_full_disk_goes_on_when_there_is_room(monkeypatch: pytest.MonkeyPatch):
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        tell("step 1")
        assert os.readlink(f"/proc/self/fd/{stream.fileno()}") == "/dev/full"
        reader, writer = os.pipe()
        os.dup2(writer, stream.fileno())
        os.close(writer)
        tell("step 2")
    with os.fdopen(reader) as lines:
        assert lines.read() == "step 1\nstep 2\n"


def test_streams_that_were_closed_before_the_start_are_passed_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    tell("nobody reads this")
    flush()


def test_a_summary_without_room_is_an_error(monkeypatch: pytest.MonkeyPatch):
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", full := Full())
    with pytest.raises(OSError, match="No space left"):
        write(full, "{}")
