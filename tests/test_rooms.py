"""Which room may import which, and that the planning half needs no torch."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import wlb
from tests.cases import in_turn

PACKAGE = Path(wlb.__file__).parent
GROUND = {"errors", "files", "lightest", "os_limits", "settings", "terminal", "token_count"}
# A room may import these rooms and the ground floor, and nothing else, not even in a function.
MAY_IMPORT = {
    "errors": set(),
    "files": set(),
    "lightest": set(),
    "os_limits": set(),
    "terminal": set(),
    "token_count": {"errors"},
    "settings": {"errors", "token_count"},
    "documents": set(),
    "workload": set(),
    "schedules": {"workload"},
    "packing": {"documents", "workload", "schedules"},
    "sharding": {"workload"},
    "job": {"documents", "packing", "schedules", "sharding", "workload"},
    "simulate": {"documents", "job", "packing", "schedules", "sharding", "workload"},
    "report": {"documents", "job", "packing", "schedules", "sharding", "simulate", "workload"},
    "attention": {"sharding"},
    "models": {"documents", "job", "runtime", "workload"},
    "runtime": {"attention", "documents", "job", "packing", "schedules", "sharding", "workload"},
    "training": {
        *("attention", "documents", "job", "models", "packing", "runtime", "schedules", "sharding", "simulate"),
        "workload",
    },
    "profiling": {"attention", "documents", "models", "runtime", "training", "workload"},
    "integrations": {
        *("attention", "documents", "job", "packing", "runtime", "sharding", "simulate", "training", "workload"),
        "shadow_mode",
    },
    "shadow_mode": {"job", "runtime", "simulate", "workload"},
}
# And commands and integrations that use them.
TORCH = {"attention", "models", "runtime", "training", "profiling", "shadow_mode"}
ANYTHING = {"cli", "__main__", "__init__"}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"), path


NAMES = {name for name, _ in modules()}


class Source(NamedTuple):
    """Of a file: its imports, wherever they are, and the names of its classes."""

    imports: list[ast.Import | ast.ImportFrom]
    classes: list[str]


@cache
def read(path: Path) -> Source:
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return Source(imports, [node.name for node in nodes if isinstance(node, ast.ClassDef)])


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that ``path`` imports anywhere, names without ``wlb.``."""
    for node in read(path).imports:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "wlb":
            module = node.module.removeprefix("wlb").removeprefix(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}".removeprefix(".")
                yield inner if inner in NAMES else module
        else:
            yield from (alias.name.removeprefix("wlb.") for alias in node.names if alias.name.startswith("wlb."))


def test_the_library_imports_no_study():
    assert not [name for name, path in modules() if "wlb_studies" in path.read_text(encoding="utf-8")]


@in_turn(("name", "path"), list(modules()))
def test_rooms_import_only_what_they_may(name: str, path: Path):
    room = name.partition(".")[0]
    if room in ANYTHING:
        return
    others = {module.partition(".")[0] for module in imported(path) if module} - {room}
    assert others <= MAY_IMPORT[room] | GROUND


def test_no_file_imports_itself_through_others():
    graph = {name: {other for other in imported(path) if other in NAMES} - {name} for name, path in modules()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " imports ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_no_two_classes_have_one_name():
    names = [name.lstrip("_") for _, path in modules() for name in read(path).classes]
    assert {name for name, count in Counter(names).items() if count > 1} <= {"Config"}  # of torchtitan's components


def test_the_planning_half_imports_no_torch():
    elsewhere = {*TORCH, "integrations", "__main__", "__init__", ""}
    names = [name for name, _ in modules() if name.partition(".")[0] not in elsewhere]
    code = "\n".join(["import sys", *(f"import wlb.{name}" for name in names), "assert 'torch' not in sys.modules"])
    subprocess.run([sys.executable, "-c", code], check=True)
