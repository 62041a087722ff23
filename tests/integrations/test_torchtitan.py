"""Our loader in torchtitan: chosen on its command line, continued from a state, and trained by its real Trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchtitan.config.override", reason="needs torchtitan", exc_type=ImportError)

import torch  # torchtitan decides whether this file runs
from torchtitan.components.dataloader import BaseDataLoader

from wlb.documents.store.writer import TokenStoreWriter
from wlb.errors import UserError
from wlb.integrations.torchtitan import BalancedDataLoader, balance
from wlb.training.data.batch import IGNORE_LABEL

ROOT = Path(__file__).resolve().parents[2]
SEQ_LEN = 64


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(0)
    prefix = tmp_path_factory.mktemp("store") / "documents"
    with TokenStoreWriter(prefix, vocab_size=1000) as writer:
        for length in np.minimum(rng.lognormal(3, 1, 300).astype(int) + 2, 100):
            writer.add(rng.integers(3, 1000, size=int(length)))
    return str(prefix)


def _loader(
    store: str, rank: int = 0, dp: int = 2, multiple_of: int = 1, local_batch_size: int = 1
) -> BalancedDataLoader:
    config = balance(BaseDataLoader.Config(dataset_path=store), micro_batches=2, multiple_of=multiple_of)
    loader: BalancedDataLoader = config.build(
        dp_world_size=dp, dp_rank=rank, tokenizer=None, seq_len=SEQ_LEN, local_batch_size=local_batch_size
    )
    return loader


def _as_lists(batches: Any, count: int) -> list[list[list[int]]]:
    return [
        [inputs["input"][0].tolist(), inputs["positions"][0].tolist(), labels[0].tolist()]
        for inputs, labels in islice(batches, count)
    ]


def test_the_command_line_replaces_the_training_loader_alone(store: str):
    from torchtitan.config.override import apply_overrides, parse_cli_imports
    from torchtitan.trainer import Trainer

    config = Trainer.Config()
    validation = config.validator.dataloader
    config.dataloader.dataset_path = store
    config.override.imports = parse_cli_imports(['wlb.integrations.torchtitan.balance={"micro_batches": 2, "seed": 3}'])
    assert len(apply_overrides(config.override, config)) == 1
    assert config.dataloader == BalancedDataLoader.Config(dataset_path=store, micro_batches=2, seed=3)
    assert config.validator.dataloader is validation


@pytest.mark.parametrize("taken", [0, 3, 4])  # at the beginning, inside a step of two micro-batches, after two steps
def test_a_loaded_state_continues_with_the_next_micro_batch(store: str, taken: int):
    whole = _as_lists(_loader(store, rank=1), 10)
    interrupted, continued = _loader(store, rank=1), _loader(store, rank=1)
    assert _as_lists(interrupted, taken) == whole[:taken]
    continued.load_state_dict(interrupted.state_dict())
    assert _as_lists(continued, 10 - taken) == whole[taken:]


def test_another_degree_continues_after_whole_steps(store: str):
    """What one rank trains next is what two would have: only the dealing differs."""
    one = _loader(store, dp=1)
    one.load_state_dict(_state_after(store, micro_batches=4))
    two = _loader(store, dp=2)
    two.load_state_dict(_state_after(store, micro_batches=4))
    of_one, of_two = (
        {segment for plan in islice(loader.steps(), 4) for segment in plan.segments} for loader in (one, two)
    )
    trained = _loader(store, dp=2)
    before = {segment for plan in islice(trained.steps(), 2) for segment in plan.segments}
    assert of_one & of_two
    assert not before & (of_one | of_two)
    with pytest.raises(UserError, match="inside a step with dp = 2, this run has 1"):
        one.load_state_dict(_state_after(store, micro_batches=3))


def _state_after(store: str, micro_batches: int) -> dict[str, Any]:
    loader = _loader(store)
    list(islice(loader, micro_batches))
    return loader.state_dict()


def test_padding_is_a_document_of_its_own_without_labels(store: str):
    (inputs, labels), (plain, _) = next(iter(_loader(store, multiple_of=64))), next(iter(_loader(store)))
    tokens = plain["input"].shape[1]
    padding = -tokens % 64
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (1, tokens + padding)
    assert torch.equal(inputs["input"][:, :tokens], plain["input"])
    assert inputs["positions"][0, tokens:].tolist() == list(range(padding))
    assert set(labels[0, tokens:].tolist()) <= {IGNORE_LABEL}


def test_what_cannot_be_trained_is_refused(store: str):
    with pytest.raises(UserError, match="local_batch_size = 2"):
        _loader(store, local_batch_size=2)
    with pytest.raises(UserError, match="dataset_path is not set"):
        BalancedDataLoader.Config().build(dp_world_size=1, dp_rank=0, seq_len=SEQ_LEN, local_batch_size=1)
    state = json.loads(_loader(store).state_dict()["wlb"])
    state["planner"]["settings"]["documents"] = 7
    with pytest.raises(UserError, match="saved with documents = 7, this run has 300"):
        _loader(store).load_state_dict({"wlb": json.dumps(state)})


def test_the_real_trainer_trains_every_document_once_with_exact_gradients(store: str):
    """Two processes, FSDP2 over gloo: the example, small."""
    pytest.importorskip("datasets", reason="torchtitan's own loader needs datasets")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/with_torchtitan.py"]
    done = subprocess.run(
        [sys.executable, *command, store, "--seq-len", str(SEQ_LEN), "--steps", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["documents_once"]
    assert report["gradient_error"] < 1e-5
    assert len(report["balanced"]["losses"]) == 3
    assert report["predicted_lock_step"] < 1.2
