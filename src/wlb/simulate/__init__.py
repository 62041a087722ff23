"""What a step costs on many GPUs, computed from plans and prices without running the model."""

from wlb.simulate.pipeline import pipeline_makespan, pipeline_makespans

__all__ = ["pipeline_makespan", "pipeline_makespans"]
