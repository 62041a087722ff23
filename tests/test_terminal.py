"""Text for people: numbers with their noun, and lines that break between words."""

import io
import os
import pty

import pytest

from wlb.terminal import beginning_of, columns, number_of, tell, wrapped


def test_one_thing_is_no_plural():
    shown = [number_of(1, "document"), number_of(0, "step"), number_of(2000, "document"), number_of(2, "process")]
    assert shown == ["1 document", "0 steps", "2,000 documents", "2 processes"]


def test_names_are_cut_and_in_one_line():
    assert beginning_of(["id", "a text\nof two  lines"]) == "id, a text of two lines"
    assert len(beginning_of(["name"] * 1000)) == 80


def test_lines_break_between_words_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch):
    line = "  1. " + "imbalance/predicted " * 6 + "x" * 90
    leader, follower = pty.openpty()
    try:
        with os.fdopen(follower, "w") as terminal:
            monkeypatch.setattr("sys.stderr", terminal)
            assert columns() == 80  # a terminal that does not say
            broken = wrapped(f"{line}\nshort").splitlines()
    finally:
        os.close(leader)
    assert [len(part) <= 80 for part in broken] == [True, True, False, True]
    assert all(part.startswith("    ") for part in broken[1:3])
    assert " ".join(broken).split() == f"{line} short".split()
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    tell(line)
    assert pipe.getvalue() == f"{line}\n"
