"""Level steps in torchtitan: each data-parallel rank runs its own number of micro-batches, and all finish together.

Several ranks share the micro-batches of long documents. Other collectives inside a micro-batch would wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config.override import derive
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.models.common.decoder import Decoder
from torchtitan.trainer import Trainer

from wlb.attention import segment_attention
from wlb.errors import UserError
from wlb.integrations.torchtitan import balance
from wlb.runtime.own_lists import in_turn


class LevelAttention(VarlenAttention):
    """Attention inside documents: ``attention_masks`` is the loader's ``attend``, or torchtitan's own in validation."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(self, q: Any, k: Any, v: Any, *, attention_masks: Any, scale: Any, **more: Any) -> Tensor:
        """Query, key and value of shape (1, tokens, heads, head_dim), in main without the 1; shaped as the query."""
        left, right = self.window_size
        if right or [name for name in more if name != "enable_gqa" and more[name] is not None]:
            raise UserError(f"level steps attend causally; window_size = {self.window_size} and {[*more]} do more")
        if isinstance(attention_masks, VarlenMetadata):
            lengths = [length for length in attention_masks.cu_seq_q.diff().tolist() if length]
            attention_masks = partial(segment_attention, segment_lengths=lengths)
        if scale is not None:
            q = q * (scale * q.shape[-1] ** 0.5)  # what follows scales by 1/sqrt(head_dim)
        rows = (tensor.flatten(0, -3) for tensor in (q, k, v))
        out: Tensor = attention_masks(*rows, window=None if left < 0 else left + 1).unflatten(0, q.shape[:-2])
        return out


class LevelTrainer(Trainer):
    """torchtitan's Trainer, for which a step is a rank's own list of micro-batches."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        kinds = ("tensor", "context", "pipeline", "expert")
        unfit = {f"{kind} parallelism": getattr(config.parallelism, f"{kind}_parallel_degree") > 1 for kind in kinds}
        unfit["torch.compile of the model"] = config.compile.enable and "model" in config.compile.components
        unfit["CUDA graphs (disable_cuda_graphs)"] = not config.training.disable_cuda_graphs
        if found := [name for name, is_on in unfit.items() if is_on]:
            raise UserError(f"level steps run with data parallelism alone; switch off {', '.join(found)}")
        super().__init__(config)
        (model,) = self.model_parts
        if type(model).get_attention_masks is not Decoder.get_attention_masks:
            raise UserError(f"{config.model_spec.name} masks more than documents, and level steps cannot; use balance")
        loss: Any = self.loss_fn
        if isinstance(loss, ChunkedLossWrapper):
            loss.set_lm_head(partial(model.lm_head))  # of an FSDP unit it would reduce the gradients itself
        self.loss_fn: Any = partial(self._loss_in_turn, loss)

    def train_step(self, data_iterator: Any) -> None:
        first = next(data_iterator)  # plans the step
        batches = [first, *islice(data_iterator, len(self.dataloader.batches.of_step) - 1)]
        self.gradient_accumulation_steps = len(batches)
        self._turns = in_turn(self.model_parts[0], [None, *batches])
        next(self._turns)  # gathers the weights
        super().train_step(iter(batches))

    def post_dataloading_process(self, input_dict: dict[str, Any], labels: Tensor) -> Any:
        # torchtitan makes masks of positions, and fails where a rank's share has no document's first token.
        inputs, labels, _ = super().post_dataloading_process({"input": input_dict["input"]}, labels)
        return inputs, labels, {"positions": input_dict["positions"], "attention_masks": input_dict["attend"]}

    def _loss_in_turn(self, loss: Any, *arguments: Any, **keywords: Any) -> Any:
        result = loss(*arguments, **keywords)  # a loss in chunks has run the backward of the head
        next(self._turns)  # the backward of the model, which comes now, may be the one that reduces gradients
        return result


def level_steps(config: Trainer.Config, **settings: Any) -> LevelTrainer.Config:
    """``config`` for level steps, its attention replaced in place; ``settings`` are those of ``balance``."""
    for _, inner, parent, name in config.model_spec.model.traverse((VarlenAttention.Config, FlexAttention.Config)):
        setattr(parent, name, LevelAttention.Config(window_size=getattr(inner, "window_size", (-1, 0))))
    dataloader = balance(config.dataloader, own_lists=True, **settings)
    level: LevelTrainer.Config = derive(config, LevelTrainer.Config, dataloader=dataloader)
    return level
