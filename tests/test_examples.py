"""The adoption examples run on two processes and train every document once."""

import importlib.util
import json
import os
import sys
from typing import Any

import pytest
import torch.distributed as dist

from tests.code_blocks import ROOT
from tests.training.distributed import run_ranks
from tests.training.processes import ranks

NEEDS = {
    "torch_loop": (),
    "hf_trainer": ("accelerate",),
    "trl_sft": ("trl", "datasets"),
    "hf_context_parallel": (),
    "with_accelerate": ("accelerate",),
    "own_lists": (),
    "with_lightning": ("lightning",),
}


# ``test_stack_pages.py`` runs the same loops as the pages show them, and the integrations' tests prove their gradients.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.proves("SFTTrainer")) if name == "trl_sft" else name for name in NEEDS],
)
def test_an_example_trains_every_document_once(name: str):
    missing = [package for package in ("transformers", *NEEDS[name]) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    with ranks(2, "-m", "tests.examples.run", name, TORCHELASTIC_RUN_ID="as under torchrun") as (first, second):
        out, err = first.communicate()
        _, of_second = second.communicate()
    assert (first.returncode, second.returncode) == (0, 0), (err + of_second)[-3000:]
    said = json.loads(out.splitlines()[-1])
    assert said["every_token_once"]
    assert said["steps"] > 1


def test_an_afternoon_measures_the_gain_trains_balanced_and_goes_back(tmp_path: Any):
    pytest.importorskip("accelerate")
    for losses in run_ranks(2, _afternoon, str(tmp_path)):
        shadow, balanced, back = losses
        assert shadow == pytest.approx(balanced, rel=0.05)  # both have learned the little that three steps teach
        assert back < balanced


def _afternoon(folder: str) -> list[float]:
    """Held-out losses of the three ways, of a few steps."""
    sys.path.append(str(ROOT / "examples"))
    os.chdir(folder)
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    example: Any = importlib.import_module("afternoon")
    example.STEPS, example.stand_ins.WINDOW, example.stand_ins.DOCUMENTS = 3, 128, 40
    return [example.train(way) for way in ("shadow", "balanced", "back")]
