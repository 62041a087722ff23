"""Mixtures of experts train exactly in every layout, however documents are packed and experts divided.

The trainer itself runs, in float64; the oracle is the plain model on one document at a time, in one process, with the
same losses of routers and the same biases.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.training.jobs import write_store
from tests.training.test_steps_equivalence import configure, trained_as_single_documents

WINDOW, WINDOW_OF_SLICES = 64, 1024

MIXTURE: dict[str, Any] = {"experts": 8, "experts_per_token": 2, "expert_hidden": 12, "first_dense_layers": 1}
SHARED: dict[str, Any] = MIXTURE | {"shared_expert_hidden": 12, "router": "sigmoid", "tied_embeddings": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    write_store(folder / "store", longest=2 * WINDOW)
    write_store(folder / "long", longest=WINDOW_OF_SLICES)
    return folder


@pytest.mark.parametrize(
    ("preset", "model", "parallel"),
    [
        ("plain-4d", MIXTURE, {}),
        ("plain-4d", MIXTURE, {"dp": 2}),
        ("plain-4d", MIXTURE, {"dp": 2, "ep": 2}),
        ("plain-4d", SHARED, {"dp": 2, "cp": 2, "ep": 4}),
        ("plain-4d", SHARED, {"dp": 2, "tp": 2, "ep": 2}),
        ("plain-4d", SHARED, {"dp": 2, "tp": 2, "ep": 4}),
        ("level", SHARED, {"dp": 4, "ep": 2}),
        ("slices", SHARED, {"dp": 2, "pp": 2, "pool": 2, "ep": 2}),
    ],
)
def test_it(preset: str, model: dict[str, Any], parallel: dict[str, Any], folder: Path) -> None:
    trained_as_single_documents(configure(folder, preset, 4, parallel, model), folder / preset)
