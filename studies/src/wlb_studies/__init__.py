"""Studies of WLB-LLM: comparisons, the paper's evaluation and published measurements, on top of the library."""
