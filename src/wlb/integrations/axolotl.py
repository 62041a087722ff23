"""Axolotl: balanced micro-batches by a plugin.

    plugins: [wlb.integrations.axolotl.WlbPlugin]
    sequence_len: 8192          # of a document at most, and the context window of a micro-batch
    sample_packing: false       # the plugin packs
    use_cache: false

Axolotl asks its plugins for a trainer class and a collator (``BasePlugin``, read in 0.19); these are its own trainer,
balanced, and ours. Keys that start with ``wlb_`` are settings of ``wlb.integrations.huggingface.balanced``, for example
``wlb_preset: elastic`` or ``wlb_cp: 2``.
"""

from __future__ import annotations

from typing import Any

from wlb.errors import UserError, require
from wlb.integrations.huggingface import balanced, register_attention
from wlb.integrations.packed import FlatteningCollator

_PREFIX = "wlb_"
_BASE: type[Any] = require("axolotl.integrations.base", "axolotl").BasePlugin


class PluginCollator(FlatteningCollator):
    """The collator, made with the arguments that Axolotl gives to any (a tokenizer, padding)."""

    def __init__(self, *positional: Any, **arguments: Any) -> None:
        super().__init__()


class WlbPlugin(_BASE):
    """Makes Axolotl's trainer a balanced one."""

    def get_trainer_cls(self, cfg: Any) -> type[Any]:
        """The trainer for ``cfg``. Raises ``UserError`` where Axolotl would pack too."""
        if cfg.sample_packing:
            raise UserError("sample_packing: true packs before the plugin can; set it to false")
        register_attention()
        trainer = require("axolotl.core.trainers.base", "axolotl").AxolotlTrainer
        settings = {key.removeprefix(_PREFIX): value for key, value in dict(cfg).items() if key.startswith(_PREFIX)}
        return balanced(trainer, context_window=int(cfg.sequence_len), **settings)

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[type[Any], dict[str, Any]]:
        """The collator of training and evaluation alike."""
        return PluginCollator, {}
