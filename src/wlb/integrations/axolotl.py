"""Axolotl: balanced micro-batches by a plugin.

plugins: [wlb.integrations.axolotl.WlbPlugin]
sequence_len: 8192          # of a document at most, and the context window of a micro-batch
sample_packing: false       # the plugin packs
wlb: {cp: 2}  # settings of wlb.integrations.huggingface.balanced, if any
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from wlb.errors import UserError, require
from wlb.integrations.huggingface import balanced
from wlb.integrations.packed import FlatteningCollator

_BASE: type[Any] = require("axolotl.integrations.base", "axolotl").BasePlugin


class WlbArguments(BaseModel):
    """What the plugin adds to Axolotl's configuration, which drops every key that no plugin declares."""

    wlb: dict[str, Any] = {}


class WlbPlugin(_BASE):
    """Makes Axolotl's trainer a balanced one."""

    def get_input_args(self) -> str:
        return f"{__name__}.{WlbArguments.__name__}"

    def get_trainer_cls(self, cfg: Any) -> type[Any]:
        """The trainer for ``cfg``. Raises ``UserError`` where Axolotl would pack too."""
        if cfg.sample_packing:
            raise UserError("sample_packing: true packs before the plugin can; set it to false")
        trainer = require("axolotl.core.trainers.base", "axolotl").AxolotlTrainer
        return balanced(trainer, context_window=int(cfg.sequence_len), **(cfg.wlb or {}))

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[Any, dict[str, Any]]:
        """The collator of training and evaluation alike, made without Axolotl's arguments (a tokenizer, padding)."""
        return (lambda *_, **__: FlatteningCollator()), {}
