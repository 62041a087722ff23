"""Steps of a job on any number of GPUs, in seconds, without running the model; and every choice that rests on them.

What comes in: a ``Job``, which may leave pools, micro-batches, weights and L_max "auto", and the lengths of documents.
What goes out: the job with all of that decided (``decide``), seconds of its steps and what they are lost to
(``SimulationResult``), and the answer of ``wlb check`` (``Verdict``). Read in this order:

1. ``job.py``: jobs from keywords or by name. ``filling.py``: the documents of each step.
2. ``step.py``: ``Steps``, from the plans of the trainer and the price of their micro-batches; ``costs.py``
   adds weights, gradients and the optimizer, ``level.py`` the waits of level steps.
3. ``rate.py``: work and tokens per second over a few steps; ``run.py``: ``simulate``, many steps and all causes.
4. ``decide.py``: ``fastest_first`` simulates the most promising choice until the best is settled, here among the pools
   of one layout; ``search.py``: the same among all layouts of a ``SearchSpace`` (``space.py``).
5. ``verdict.py`` compares systems; ``estimate.py`` is ``wlb check`` and ``wlb simulate`` without their output.

What you may touch: a cost is added in one of the files of 2, under a name of ``CAUSES`` and a part of
``verdict.PARTS``. Prices of micro-batches are not made here but in ``wlb.sharding.latency``, so that plans and
simulation agree (``tests/simulate/test_one_price.py``).
"""

from wlb.schedules.timing import pipeline_makespan
from wlb.simulate.job import simulated_job
from wlb.simulate.rate import simulate_steps
from wlb.simulate.run import SimulationResult, simulate
from wlb.simulate.step import CAUSES

__all__ = ["CAUSES", "SimulationResult", "pipeline_makespan", "simulate", "simulate_steps", "simulated_job"]
