"""The training loop: the whole epoch, and a stop where ranks planned different steps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.distributed import RankFailure, run_ranks
from tests.training.jobs import WINDOW, job, read_steps, train, write_store
from wlb.documents.segments import Segment, split_overlong
from wlb.documents.store.reader import TokenStore
from wlb.job.config import JobConfig


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_store(folder / "store")
    return folder / "store"


def configure(folder: Path, store: Path, parallel: dict[str, Any], **training: Any) -> JobConfig:
    return job(
        folder,
        data={"store": str(store)},
        model={"layers": 4},
        parallel=parallel,
        training={"dtype": "float64", **training},
    )


def _train_with_own_data(config: JobConfig, other: JobConfig) -> None:
    train(config if torch.distributed.get_rank() else other)


def test_without_a_number_of_steps_one_epoch_is_trained(tmp_path, store):
    config = configure(tmp_path, store, {"pp": 2}, steps=None)
    audited = config.metrics.model_copy(update={"document_ids": "segments"})
    summary = run_ranks(2, train, config.model_copy(update={"metrics": audited}))[0]
    rows = read_steps(tmp_path)
    documents = [document for row in rows for document in row["document_ids"]]
    opened = TokenStore.open(store)
    assert sorted(documents) == list(range(len(opened)))
    pieces = sorted(tuple(piece) for row in rows for piece in row["segments"])
    assert pieces == [
        (document, start, min(WINDOW, length - start))
        for document, length in enumerate(opened.lengths.tolist())
        for start in range(0, length, WINDOW)
    ]
    assert (summary["tokens"], summary["documents"], summary["steps"]) == (opened.tokens, len(opened), len(rows))
    _, report = split_overlong([Segment(i, 0, n) for i, n in enumerate(opened.lengths.tolist())], WINDOW)
    assert report.documents > 0
    assert (summary["overlong"], summary["pending_documents"]) == (asdict(report), 0)


def test_ranks_that_plan_differently_do_not_train(tmp_path, store):
    config = configure(tmp_path, store, {"dp": 2})
    other = config.model_copy(update={"data": config.data.model_copy(update={"seed": 9})})
    with pytest.raises(RankFailure, match="step 1: ranks planned different steps"):
        run_ranks(2, _train_with_own_data, config, other)
