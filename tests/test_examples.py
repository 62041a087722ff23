"""The adoption examples run on two processes: the same documents, once each, and loss and gradient as one at a time."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.training.processes import ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "torch_loop": (),
    "hf_trainer": ("transformers", "accelerate"),
    "trl_sft": ("trl", "datasets"),
    "hf_context_parallel": ("transformers",),
    "with_lightning": ("lightning",),
}


# Of the others the integrations' own tests prove on two processes that gradients are those of single documents.
@pytest.mark.parametrize(
    "name", [name if name == "torch_loop" else pytest.param(name, marks=pytest.mark.exhaustive) for name in NEEDS]
)
def test_an_example_trains_the_same_documents_once_in_both_ways(name: str):
    missing = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    small = ["--documents", "32", "--context-window", "512", "--turns", "1"]
    with ranks(2, EXAMPLES / f"{name}.py", *small, TORCHELASTIC_RUN_ID="as under torchrun") as (first, second):
        out, err = first.communicate()
        _, of_second = second.communicate()
    assert (first.returncode, second.returncode) == (0, 0), (err + of_second)[-3000:]
    rows = {line[:28].strip(): line[28:].split() for line in out.splitlines()}
    assert len(set(rows["documents"][::2])) == 1, rows["documents"]
    assert set(rows["documents"][1::2]) == {"once"}
    assert all(float(error) < 1e-3 for error in rows["gradient, one at a time"])
    if name != "hf_context_parallel":  # where ranks share every micro-batch, and keep short documents whole instead
        original, *_, balanced = map(float, rows["imbalance, predicted"])
        assert balanced <= original
    assert re.search(r"speed at equal work, balanced: \d+\.\d\dx \(.* same documents\)", out)
