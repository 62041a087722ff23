"""CPU seconds of a host for one block and micro-batch, with and without tensor parallelism.

Run it as ``python -m benchmarks.host_time``. A block of tiny matrices, so that nearly all of the time is PyTorch's:
autograd, modules, and with tensor parallelism DTensors and their hooks. On a GPU launching replaces the tiny kernels.
``wlb.workload.costs`` prices blocks with it.
"""

import json
import platform
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from wlb.models.transformer import Transformer, TransformerConfig
from wlb.training.parallel.tensor_parallel import apply_tensor_parallel
from wlb.workload import ModelShape

_LAYERS, _TOKENS, _ROUNDS = 20, 8, 31
_SHAPE = ModelShape(hidden=16, layers=_LAYERS, heads=2, kv_heads=2, head_dim=8, ffn_hidden=16, vocab_size=16)


def _attend(*of_heads: Tensor) -> Tensor:
    query, key, value = (x.transpose(0, 1)[None] for x in of_heads)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1)


def _milliseconds(model: Transformer) -> dict[str, float]:
    """Medians of a block, forward and backward."""
    tokens, positions, found = torch.arange(_TOKENS), torch.arange(_TOKENS), []
    for _ in range(_ROUNDS):
        marks = [time.process_time()]
        scores: Any = model(tokens, positions, _attend)
        marks.append(time.process_time())
        (scores.to_local() if hasattr(scores, "to_local") else scores).sum().backward()
        marks.append(time.process_time())
        found.append([1e3 * (marks[1] - marks[0]) / _LAYERS, 1e3 * (marks[2] - marks[1]) / _LAYERS])
    return dict(zip(("forward_ms", "backward_ms"), map(statistics.median, zip(*found, strict=True)), strict=True))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain, split = Transformer(TransformerConfig(_SHAPE)), Transformer(TransformerConfig(_SHAPE))
    apply_tensor_parallel(split, init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))["tp"])
    print(
        json.dumps(
            {
                "machine": platform.machine(),
                "torch": torch.__version__,
                "plain": _milliseconds(plain),
                "tensor parallel": _milliseconds(split),
            },
            indent=2,
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
