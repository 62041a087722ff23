"""Our loader in torchtitan, 0.3.0 or main: chosen on its command line, continued from a state, trained by its Trainer.

Main is not on the package index: a checkout on PYTHONPATH, with grain and tyro installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import islice
from typing import Any

import numpy as np
import pytest

if find_spec("torchtitan") is None:  # a broken one fails
    pytest.skip("needs torchtitan", allow_module_level=True)

import torch  # torchtitan decides whether this file runs

from tests.code_blocks import ROOT, blocks_of
from wlb.documents.store.writer import TokenStoreWriter
from wlb.errors import UserError
from wlb.integrations.torchtitan import (
    BalancedDataLoader,
    BaseDataLoader,
    LevelAttention,
    LevelTrainer,
    Trainer,
    balance,
    check_trainer,
    level_steps,
)
from wlb.runtime.loss import IGNORE_LABEL

SEQ_LEN = 64
IN_ROWS = BaseDataLoader.__module__ == "torchtitan.components.dataloader"  # 0.3.0, not main
TOKENS = -1  # dimension of what the loader yields


def _sizes(too_many: int = 1) -> dict[str, int]:
    """What torchtitan tells the loader about a micro-batch, times ``too_many``."""
    if IN_ROWS:
        return {"seq_len": SEQ_LEN, "local_batch_size": too_many}
    return {"max_context_length": SEQ_LEN, "num_tokens_per_batch": too_many * SEQ_LEN}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(0)
    prefix = tmp_path_factory.mktemp("store") / "documents"
    with TokenStoreWriter(prefix, vocab_size=1000) as writer:
        for length in np.minimum(rng.lognormal(3, 1, 300).astype(int) + 2, 100):
            writer.add(rng.integers(3, 1000, size=int(length)))
    return str(prefix)


def _loader(store: str, rank: int = 0, dp: int = 2, multiple_of: int = 1, **sizes: int) -> BalancedDataLoader:
    config = balance(BaseDataLoader.Config(), store=store, micro_batches=2, multiple_of=multiple_of)
    loader: BalancedDataLoader = config.build(dp_world_size=dp, dp_rank=rank, **(sizes or _sizes()))
    return loader


def _as_lists(batches: Any, count: int) -> list[list[list[int]]]:
    return [
        [inputs["input"].flatten().tolist(), inputs["positions"].flatten().tolist(), labels.flatten().tolist()]
        for inputs, labels in islice(batches, count)
    ]


def test_the_command_line_replaces_the_training_loader_alone(store: str):
    from torchtitan.config.override import apply_overrides, parse_cli_imports
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    validation = config.validator.dataloader
    given = json.dumps({"store": store, "micro_batches": 2, "seed": 3})
    config.override.imports = parse_cli_imports([f"wlb.integrations.torchtitan.balance={given}"])
    assert len(apply_overrides(config.override, config)) == 1
    replaced = config.dataloader
    assert isinstance(replaced, BalancedDataLoader.Config)
    assert (replaced.store, replaced.micro_batches, replaced.seed) == (store, 2, 3)
    assert config.validator.dataloader is validation


@pytest.mark.proves("resume")
@pytest.mark.parametrize("taken", [0, 3, 4])  # at the beginning, inside a step of two micro-batches, after two steps
def test_a_loaded_state_continues_with_the_next_micro_batch(store: str, taken: int):
    whole = _as_lists(_loader(store, rank=1), 10)
    interrupted, continued = _loader(store, rank=1), _loader(store, rank=1)
    assert _as_lists(interrupted, taken) == whole[:taken]
    continued.load_state_dict(interrupted.state_dict())
    assert _as_lists(continued, 10 - taken) == whole[taken:]


def test_padding_is_a_document_of_its_own_without_labels(store: str):
    (inputs, labels), (plain, _) = next(iter(_loader(store, multiple_of=64))), next(iter(_loader(store)))
    tokens = plain["input"].shape[TOKENS]
    padding = -tokens % 64
    shape = (1, tokens + padding) if IN_ROWS else (tokens + padding,)
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == shape
    assert torch.equal(inputs["input"][..., :tokens], plain["input"])
    assert inputs["positions"][..., tokens:].flatten().tolist() == list(range(padding))
    assert set(labels[..., tokens:].flatten().tolist()) <= {IGNORE_LABEL}


def test_what_cannot_be_trained_is_refused(store: str):
    with pytest.raises(UserError, match=r"(2|128)}, but a balanced micro-batch holds one context"):
        _loader(store, **_sizes(too_many=2))
    with pytest.raises(UserError, match=r"gives its data loader {'rows': 3}, .*wlb needs torchtitan 0\.3\.0 or its"):
        _loader(store, rows=3)
    with pytest.raises(UserError, match='the override has no "store"; give the prefix'):
        BalancedDataLoader.Config().build(dp_world_size=1, dp_rank=0, **_sizes())
    state = json.loads(_loader(store).state_dict()["wlb"])
    state["settings"]["order"]["documents"] = 7
    with pytest.raises(UserError, match="saved with documents = 7 and this run has 300"):
        _loader(store).load_state_dict({"wlb": json.dumps(state)})
    level = balance(BaseDataLoader.Config(), store=store, micro_batches=2, own_lists=True)
    next(begun := iter(loader := level.build(dp_world_size=2, dp_rank=0, **_sizes())))
    assert len(begun.of_step) > 1
    with pytest.raises(UserError, match="of a level step; save after whole steps"):
        loader.state_dict()


def test_a_trainer_that_reads_batches_otherwise_is_refused():
    for other in (
        {"post_dataloading_process": None},
        {"train_step": lambda self, data_iterator, num_valid_tokens: None},
    ):
        kept = {name: function for name, function in (vars(Trainer) | other).items() if function is not None}
        with pytest.raises(
            UserError, match=rf"Trainer has no {next(iter(other))}\(.*; wlb.integrations.torchtitan needs"
        ):
            check_trainer(type("Trainer", (), kept))


@pytest.mark.proves("packed batches", "own lists", "experts")
@pytest.mark.parametrize(("level", "ep"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_the_real_trainer_trains_every_document_once_with_exact_gradients(store: str, level: bool, ep: int):
    """FSDP2 over gloo. In level steps ranks share some micro-batches and differ in how many they run.

    Two groups of two ranks that share experts do so too, and the ranks of a group run the same micro-batches.
    """
    processes, steps = (4, 2) if level and ep > 1 else (2, 3)
    program = ("-m", "tests.integrations.torchtitan_steps", store, "--seq-len", str(SEQ_LEN), "--steps", str(steps))
    report = _run(processes, *program, "--ep", str(ep), *["--level"] * level)
    assert report["documents_once"]
    assert report["continues"]
    assert report["error"] < 2e-6  # float32
    assert report["bias_error"] == 0
    assert (report["shared"] > 0) == level
    first, *of_group, last = report["micro_batches"]
    assert (first != last) == level
    assert of_group in ([], [first, last])


def level_debugmodel() -> Any:
    """A configuration as torchtitan finds it by its command line."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    return level_steps(llama3_debugmodel(), store="documents", micro_batches=2)


def test_the_page_makes_level_steps():
    (block,) = (b for b in blocks_of(ROOT / "docs" / "stacks" / "pretraining.md") if "import level_steps" in b.text)
    names: dict[str, Any] = {}
    exec(block.text, names)
    config = names["level_8b"]()
    assert isinstance(config, LevelTrainer.Config)
    assert (config.dataloader.store, config.dataloader.micro_batches) == ("corpus/documents", 8)


def test_the_command_line_takes_level_steps_and_what_they_exclude_is_refused():
    from torchtitan.config import ConfigManager

    unfit = ["--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2", "--compile.enable"]
    arguments = ["--module", __name__, "--config", "level_debugmodel", *unfit, "--training.disable_cuda_graphs"]
    config = ConfigManager().parse_args(arguments)
    assert isinstance(config, LevelTrainer.Config)
    assert config.dataloader.own_lists
    assert all(
        isinstance(layer.attention.inner_attention, LevelAttention.Config) for layer in config.model_spec.model.layers
    )
    with pytest.raises(
        UserError, match=r"switch off tensor parallelism, pipeline parallelism, torch.compile of the model$"
    ):
        config.build()
    config.training.disable_cuda_graphs, config.parallelism.pipeline_parallel_degree = False, 1
    with pytest.raises(UserError, match="CUDA graphs"):
        config.build()
    from torchtitan.models.qwen3 import model_registry

    config.model_spec = model_registry("debugmodel_moe", moe_comm_backend="deepep")
    with pytest.raises(UserError, match=r"switch off .*, a moe_comm_backend that is not standard"):
        config.build()


def _run(processes: int, *program: str) -> dict[str, Any]:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *program]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return report
