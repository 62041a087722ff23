"""Jobs from configurations, names and keywords, and what they refuse."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.simulate.jobs import SHAPE, WINDOW, job
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.job import Job
from wlb.job.memory.fit import fits, too_large
from wlb.schedules.layout import Layout
from wlb.simulate import simulated_job
from wlb.simulate.decide import decide
from wlb.workload import hardware_preset, model_shape

H100 = hardware_preset("h100")
NO_LENGTHS = np.array([], np.int64)  # of which L_max does not depend


def configuration(**sections) -> JobConfig:
    return JobConfig.model_validate({"data": {"store": "corpus", "context_window": WINDOW}} | sections)


def test_a_configuration_becomes_the_job_it_describes():
    config = configuration(
        preset="wlb-llm",
        model={"name": "7b", "layers": 12},
        parallel={"pp": 2, "cp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b"},
        training={"activation_checkpointing": "full"},
    )
    simulated = Job.from_config(config)
    assert simulated.shape == replace(model_shape("7b"), layers=12)
    assert simulated.packing == config.packing
    assert simulated.sharding.strategy == "adaptive"
    assert (simulated.layout.world_size, simulated.layout.stages, simulated.layout.schedule) == (
        4,
        4,
        "interleaved_1f1b",
    )
    assert simulated.activation_checkpointing == "full"


def test_the_length_factor_is_what_memory_allows():
    config = configuration(preset="wlb-llm", model={"name": "550m"}, packing={"max_length_factor": "auto"})
    simulated = decide(Job.from_config(config), NO_LENGTHS)
    assert 1 <= float(simulated.packing.max_length_factor) <= 4
    assert fits(simulated)
    with pytest.raises(UserError, match="GiB of 90% of a GPU"):
        decide(Job.from_config(config, replace(H100, memory_bytes=1e9)), NO_LENGTHS)
    little = configuration(model={"name": "550m"}, training={"memory_gib": 1.0})
    assert too_large(Job.from_config(little)) is not None  # as the trainer says


def test_key_value_heads_are_replicated_where_ranks_are_more():
    assert simulated_job("70b", WINDOW, tp=16).shape.kv_heads == 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(job(dp=2), layout=Layout(dp=3)), "must be a multiple of parallel.dp = 3"),
        (
            lambda: job(pp=2, schedule="gpipe"),
            "unknown pipeline schedule 'gpipe'; choose from auto, 1f1b, interleaved_1f1b, planned",
        ),
        (lambda: simulated_job(SHAPE, WINDOW, "worst"), "preset 'worst' is unknown"),
        (lambda: Job.from_config(configuration(model={"pretrained": Path("x")})), "holds no config.json"),
    ],
)
def test_mistakes_are_named_in_one_line(make, message):
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
