"""The Axolotl plugin, under Axolotl's own classes or, where it is not installed, stand-ins with their interface."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from tests.code_blocks import ROOT, blocks_of
from wlb.errors import UserError

transformers: Any = importlib.import_module("transformers")
yaml: Any = importlib.import_module("yaml")

(BLOCK,) = (b for b in blocks_of(ROOT / "docs" / "stacks" / "huggingface.md") if b.language == "yaml")
CONFIGURATION: dict[str, Any] = yaml.safe_load(BLOCK.text) | {"sequence_len": 512}


class Settings(dict[str, Any]):
    """A configuration as Axolotl hands it to plugins."""

    __getattr__ = dict.get


class AxolotlInput(BaseModel):
    """The part of Axolotl's schema that is needed here; like Axolotl's it drops what it does not know."""

    sequence_len: int
    sample_packing: bool


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_ins: list[tuple[str, dict[str, Any]]] = [
        ("axolotl.integrations.base", {"BasePlugin": object}),
        ("axolotl.core.trainers.base", {"AxolotlTrainer": type("AxolotlTrainer", (transformers.Trainer,), {})}),
    ]
    for name, found in stand_ins:
        try:
            importlib.import_module(name)
        except ImportError:
            module = ModuleType(name)
            vars(module).update(found)
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "wlb.integrations.axolotl", raising=False)
    module, _, name = CONFIGURATION["plugins"][0].rpartition(".")
    yield getattr(importlib.import_module(module), name)()
    sys.modules.pop("wlb.integrations.axolotl", None)


def validated(plugin: Any, configuration: dict[str, Any]) -> Settings:
    """``configuration`` as it comes out of Axolotl's validation, which merges the plugin's class into its own."""
    module, _, name = plugin.get_input_args().rpartition(".")
    merged = type("AxolotlInputConfig", (AxolotlInput, getattr(importlib.import_module(module), name)), {})
    return Settings(merged(**configuration).model_dump(exclude_none=True))


def test_the_plugin_gives_a_balanced_trainer_with_the_settings_asked_for(plugin: Any):
    trainer = plugin.get_trainer_cls(validated(plugin, CONFIGURATION))
    assert trainer.__name__ == "BalancedAxolotlTrainer"
    assert trainer._wlb_planning == {"context_window": 512, "cp": 2, "sharding": "balanced"}
    plain = plugin.get_trainer_cls(validated(plugin, {"sequence_len": 512, "sample_packing": False}))
    assert plain._wlb_planning == {"context_window": 512, "cp": 1, "sharding": "balanced"}


def test_the_plugin_gives_our_collator_and_refuses_axolotls_packing(plugin: Any):
    cfg = validated(plugin, CONFIGURATION)
    collator, arguments = plugin.get_collator_cls_and_kwargs(cfg)
    assert "use_cache" in collator("tokenizer", padding=True, **arguments)([[1, 2]])
    with pytest.raises(UserError, match="sample_packing"):
        plugin.get_trainer_cls(Settings(cfg, sample_packing=True))


def test_axolotls_own_validation_keeps_the_settings(plugin: Any):
    schemas = pytest.importorskip("axolotl.utils.schemas.config", exc_type=ImportError)
    module, _, name = plugin.get_input_args().rpartition(".")
    merged = type("Merged", (schemas.AxolotlInputConfig, getattr(importlib.import_module(module), name)), {})
    given = CONFIGURATION | {
        "base_model": "tiny",
        "datasets": [{"path": "documents", "type": "completion"}],
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
    }
    assert merged(**given).model_dump(exclude_none=True)["wlb"] == CONFIGURATION["wlb"]


def test_without_axolotl_the_remedy_is_one_line():
    if importlib.util.find_spec("axolotl") is not None:
        pytest.skip("axolotl is installed")
    with pytest.raises(UserError, match=r"pip install 'wlb-llm\[axolotl\]'"):
        importlib.import_module("wlb.integrations.axolotl")
