"""Axolotl: balanced micro-batches by a plugin.

    plugins: [wlb.integrations.axolotl.WlbPlugin]
    sequence_len: 8192          # of a document at most, and the context window of a micro-batch
    sample_packing: false       # the plugin packs
    use_cache: false
    wlb: {preset: best, cp: 2}  # settings of wlb.integrations.huggingface.balanced, if any

Axolotl asks its plugins for a trainer class and a collator (``BasePlugin``, of 0.19); these are its own trainer,
balanced, and ours. It drops every key of the configuration that no plugin declares, which ``WlbArguments`` does.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from wlb.errors import UserError, require
from wlb.integrations.huggingface import balanced, register_attention
from wlb.integrations.packed import FlatteningCollator

_BASE: type[Any] = require("axolotl.integrations.base", "axolotl").BasePlugin


class WlbArguments(BaseModel):
    """What the plugin adds to Axolotl's configuration."""

    wlb: dict[str, Any] = {}


class PluginCollator(FlatteningCollator):
    """The collator, made with the arguments that Axolotl gives to any (a tokenizer, padding)."""

    def __init__(self, *positional: Any, **arguments: Any) -> None:
        super().__init__()


class WlbPlugin(_BASE):
    """Makes Axolotl's trainer a balanced one."""

    def get_input_args(self) -> str:
        """Where Axolotl finds the settings of the plugin."""
        return f"{__name__}.{WlbArguments.__name__}"

    def get_trainer_cls(self, cfg: Any) -> type[Any]:
        """The trainer for ``cfg``. Raises ``UserError`` where Axolotl would pack too."""
        if cfg.sample_packing:
            raise UserError("sample_packing: true packs before the plugin can; set it to false")
        register_attention()
        trainer = require("axolotl.core.trainers.base", "axolotl").AxolotlTrainer
        return balanced(trainer, context_window=int(cfg.sequence_len), **(cfg.wlb or {}))

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[type[Any], dict[str, Any]]:
        """The collator of training and evaluation alike."""
        return PluginCollator, {}
