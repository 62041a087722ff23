"""torchtitan trains balanced micro-batches, by one override on its command line.

    --override.imports 'wlb.integrations.torchtitan.balance={"micro_batches": 8, "model": "llama3-8b"}' \\
    --dataloader.dataset_path PREFIX --training.local_batch_size 1 --training.global_batch_size 64

``PREFIX`` is a token store (``wlb prepare``, or Megatron's ``.bin`` and ``.idx``), ``micro_batches`` the gradient
accumulation: global batch size / data-parallel degree, here 8 ranks. In place of rows cut every ``seq_len`` tokens come
micro-batches of whole documents, up to ``seq_len`` tokens each, that take all ranks equally long; they hold ``seq_len``
tokens on average and up to 1.5 times as many. torchtitan's own loss, a sum over tokens divided by the step's number
of labels, stays right for them, and its position-based masks keep documents apart (attention ``flex`` or ``varlen``).

Every rank plans; the state is the plan's, so a checkpoint continues exactly, and also with another data-parallel
degree. Not with pipeline parallelism, whose schedules take one length of micro-batch (pytorch#159942), nor with CUDA
graphs (``--training.disable_cuda_graphs``).

Written for torchtitan 0.3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config.override import derive, override

from wlb.documents.store.shards import open_store
from wlb.errors import UserError
from wlb.integrations.batches import ItemsOfSteps, WholeSteps, balanced_job
from wlb.integrations.batches.processes import Processes, digest
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.training.data.batch import IGNORE_LABEL, make_batch

_STATE = "wlb"


class BalancedDataLoader(BaseDataLoader):
    """Yields ``({"input", "positions"}, labels)``, each int64 of shape (1, tokens): this rank's micro-batches.

    Never ends: documents of the next epoch follow those of this one into the same steps. Documents over ``seq_len``
    tokens are split. ``state_dict`` is the same on every rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        micro_batches: int = 1
        """Micro-batches of a rank in a step: the gradient accumulation."""

        model: str = "7b"
        """Whose prices documents have: a model that ``wlb`` knows, near the trained one in size."""

        hardware: str = "h100"
        """On which hardware."""

        seed: int = 0
        """Of the order of documents."""

        multiple_of: int = 128
        """Tokens of a micro-batch are padded to a multiple of this: of what tensor parallelism and twice context
        parallelism divide by. Padding has no labels and is a document of its own."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        if config.dataset_path is None:
            raise UserError("dataloader.dataset_path is not set; give the prefix of a token store (see `wlb prepare`)")
        if local_batch_size != 1:
            raise UserError(
                f"training.local_batch_size = {local_batch_size}, but a balanced micro-batch is one packed row; set it "
                'to 1 and give its number as "micro_batches" of the override'
            )
        self._store = open_store(config.dataset_path)
        self._rank, self._multiple_of = dp_rank, config.multiple_of
        job = balanced_job(
            self._store.lengths,
            seq_len,
            config.micro_batches,
            dp=dp_world_size,
            model=config.model,
            hardware=config.hardware,
            seed=config.seed,
            overlong="split",
        )
        self._processes = Processes(dp_rank, dp_world_size, 1)
        steps = WholeSteps(job, self._store.lengths, epochs=None)
        self._micro_batches = ItemsOfSteps[MicroBatch](steps, lambda plan: plan.ranks[dp_rank])

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        begin = {"state": digest(self._micro_batches.state_dict())}
        self._processes.agree(self._micro_batches.steps.settings | begin, self._rank)
        return map(self._tensors, self._micro_batches)

    def steps(self) -> Iterator[StepPlan]:
        """The plans of all ranks, after the one that is being yielded."""
        return self._micro_batches.steps

    def state_dict(self) -> dict[str, Any]:
        return {_STATE: json.dumps(self._micro_batches.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``; from none at all, as torchtitan may ask, at the beginning.

        Raises ``UserError`` for a state of other documents or another seed, and inside a step for any other setting.
        """
        if state_dict:
            self._micro_batches.load_state_dict(json.loads(state_dict[_STATE]))

    def _tensors(self, micro_batch: MicroBatch) -> tuple[dict[str, Tensor], Tensor]:
        batch = make_batch(micro_batch, self._store)
        padding = -len(batch.tokens) % self._multiple_of
        positions = torch.cat([batch.positions, torch.arange(padding)])
        inputs = {"input": F.pad(batch.tokens, (0, padding))[None], "positions": positions[None]}
        return inputs, F.pad(batch.labels, (0, padding), value=IGNORE_LABEL)[None]


def balance(config: BaseDataLoader.Config, **settings: Any) -> BalancedDataLoader.Config:
    """The training data loader as a ``BalancedDataLoader``; ``settings`` are the fields of its ``Config``."""
    balanced: BalancedDataLoader.Config = derive(config, BalancedDataLoader.Config, **settings)
    return balanced


override(
    target=BaseDataLoader.Config,
    fqns=["dataloader"],  # not the validator's
    description="micro-batches that take all ranks equally long (wlb)",
)(balance)
