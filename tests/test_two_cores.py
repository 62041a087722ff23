"""Work shared with a forked copy of this process."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from wlb import two_cores
from wlb.errors import UserError
from wlb.two_cores import on_two_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_cores, "usable_cores", lambda: 2)


def test_it_is_map_with_the_later_half_elsewhere():
    here = os.getpid()
    for number in range(6):
        found = list(on_two_cores(lambda item: (item * item, os.getpid() == here), range(number)))
        assert [square for square, _ in found] == [item * item for item in range(number)]
        assert [is_here for _, is_here in found] == [item < (number + 1) // 2 for item in range(number)]


def test_results_come_as_they_are_ready():
    """The first one, before the copy has done anything."""
    reader, writer = os.pipe()
    results = on_two_cores(lambda item: item or os.read(reader, 1), [b"own", b""])
    assert next(results) == b"own"
    os.write(writer, b"x")
    assert list(results) == [b"x"]


def test_one_core_forks_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(two_cores, "usable_cores", lambda: 1)
    monkeypatch.delattr(os, "fork")
    assert list(on_two_cores(str, [1, 2, 3])) == ["1", "2", "3"]


def _fails(item: int) -> int:
    if item == 3:
        raise UserError("three is too many")
    return item


class _OfTwoWords(Exception):
    """Cannot be read from a pickle, which has one."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def _fails_oddly(item: int) -> int:
    if item == 1:
        raise EOFError("one")
    if item == 6:
        raise _OfTwoWords("six", "items")
    return item


def _dies_elsewhere(here: int, item: int) -> int:
    if os.getpid() != here:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_mistakes_are_raised_and_what_a_killed_copy_had_to_do_is_done_here():
    with pytest.raises(UserError, match="three is too many"):
        list(on_two_cores(_fails, [1, 2, 3]))
    with pytest.raises(UserError, match="three is too many"):
        list(on_two_cores(_fails, [3, 2, 1]))
    with pytest.raises(EOFError, match="one"):
        list(on_two_cores(_fails_oddly, [1, 2, 3]))
    with pytest.raises(_OfTwoWords, match="six items"):
        list(on_two_cores(_fails_oddly, [3, 6]))
    here = os.getpid()
    assert list(on_two_cores(lambda item: _dies_elsewhere(here, item), [1, 2, 3, 4])) == [1, 2, 3, 4]


def test_a_copy_ends_with_whoever_asked(monkeypatch: pytest.MonkeyPatch):
    ended: list[int] = []
    waitpid = os.waitpid
    monkeypatch.setattr(os, "waitpid", lambda process, options: ended.append(waitpid(process, options)[0]))
    reader, _ = os.pipe()
    results = on_two_cores(lambda item: os.read(reader, 1) if item else b"own", [0, 1])
    assert next(results) == b"own"
    del results
    assert len(ended) == 1


def test_a_copy_ends_with_a_process_that_is_killed():
    """As wlb serve kills the one that answers a question, when the page asks another."""
    reader, writer = os.pipe()
    never, _ = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            list(on_two_cores(lambda _: os.write(writer, b"x") and os.read(never, 1), [0, 1]))
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read(2) == b"xx"
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert pipe.read() == b""  # nobody holds the other end


def test_nobody_needs_to_wait_for_a_copy():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert list(on_two_cores(str, [1, 2])) == ["1", "2"]
    finally:
        signal.signal(signal.SIGCHLD, before)
