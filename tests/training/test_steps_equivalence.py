"""Every optimizer step of the whole job has the loss of a plain loop over single documents in one process.

The job is the trainer itself, with its loader, sharding, gradient clipping and learning rate, in float64. The oracle
gets the same plans, runs one segment at a time on the unparallelised model and updates it with AdamW.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.distributed import run_ranks
from tests.training.jobs import read_steps, settings, trainer_of, write_store
from tests.training.oracle import losses_of_single_documents, remembered_plans
from wlb.job.config import JobConfig
from wlb.packing.plan import StepPlan

STEPS = 20
WINDOW = 64
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain-4d": {"dp": 2, "pp": 2, "cp": 2},
    "fixed-4d": {"dp": 2, "tp": 2},
    "wlb-llm": {"pp": 2, "cp": 2},
    "best": {"pp": 2, "cp": 2, "tp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b"},
    # The four ranks of a stage make one pool; its three micro-batches are one round over two pipeline ranks.
    "elastic": {"dp": 2, "cp": 2, "pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b", "pool": 4},
    "level": {"dp": 2},  # elastic, whose two ranks run micro-batches of their own
}
PACKING: dict[str, dict[str, Any]] = {
    "wlb-llm": {"outlier_thresholds": [16, 40]},
    "elastic": {"pool_micro_batches": 3, "grouping": "alike"},
    "level": {"grouping": "level", "max_length_factor": 1.0},  # half a context window on each rank
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    write_store(folder / "store", longest=2 * WINDOW)
    return folder


def configure(folder: Path, preset: str, steps: int) -> JobConfig:
    sections = settings(
        folder,
        model={"layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 68},
        data={"context_window": WINDOW},
        parallel=LAYOUTS[preset],
        packing=PACKING.get(preset, {}),
        training={"steps": steps, "dtype": "float64", "learning_rate": 0.02, "gradient_clip": 0.5},
        metrics={"dir": str(folder / preset / "metrics")},
    )
    return JobConfig.model_validate({"preset": "elastic" if preset == "level" else preset, **sections})


def _train(config: JobConfig) -> list[StepPlan]:
    trainer = trainer_of(config)
    plans = remembered_plans(trainer)
    trainer.run()
    return plans


# Every preset runs through the same trainer, and each of these parts of it in the others too; the first steps have all
# that later ones have.
@pytest.mark.parametrize(
    ("preset", "steps"),
    [("elastic", 3), ("level", 3), *(pytest.param(preset, STEPS, marks=pytest.mark.exhaustive) for preset in LAYOUTS)],
)
def test_steps_have_the_losses_of_single_documents(preset: str, steps: int, folder: Path) -> None:
    config = configure(folder, preset, steps)
    plans = run_ranks(config.parallel.layout.world_size, _train, config)[0]
    if preset == "level":
        assert {len(part.ranks) for plan in plans for part in plan.micro_batches} == {1, 2}
    losses = [row["loss"] for row in read_steps(folder / preset)]
    assert len(losses) == steps
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(losses_of_single_documents(config, plans), rel=1e-9)
