"""Studies of WLB-LLM: comparisons, the paper's evaluation, published measurements. They import the library."""
