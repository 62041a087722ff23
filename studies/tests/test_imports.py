"""What the studies take from the library: names without an underscore, of the packages that README names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import wlb_studies

ROOT = Path(wlb_studies.__file__).parent
README = ROOT.parents[1] / "README.md"
# Training one's own models is for the study of convergence alone.
TRAINS = {ROOT / "paper" / name for name in ("convergence.py", "training_runs.py")}


def imported(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "wlb":
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_studies_take_documented_names_of_the_library():
    documented = README.read_text(encoding="utf-8")
    for path in ROOT.rglob("*.py"):
        for module, name in imported(path):
            assert not name.startswith("_") or name == "__version__", f"{path} imports {module}.{name}"
            package = ".".join(module.split(".")[:2]) if "." in module else "wlb.errors"
            assert f"`{package}`" in documented or path in TRAINS, f"{path} imports {module}"
