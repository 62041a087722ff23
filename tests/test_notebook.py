"""The notebook runs from the first cell to the last, and its verdict is that of the command it names."""

import io
import json
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import typer

from wlb.cli.app import app
from wlb.cli.groups import names_of
from wlb.cli.options import JobOptions
from wlb.documents.lengths import read_lengths
from wlb.simulate.estimate import Estimate, estimate
from wlb.simulate.space import SearchSpace

NOTEBOOK = Path(__file__).parents[1] / "examples" / "lengths_to_gain.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What all cells defined; ``printed`` is their text. The verdict is of few layouts and one step."""

    def estimated(space: SearchSpace, lengths: Any, presets: list[str], source: str) -> Estimate:
        few = replace(space, fixed={"cp": 2, "pp": 1, "tp": 4})
        return estimate(few, lengths, presets, 1, source=source)

    found: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()) as out, mock.patch("wlb.simulate.estimate.estimate", estimated):
        for cell in CELLS:
            if cell["cell_type"] == "code":
                assert not cell["outputs"], "commit it without outputs"
                exec("".join(cell["source"]), found)
    return found | {"printed": out.getvalue()}


def test_the_loop_trains_every_document_once_on_balanced_steps(names: dict[str, Any]):
    assert sorted(s.document for plan in names["balanced"] for s in plan.segments) == [*range(len(names["documents"]))]
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert max(plan.imbalance for plan in names["balanced"][:-1]) < 1.01
    assert np.mean([plan.imbalance for plan in names["usual"]]) > 1.1
    assert "step 0: loss" in names["printed"]
    assert str(names["verdict"]) in names["printed"]
    assert names["arrivals"][3].imbalance > 1.5


def test_its_job_is_that_of_the_command_it_names(names: dict[str, Any]):
    """So its verdict is too: ``tests/simulate/test_estimate.py`` proves that commands give one number."""
    (command,) = re.findall(r"`wlb check (synthetic.+?)`", "".join(line for cell in CELLS for line in cell["source"]))
    check = typer.main.get_command(app).commands["check"]  # type: ignore[attr-defined]
    context = check.make_context("check", shlex.split(command))
    asked = JobOptions(**{name: context.params[name] for name in names_of(JobOptions)})
    lengths = read_lengths(context.params["lengths"])
    assert lengths.tolist() == names["lengths"].tolist()
    space = replace(asked.space(context, None, lengths), assumed=names["space"].assumed)
    assert space == names["space"]
    assert context.params["systems"].split(",") == [*names["verdict"].systems]
