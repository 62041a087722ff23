"""The Axolotl plugin, where Axolotl can be imported."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from wlb.errors import UserError


class Settings(dict[str, Any]):
    """A configuration as Axolotl hands it to plugins."""

    __getattr__ = dict.get


def test_the_plugin_gives_a_balanced_trainer_and_our_collator():
    pytest.importorskip("axolotl.integrations.base", exc_type=ImportError)
    plugin = importlib.import_module("wlb.integrations.axolotl").WlbPlugin()
    cfg = Settings(sequence_len=512, sample_packing=False, wlb_preset="best")
    assert plugin.get_trainer_cls(cfg).__name__ == "BalancedAxolotlTrainer"
    collator, arguments = plugin.get_collator_cls_and_kwargs(cfg)
    assert "use_cache" in collator("tokenizer", padding=True, **arguments)([[1, 2]])
    with pytest.raises(UserError, match="sample_packing"):
        plugin.get_trainer_cls(Settings(cfg, sample_packing=True))


def test_without_axolotl_the_remedy_is_one_line():
    if importlib.util.find_spec("axolotl") is not None:
        pytest.skip("axolotl is installed")
    with pytest.raises(UserError, match=r"pip install 'wlb-llm\[axolotl\]'"):
        importlib.import_module("wlb.integrations.axolotl")
