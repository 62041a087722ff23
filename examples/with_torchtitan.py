"""torchtitan's Trainer with balanced micro-batches, on GPUs; on its command line --override.imports does the same.

    wlb prepare --stdlib --train-bpe 1024 --out demo/corpus
    torchrun --standalone --nproc-per-node 8 examples/with_torchtitan.py demo/corpus

For torchtitan 0.3.0; docs/stacks/pretraining.md has main's. ``tests/integrations/test_torchtitan.py`` trains
like this on CPUs, with exact gradients.
"""

import os
import sys
from typing import Any

import torch.distributed as dist
from torchtitan.models.llama3.config_registry import llama3_debugmodel_varlen_attn

MICRO_BATCHES, SEQ_LEN = 4, 8192


def balanced(config: Any, store: str) -> Any:
    """What a user adds."""
    settings = {"store": store, "micro_batches": MICRO_BATCHES, "model": "tiny", "hardware": "h100"}
    config.override.imports = [("wlb.integrations.torchtitan.balance", settings)]
    config.training.seq_len, config.training.local_batch_size = SEQ_LEN, 1
    config.training.global_batch_size = MICRO_BATCHES * int(os.environ["WORLD_SIZE"])
    config.training.disable_cuda_graphs = True  # lengths differ
    return config


if __name__ == "__main__":
    balanced(llama3_debugmodel_varlen_attn(), sys.argv[1]).build().train()
    dist.destroy_process_group()
