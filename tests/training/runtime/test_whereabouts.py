"""What a thread is doing is read from its stack, wherever the package and torch are installed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import wlb
from wlb.training.runtime.whereabouts import stack_of, whereabouts_of

PACKAGE = Path(wlb.__file__).parent
TORCH = Path(torch.__file__).parent
OURS = f"{PACKAGE}/training/runtime/collectives.py"
COLLECTIVE = f"{TORCH}/distributed/distributed_c10d.py"
WRAPPER = f"{TORCH}/distributed/c10d_logger.py"


@contextmanager
def standing_in(*files: str) -> Iterator[int]:
    """A thread that stands in a function of the last of ``files``, called from one in each of those before it."""
    standing, release = threading.Event(), threading.Lock()
    release.acquire()
    calls: list[Callable[[], object]] = [standing.set, release.acquire]
    for file in reversed(files):
        names: dict[str, Any] = {"calls": calls}
        exec(compile("def f():\n for call in calls: call()", file, "exec"), names)
        calls = [names["f"]]
    thread = threading.Thread(target=calls[0], daemon=True)
    thread.start()
    standing.wait()
    assert thread.ident is not None
    yield thread.ident
    release.release()
    thread.join()


@pytest.mark.parametrize(
    ("files", "waiting", "place"),
    [
        (
            [OURS, COLLECTIVE],
            True,
            "f (torch/distributed/distributed_c10d.py:2), called from f (wlb/training/runtime/collectives.py:2)",
        ),
        ([OURS, COLLECTIVE, WRAPPER], True, "f (torch/distributed/distributed_c10d.py:2), called from f (wlb/"),
        (
            [OURS, f"{TORCH}/distributed/checkpoint/filesystem.py"],
            False,
            "f (distributed/checkpoint/filesystem.py:2), inside",
        ),
        ([OURS, f"{PACKAGE}/attention/exchange.py"], True, "f (wlb/attention/exchange.py:2)"),
        # Checkouts in directories that are called like the package, or like torch's.
        ([OURS, "/home/wlb/venv/json/decoder.py"], False, "f (venv/json/decoder.py:2), inside f (wlb/training/"),
        ([OURS, "/home/torch/distributed/job.py"], False, "f (torch/distributed/job.py:2), inside f (wlb/training/"),
        (["/home/wlb/job.py", COLLECTIVE], True, "f (torch/distributed/distributed_c10d.py:2)"),
    ],
)
def test_a_place_is_told_by_the_directories_of_the_packages(files, waiting, place):
    with standing_in(*files) as thread:
        whereabouts = whereabouts_of(thread)
    assert whereabouts.waiting == waiting
    assert whereabouts.place.startswith(place)
    assert ("called from" in whereabouts.place) == ("called from" in place)


def test_a_thread_that_stands_still_is_told_from_one_that_moves():
    release = threading.Event()
    thread = threading.Thread(target=release.wait, daemon=True)
    thread.start()
    assert thread.ident is not None
    first = stack_of(thread.ident)
    assert first == stack_of(thread.ident)
    assert not whereabouts_of(thread.ident).waiting
    assert whereabouts_of(thread.ident).place.startswith("wait (")
    release.set()
    thread.join()
    assert stack_of(thread.ident) == ()
