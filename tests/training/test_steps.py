"""The loader hands out what the plan says, ahead of time, and its state is that of the step last handed out."""

import json
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.jobs import VOCABULARY, job, write_store
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.runtime.batch import Batch, RankSlice
from wlb.runtime.loss import IGNORE_LABEL
from wlb.runtime.steps import RankStep, RankSteps
from wlb.training.steps import open_steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    write_store(folder / "store")
    return folder


def open_loader(
    folder: Path,
    changes: dict[str, dict[str, Any]] | None = None,
    *,
    share: RankSlice | None = None,
    state: dict[str, Any] | None = None,
) -> closing[RankSteps[Batch]]:
    config = job(folder, **(changes or {}))
    store = TokenStore.open(*config.data.stores)
    spec = Job.from_config(config, "h100", vocab_size=config.model.vocab_size or VOCABULARY)
    return closing(open_steps(store, spec, config.training, share=share, state=state))


def same_step(left: RankStep[Batch], right: RankStep[Batch]) -> bool:
    return (
        left.plan == right.plan
        and left.planned.documents == right.planned.documents
        and left.loss_tokens == right.loss_tokens
        and all(
            torch.equal(a.tokens, b.tokens) and torch.equal(a.labels, b.labels)
            for a, b in zip(left.batches, right.batches, strict=True)
        )
    )


def test_an_epoch_trains_every_document_once(tmp_path):
    folder, store = tmp_path, write_store(tmp_path / "store", shards=12)
    tokens: dict[int, dict[int, int]] = {}
    finished: list[int] = []
    labelled = 0
    with open_loader(folder, {"training": {"steps": None}}) as loader:
        for step in loader:
            finished += step.planned.documents
            labels = torch.cat([batch.labels for batch in step.batches])
            assert step.loss_tokens == int((labels != IGNORE_LABEL).sum())
            labelled += step.loss_tokens
            for planned, batch in zip(step.plan.ranks[0], step.batches, strict=True):
                position = 0
                for document, start, length in planned.segments:
                    piece = batch.tokens[position : position + length].tolist()
                    tokens.setdefault(document, {}).update(enumerate(piece, start))
                    position += length
    assert sorted(finished) == list(range(len(store)))
    assert labelled == store.tokens - len(store)
    for document, read in tokens.items():
        assert [read[i] for i in sorted(read)] == store.read(document).tolist()


@pytest.mark.parametrize("steps", [None, 100])
def test_the_state_is_that_of_the_last_step_handed_out(folder, steps):
    changes = {"training": {"steps": steps}}
    with open_loader(folder, changes) as straight:
        list(islice(straight, 4))
        time.sleep(0.1)  # the threads are ahead by now
        state = json.loads(json.dumps(straight.state_dict()))
        rest = list(islice(straight, 5))
    with open_loader(folder, changes, state=state) as resumed:
        assert resumed.state_dict() == state
        for expected, actual in zip(rest, islice(resumed, 5), strict=True):
            assert same_step(expected, actual)


def test_a_state_is_refused_on_other_settings_and_data(folder, tmp_path):
    write_store(tmp_path / "store", documents=401)
    with open_loader(folder) as loader:
        state = loader.state_dict()
    refused: list[tuple[dict[str, dict[str, Any]], str]] = [
        ({"data": {"seed": 1}}, "data.seed = 0 and this run has 1"),
        ({"packing": {"method": "sequential"}}, "packing.method = 'balanced'"),
        ({"data": {"seed": 1, "overlong": "drop"}}, r"overlong = 'split' and .* 'drop' \(and 1 more setting\)"),
        ({"data": {"store": str(tmp_path / "store")}}, r"token store = .* start anew with another checkpoint\.dir"),
    ]
    for changes, named in refused:
        with pytest.raises(UserError, match=named):
            open_loader(folder, changes, state=state)


def test_a_mixture_is_continued_with_its_weights(folder):
    write_store(folder / "other", documents=60)
    mixture = [{"store": str(folder / "store"), "weight": 3}, {"store": str(folder / "other"), "weight": 1}]
    changes: dict[str, dict[str, Any]] = {"data": {"store": None, "mixture": mixture}}
    with open_loader(folder, changes) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
    mixture[1]["weight"] = 2
    with pytest.raises(UserError, match=r"data\.weights = \[3\.0, 1\.0\] and this run has \[3\.0, 2\.0\]"):
        open_loader(folder, changes, state=state)


def test_a_state_does_not_depend_on_how_settings_are_said(folder):
    changes = {"packing": {"method": "variable_length"}}
    with open_loader(folder, changes) as loader:
        state = loader.state_dict()
    same = {"packing": {"method": "variable_length", "max_delay": 16, "outlier_thresholds": [24, 72]}}
    with open_loader(folder, same, state=state):
        pass
    with pytest.raises(UserError, match=r"packing.max_delay = 16 and this run has 3"):
        open_loader(folder, {"packing": {"method": "variable_length", "max_delay": 3}}, state=state)
