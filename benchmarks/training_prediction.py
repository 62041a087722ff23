"""What the simulator expects of the steps that ``training.py`` and ``fidelity.py`` measure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from wlb.config import JobConfig
from wlb.documents.store.reader import TokenStore
from wlb.packing.plan import StepPlan
from wlb.planning.planner import StepPlanner
from wlb.simulate import SimulatedJob, simulate_steps
from wlb.workload.profile import WorkloadProfile


def simulated_job(config: JobConfig, profile: WorkloadProfile | None = None) -> SimulatedJob:
    """The job of ``config`` on this machine's cores, computing as measured in ``profile``."""
    vocab_size = TokenStore.open(config.data.store).vocab_size
    return SimulatedJob.from_config(config, "cpu", vocab_size=vocab_size, profile=profile)


def plan_steps(config: JobConfig, steps: int) -> list[StepPlan]:
    """The plans of the job's first ``steps`` steps, from its configuration and document lengths alone."""
    lengths = TokenStore.open(config.data.store).lengths
    return [*islice(StepPlanner(simulated_job(config), lengths).plans(), steps)]


def predicted_seconds(plans: Sequence[StepPlan], config: JobConfig, profile: WorkloadProfile) -> list[float]:
    """Simulated seconds of each step."""
    seconds: list[float] = simulate_steps(plans, simulated_job(config, profile)).seconds.tolist()
    return seconds
