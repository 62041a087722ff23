"""The adoption examples run on two processes and train every document once."""

import importlib.util
import json

import pytest

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
