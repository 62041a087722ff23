"""A token store and a configuration small enough for a test: a step takes some tens of milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.limits import HUNG_SECONDS
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.documents.synthetic import sample_lengths
from wlb.job.config import JobConfig

if TYPE_CHECKING:
    from wlb.training.trainer import Trainer

VOCABULARY = 67
WINDOW = 128

SMALL: dict[str, dict[str, Any]] = {
    "model": {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_hidden": 24},
    "data": {"context_window": WINDOW},
    "packing": {"global_batch": 4},
    "training": {"steps": 6, "warmup_steps": 2, "device": "cpu", "timeout_seconds": HUNG_SECONDS, "threads": 1},
    "metrics": {"document_ids": True, "tensorboard": False},
}


def write_store(prefix: Path, documents: int = 400, longest: int = 2 * WINDOW, shards: int = 1) -> TokenStore:
    """Random tokens in documents of very different lengths, some over the context window.

    In several ``shards``, ``prefix`` is the directory that they lie in.
    """
    rng = np.random.default_rng(5)
    parts = [prefix] if shards == 1 else [prefix / f"shard{number}" for number in range(shards)]
    for part, lengths in zip(parts, np.array_split(sample_lengths(documents, longest, seed=3), shards), strict=True):
        part.parent.mkdir(parents=True, exist_ok=True)
        with TokenStoreWriter(part, vocab_size=VOCABULARY) as writer:
            for length in lengths:
                writer.add(rng.integers(0, VOCABULARY, length))
    return TokenStore.open(prefix)


def settings(folder: Path, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of a small job that lives in ``folder``, with ``changes`` merged in."""
    sections = {name: dict(section) for name, section in SMALL.items()}
    sections["data"]["store"] = str(folder / "store")
    sections["metrics"]["dir"] = str(folder / "metrics")
    for name, section in changes.items():
        sections.setdefault(name, {}).update(section)
    return sections


def job(folder: Path, preset: str = "balanced", /, **changes: dict[str, Any]) -> JobConfig:
    return JobConfig.model_validate({"preset": preset, **settings(folder, **changes)})


def write_config(folder: Path, preset: str = "balanced", /, **changes: dict[str, Any]) -> Path:
    """The same as a TOML file; its path."""
    lines = [f'preset = "{preset}"']
    for name, section in settings(folder, **changes).items():
        lines.append(f"[{name}]")
        given = {key: value for key, value in section.items() if value is not None}  # TOML has no null
        lines += [f"{key} = {json.dumps(value)}" for key, value in given.items()]  # JSON values are valid TOML
    path = folder / "job.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def endless(folder: Path, dp: int = 2, every: int = 5, **training: Any) -> Path:
    """The file of a job that goes on until it is ended, with a checkpoint after ``every`` steps."""
    return write_config(
        folder,
        parallel={"dp": dp},
        training={"steps": 100_000, **training},
        checkpoint={"dir": str(folder / "checkpoints"), "every": every},
    )


def trainer_of(config: JobConfig) -> Trainer:
    """This rank's trainer of a job on CPUs, checked as before every start."""
    import torch  # here, as the tests of the planning half do without

    from wlb.training.preflight import check_job
    from wlb.training.trainer import Trainer

    return Trainer(check_job(config, config.parallel.layout.world_size), torch.device("cpu"))


def train(config: JobConfig) -> dict[str, Any] | None:
    """Be a rank of the job; returns what rank 0 sums up."""
    return trainer_of(config).run()


def read_steps(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics" / "steps.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
