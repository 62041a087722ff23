"""The examples of stacks that run without a GPU, small, in processes of their own; torchtitan's is run by its test."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wlb.documents.store.writer import TokenStoreWriter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("store") / "documents"
    with TokenStoreWriter(prefix, vocab_size=8) as writer:
        for length in np.minimum(np.random.default_rng(0).lognormal(5, 1.2, 200).astype(int) + 2, 2000):
            writer.add(np.ones(length, dtype=np.int64))
    return prefix


def _printed(example: str, *arguments: Any) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", f"examples/{example}.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    printed: dict[str, dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])
    return printed


def test_megatron(store: Path):
    data_schedule = pytest.importorskip("megatron.core.datasets.data_schedule", reason="needs Megatron-Core")
    if not hasattr(data_schedule, "scheduler_map"):
        pytest.skip("needs Megatron-LM's main (0.20): this Megatron-Core has no scheduler_map")
    size = ["--max-seqlen-per-dp-cp-rank", 2048, "--samples", 100, "--batches", 2]
    theirs, ours = _printed("with_megatron", store, *size).values()
    assert theirs["samples_once"]
    assert ours["samples_once"]
    assert ours["predicted_lock_step"] < theirs["predicted_lock_step"]


def test_verl(store: Path):
    if importlib.util.find_spec("verl") is None:
        pytest.skip("needs verl")
    theirs, ours = _printed("with_verl", store, "--max-tokens", 2048, "--rollouts", 96).values()
    assert theirs["rollouts_once"]
    assert ours["rollouts_once"]
    assert ours["most_tokens_of_a_micro_batch"] <= 2048
    assert ours["imbalance_of_ranks"] <= theirs["imbalance_of_ranks"] + 1e-6
