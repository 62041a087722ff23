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
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.integrations.batches import ItemsOfSteps, WholeSteps, balanced_job
from wlb.integrations.batches.processes import Processes, digest
from wlb.packing.plan import StepPlan
from wlb.runtime.batch import read_batch
from wlb.runtime.collectives import device_of, sharing_group
from wlb.runtime.own_lists import check_same_plan
from wlb.runtime.sharded_batch import RankShare, ShardedAttention

_VERSIONS = "torchtitan 0.3.0 or its main of August 2026 (b5bcd76)"

try:
    from torchtitan.config.override import derive, override

    try:
        from torchtitan.components.dataloader import BaseDataLoader  # 0.3.0
    except ModuleNotFoundError:
        from torchtitan.components.data.loader import BaseDataLoader  # main
except ImportError as error:
    raise UserError(f"{error}; wlb.integrations.torchtitan needs {_VERSIONS}") from error

Batch = tuple[dict[str, Any], Tensor]


class BalancedDataLoader(BaseDataLoader):
    """Yields ``({"input", "positions"}, labels)``, each int64: this rank's micro-batches.

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
        self._store = TokenStore.open(prefix)
        self._own_lists = config.own_lists
        names = ("model", "hardware", "seed", "max_length_factor", "own_lists")
        settings = {name: getattr(config, name) for name in names}
        job = balanced_job(self._store.lengths, _window(sizes), config.micro_batches, dp=dp_world_size, **settings)
        self._processes = Processes(dp_rank, dp_world_size, 1)
        layout = replace(job.layout, tp=config.multiple_of)  # pads shares to a multiple of it
        self._share = RankShare(*divmod(dp_rank, layout.cp), layout, workload=job.costs)
        self._sharing: dist.ProcessGroup | None = None
        steps = WholeSteps(job, self._store.lengths, epochs=None)
        self._micro_batches = ItemsOfSteps[Batch](steps, self._of_rank)

    def __iter__(self) -> Iterator[Batch]:
        begin = {"state": digest(self._micro_batches.state_dict())}
        self._processes.agree(self._micro_batches.steps.settings | begin, self._processes.rank)
        return self._micro_batches

    @property
    def of_step(self) -> int:
        """Micro-batches of this rank in the step that is being yielded."""
        return self._micro_batches.of_step

    def state_dict(self) -> dict[str, Any]:
        return {"wlb": json.dumps(self._micro_batches.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``; from none at all, as torchtitan may ask, at the beginning.

        Raises ``UserError`` for a state of other documents or another seed, and inside a step for any other setting.
        """
        if state_dict:
            self._micro_batches.load_state_dict(json.loads(state_dict["wlb"]))

    def _of_rank(self, plan: StepPlan) -> list[Batch]:
        """This rank's micro-batches; with own lists also ``attend``, the attention over each, by a collective call."""
        if self._own_lists and self._processes.ranks > 1 and dist.is_initialized():
            self._sharing = self._sharing or sharing_group(self._processes.ranks)
            check_same_plan(plan, device_of(self._sharing), self._sharing)
        batches = []
        for share in self._share.batches(plan, lambda part: read_batch(part, self._store)):
            padding = torch.arange(share.rows - share.local_tokens)  # a document of its own
            positions = torch.cat([share.positions[: share.local_tokens], padding])
            inputs: dict[str, Any] = {"input": share.tokens[self._row], "positions": positions[self._row]}
            if self._own_lists:
                group = self._sharing if share.shard_plan.cp_size > 1 else None
                inputs["attend"] = ShardedAttention(share.local_tokens, share.shard_plan, group, share.ranks or None)
            batches.append((inputs, share.labels[self._row]))
        return batches


def _window(sizes: dict[str, Any]) -> int:
    """The context window, of what torchtitan tells its loader."""
    match sizes:
        case {"seq_len": int(window), "local_batch_size": rows}:
            given, wanted, fits = f"local_batch_size = {rows}", 1, rows == 1
        case {"max_context_length": int(window), "num_tokens_per_batch": tokens}:
            given, wanted, fits = f"num_tokens_per_microbatch_per_dp_rank = {tokens}", window, tokens == window
        case _:
            raise UserError(f"torchtitan gives its data loader {', '.join(sizes)}; wlb needs {_VERSIONS}")
    if not fits:
        raise UserError(
            f"training.{given}, but a balanced micro-batch holds one context of {window} tokens on average; set it to "
            f'{wanted} and give the number of micro-batches as "micro_batches" of the override'
        )
    return window


def balance(config: BaseDataLoader.Config, **settings: Any) -> BalancedDataLoader.Config:
    """The training data loader as a ``BalancedDataLoader``; ``settings`` are the fields of its ``Config``."""
    balanced: BalancedDataLoader.Config = derive(config, BalancedDataLoader.Config, **settings)
    return balanced


override(
    target=BaseDataLoader.Config,
    fqns=["dataloader"],  # not the validator's
    description="micro-batches that take all ranks equally long (wlb)",
)(balance)
