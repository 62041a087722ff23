"""Every published name is there and is called as documented, and the planning names load no torch."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest
import typer

import wlb
from tests.cases import in_turn
from tests.contract.names import (
    COMMANDS,
    HARDWARE,
    MODELS,
    PACKER_METHODS,
    PACKERS,
    PRESETS,
    PUBLISHED,
    SETTINGS,
    STRATEGIES,
)
from wlb import StepPlan, make_packer, make_shard_plan, make_workload
from wlb.cli.app import app
from wlb.errors import UserError
from wlb.job.config import JobConfig

ROOT = Path(__file__).parents[2]
_MORE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def resolve(path: str) -> Any:
    """What the dotted ``path`` names: the longest module in it, and attributes of that."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name not in [".".join(parts[: n + 1]) for n in range(count)]:
                raise  # a dependency of the module is missing, not the module
            continue
        for name in parts[count:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"{path} starts with no module")


OF_FRAMEWORKS = [path for path in PUBLISHED if path.startswith("wlb.integrations.")]


def broken_promises(promised: str, function: Callable[..., Any]) -> list[str]:
    """How calls that the parameters ``promised`` allow could fail with ``function``."""
    wanted = inspect.signature(eval(f"lambda {promised}: None")).parameters
    actual = {p.name: p for p in inspect.signature(function).parameters.values() if p.name != "self"}
    problems = []
    for index, (name, parameter) in enumerate(wanted.items()):
        found = actual.get(name)
        if found is None:
            problems.append(f"has no parameter {name}")
        elif parameter.default is not Parameter.empty and found.default is Parameter.empty:
            problems.append(f"{name} has no default")
        elif parameter.kind is Parameter.POSITIONAL_OR_KEYWORD and (
            found.kind is not parameter.kind or [*actual].index(name) != index
        ):
            problems.append(f"{name} is not positional parameter {index + 1}")
    new = [found for name, found in actual.items() if name not in wanted]
    return problems + [
        f"{p.name} is new and has no default" for p in new if p.default is p.empty and p.kind not in _MORE
    ]


@in_turn("path", [path for path in PUBLISHED if path not in OF_FRAMEWORKS])
def test_a_published_name_is_called_as_documented(path: str):
    assert as_published(path)


@pytest.mark.parametrize("path", OF_FRAMEWORKS)
def test_a_published_name_of_an_integration_is_called_as_documented(path: str):
    try:
        assert as_published(path)
    except (ImportError, UserError) as missing:
        pytest.skip(str(missing))  # the framework is not installed, or too old


def as_published(path: str) -> bool:
    found, promised = resolve(path), PUBLISHED[path]
    return promised is None or not broken_promises(promised, found)


def test_a_changed_signature_is_found():
    def function(a: int, b: int = 0, *, c: int, d: int = 0, **more: int) -> None: ...

    for promised, problems in (
        ("a, b=..., *, c, d=..., **more", []),
        ("b=..., a=..., *, c", ["b is not positional parameter 1", "a has no default"]),
        ("a, e=..., *, c", ["has no parameter e"]),
        ("a", ["c is new and has no default"]),
    ):
        assert broken_promises(promised, function) == problems


@in_turn("name", PACKERS)
def test_packers_have_the_published_methods(name: str):
    packer = make_packer(name, micro_batches=2, context_window=64, workload=make_workload("tiny", "cpu"))
    assert not [
        problem for n, promised in PACKER_METHODS.items() for problem in broken_promises(promised, getattr(packer, n))
    ]
    plans = packer.plan([(7, 64), (8, 32), (9, 32)])
    packer.load_state_dict(packer.state_dict())
    plans += packer.drain()
    assert all(isinstance(plan, StepPlan) for plan in plans)
    assert {segment.document for plan in plans for segment in plan.segments} == {7, 8, 9}


def test_strategies_and_presets_are_known():
    for name in STRATEGIES:
        make_shard_plan([40, 7], cp_size=2, strategy=name)
    for model, hardware in [*((m, "h100") for m in MODELS), *(("tiny", h) for h in HARDWARE)]:
        assert make_workload(model, hardware).document_seconds([1])[0] > 0


def test_commands_have_the_published_options():
    group: Any = typer.main.get_command(app)
    options = {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in group.commands.items()
    }
    missing = {name: set(promised.split()) - options.get(name, set()) for name, promised in COMMANDS.items()}
    assert not {name: of_one for name, of_one in missing.items() if of_one}


def test_configurations_have_the_published_settings():
    sections: dict[str, Any] = {name: field.annotation for name, field in JobConfig.model_fields.items()}
    missing = {name: set(promised.split()) - set(sections[name].model_fields) for name, promised in SETTINGS.items()}
    assert not {name: of_one for name, of_one in missing.items() if of_one}
    for preset in PRESETS:
        JobConfig.model_validate({"preset": preset, "data": {"store": "corpus"}})


@in_turn("page", PAGES)
def test_names_in_the_docs_exist(page: Path):
    for path in re.findall(r"`(wlb(?:\.\w+)+)", page.read_text(encoding="utf-8")):
        resolve(path)


def test_planning_names_load_lazily_and_without_torch():
    """In an interpreter of its own, as this one has imported both."""
    code = """
import sys, wlb
assert not {"torch", "numpy", "pydantic"} & {*sys.modules}
assert {*wlb.__all__} <= {*dir(wlb)}
from wlb import make_packer, arrange, StepPlan, MicroBatch, Segment, make_shard_plan, ShardPlan, make_workload
assert all(getattr(wlb, name) is not None for name in wlb.__all__)
import wlb.job.memory.fit, wlb.simulate
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_refused_like_that_of_any_module():
    with pytest.raises(AttributeError, match="module 'wlb' has no attribute 'pack'"):
        wlb.pack  # type: ignore[attr-defined]  # noqa: B018
