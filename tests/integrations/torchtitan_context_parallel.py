"""torchtitan's Trainer with flex attention, micro-batches shared by all processes; prints losses and gradient norms.

    torchrun --standalone --nproc-per-node 2 tests/integrations/torchtitan_context_parallel.py PREFIX

Weights are the same for any number of processes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention import flex_attention

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from torchtitan_cpu import RecordingTrainer, Trainer, cpu_config  # isort: skip  # before other parts of torchtitan
from torchtitan.distributed.context_parallel import api
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry

from wlb.integrations.torch_context_parallel import MaskBlockBalancer

flex_attention._validate_device = lambda *_: None  # it has gradients on CPUs, uncompiled, but asks not to be used there
FlexAttention._compiled_flex_attn = staticmethod(flex_attention.flex_attention)


def shared_by_all(store: str) -> Trainer.Config:
    config = cpu_config(store, seq_len=512, micro_batches=2, steps=2)
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.training.global_batch_size = 2
    config.parallelism.context_parallel_degree = dist.get_world_size()
    config.parallelism.context_parallel_load_balancer = "ptrr"
    settings = {"store": store, "micro_batches": 2, "model": "tiny", "hardware": "cpu", "multiple_of": 256}
    config.override.imports = [
        ("wlb.integrations.torchtitan.balance", settings),
        "wlb.integrations.torchtitan.mask_blocks",
    ]
    return config


def main() -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo")
    recorder = RecordingTrainer(shared_by_all(sys.argv[1]))
    assert api._PTRRLoadBalancer is MaskBlockBalancer
    generator = torch.Generator().manual_seed(0)
    for name, weight in recorder.trainer.model_parts[0].named_parameters():
        whole = torch.randn(weight.shape, generator=generator) * 0.02 + ("norm" in name)
        if isinstance(weight, DTensor):
            whole = distribute_tensor(whole, weight.device_mesh, weight.placements)
        weight.data.copy_(whole)
    for _ in range(2):
        recorder.step()
    if dist.get_rank() == 0:
        print(json.dumps({"losses": recorder.losses, "gradient_norms": recorder.gradient_norms}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
