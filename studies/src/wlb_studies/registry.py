"""The experiments of ``wlb-studies paper``. A new experiment is one new file and one line here.

An experiment takes ``Settings`` and returns a ``Report`` (``experiment``): tables with columns marked as quoted,
simulated or measured, the paper's findings and whether they hold, the assumptions, and a picture.
"""

from collections.abc import Callable

from wlb_studies import gains
from wlb_studies.experiment import Report, Settings
from wlb_studies.paper import breakdown, context_windows, convergence, imbalance, kernel, sharding, speedups, table2
from wlb_studies.policies import grid, level

EXPERIMENTS: dict[str, Callable[[Settings], Report]] = {
    "imbalance": imbalance.run,  # Figures 1 and 4: latency per GPU of 8,192
    "table2": table2.run,  # Table 2: packing methods
    "speedups": speedups.run,  # Table 1 and Figure 12: eight jobs, also in each system's own layout; 405B
    "breakdown": breakdown.run,  # Figure 13: each remedy alone
    "context-windows": context_windows.run,  # Figure 14: 7B, 32K to 1M
    "sharding": sharding.run,  # Figure 15: strategies on one layer
    "kernel": kernel.run,  # Figures 7 and 10: attention by length
    "gains": gains.run,  # who gains, by model, window and GPUs
    "mixtures": gains.mixtures,  # the same for mixtures of experts, under expert parallelism
    "grid": grid.run,  # published policies since, beside ours, in 28 jobs
    "level": level.run,  # level steps over the ideal, beside pools
    "convergence": convergence.run,  # Figure 16: what a small model learns
}
# What ``wlb-studies paper`` runs without a name: minutes, and no training.
BEYOND = ("gains", "mixtures", "grid", "level", "convergence")
OF_THE_PAPER = tuple(name for name in EXPERIMENTS if name not in BEYOND)
