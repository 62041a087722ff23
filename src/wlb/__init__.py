"""WLB-LLM: workload-balanced 4D-parallel training of language models on variable-length documents."""

__version__ = "0.1.0"
