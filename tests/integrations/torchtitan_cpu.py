"""torchtitan's own Trainer on CPUs and gloo, to try things where no GPU is. On GPUs nothing here is needed.

It asks for a GPU in a few places; those are replaced on import, so import this file before ``torchtitan.trainer``. Its
debug model runs in float32, with our attention in place of the CUDA kernel for packed sequences.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchtitan.tools.utils as titan_utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu  # others copy them when they are imported

import torchtitan.components.metrics as titan_metrics  # noqa: E402
import torchtitan.distributed.utils as titan_distributed  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import VarlenAttention  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, MoE  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel_varlen_attn  # noqa: E402
from torchtitan.models.qwen3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from wlb.documents.store.reader import TokenStore  # noqa: E402
from wlb.integrations.torchtitan import BaseDataLoader, LevelAttention, level_steps  # noqa: E402

IN_ROWS = BaseDataLoader.__module__ == "torchtitan.components.dataloader"  # 0.3.0, not main


class _NoMemoryMonitor:
    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return titan_metrics.DeviceMemStats(*[0] * len(titan_metrics.DeviceMemStats._fields))

    def reset_peak_stats(self) -> None:
        pass


titan_metrics.build_device_memory_monitor = _NoMemoryMonitor
titan_distributed.set_pg_timeouts = lambda **_: None  # gloo's cannot be changed


class Float32Experts(GroupedExperts):
    """torchtitan's experts, which compute in bfloat16, in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        gate, down, up = (w.to_local() if isinstance(w, DTensor) else w for w in self.parameters())
        ends = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)

        def times(rows: Tensor, weight: Tensor) -> Tensor:
            return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=ends)

        return times(F.silu(times(x_RD, gate)) * times(x_RD, up), down)


class StoredTokens(BaseTokenizer):
    """ "Encodes" the index of a document as its tokens in the store."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        store: str

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self._store = TokenStore.open(config.store)

    def encode(self, document: int, **_: Any) -> list[int]:
        tokens: list[int] = self._store.read(document).tolist()
        return tokens

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


def cpu_config(
    store: str, *, seq_len: int, micro_batches: int, steps: int, level: bool = False, ep: int = 1
) -> Trainer.Config:
    """torchtitan's debug Llama with our batches of ``store`` on the processes of this job, with FSDP2.

    With ``ep`` over 1 its debug Qwen3 with two layers of eight experts, and expert parallelism.
    """
    config = llama3_debugmodel_varlen_attn()
    if ep > 1:
        config.model_spec, config.parallelism.expert_parallel_degree = _small_mixture(), ep
    for _, attention, parent, name in list(config.model_spec.model.traverse(VarlenAttention.Config)):
        setattr(parent, name, LevelAttention.Config(window_size=attention.window_size))
    if not level:  # which trains with the loss in chunks, for which it pads
        config.loss = CrossEntropyLoss.Config(global_vocab_size=config.loss.loss_fn.global_vocab_size)
    config.tokenizer = StoredTokens.Config(store=store)
    priced_as = "tiny" if ep == 1 else "qwen3-30b-a3b"
    settings: dict[str, Any] = {"store": store, "micro_batches": micro_batches, "model": priced_as, "hardware": "cpu"}
    settings |= {"multiple_of": 8 if level else 1, "seed": 0}
    config.override.imports = [] if level else [("wlb.integrations.torchtitan.balance", settings)]
    config.training.steps = steps
    rows = micro_batches * int(os.environ.get("WORLD_SIZE", "1"))
    if IN_ROWS:
        config.training.seq_len = seq_len
        config.training.local_batch_size, config.training.global_batch_size = 1, rows
    else:
        config.training.max_context_length = config.training.num_tokens_per_microbatch_per_dp_rank = seq_len
        config.training.num_tokens_per_train_step = rows * seq_len
    config.training.mixed_precision_param, config.training.max_norm = "float32", 1e9  # gradients are not clipped
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.validator.enable = config.checkpoint.enable = False
    config.hf_assets_path = None
    windows = 0.75 if ep == 1 else 0.35  # so that ranks or groups of ranks share some documents
    return level_steps(config, max_length_factor=windows, **settings) if level else config


def _small_mixture() -> Any:
    spec = model_registry("debugmodel_moe", attn_backend="varlen")
    spec.model.layers = spec.model.layers[:2]
    for _, moe, _, _ in [*spec.model.traverse(MoE.Config)]:
        routed, init = moe.routed_experts, moe.routed_experts.inner_experts.param_init
        routed.inner_experts = Float32Experts.Config(dim=256, hidden_dim=64, num_experts=8, param_init=init)
        moe.num_experts = moe.router.num_experts = moe.router.gate.out_features = (
            routed.token_dispatcher.num_experts
        ) = 8
        moe.router.top_k = routed.token_dispatcher.top_k = 2
    return spec


class RecordingTrainer:
    """A Trainer whose steps are made one by one; remembers what it trained."""

    def __init__(self, config: Trainer.Config) -> None:
        self.trainer = config.build()
        torch.manual_seed(dist.get_rank())
        for weight in self.trainer.model_parts[0].parameters():
            if weight.dim() > 1:  # on CPUs torchtitan makes the shards of all ranks alike, so experts would be
                torch.nn.init.normal_(weight.to_local().data, std=0.02)
        for module in self.trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging
        self.trained: list[tuple[Tensor, Tensor]] = []  # tokens and positions of each micro-batch
        self.forward_backward = self.trainer.forward_backward_step
        self.trainer.forward_backward_step = self._recorded
        self.losses: list[float] = []
        self.trainer.metrics_processor.log = lambda step, loss, *_, **__: self.losses.append(loss)
        self._batches = self.trainer.batch_generator(self.trainer.dataloader)

    def step(self) -> None:
        self.trainer.step += 1
        self.trainer.train_step(self._batches)

    def _recorded(self, *, input_dict: dict[str, Tensor], labels: Tensor, **more: Any) -> Tensor:
        self.trained.append((input_dict["input"].flatten(), input_dict["positions"].flatten()))
        loss: Tensor = self.forward_backward(input_dict=input_dict, labels=labels, **more)
        return loss
