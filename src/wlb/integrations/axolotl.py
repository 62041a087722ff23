"""Axolotl: a plugin for balanced micro-batches. Its configuration:

plugins: [wlb.integrations.axolotl.WlbPlugin]
sequence_len: 8192          # the longest document, and the context window of a micro-batch
sample_packing: false       # because the plugin packs
wlb: {cp: 2}                # optional settings of wlb.integrations.huggingface.balanced
"""

from typing import Any

from pydantic import BaseModel

from wlb.errors import UserError, require
from wlb.integrations.huggingface import balanced
from wlb.integrations.packed import FlatteningCollator

_BASE: type[Any] = require("axolotl.integrations.base", "axolotl").BasePlugin


class WlbArguments(BaseModel):
    """The keys that the plugin declares. Axolotl drops every key of its configuration that nobody declares."""

    wlb: dict[str, Any] = {}


class WlbPlugin(_BASE):
    """Makes Axolotl's trainer a balanced one."""

    def get_input_args(self) -> str:
        return f"{__name__}.{WlbArguments.__name__}"

    def get_trainer_cls(self, cfg: Any) -> type[Any]:
        """The trainer for ``cfg``. Raises ``UserError`` if Axolotl packs as well."""
        if cfg.sample_packing:
            raise UserError("sample_packing is true, so Axolotl packs before the plugin; set it to false")
        trainer = require("axolotl.core.trainers.base", "axolotl").AxolotlTrainer
        return balanced(trainer, context_window=int(cfg.sequence_len), **(cfg.wlb or {}))

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[Any, dict[str, Any]]:
        """One collator for training and evaluation; it ignores the arguments of Axolotl (tokenizer, padding)."""
        return (lambda *_, **__: FlatteningCollator()), {}
