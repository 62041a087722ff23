"""The configurations that come with the project are valid, and the ones for clusters fit their GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from wlb.config import PRESETS
from wlb.config_file import load_config
from wlb.memory.step import predict_memory
from wlb.planning.memory import longest_micro_batch
from wlb.training.memory_budget import memory_settings
from wlb.training.parallel.parallelize import check_layout
from wlb.training.runtime.environment import transformer_config

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.toml"))
GPU_BYTES = 0.9 * 80e9


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_valid_and_fits(path):
    config = load_config(path)
    model = transformer_config(config.model, vocab_size=32_000)
    check_layout(model.shape, config.parallel)
    if config.training.device == "cuda":
        tokens = [longest_micro_batch(config)] * (config.packing.micro_batches // config.parallel.dp)
        assert predict_memory(memory_settings(config, model, "cuda"), tokens).total < GPU_BYTES


def test_there_is_a_small_configuration_for_every_preset():
    assert {load_config(path).preset for path in CONFIGS if path.stem.startswith("tiny")} == set(PRESETS)
