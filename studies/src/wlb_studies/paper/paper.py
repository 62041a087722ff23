"""The paper's numbers: the quoted column of every table here.

All numbers are quoted from WLB-LLM (OSDI '25, proceedings pages 785-801; arXiv 2503.17924). Figures without printed
values, in text or table, are left out rather than read off a plot. The layouts of its Table 1 are in
``wlb_studies.paper.jobs``.
"""

from wlb.schedules.layout import Layout

# Section 1 and Figure 1 (a): the slowest of 8K GPUs that train a 405B model at 128K, over "the others".
IMBALANCE_SLOWEST_GPU = 1.44

# Table 2: method, setting, imbalance degree, packing milliseconds of a global batch. 7B-128K.
TABLE_2: dict[str, tuple[float, float]] = {
    "sequential": (1.44, 0),
    "fixed_greedy:1": (1.41, 4),
    "fixed_greedy:2": (1.22, 5),
    "fixed_greedy:4": (1.11, 5),
    "fixed_greedy:8": (1.08, 5),
    "fixed_solver:1": (1.40, 467),
    "fixed_solver:2": (1.18, 1488),
    "fixed_solver:4": (1.09, 25313),
    "variable_length:1": (1.24, 8),
    "variable_length:2": (1.05, 20),
    "variable_length:3": (1.05, 23),
}

# Section 7.2: speedups over Plain-4D, means over the eight rows of Table 1.
FIXED_4D_SPEEDUP = 1.03
WLB_LLM_SPEEDUP = 1.23
WLB_LLM_SPEEDUP_BY_WINDOW = {65_536: 1.15, 131_072: 1.30}

# Section 7.3 and Figure 13: speedups over Plain-4D for 7B-128K.
BREAKDOWN = {"cp: per-document": 1.02, "cp: adaptive": 1.05, "pp: packing": 1.28, "WLB-LLM": 1.33}

# Section 7.3 and Figure 14: speedups over Plain-4D of 7B that the text gives. Windows from 32K to 160K.
CONTEXT_WINDOWS = {131_072: 1.33, 163_840: 1.40}

# Section 7.4 and Figure 15: speedups over per-sequence sharding by context window, one layer of 7B, cp 4. The gain of
# adaptive sharding is given for both windows together: 7.5% over per-sequence, 3.4% over per-document sharding.
SHARDING_PER_DOCUMENT = {65_536: 1.01, 131_072: 1.07}
SHARDING_ADAPTIVE = 1.075
SHARDING_ADAPTIVE_OVER_PER_DOCUMENT = 1.034

# Section 5.2 and Figure 10: tokens of queries up to which the latency of the attention kernel stays the same, and
# between which the FLOP/s that it reaches rise significantly.
KERNEL_FLAT_UNTIL = 128
KERNEL_RISE = (128, 256)

# Section 7.4 and Figure 16: a 550M model; how much higher the training loss of fixed-length packing over 8 global
# batches is than over one, on average, and the mean delay of a token in steps under WLB-LLM.
CONVERGENCE_LOSS_INCREASE = 0.016
CONVERGENCE_TOKEN_DELAY = 0.5


def sizes(layout: Layout) -> str:
    """A layout in the order of Table 1: tp, cp, pp, dp."""
    return f"{layout.tp},{layout.cp},{layout.pp},{layout.dp}"
