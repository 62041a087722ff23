"""The notebook runs from the first cell to the last, and prints what its text says."""

import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "lengths_to_gain.ipynb"


def test_every_cell_runs_and_balancing_gains(capsys):
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "commit it without outputs"
            exec("".join(cell["source"]), names)
    assert names["imbalance"]("makespan") < 1.01 < names["imbalance"]("sequential")
    assert names["results"]["elastic"].token_delay == 0
    assert names["results"]["elastic"].work_rate > names["base"].work_rate
    assert "x at equal work, token delay 0.00 steps" in capsys.readouterr().out
