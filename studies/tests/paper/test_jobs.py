"""The jobs of the paper run in its layouts, on the GPUs and with the global batch of the jobs that commands name."""

import pytest

from wlb.job.config import PRESETS
from wlb.simulate.job import NAMED_JOBS
from wlb_studies.paper.jobs import ALL_JOBS


@pytest.mark.parametrize("name", ALL_JOBS)
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_named_jobs_can_run(name, preset):
    job, simulated = ALL_JOBS[name], ALL_JOBS[name].under(preset)
    batch = simulated.packing.global_batch
    assert batch == simulated.layout.pp * simulated.layout.dp
    assert NAMED_JOBS[name] == (job.model, job.context_window, job.layout.world_size, batch)


def test_every_named_job_has_a_layout():
    assert [*ALL_JOBS] == [*NAMED_JOBS]
