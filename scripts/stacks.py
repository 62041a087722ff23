"""Test the integrations under the pins of each front end, and say which of their features are exact there.

    .venv/bin/python scripts/stacks.py [NAME ...] [--torchtitan DIR] [--megatron DIR]    # or make stacks
    .venv/bin/python scripts/stacks.py --table    # only write the table of docs/index.md again

Environments are kept in ``.venv-stacks``, each over ``.venv``, and hold only what differs. A test marked ``proves``
stands for a feature. The results go to ``src/wlb/integrations/tested.json``; a stack that was not run keeps its last.
"""

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "src" / "wlb" / "integrations" / "tested.json"
PAGE = ROOT / "docs" / "index.md"
BEGIN, END = "<!-- made by scripts/stacks.py -->\n", "<!-- end -->\n"
EXAMPLES = "tests/test_examples.py::test_an_example_trains_every_document_once"
HF = ("tests/integrations", "tests/runtime/test_own_lists.py", EXAMPLES)
TITAN, MEGATRON = ("tests/integrations/test_torchtitan.py",), ("tests/integrations/test_megatron.py",)


class Stack(NamedTuple):
    """A front end in a version: what it pins of what WLB calls, the tests, and which checkout it needs."""

    version: str
    pins: Sequence[str]
    tests: Sequence[str] = HF
    checkout: str = ""


STACKS = {
    "transformers": Stack("5.24.0", ["transformers==5.24.0"]),
    "TRL": Stack("1.16.0", ["trl==1.16.0", "transformers==5.24.0"]),
    "Axolotl": Stack(
        "0.19.0", ["transformers==5.16.1", "trl==1.9.0", "accelerate==1.13.0", "datasets==4.8.4", "peft==0.20.0"]
    ),
    "ms-swift": Stack("4.6.0", ["transformers<5.20", "trl<1", "datasets<4.8.5", "peft<0.21"]),
    "LLaMA-Factory": Stack(
        "0.9.5", ["transformers==5.6.0", "trl==0.24.0", "accelerate==1.11.0", "datasets==4.0.0", "peft==0.18.1"]
    ),
    "torch": Stack("2.15.0", ["torch==2.15.0"]),
    "torchtitan": Stack("0.3.0", ["torchtitan==0.3.0", "triton"], TITAN),
    "torchtitan main": Stack("", ["datasets<4.8", "grain", "spmd_types==0.2.3", "triton", "tyro"], TITAN, "torchtitan"),
    "Megatron-LM": Stack("", ["triton"], MEGATRON, "megatron"),
}
FEATURES = (
    "packed batches",
    "own lists",
    "context parallelism",
    "resume",
    "Trainer",
    "evaluation",
    "experts",
    "SFTTrainer",
    "Accelerate",
    "Lightning",
    "Lfm2, Qwen3-Next, Qwen3.5, Bamba, Zamba2",
    "Nemotron-H, Falcon-H1",
    "OPT",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(STACKS)}; all by default")
    parser.add_argument("--table", action="store_true", help="run nothing")
    for name in ("torchtitan", "megatron"):
        parser.add_argument(f"--{name}", type=Path, help="a checkout of its main")
    asked = parser.parse_args()
    if unknown := {*asked.names} - {*STACKS}:
        parser.error(f"{', '.join(unknown)} unknown; choose from {', '.join(STACKS)}")
    results = {row["stack"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))} if RESULTS.exists() else {}
    summary = []
    for name in [] if asked.table else asked.names or STACKS:
        checkout: Path | None = getattr(asked, STACKS[name].checkout, None)
        if STACKS[name].checkout and not checkout:
            summary.append(f"{name}: not run, as no checkout was given: --{STACKS[name].checkout} DIR")
            continue
        said, row = _run(name, STACKS[name], checkout)
        summary.append(said)
        _write(results := results | ({name: row} if row else {}))
    _write(results)
    print("\n".join(["", *summary]))
    return int(any("FAILED" in said for said in summary))


def _write(results: Mapping[str, Mapping[str, Any]]) -> None:
    rows = [results[name] for name in STACKS if name in results]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(rows) + END + rest.partition(END)[2], encoding="utf-8")


def _run(name: str, stack: Stack, checkout: Path | None) -> tuple[str, dict[str, Any] | None]:
    """One line of the summary, and the results if tests ran."""
    folder = ROOT / ".venv-stacks" / name.replace(" ", "-")
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        (base,) = (ROOT / ".venv").glob("lib/python*/site-packages")
        (python.parents[1] / base.relative_to(ROOT / ".venv") / "base.pth").write_text(f"{base}\n")
    if stack.pins:
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *stack.pins]
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        if installed.returncode:
            return f"{name}: not run, as {(installed.stderr.strip() or 'pip failed').splitlines()[-1]}", None
    paths = [*([checkout.resolve()] if checkout else []), ROOT, ROOT / "src", ROOT / "studies" / "src"]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    (xml := folder / "results.xml").unlink(missing_ok=True)
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-m",
        "proves or not exhaustive",
        f"--junitxml={xml}",
        *stack.tests,
    ]
    print(f"== {name} {stack.version}: {' '.join(stack.pins)}", flush=True)
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if not xml.exists():
        return f"{name}: FAILED before the first test", None
    counts, features = read(ElementTree.parse(xml))
    names = sorted(
        {"torch", "transformers", "accelerate", *(pin.partition("=")[0].partition("<")[0] for pin in stack.pins)}
    )
    versions = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    found = subprocess.run([python, "-c", versions], capture_output=True, text=True, check=True).stdout
    pins = {package: version.partition("+")[0] for package, version in json.loads(found).items()}
    version, release = _revision(checkout) if checkout else stack.version, ".".join(map(str, sys.version_info[:2]))
    row = {"stack": name, "version": version, "pins": pins, "python": release, "features": features}
    return f"{name}: {', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))}", row


def _revision(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def read(tree: "ElementTree.ElementTree[Any]") -> tuple[Counter[str], dict[str, str]]:
    """How many tests passed, FAILED and were skipped, and what the results of pytest say of each feature.

    A feature is exact if all its tests passed, and refused if WLB refuses to train some of it; "not run" also if a test
    was skipped, or if a file of tests could not be read.
    """
    counts: Counter[str] = Counter()
    of_features: dict[str, set[str]] = {feature: set() for feature in FEATURES}
    for case in tree.iter("testcase"):
        of_kind = {"failure": "FAILED", "error": "FAILED", "skipped": "skipped"}
        kind = next((of_kind[part.tag] for part in case if part.tag in of_kind), "passed")
        counts[kind] += 1
        properties = [(each.get("name"), each.get("value")) for each in case.iter("property")]
        refused = any(name == "refused" for name, _ in properties)
        for name, feature in properties:
            if name == "proves":
                of_features[str(feature)].add("refused" if refused and kind == "passed" else kind)
    unread = any(not case.get("classname") and case.find("error") is not None for case in tree.iter("testcase"))
    return counts, {feature: "not run" if unread else _verdict(kinds) for feature, kinds in of_features.items()}


def _verdict(kinds: set[str]) -> str:
    if "FAILED" in kinds:
        return "failed"
    if not kinds or "skipped" in kinds:
        return "not run"
    return "refused" if "refused" in kinds else "exact"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The results in Markdown."""
    return "".join(f"|{'|'.join(cells)}|\n" for cells in _cells(rows))


def _cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    yield ["pins of", *(f"{row['stack']} {row['version']}" for row in rows)]
    yield ["---"] * (len(rows) + 1)
    for feature in FEATURES:
        yield [feature, *(row["features"].get(feature, "not run").replace("not run", "–") for row in rows)]


if __name__ == "__main__":
    sys.exit(main())
