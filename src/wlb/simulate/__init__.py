"""Simulates steps on many GPUs, from plans and prices, without running the model."""

from wlb.schedules.timing import pipeline_makespan
from wlb.simulate.job import simulated_job
from wlb.simulate.rate import simulate_step, simulate_steps
from wlb.simulate.run import SimulationResult, simulate
from wlb.simulate.step import CAUSES

__all__ = [
    "CAUSES",
    "SimulationResult",
    "pipeline_makespan",
    "simulate",
    "simulate_step",
    "simulate_steps",
    "simulated_job",
]
