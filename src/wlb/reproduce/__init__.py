"""The paper's evaluation, one experiment a file: what it says beside what our simulation, or this machine, gives.

An experiment takes ``Settings`` and gives a ``Report`` (``experiment``): tables whose columns say whether they are
quoted, simulated or measured, the paper's findings and whether they hold, what is assumed, and a picture. The quoted
figures are all in ``paper``. A new experiment is one new file and one line in ``EXPERIMENTS``.
"""

from __future__ import annotations

from wlb.reproduce import breakdown, context_windows, convergence, imbalance, kernel, sharding, speedups, table2
from wlb.reproduce.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment("imbalance", "Figures 1 and 4: latency per GPU of 8,192", imbalance.run),
        Experiment("table2", "Table 2: packing methods", table2.run),
        Experiment("speedups", "Table 1 and Figure 12: eight jobs, four systems", speedups.run),
        Experiment("breakdown", "Figure 13: each remedy alone", breakdown.run),
        Experiment("context-windows", "Figure 14: 7B, 32K to 1M", context_windows.run),
        Experiment("sharding", "Figure 15: strategies on one layer", sharding.run),
        Experiment("kernel", "Figures 7 and 10: attention by length", kernel.run),
        Experiment("convergence", "Figure 16: what a small model learns", convergence.run),
    )
}
SIMULATED = tuple(
    name for name in EXPERIMENTS if name != "convergence"
)  # what ``wlb reproduce all`` runs: minutes, no training
