"""The training loop: the whole epoch, a stop where ranks planned different steps, plans by measured prices."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.distributed import RankFailure, run_ranks
from tests.training.jobs import WINDOW, job, read_steps, train, trainer_of, write_store
from wlb.documents.segments import split_overlong
from wlb.documents.store.reader import TokenStore
from wlb.job.config import JobConfig
from wlb.runtime.batch import Batch
from wlb.runtime.calibration import Calibration
from wlb.training import trainer
from wlb.training.checkpoint.files import checkpoint_path


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
    _, report = split_overlong(np.array([(i, 0, n) for i, n in enumerate(opened.lengths)]), WINDOW)
    assert report.documents > 0
    assert (summary["overlong"], summary["pending_documents"]) == (asdict(report), 0)


@pytest.mark.parametrize(
    ("seed", "pool", "message"),
    [(9, 2, "process 1 and process 0 planned different steps"), (0, 1, "ranks decided on different jobs")],
)
def test_ranks_that_plan_differently_do_not_train(tmp_path, store, seed, pool, message):
    config, other = (
        job(
            tmp_path,
            data={"store": str(store), "seed": of_seed},
            parallel={"dp": 2, "pool": of_pool},
            packing={"rank_micro_batches": 4},
        )
        for of_seed, of_pool in ((0, 2), (seed, pool))
    )
    with pytest.raises(RankFailure, match=message):
        run_ranks(2, _train_with_own_data, config, other)


def _calibrated(config: JobConfig, speeds: tuple[float, float]) -> tuple[list[str], Any]:
    """Train where documents cost exactly what made-up prices say, over this rank's speed; what was said of it."""
    said: list[str] = []

    @contextmanager
    def timing(found: Calibration, batch: Batch) -> Iterator[None]:
        yield
        if not batch.is_shared:
            lengths = np.array(batch.segment_lengths, float)
            squares, tokens = float((lengths**2).sum()), float(lengths.sum())
            taken = 1e-6 * squares + 1e-4 * tokens + 1e-3
            found._timed.append((squares, tokens, 0.0, taken / speeds[torch.distributed.get_rank()]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "timing", timing)
        patch.setattr(trainer, "tell", said.append)
        one = trainer_of(config)
        one.run()
    return said, one.calibration and one.calibration.state_dict()


def test_a_job_plans_by_what_it_measures_and_resumes_to_the_bit(tmp_path, store):
    def calibrating(name: str, **training: Any) -> JobConfig:
        return job(
            tmp_path / name,
            "balanced",
            data={"store": str(store)},
            parallel={"dp": 2},
            packing={"grouping": "level", "global_batch": 8, "max_length_factor": 1.0},
            training={"dtype": "float64", **training},
            checkpoint={"dir": str(tmp_path / name / "checkpoints"), "every": 2, "keep": 9},
        )

    def outcomes(name: str) -> list[tuple[Any, ...]]:
        keys = ("step", "loss", "grad_norm", "documents", "document_ids", "imbalance_degree")
        return [tuple(row[key] for key in keys) for row in read_steps(tmp_path / name)]

    speeds = (1.0, 0.5)
    straight = run_ranks(2, _calibrated, calibrating("straight", calibrate=2, steps=5), speeds)
    (said, state), (quiet, other) = straight
    assert (len(said), quiet, state) == (1, [], other)
    assert "planning from now on with prices measured up to step 2" in said[0]
    assert state["speeds"][0] / state["speeds"][1] == pytest.approx(2, rel=0.02)

    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(checkpoint_path(tmp_path / "resumed" / "checkpoints", 5))  # as if it was killed before
    assert run_ranks(2, _calibrated, calibrating("resumed", calibrate=2, steps=5), speeds)[0][1] == state
    assert outcomes("resumed") == outcomes("straight")

    run_ranks(2, _calibrated, calibrating("without", steps=5), speeds)
    for with_prices, without in zip(outcomes("straight"), outcomes("without"), strict=True):
        assert sorted(with_prices[4]) == sorted(without[4])
        assert with_prices[1:3] == pytest.approx(without[1:3], rel=1e-9)
    assert outcomes("straight")[2][5] != outcomes("without")[2][5]
