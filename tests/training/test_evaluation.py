"""The held-out loss in every layout is that of the documents alone, and measuring it changes nothing."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.training.distributed import run_ranks
from tests.training.jobs import VOCABULARY, WINDOW, job, read_steps, train, trainer_of, write_store
from wlb.attention import segment_attention
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.job import Job
from wlb.models.configured_model import configured_model
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer
from wlb.runtime import loss
from wlb.training.evaluation import Evaluator, HeldOut
from wlb.training.preflight import check_job
from wlb.training.process import Terminated
from wlb.training.rank_model import build_model

CPU = torch.device("cpu")
INTERLEAVED = {"cp": 2, "pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b"}
DEALT: list[dict[str, Any]] = [{"pp": 2, "tp": 2, "head": "dealt"}, INTERLEAVED | {"head": "dealt"}]
LAYOUTS: list[dict[str, Any]] = [{"dp": 2, "pp": 2}, INTERLEAVED, *DEALT]


def write_held_out(prefix: Path, tokens: int = VOCABULARY) -> TokenStore:
    """20 documents: of one token, without any, two longer than the context window and one as long."""
    rng = np.random.default_rng(8)
    with TokenStoreWriter(prefix, vocab_size=tokens) as writer:
        for length in [1, 0, 2 * WINDOW + 5, WINDOW + 1, WINDOW, *rng.integers(2, WINDOW, 15)]:
            writer.add(rng.integers(0, tokens, length))
    return TokenStore.open(prefix)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    write_store(folder / "store")
    write_held_out(folder / "held_out")
    return folder


def _job(folder: Path, preset: str = "balanced", /, **changes: Any) -> JobConfig:
    evaluation = {"store": str(folder / "held_out"), **changes.pop("evaluation", {})}
    training = {"steps": 4, **changes.pop("training", {})}
    return job(folder, preset, evaluation=evaluation, training=training, **changes)


def _evaluate(configs: list[JobConfig]) -> list[dict[str, Any] | None]:
    loss.CHUNK_ROWS = 100  # in this process; less than a window
    return [Evaluator(build_model(check_job(config, dist.get_world_size()), CPU)).run() for config in configs]


def _alone(config: JobConfig) -> tuple[list[float], list[int]]:
    """Losses summed and labelled tokens by bucket, from one piece of one document at a time."""
    assert config.evaluation.store is not None
    store = TokenStore.open(config.evaluation.store)
    model = Transformer(configured_model(config.model, 68)).double()
    initialise_weights(model, layers=4, seed=0)
    sums, tokens = [0.0] * 2, [0] * 2
    for document in range(len(store)):
        whole = torch.from_numpy(store.read(document).astype(np.int64))
        bucket = int(len(whole) >= 256)
        for start in range(0, len(whole), WINDOW):
            ids, labels = whole[start : start + WINDOW], whole[start + 1 : start + WINDOW + 1]
            attend = partial(segment_attention, segment_lengths=(len(ids),))
            with torch.no_grad():
                scores = model(ids, torch.arange(len(ids)), attend)
            sums[bucket] += F.cross_entropy(scores[: len(labels)], labels, reduction="sum").item()
            tokens[bucket] += len(labels)
    return sums, tokens


def test_every_layout_finds_the_loss_of_the_documents_alone(folder: Path) -> None:
    model = {"layers": 4, "kv_heads": 2, "vocab_size": 68}
    configs = [_job(folder, model=model, parallel=layout, training={"dtype": "float64"}) for layout in LAYOUTS]
    sums, tokens = _alone(configs[0])
    for results in run_ranks(4, _evaluate, configs):
        for evaluation in results:
            assert (evaluation["documents"], [*evaluation["buckets"]]) == (19, ["1-255", "256+"])
            for bucket, total, count in zip(evaluation["buckets"].values(), sums, tokens, strict=True):
                assert bucket == {"loss": pytest.approx(total / count, rel=1e-12), "tokens": count}
            assert evaluation["loss"] == pytest.approx(sum(sums) / sum(tokens), rel=1e-12)


def _rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics" / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("layout", "preset", "packing"),
    [({"pp": 2, "head": "dealt"}, "balanced", {}), ({"dp": 2}, "balanced", {"grouping": "level"})],
)
def test_training_is_the_same_to_the_last_bit(
    layout: dict[str, Any], preset: str, packing: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    losses = []
    for name, evaluation in (("with", {"every": 2}), ("without", {"every": 1000})):
        metrics = {"dir": str(tmp_path / name / "metrics")}
        run_ranks(
            2, train, _job(folder, preset, parallel=layout, packing=packing, evaluation=evaluation, metrics=metrics)
        )
        losses.append([(row["loss"], row["grad_norm"]) for row in read_steps(tmp_path / name)])
    assert losses[0] == losses[1]
    with_rows, without_rows = _rows(tmp_path / "with"), _rows(tmp_path / "without")
    assert [row["step"] for row in with_rows] == [2, 4]
    assert [row["step"] for row in without_rows] == [4]
    assert with_rows[-1]["loss"] == without_rows[-1]["loss"]
    assert len({row["loss"] for row in with_rows}) == 2


def _end_while_evaluating(config: JobConfig, step: int) -> None:
    """Train until the evaluation after ``step``, then be asked to end on the last rank."""
    trainer = trainer_of(config)
    assert trainer.evaluator is not None
    run = trainer.evaluator.run

    def asked(_: object) -> dict[str, Any] | None:
        if trainer.step == step and dist.get_rank() == 1:
            trainer.termination.asked.set()
        return run(trainer.termination.asked.is_set)

    trainer.evaluator.run = asked  # type: ignore[method-assign,assignment]
    with pytest.raises(Terminated):
        trainer.run()


@pytest.mark.parametrize(("step", "before"), [(2, [1]), (3, [1, 2])])
def test_an_evaluation_that_was_broken_off_is_made_up_for(
    step: int, before: list[int], folder: Path, tmp_path: Path
) -> None:
    config = _job(
        folder,
        parallel={"dp": 2},
        training={"steps": 3},
        evaluation={"every": 1},
        metrics={"dir": str(tmp_path / "metrics")},
        checkpoint={"dir": str(tmp_path / "checkpoints"), "every": 100},
    )
    run_ranks(2, _end_while_evaluating, config, step)
    assert [row["step"] for row in _rows(tmp_path)] == before
    run_ranks(2, train, config)
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2, 3]


def test_buckets_grow_fourfold_up_to_the_window(folder: Path) -> None:
    for window, names in ((4095, ["1-255", "256-1023", "1024+"]), (4096, ["1-255", "256-1023", "1024-4095", "4096+"])):
        config = _job(folder, data={"context_window": window})
        held_out = HeldOut(config.evaluation, Job.from_config(config, "cpu", vocab_size=VOCABULARY))
        assert held_out.buckets == names
    result = held_out.result([6.0, 0.0, math.inf, 1.0], [3, 0, 2, 1])
    assert [one["loss"] for one in (result, *result["buckets"].values())] == [None, 2.0, None, None, 1.0]
    with pytest.raises(ValueError, match=r"evaluation\.every needs evaluation\.store"):
        job(folder, evaluation={"every": 5})


def test_overlong_documents_and_the_limit_are_those_of_the_configuration(folder: Path) -> None:
    def scored(data: dict[str, Any], **evaluation: Any) -> list[tuple[int, int]]:
        config = _job(folder, data=data, evaluation=evaluation)
        held_out = HeldOut(config.evaluation, Job.from_config(config, "cpu", vocab_size=VOCABULARY))
        segments = [segment for plan in held_out.plans for segment in plan.segments]
        assert len(set(segments)) == len(segments)
        return sorted((segment.document, segment.length) for segment in segments)

    assert scored({}, documents=5) == [(0, 1), (2, 5), (2, WINDOW), (2, WINDOW), (3, 1), (3, WINDOW), (4, WINDOW)]
    assert scored({"overlong": "truncate"}, documents=4) == [(0, 1), (2, WINDOW), (3, WINDOW)]
    assert scored({"overlong": "drop"}, documents=5) == [(0, 1), (4, WINDOW)]
    with pytest.raises(UserError, match=r"document 2 has 261 tokens, over context_window = 128"):
        scored({"overlong": "error"})


def test_a_store_that_cannot_be_scored_stops_a_job_before_it_starts(folder: Path, tmp_path: Path) -> None:
    def refused(name: str, message: str, **sections: Any) -> None:
        metrics = {"dir": str(tmp_path / "metrics")}
        config = _job(folder, evaluation={"store": str(tmp_path / name)}, metrics=metrics, **sections)
        with pytest.raises(UserError, match=message):
            check_job(config, 1)

    check_job(_job(folder, metrics={"dir": str(tmp_path / "metrics")}), 1)
    refused("none", "does not exist")
    write_held_out(tmp_path / "large", tokens=100)
    refused("large", r"evaluation.store .*large has a vocabulary of 100, but the model has 67")
    with TokenStoreWriter(tmp_path / "empty", vocab_size=VOCABULARY) as writer:
        writer.add(np.arange(0))
    refused("empty", r"nothing to train on in .*empty")
    unlabelled = write_held_out(tmp_path / "unlabelled")
    (tmp_path / "unlabelled.mask").write_bytes(bytes(unlabelled.tokens))
    refused("unlabelled", r"evaluation.store .*unlabelled has no labels, so it has no loss")
    for name, kind in (("ours", "a"), ("theirs", "b")):
        with TokenStoreWriter(tmp_path / name, vocab_size=VOCABULARY) as writer:
            writer.details["tokenizer"] = {"kind": kind}
            writer.add(np.arange(20))
    refused("theirs", r"another tokenizer than .*ours of \[data\]", data={"store": str(tmp_path / "ours")})
