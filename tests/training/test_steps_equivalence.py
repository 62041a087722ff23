"""Every optimizer step of the whole job has the loss of a plain loop over single documents in one process.

The job is the trainer itself, with its loader, sharding, gradient clipping and learning rate, in float64. The oracle
gets the same plans, runs one segment at a time on the unparallelised model and updates it with AdamW.
"""

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.training.distributed import run_ranks
from tests.training.jobs import job, read_steps, train, trainer_of, write_store
from tests.training.oracle import losses_of_single_documents, remembered_plans
from wlb.job.config import PRESETS, JobConfig
from wlb.packing.plan import StepPlan
from wlb.schedules.operations import WEIGHT

STEPS = 20
WINDOW, WINDOW_OF_SLICES = 64, 512
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain-4d": {"dp": 2, "pp": 2, "cp": 2},
    "fixed-4d": {"dp": 2, "tp": 2},
    "wlb-llm": {"pp": 2, "cp": 2},
    "balanced": {"pp": 2, "cp": 2, "tp": 2, "virtual_pp": 2},
    "pool": {"dp": 2, "cp": 2, "pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b", "pool": 4},  # of a stage
    "level": {"dp": 2},  # whose two ranks run micro-batches of their own
    "slices": {"dp": 2, "pp": 2, "pool": 1},
    "dealt": {"dp": 2, "pp": 2, "pool": 1, "head": "dealt"},  # slices, too
}
PACKING: dict[str, dict[str, Any]] = {
    "wlb-llm": {"outlier_thresholds": [16, 40]},
    "pool": {"rank_micro_batches": 4, "grouping": "even"},
    "level": {"grouping": "level", "max_length_factor": 1.0},  # half a context window on each rank
    "slices": {"rank_micro_batches": 8, "grouping": "slices", "global_batch": 2, "max_length_factor": 0.5},
    "others": {"global_batch": 2},  # models, with tensor parallelism, which plans operators anew for every length
}
PACKING["dealt"] = PACKING["slices"]

FEW = {"layers": 2}  # a stage has one of them
ROTARY = {"factor": 4.0, "original_max_position_embeddings": 16}
BIASES = {"qkv_bias": True, "qk_norm": True}
TIED: dict[str, Any] = BIASES | {"tied_embeddings": True, "rope_scaling": {"rope_type": "llama3", **ROTARY}}
UNTIED: dict[str, Any] = BIASES | {
    "o_bias": True,
    "sliding_window": 4,
    "full_attention_layers": 1,
    "rope_scaling": {"rope_type": "yarn", **ROTARY},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_stores(tmp_path_factory.mktemp("steps"))


def with_stores(folder: Path) -> Path:
    write_store(folder / "store", longest=2 * WINDOW)
    write_store(folder / "long", longest=WINDOW_OF_SLICES)
    return folder


def configure(
    folder: Path,
    preset: str,
    steps: int,
    parallel: dict[str, Any],
    model: dict[str, Any] | None = None,
    **training: Any,
) -> JobConfig:
    return job(
        folder,
        preset if preset in PRESETS else "balanced",
        model={"layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 68} | (model or {}),
        data={"context_window": WINDOW_OF_SLICES, "store": str(folder / "long")}
        if preset in ("slices", "dealt")
        else {"context_window": WINDOW},
        parallel=parallel,
        packing=PACKING.get(preset, {}),
        training={"steps": steps, "dtype": "float64", "learning_rate": 0.02, "gradient_clip": 0.5} | training,
        metrics={"dir": str(folder / preset / "metrics")},
    )


def _train(config: JobConfig) -> tuple[list[StepPlan], dict[str, bytes]]:
    """The steps, and this rank's part of the weights outside the blocks."""
    trainer = trainer_of(config)
    plans = remembered_plans(trainer)
    trainer.run()
    weights = (
        named for stage in trainer.model.stages for named in stage.named_parameters() if "layers" not in named[0]
    )
    return plans, {name: weight.to_local().detach().numpy().tobytes() for name, weight in weights}  # type: ignore[attr-defined]


def trained_as_single_documents(config: JobConfig, folder: Path, tolerance: float = 1e-9) -> list[StepPlan]:
    layout = config.parallel.layout
    by_rank: list[tuple[list[StepPlan], dict[str, bytes]]] = run_ranks(layout.world_size, _train, config)
    plans, of_pipeline = by_rank[0][0], [held for _, held in by_rank[:: layout.world_size // layout.pp]]
    for name in {name for held in of_pipeline for name in held}:
        assert len({held[name] for held in of_pipeline if name in held}) == 1, name  # its copies are equal
    losses = [row["loss"] for row in read_steps(folder)]
    assert len(losses) == config.training.steps
    assert len(set(losses)) == len(losses)  # weights change
    assert losses == pytest.approx(losses_of_single_documents(config, plans), rel=tolerance)
    return plans


# Every preset runs through the same trainer, and each of these parts of it in the others too; the first steps have all
# that later ones have.
@pytest.mark.parametrize(
    ("preset", "steps"),
    [
        ("level", 3),
        ("dealt", 3),
        *(pytest.param(preset, STEPS, marks=pytest.mark.exhaustive) for preset in LAYOUTS),
    ],
)
def test_steps_have_the_losses_of_single_documents(preset: str, steps: int, folder: Path) -> None:
    plans = trained_as_single_documents(configure(folder, preset, steps, LAYOUTS[preset]), folder / preset)
    if preset == "level":
        assert {len(part.ranks) for plan in plans for part in plan.micro_batches} == {1, 2}
    if preset in ("slices", "dealt"):
        assert any(part.earlier for plan in plans for part in plan.micro_batches)
        lists = [of_rank for plan in plans for pipeline in plan.operations for of_rank in pipeline]
        assert any(one[::2] == after[::2] for of in lists for one, after in pairwise(of) if one.kind == WEIGHT)


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


# Every kind of layout once, and both kinds of head; the others repeat them crosswise.
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (TIED | FEW, {"pp": 2, "tp": 2, "head": "dealt"}),
        (TIED, {"dp": 2, "pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b"}),
        (UNTIED | FEW, {"cp": 2, "tp": 2}),
        exhaustive(TIED, {"pp": 2, "tp": 2}),
        exhaustive(TIED, {"pp": 4}),
        exhaustive(TIED, {"pp": 4, "head": "dealt"}),
        exhaustive(UNTIED, {"pp": 2, "tp": 2}),
        exhaustive(UNTIED, {"pp": 2, "tp": 2, "head": "dealt"}),
        exhaustive(TIED, {"cp": 2, "tp": 2}),
    ],
)
def test_steps_of_other_models_do_too(model: dict[str, Any], parallel: dict[str, Any], folder: Path) -> None:
    """Biases, q/k norms, tied embeddings, windows and scaled rotary positions."""
    trained_as_single_documents(configure(folder, "others", 2, parallel, model), folder / "others")


def test_a_tied_model_continues_with_another_number_of_stages(tmp_path: Path) -> None:
    write_store(tmp_path / "store")

    def configure(name: str, pp: int, steps: int) -> JobConfig:
        return job(
            tmp_path,
            model={"tied_embeddings": True, "qk_norm": True},
            parallel={"pp": pp},
            training={"steps": steps, "lr_schedule": "constant", "dtype": "float64", "learning_rate": 0.01},
            checkpoint={"dir": str(tmp_path / name / "checkpoints"), "every": 1},
            metrics={"dir": str(tmp_path / name / "metrics")},
        )

    run_ranks(1, train, configure("straight", pp=1, steps=3))
    shutil.copytree(tmp_path / "straight", tmp_path / "moved")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "moved" / "checkpoints" / f"step-{step:08d}")
    for pp, steps in ((2, 2), (1, 3)):
        run_ranks(pp, train, configure("moved", pp, steps))
    straight, moved = ([row["loss"] for row in read_steps(tmp_path / name)] for name in ("straight", "moved"))
    assert moved == pytest.approx(straight, rel=1e-10)
