"""The held-out loss in every layout is that of the documents alone, and measuring it changes nothing."""

from __future__ import annotations

import json
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
from wlb.job.config import EvaluationConfig, JobConfig
from wlb.job.job import Job
from wlb.models.configured_model import configured_model
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer
from wlb.training.data.loader import RankShare
from wlb.training.environment import trained_model
from wlb.training.evaluation.evaluator import Evaluator
from wlb.training.evaluation.held_out import Evaluation, HeldOut, bucket_boundaries
from wlb.training.failures import Terminated
from wlb.training.parallel.mesh import build_mesh
from wlb.training.parallel.parallelize import Execution, build_stage_modules
from wlb.training.preflight import check_job

CPU = torch.device("cpu")
BUCKETS = [2, 16, 64, 129]
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"tp": 2}, {"cp": 2}],
    4: [{"dp": 2, "pp": 2}, {"pp": 2, "tp": 2}, {"cp": 2, "pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b"}],
}


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


def _job(folder: Path, preset: str = "best", /, **changes: Any) -> JobConfig:
    evaluation = {"store": str(folder / "held_out"), "length_buckets": BUCKETS, **changes.pop("evaluation", {})}
    training = {"steps": 4, **changes.pop("training", {})}
    return job(folder, preset, evaluation=evaluation, training=training, **changes)


def _in_layout(folder: Path, layout: dict[str, Any]) -> JobConfig:
    model = {"layers": 4, "kv_heads": 2, "vocab_size": 68}
    return _job(folder, model=model, parallel=layout, training={"dtype": "float64"})


def _evaluate(configs: list[JobConfig]) -> list[Evaluation]:
    results = []
    for config in configs:
        model = configured_model(config.model, 68)
        job = Job.from_config(config, "cpu", vocab_size=68)
        mesh = build_mesh(job.layout, "cpu")
        execution = Execution(CPU, torch.float64)
        stages = build_stage_modules(model, job.layout, mesh, execution, seed=0)
        share = RankShare.in_job(job, mesh.rank("dp"), mesh.rank("cp"))
        found = Evaluator(config.evaluation, job, stages, mesh, share, execution).run()
        assert found is not None
        results.append(found)
    return results


def _alone(config: JobConfig, piece: int = WINDOW) -> tuple[list[float], list[int], list[int]]:
    """Losses summed, labelled tokens and documents by bucket, from one piece of one document at a time."""
    assert config.evaluation.store is not None
    store = TokenStore.open(config.evaluation.store)
    model = Transformer(configured_model(config.model, 68)).double()
    initialise_weights(model, layers=4, seed=0)
    sums, tokens, documents = [0.0] * 5, [0] * 5, [0] * 5
    for document in range(len(store)):
        whole = torch.from_numpy(store.read(document).astype(np.int64))
        bucket = sum(len(whole) >= boundary for boundary in BUCKETS)
        documents[bucket] += len(whole) > 0
        for start in range(0, len(whole), piece):
            ids, labels = whole[start : start + piece], whole[start + 1 : start + piece + 1]
            attend = partial(segment_attention, segment_lengths=(len(ids),))
            with torch.no_grad():
                scores = model(ids, torch.arange(len(ids)), attend)
            sums[bucket] += F.cross_entropy(scores[: len(labels)], labels, reduction="sum").item()
            tokens[bucket] += len(labels)
    return sums, tokens, documents


# Two processes repeat a dimension of what four prove of each two.
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_every_layout_finds_the_loss_of_the_documents_alone(world_size: int, folder: Path) -> None:
    configs = [_in_layout(folder, layout) for layout in LAYOUTS[world_size]]
    sums, tokens, documents = _alone(configs[0])
    assert min(tokens[1:]) > 0  # documents of one token have no label
    for results in run_ranks(world_size, _evaluate, configs):
        for evaluation in results:
            assert [bucket.tokens for bucket in evaluation.buckets] == tokens
            assert [bucket.documents for bucket in evaluation.buckets] == documents
            assert [(bucket.start, bucket.stop) for bucket in evaluation.buckets] == [
                (1, 2), (2, 16), (16, 64), (64, 129), (129, None)
            ]  # fmt: skip
            expected = [total / count for total, count in zip(sums[1:], tokens[1:], strict=True)]
            assert [bucket.loss for bucket in evaluation.buckets[1:]] == pytest.approx(expected, rel=1e-12)
            assert evaluation.loss == pytest.approx(sum(sums) / sum(tokens), rel=1e-12)
            assert evaluation.to_json(3)["buckets"][0]["loss"] is None


def _rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics" / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# Data-parallel ranks repeat what level steps prove of them.
@pytest.mark.parametrize(
    ("layout", "preset", "packing"),
    [
        pytest.param({"dp": 2}, "best", {}, marks=pytest.mark.exhaustive),
        ({"pp": 2}, "best", {}),
        ({"dp": 2}, "elastic", {"grouping": "level"}),
    ],
    ids=["dp", "pp", "level"],
)
def test_training_is_the_same_to_the_last_bit(
    layout: dict[str, int], preset: str, packing: dict[str, Any], folder: Path, tmp_path: Path
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

    def request() -> bool:
        if trainer.step == step and dist.get_rank() == 1:
            trainer.termination.asked.set()
        return trainer.termination.requested

    assert trainer.evaluator is not None
    run = trainer.evaluator.run
    trainer.evaluator.run = lambda asked_to_end: run(request)  # type: ignore[method-assign,assignment,misc]
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


def test_buckets_rise_and_by_default_grow_fourfold_up_to_the_window(folder: Path) -> None:
    boundaries = {window: bucket_boundaries(EvaluationConfig(), window) for window in (128, 4096, 5000)}
    assert boundaries == {128: [256], 4096: [256, 1024, 4096], 5000: [256, 1024, 4096]}
    with pytest.raises(ValueError, match="must rise"):
        _job(folder, evaluation={"length_buckets": [64, 16]})
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
    with pytest.raises(UserError, match=r"document 2 has 261 tokens, over data.context_window = 128"):
        scored({"overlong": "error"})


def test_a_store_that_cannot_be_scored_stops_a_job_before_it_starts(folder: Path, tmp_path: Path) -> None:
    check_job(_job(folder), 1)
    with pytest.raises(UserError, match="does not exist"):
        check_job(_job(folder, evaluation={"store": str(tmp_path / "none")}), 1)
    write_held_out(tmp_path / "large", tokens=100)
    with pytest.raises(UserError, match=r"evaluation.store .*large has a vocabulary of 100, the model one of 67"):
        check_job(_job(folder, evaluation={"store": str(tmp_path / "large")}), 1)
    with TokenStoreWriter(tmp_path / "empty", vocab_size=VOCABULARY) as writer:
        writer.add(np.arange(0))
    with pytest.raises(UserError, match=r"nothing to train on in token store .*empty"):
        check_job(_job(folder, evaluation={"store": str(tmp_path / "empty")}), 1)
    write_held_out(tmp_path / "unlabelled")
    (tmp_path / "unlabelled.mask").write_bytes(bytes(TokenStore.open(tmp_path / "unlabelled").tokens))
    with pytest.raises(UserError, match=r"evaluation.store .*unlabelled has no label, so there is no loss to take"):
        check_job(_job(folder, evaluation={"store": str(tmp_path / "unlabelled")}), 1)
    for name, kind in (("ours", "a"), ("theirs", "b")):
        with TokenStoreWriter(tmp_path / name, vocab_size=VOCABULARY, details={"tokenizer": {"kind": kind}}) as writer:
            writer.add(np.arange(20))
    stores = {"data": {"store": str(tmp_path / "ours")}, "evaluation": {"store": str(tmp_path / "theirs")}}
    with pytest.raises(UserError, match=r"another tokenizer than .*ours of \[data\]"):
        check_job(_job(folder, **stores), 1)


def test_a_store_without_a_vocabulary_is_looked_at_before_the_start(folder: Path, tmp_path: Path) -> None:
    write_held_out(tmp_path / "held_out", tokens=100)
    (tmp_path / "held_out.json").unlink()
    config = _job(folder, evaluation={"store": str(tmp_path / "held_out")}, metrics={"dir": str(tmp_path / "metrics")})
    assert trained_model(config, TokenStore.open(config.data.stores[0])).shape.vocab_size == VOCABULARY
    with pytest.raises(UserError, match=r"held_out has token \d+, outside the vocabulary of model\.vocab_size = 67"):
        check_job(config, 1)
