"""A job on a mixture, with shards, a loss mask and a sliding window, goes on in another layout with the same steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.distributed import run_ranks
from tests.training.jobs import VOCABULARY, job, read_steps, train, write_store
from tests.web import Faults, files_of, served
from wlb.documents.store.reader import TokenStoreWriter
from wlb.job.config import JobConfig

WEIGHTS = {"store": 2.0, "chats": 1.0}


def _configure(folder: Path, name: str, steps: int, stores: str = "", **parallel: int) -> JobConfig:
    mixture = [{"store": f"{stores or folder}/{store}", "weight": weight} for store, weight in WEIGHTS.items()]
    model: dict[str, Any] = {"sliding_window": 20, "full_attention_layers": 1, "qkv_bias": True, "o_bias": True}
    return job(
        folder,
        model=model | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        data={"store": None, "mixture": mixture},
        parallel=parallel,
        training={"steps": steps, "lr_schedule": "constant", "dtype": "float64", "learning_rate": 0.01},
        checkpoint={"dir": str(folder / name / "checkpoints"), "every": 2},
        metrics={"dir": str(folder / name / "metrics"), "document_ids": "segments"},
    )


def test_a_resumed_mixture_trains_the_steps_of_one_left_in_peace(tmp_path: Path) -> None:
    _write_stores(tmp_path, shards=3)
    run_ranks(1, train, _configure(tmp_path, "straight", 4))
    run_ranks(2, train, _configure(tmp_path, "moved", 2, dp=2))
    run_ranks(2, train, _configure(tmp_path, "moved", 4, pp=2))
    straight, moved = (read_steps(tmp_path / name) for name in ("straight", "moved"))
    for key in ("segments", "document_ids", "store_tokens", "loss_tokens"):
        assert [row[key] for row in moved] == [row[key] for row in straight], key
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in moved] == pytest.approx([row[key] for row in straight], rel=1e-9)
    for row in straight:
        assert sum(row["store_tokens"]) == row["tokens"]
        assert 0 < row["loss_tokens"] < row["tokens"]
    shares = np.array([row["store_tokens"] for row in straight]).sum(axis=0)
    assert shares[0] / shares.sum() == pytest.approx(2 / 3, abs=0.1)


def test_stores_on_a_server_train_the_steps_of_those_on_the_disk(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="needs the HTTP file system of fsspec")
    _write_stores(tmp_path)
    server = Faults(files_of(tmp_path))
    server.faults.extend(["error", "cut", "short"])
    with served(server) as url:
        configs = _configure(tmp_path, "local", 2), _configure(tmp_path, "remote", 2, url)
        run_ranks(1, _train_each, configs)
    assert not server.faults
    assert set(server.gets) == {f"{store}.{ending}" for store in WEIGHTS for ending in ("bin", "idx", "json")} | {
        "chats.mask"
    }
    local, remote = (read_steps(tmp_path / name) for name in ("local", "remote"))
    assert len(local) == 2
    for key in ("segments", "document_ids", "store_tokens", "loss_tokens", "loss", "grad_norm"):
        assert [row[key] for row in remote] == [row[key] for row in local], key


def _train_each(configs: Sequence[JobConfig]) -> None:
    for config in configs:
        train(config)


def _write_stores(folder: Path, shards: int = 1) -> None:
    random = np.random.default_rng(2)
    write_store(folder / "store", shards=shards)
    with TokenStoreWriter(folder / "chats", vocab_size=VOCABULARY, masked=True) as writer:
        for length in random.integers(5, 60, 40):
            writer.add(random.integers(0, VOCABULARY, length), random.random(length) < 0.3)
