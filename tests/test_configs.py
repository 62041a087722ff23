"""The configurations that come with the project are valid, and the ones for clusters fit their GPUs."""

from pathlib import Path

import pytest

from wlb.job.config import PRESETS
from wlb.job.config_file import load_config
from wlb.job.job import Job
from wlb.job.memory.fit import fits

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_valid_and_fits(path):
    config = load_config(path)
    hardware = "h100" if config.training.device == "cuda" else "cpu"
    job = Job.from_config(config, hardware, vocab_size=32_000)
    assert hardware == "cpu" or fits(job)


def test_there_is_a_small_configuration_for_every_preset():
    assert {load_config(path).preset for path in CONFIGS if path.stem.startswith("tiny")} == set(PRESETS)
