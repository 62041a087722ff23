"""Mixtures of experts train exactly, however documents are packed and experts divided.

The trainer itself runs, in float64. The oracle is the plain model on one document at a time, in one process, with the
same losses of routers and the same biases.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training.distributed import run_ranks
from tests.training.jobs import read_steps, train, write_store
from tests.training.test_steps_equivalence import STEPS, WINDOW, configure, trained_as_single_documents, with_stores
from wlb.job.config import CheckpointConfig, EvaluationConfig

TOLERANCE = 1e-12  # of the loss of a step
SOFTMAX: dict[str, Any] = {"experts": 8, "experts_per_token": 2, "expert_hidden": 12}
SIGMOID: dict[str, Any] = SOFTMAX | {
    "shared_expert_hidden": 10,
    "first_dense_layers": 1,
    "router": "sigmoid",
    "tied_embeddings": True,
}
FEW = {"layers": 3}  # a dense one, and two with experts
ROUTED: dict[str, Any] = {"balance_loss": 0.02, "router_z_loss": 0.01, "learning_rate": 0.003}
ROUTED["gradient_clip"] = 0.01  # every step is clipped


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_stores(tmp_path_factory.mktemp("experts"))


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, STEPS, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("system", "model", "parallel", "checkpointing", "steps"),
    [  # the balance loss has a gradient from step 2 on, seen in the loss of step 3
        ("plain-4d", SIGMOID | FEW, {"tp": 2, "ep": 2}, "keep_attention", 3),
        ("level", SIGMOID | FEW, {"dp": 4, "ep": 2}, "full", 3),
        exhaustive("slices", SOFTMAX, {"dp": 2, "pp": 2, "pool": 2, "ep": 2}, "none"),
        exhaustive("plain-4d", SIGMOID, {"dp": 2, "tp": 2, "ep": 4}, "keep_attention"),
        exhaustive("plain-4d", SOFTMAX, {}, "none"),
        exhaustive("plain-4d", SOFTMAX, {"dp": 2}, "full"),
        exhaustive("plain-4d", SIGMOID, {"dp": 4, "ep": 2}, "keep_attention"),
        exhaustive("plain-4d", SIGMOID, {"dp": 4, "ep": 2, "weights": "gathered"}, "full"),
        exhaustive("per-document-4d", SIGMOID, {"dp": 2, "cp": 2, "ep": 2}, "none"),
        exhaustive("wlb-llm", SOFTMAX, {"dp": 2, "cp": 2, "ep": 4}, "full"),
        exhaustive("plain-4d", SOFTMAX, {"cp": 2, "tp": 2, "ep": 2}, "full"),
        exhaustive("plain-4d", SIGMOID, {"dp": 2, "cp": 2, "tp": 2, "ep": 4}, "none"),
        exhaustive("plain-4d", SIGMOID, {"dp": 2, "pp": 2, "tp": 2, "ep": 4}, "keep_attention"),
        exhaustive("level", SOFTMAX, {"dp": 4, "ep": 2}, "none"),
        exhaustive("level", SIGMOID, {"dp": 4, "ep": 4}, "keep_attention"),
        exhaustive("level", SIGMOID, {"dp": 2, "tp": 2, "ep": 2}, "full"),
        exhaustive("level", SOFTMAX, {"dp": 6, "ep": 2}, "full"),
        exhaustive("slices", SIGMOID, {"dp": 2, "pp": 2, "pool": 2, "ep": 2}, "full"),
        exhaustive("slices", SIGMOID, {"dp": 2, "pp": 2, "tp": 2, "pool": 2, "ep": 4}, "keep_attention"),
    ],
)
def test_steps_have_the_losses_of_single_documents(
    system: str, model: dict[str, Any], parallel: dict[str, Any], checkpointing: str, steps: int, folder: Path
) -> None:
    config = configure(folder, system, steps, parallel, model, **ROUTED, activation_checkpointing=checkpointing)
    plans = trained_as_single_documents(config, folder / system, TOLERANCE)
    if system == "level" and config.parallel.layout.dp_cp > config.parallel.layout.ep_ranks:
        rounds = [{one.ranks for one in plan.micro_batches} for plan in plans]
        assert any(len(groups) > 1 for groups in rounds)
        several = [len(one.segments) > 1 for plan in plans for one in plan.micro_batches if len(one.ranks) > 1]
        assert any(several) == (config.parallel.layout.ep_ranks > 1)  # other ranks share single documents only
    if system == "slices":
        assert any(part.earlier for plan in plans for part in plan.micro_batches)


def test_a_job_continues_to_the_bit_and_with_experts_divided_otherwise(tmp_path: Path) -> None:
    write_store(tmp_path / "store", longest=2 * WINDOW)

    def run(name: str, ep: int, steps: int) -> list[float]:
        rates: dict[str, Any] = {"lr_schedule": "constant", "router_bias_rate": 0.05}
        config = configure(tmp_path, "level", steps, {"dp": 2, "ep": ep}, SIGMOID, **ROUTED, **rates)
        sections = {
            "checkpoint": CheckpointConfig(dir=tmp_path / name / "checkpoints", every=1, keep=steps),
            "evaluation": EvaluationConfig.of({"store": str(tmp_path / "store"), "documents": 8}),
            "metrics": config.metrics.changed(dir=tmp_path / name / "metrics"),
        }
        run_ranks(2, train, config.model_copy(update=sections))
        evaluation = (tmp_path / name / "metrics" / "evaluation.jsonl").read_text(encoding="utf-8")
        return [*(row["loss"] for row in read_steps(tmp_path / name)), json.loads(evaluation)["loss"]]

    straight = run("straight", 2, 2)
    for name, ep in (("again", 2), ("otherwise", 1)):
        shutil.copytree(tmp_path / "straight", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000002")
        assert run(name, ep, 2) == (straight if ep == 2 else pytest.approx(straight, rel=TOLERANCE))
