"""torchtitan trains balanced micro-batches, by one override on its command line.

    --override.imports 'wlb.integrations.torchtitan.balance={"store": "PREFIX", "micro_batches": 8}'

``PREFIX`` is a token store. In place of rows cut every ``seq_len`` tokens come micro-batches of whole documents that
take all ranks equally long; they hold ``seq_len`` tokens on average and up to 1.5 times as many. torchtitan's loss, a
sum over tokens divided by the step's number of labels, stays right for them, and its masks of positions keep documents
apart (attention ``flex`` or ``varlen``). A checkpoint continues exactly, also with another data-parallel degree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wlb.attention import segment_attention
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.integrations.batches import ItemsOfSteps
from wlb.integrations.packed import PackedBatch, PackedSteps
from wlb.runtime.batch import IGNORE_LABEL

_VERSIONS = "torchtitan 0.3.0 or its main of August 2026 (b5bcd76)"

try:
    from torchtitan.config.override import derive, override
    from torchtitan.trainer import BaseDataLoader  # of a module that has another name in 0.3.0 than in main
except ImportError as error:
    raise UserError(f"{error}; wlb.integrations.torchtitan needs {_VERSIONS}") from error

Batch = tuple[dict[str, Any], Tensor]


class BalancedDataLoader(BaseDataLoader):
    """Yields ``({"input", "positions"}, labels)``, each int64: this rank's micro-batches, of step after step.

    Their shape is (1, tokens) in 0.3.0 and (tokens,) in main. Never ends: documents of the next epoch follow those of
    this one into the same steps. Documents over the context are split. ``state_dict`` is the same on every rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        store: str | None = None  # prefix of a token store; if not given, 0.3.0's dataset_path
        micro_batches: int = 1  # of a rank in a step: the gradient accumulation
        model: str = "7b"  # by whose prices documents are balanced: one that wlb knows, near the trained one in size
        hardware: str = "h100"  # on which it is priced
        seed: int = 0  # of the order of documents
        multiple_of: int = 128  # micro-batches are padded to a multiple of this many tokens: 128 times cp, and of tp
        max_length_factor: float = 1.5  # contexts that a micro-batch may hold on one rank, in its memory
        own_lists: bool = False  # set by wlb.integrations.torchtitan_level

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **sizes: Any) -> None:
        prefix = config.store or getattr(config, "dataset_path", None)
        if prefix is None:
            raise UserError('no documents; give the override the prefix of a token store, "store" (see `wlb prepare`)')
        self._row = None if "seq_len" in sizes else ...  # a dimension more, or none
        self._multiple_of, self._own_lists = config.multiple_of, config.own_lists
        names = ("micro_batches", "model", "hardware", "seed", "max_length_factor", "own_lists")
        settings = {name: getattr(config, name) for name in names}
        settings |= {"context_window": _window(sizes), "dp": dp_world_size, "rank": dp_rank, "epochs": None}
        steps = PackedSteps(TokenStore.open(prefix), **settings)
        self.batches = ItemsOfSteps(steps, lambda step: [*map(self._as_torchtitan_has_it, step.batches)])

    def __iter__(self) -> Iterator[Batch]:
        self.batches.steps.agree()
        return self.batches

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after the last micro-batch. Raises ``UserError`` inside a level step."""
        state = self.batches.state_dict()
        if self._own_lists and state["taken"]:
            raise UserError("ranks are at different places inside a level step; save after whole steps")
        return {"wlb": json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``; from none at all, as torchtitan may ask, at the beginning.

        Raises ``UserError`` for a state of other documents or another seed, and inside a step for any other setting.
        """
        if state_dict:
            self.batches.load_state_dict(json.loads(state_dict["wlb"]))

    def _as_torchtitan_has_it(self, batch: PackedBatch) -> Batch:
        """``batch`` with padding, a document of its own; with own lists also ``attend``, the attention over it."""
        padding = -len(batch.tokens) % self._multiple_of
        tokens, labels = F.pad(batch.tokens, (0, padding)), F.pad(batch.labels, (0, padding), value=IGNORE_LABEL)
        positions = torch.cat([batch.position_ids, torch.arange(padding)])
        inputs: dict[str, Any] = {"input": tokens[self._row], "positions": positions[self._row]}
        if self._own_lists:
            lengths = [*batch.segment_lengths, *[padding] * (padding > 0)]
            inputs["attend"] = batch.attend or partial(segment_attention, segment_lengths=lengths)
        return inputs, labels[self._row]


def _window(sizes: dict[str, Any]) -> int:
    """The context window, of what torchtitan tells its loader."""
    match sizes:
        case {"seq_len": int(window), "local_batch_size": 1}:
            return window
        case {"max_context_length": int(window), "num_tokens_per_batch": tokens} if tokens == window:
            return window
    raise UserError(
        f"torchtitan gives its data loader {sizes}, but a balanced micro-batch holds one context on average; set "
        "training.local_batch_size = 1 (0.3.0) or num_tokens_per_microbatch_per_dp_rank = max_context_length (main), "
        f'and give the number of micro-batches as "micro_batches" of the override; wlb needs {_VERSIONS}'
    )


def balance(config: BaseDataLoader.Config, **settings: Any) -> BalancedDataLoader.Config:
    """The training data loader as a ``BalancedDataLoader``; ``settings`` are the fields of its ``Config``."""
    balanced: BalancedDataLoader.Config = derive(config, BalancedDataLoader.Config, **settings)
    return balanced


# The field at the top is not the validator's.
override(target=BaseDataLoader.Config, fqns=["dataloader"], description="equal work on all ranks (wlb)")(balance)
