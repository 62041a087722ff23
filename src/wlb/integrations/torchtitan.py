"""torchtitan: balanced micro-batches by one override, or level steps by a configuration (``level_steps``).

    --override.imports 'wlb.integrations.torchtitan.balance={"store": "PREFIX", "micro_batches": 8}'

``PREFIX`` is a token store. Micro-batches of whole documents and equal work replace rows of ``seq_len`` tokens. They
hold ``seq_len`` tokens on average and up to 1.5 times as many. torchtitan divides the summed loss by the labels of the
step, and its position masks keep documents apart (attention ``flex`` or ``varlen``), so gradients stay right.

In a level step each rank runs its own number of micro-batches, all finish together, and several ranks share long
documents. Any other collective inside a micro-batch would deadlock.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wlb.attention import segment_attention
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.integrations.batches import ItemsOfSteps
from wlb.integrations.packed import PackedBatch, PackedSteps
from wlb.runtime.environment import set_up_gpu
from wlb.runtime.loss import IGNORE_LABEL
from wlb.runtime.own_lists import in_turn, warn_of_memory

_VERSIONS = "torchtitan 0.3.0 or its main of August 2026 (b5bcd76)"

try:
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.models.common.moe import MoE
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
    from torchtitan.trainer import BaseDataLoader, Trainer  # 0.3.0 and main define BaseDataLoader in different modules
except ImportError as error:
    raise UserError(f"{error}; wlb.integrations.torchtitan needs {_VERSIONS}") from error

# What torchtitan reads our batches with, and level steps override. Later mains read batches in the model (#4116) and
# expect counts of tokens in them (#4398).
_CALLED = {
    "post_dataloading_process": ["self", "input_dict", "labels"],
    "forward_backward_step": ["self", "input_dict", "labels", "global_valid_tokens"],
    "train_step": ["self", "data_iterator"],
}

Batch = tuple[dict[str, Any], Tensor]


def check_trainer(trainer: Any) -> None:
    """Raise ``UserError`` if torchtitan's ``trainer`` calls by other names or arguments than ours expects."""
    for name, expected in _CALLED.items():
        if [*signature(getattr(trainer, name, lambda: None)).parameters] != expected:
            other = f"torchtitan's Trainer has no {name}({', '.join(expected[1:])})"
            raise UserError(f"{other}; wlb.integrations.torchtitan needs {_VERSIONS}")


check_trainer(Trainer)


class BalancedDataLoader(BaseDataLoader):
    """Yields the micro-batches of this rank, step after step: ``({"input", "positions"}, labels)``, each int64.

    Their shape is (1, tokens) in 0.3.0 and (tokens,) in main. It never ends: a step may hold the last documents of one
    epoch and the first of the next. Documents over the context are split. ``state_dict`` is the same on every rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        store: str | None = None  # prefix of a token store
        micro_batches: int = 1  # per rank and step: the gradient accumulation
        model: str = "7b"  # prices documents: a model that wlb knows, near the trained one in size
        hardware: str = "h100"  # prices documents
        seed: int = 0  # for the order of documents
        multiple_of: int = 128  # pads micro-batches to a multiple of so many tokens: 128 times cp, and a multiple of tp
        max_length_factor: float = 1.5  # contexts that a micro-batch on one rank may hold
        own_lists: bool = False  # set by level_steps
        ep: int = 1  # set by LevelTrainer

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **sizes: Any) -> None:
        if config.store is None:
            raise UserError('the override has no "store"; give the prefix of a token store, which `wlb prepare` makes')
        self._row = None if "seq_len" in sizes else ...  # a dimension more, or none
        self._multiple_of, self._own_lists = config.multiple_of, config.own_lists
        names = ("micro_batches", "model", "hardware", "seed", "max_length_factor", "own_lists", "ep")
        settings: dict[str, Any] = {name: getattr(config, name) for name in names}
        settings |= {"context_window": _window(sizes), "dp": dp_world_size, "rank": dp_rank}
        steps = PackedSteps(TokenStore.open(config.store), **settings, epochs=None, device="cpu")
        self.batches = ItemsOfSteps(steps, lambda step: [*map(self._as_torchtitan_has_it, step.batches)])

    def __iter__(self) -> Iterator[Batch]:
        self.batches.steps.agree()
        return self.batches

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after the last micro-batch. Raises ``UserError`` inside a level step."""
        state = self.batches.state_dict()
        if self._own_lists and state["taken"]:
            raise UserError("the ranks are at different micro-batches of a level step; save after whole steps")
        return {"wlb": json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``, or begin where it is empty, as torchtitan may ask.

        Raises ``UserError`` for a state of other documents or another seed; inside a step for any changed setting.
        """
        if state_dict:
            self.batches.load_state_dict(json.loads(state_dict["wlb"]))

    def _as_torchtitan_has_it(self, batch: PackedBatch) -> Batch:
        """``batch`` with its padding as an extra document; with own lists also ``attend``, zero for padding.

        And ``tokens``, the number without padding.
        """
        padding = -len(batch.tokens) % self._multiple_of
        tokens, labels = F.pad(batch.tokens, (0, padding)), F.pad(batch.labels, (0, padding), value=IGNORE_LABEL)
        positions = torch.cat([batch.position_ids, torch.arange(padding)])
        inputs: dict[str, Any] = {"input": tokens[self._row], "positions": positions[self._row]}
        if self._own_lists:
            inputs |= {"attend": batch.attention, "tokens": batch.own_tokens}
        return inputs, labels[self._row]


def _window(sizes: dict[str, Any]) -> int:
    """The context window, from the sizes that torchtitan gives its loader."""
    match sizes:
        case {"seq_len": int(window), "local_batch_size": 1}:
            return window
        case {"max_context_length": int(window), "num_tokens_per_batch": tokens} if tokens == window:
            return window
    given = f"torchtitan gives its data loader {sizes}, but a balanced micro-batch holds one context on average"
    right = "training.local_batch_size = 1 (0.3.0) or num_tokens_per_microbatch_per_dp_rank = max_context_length (main)"
    raise UserError(f'{given}; set {right}, and "micro_batches" in the override; wlb needs {_VERSIONS}')


def balance(config: BaseDataLoader.Config, **settings: Any) -> BalancedDataLoader.Config:
    """The training data loader as a ``BalancedDataLoader``; ``settings`` are the fields of its ``Config``."""
    set_up_gpu()
    balanced: BalancedDataLoader.Config = derive(config, BalancedDataLoader.Config, **settings)
    return balanced


# The top-level field; the validator has its own data loader.
override(target=BaseDataLoader.Config, fqns=["dataloader"], description="equal work on all ranks (wlb)")(balance)


class LevelAttention(VarlenAttention):
    """Attention inside documents: ``attention_masks`` is ``attend`` of the loader, or in validation torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def parallelize(self, parallel_dims: Any) -> None:
        """Leave heads and tokens whole: only experts are parallel."""

    def forward(self, q: Any, k: Any, v: Any, *, attention_masks: Any, scale: Any, **more: Any) -> Tensor:
        """Query, key, value and output have shape (1, tokens, heads, head_dim), in main without the 1."""
        left, right = self.window_size
        if right or [name for name in more if name != "enable_gqa" and more[name] is not None]:
            raise UserError(f"level steps attend causally; leave out window_size = {self.window_size} and {[*more]}")
        if isinstance(attention_masks, VarlenMetadata):
            lengths = [length for length in attention_masks.cu_seq_q.diff().tolist() if length]
            attention_masks = partial(segment_attention, segment_lengths=lengths)
        if scale is not None:
            q = q * (scale * q.shape[-1] ** 0.5)  # our attention scales by 1/sqrt(head_dim)
        rows = (tensor.flatten(0, -3) for tensor in (q, k, v))
        out: Tensor = attention_masks(*rows, window=None if left < 0 else left + 1).unflatten(0, q.shape[:-2])
        return out


class LevelTrainer(Trainer):
    """torchtitan's Trainer, with a different number of micro-batches on each rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        kinds = ("tensor", "context", "pipeline")
        unfit = {f"{kind} parallelism": getattr(config.parallelism, f"{kind}_parallel_degree") > 1 for kind in kinds}
        mixtures = [moe for _, moe, *_ in config.model_spec.model.traverse(MoE.Config)]
        standard = [isinstance(one.routed_experts.token_dispatcher, AllToAllTokenDispatcher.Config) for one in mixtures]
        unfit["a moe_comm_backend that is not standard"] = not all(standard)
        unfit["torch.compile of the model"] = config.compile.enable and "model" in config.compile.components
        unfit["CUDA graphs (disable_cuda_graphs)"] = not config.training.disable_cuda_graphs
        if found := [name for name, is_on in unfit.items() if is_on]:
            raise UserError(f"level steps support data and expert parallelism only; switch off {', '.join(found)}")
        config.dataloader.ep = config.parallelism.expert_parallel_degree
        super().__init__(config)
        (model,) = self.model_parts
        if type(model).get_attention_masks is not Decoder.get_attention_masks:
            own = f"{config.model_spec.name} has its own masks"
            raise UserError(f"{own}, which level steps do not support; use balance")
        for module in model.modules():
            if isinstance(module, MoE):
                module.router.register_forward_hook(partial(self._leave_out_padding, module))
        warn_of_memory(model)
        loss: Any = self.loss_fn
        if isinstance(loss, ChunkedLossWrapper):
            loss.set_lm_head(partial(model.lm_head))  # given the FSDP unit itself, it would reduce the gradients

    def train_step(self, data_iterator: Any) -> None:
        first = next(data_iterator)  # plans the step
        batches = [first, *islice(data_iterator, len(self.dataloader.batches.of_step) - 1)]
        self.gradient_accumulation_steps = len(batches)
        self._turns, self._left = in_turn(self.model_parts[0], batches), len(batches)
        super().train_step(iter(batches))

    def forward_backward_step(self, *arguments: Any, **keywords: Any) -> Any:
        next(self._turns)  # the first time gathers the weights
        loss = super().forward_backward_step(*arguments, **keywords)
        self._left -= 1
        if self._left == 0:
            next(self._turns, None)  # reduces the gradients
        return loss

    def _leave_out_padding(self, moe: Any, _router: Any, _inputs: Any, routed: tuple[Tensor, ...]) -> None:
        """Do not count padding among the tokens of experts, by which torchtitan balances them."""
        if moe.training:
            experts_of_padding = routed[1].flatten(0, -2)[self._tokens :].flatten()
            moe.tokens_per_expert_E.sub_(experts_of_padding.bincount(minlength=len(moe.tokens_per_expert_E)))

    def post_dataloading_process(self, input_dict: dict[str, Any], labels: Tensor) -> Any:
        # torchtitan makes masks from positions, which fails where no document begins on this rank.
        inputs, labels, _ = super().post_dataloading_process({"input": input_dict["input"]}, labels)
        self._tokens = input_dict["tokens"]
        return inputs, labels, {"positions": input_dict["positions"], "attention_masks": input_dict["attend"]}


def level_steps(config: Trainer.Config, **settings: Any) -> LevelTrainer.Config:
    """Make ``config`` run level steps, and replace its attention in place; ``settings`` are those of ``balance``."""
    for _, inner, parent, name in config.model_spec.model.traverse((VarlenAttention.Config, FlexAttention.Config)):
        setattr(parent, name, LevelAttention.Config(window_size=getattr(inner, "window_size", (-1, 0))))
    dataloader = balance(config.dataloader, own_lists=True, **settings)
    level: LevelTrainer.Config = derive(config, LevelTrainer.Config, dataloader=dataloader)
    return level
