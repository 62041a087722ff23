"""Options of the test suite."""

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from functools import _lru_cache_wrapper
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import programs  # before anything is spawned
from tests.limits import EXHAUSTIVE_EXAMPLES, USUAL_EXAMPLES

# A deadline is an assertion about time, and fails on a busy machine; so does the check that drawing examples is quick.
ANY_TIME = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("usual", ANY_TIME, max_examples=USUAL_EXAMPLES)
settings.register_profile("exhaustive", ANY_TIME, max_examples=EXHAUSTIVE_EXAMPLES)
settings.load_profile("usual")


# What takes longest begins first in each of the parts that workers begin with, or one would be left with it at the end.
LONGEST = (
    "tests/training",
    "tests/test_documentation.py",
    "tests/test_stack_pages.py",
    "tests/integrations/huggingface",
    "tests/simulate",
    "tests/benchmarks",
    "studies/tests",
)


# Before torch is imported, here and in programs: models this small lose far more to thread switches than threads win.
os.environ["OMP_NUM_THREADS"] = "1"
gc.disable()  # while tests are collected: what they import stays, and searching it takes as long as importing it


@pytest.fixture(scope="module")
def kernels_launched_at_once() -> Iterator[None]:
    """Without the time of launching kernels, which would hide everything else in the smallest jobs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_HOST_SECONDS", "_HOST_SECONDS_TP"):
            patch.setattr(f"wlb.workload.costs.{name}", 0.0)
        _forget_prices()
        yield
    _forget_prices()  # tests of other modules in this process ask for some of the same ones


def _forget_prices() -> None:
    for name, module in [*sys.modules.items()]:
        for cached in vars(module).values() if name.partition(".")[0] in ("wlb", "wlb_studies") else ():
            if isinstance(cached, _lru_cache_wrapper):
                cached.cache_clear()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All workers of xdist fork from one server, which starts while they collect tests."""
    node.workerinput["server"] = programs.server_address()


def pytest_configure(config: Any) -> None:
    if hasattr(config, "workerinput"):
        programs.fork_from(config.workerinput["server"])


def pytest_collection_modifyitems(config: Any, items: list[pytest.Item]) -> None:
    for item in items:  # for the results as XML, which scripts/stacks.py reads
        item.user_properties += [("proves", name) for mark in item.iter_markers("proves") for name in mark.args]
    long = [item for item in items if item.nodeid.startswith(LONGEST)]
    short = [item for item in items if not item.nodeid.startswith(LONGEST)]
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = [item for part in range(workers) for kind in (long, short) for item in _part(kind, part, workers)]
    gc.freeze()
    gc.enable()


def _part(items: Sequence[pytest.Item], part: int, parts: int) -> Sequence[pytest.Item]:
    return items[part * len(items) // parts : (part + 1) * len(items) // parts]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-layouts", action="store_true", help="tests/training/test_equivalence.py: every layout of up to 8 ranks"
    )
