"""What is concluded from losses and the order of documents, and a run of two steps by every method."""

from typing import IO
from unittest.mock import Mock

import numpy as np
import pytest

from tests.programs import finished
from wlb.documents.permutation import Permutation
from wlb.documents.store.reader import TokenStore
from wlb.documents.store.writer import TokenStoreWriter
from wlb.errors import UserError
from wlb.job.config_file import load_config
from wlb_studies.paper import training_runs
from wlb_studies.paper.convergence import Trained, displacement, measured, outside_noise, report
from wlb_studies.paper.training_runs import METHODS, SeedRun, _check, _settings, _to_toml, runs_of, train_all

from .test_reports import check_report


def trained(loss: float) -> Trained:
    curve = ([1.0, 2.0], [5.0, loss])
    return Trained(curve, curve, loss, loss, 0.01, 0.5, 0.4, 0.1, 3.0)


def test_noise_is_students_t_on_pooled_paired_differences():
    quiet, loud = [0.001, -0.001], [0.1, 0.102]
    assert outside_noise({"quiet": quiet, "loud": loud}) == {"quiet": False, "loud": True}
    assert outside_noise({"one": [0.1]}) == {"one": None}
    # Exactly at the boundary of a plain paired t test: one method, two seeds, t = 12.706 with one degree of freedom.
    spread = 0.01
    for factor, expected in ((0.99, False), (1.01, True)):
        mean = factor * 12.706 * spread / np.sqrt(2)
        assert outside_noise({"one": [mean - spread / np.sqrt(2), mean + spread / np.sqrt(2)]}) == {"one": expected}


def test_a_report_says_for_every_method_whether_it_differs(tmp_path):
    methods = {name: [trained(2.0), trained(2.1)] for name in METHODS}
    methods["fixed_greedy:8"] = [trained(2.2), trained(2.31)]
    made = report(methods, 2, [0, 1])
    check_report(made)
    said = {row[0]: row[5] for row in made.tables[0].rows}
    assert said == dict.fromkeys(METHODS, "no") | {"unpacked": "", "fixed_greedy:8": "yes"}
    made.draw(tmp_path / "picture.png")
    assert made.findings[-1].holds


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Two-step runs of a model that trains in no time; their stores and directory."""
    monkeypatch.setattr(training_runs, "WINDOW", 64)
    stores = tmp_path / "train", tmp_path / "held-out"
    random = np.random.default_rng(0)
    for prefix in stores:
        with TokenStoreWriter(prefix, vocab_size=64) as writer:
            for length in random.integers(2, 100, 60):
                writer.add(random.integers(0, 64, length))
            writer.details = {"tokenizer": {"kind": "none"}}
    return stores, tmp_path


def _forked(command: list[str], *, stdout: IO[bytes], stderr: IO[bytes]) -> Mock:
    done = finished(*command[1:])
    stdout.write(f"{done.stdout}{done.stderr}".encode())
    return Mock(returncode=done.returncode)


def test_runs_train_once_and_are_measured(tiny, monkeypatch):
    monkeypatch.setattr(training_runs, "subprocess", Mock(Popen=_forked))
    data, folder = tiny
    run = runs_of(folder, 2, [0])[0]
    said: list[str] = []
    train_all([run], data, said.append)
    assert run.finished
    assert said == ["1 of 1 runs finished, the last unpacked, seed 0"]
    before = run.log.stat().st_mtime_ns
    train_all([run], data, said.append)
    assert run.log.stat().st_mtime_ns == before
    found = measured(run, TokenStore.open(data[0]).lengths)
    assert found.token_delay == 0
    assert found.displaced_steps < 1
    assert len(found.training[1]) == 2


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_a_valid_job(method, tmp_path):
    run = SeedRun(method, 0, 10, tmp_path)
    config = tmp_path / "job.toml"
    config.write_text(_to_toml(_settings(run, (tmp_path / "train", tmp_path / "held-out"))))
    assert load_config(config).packing.global_batch == training_runs.MICRO_BATCHES


def test_a_failing_run_is_told_with_its_last_line(tmp_path):
    run = SeedRun("WLB-LLM", 1, 10, tmp_path)
    run.log.write_text("step 1\nwlb: error: no room\n")
    with pytest.raises(UserError, match=r"training WLB-LLM with seed 1 failed, see .*log.txt: wlb: error: no room"):
        _check(run, 1)


def test_arrival_order_is_no_displacement():
    lengths = np.array([30, 10, 20, 40, 50, 50])
    order, room = Permutation(6, 0, 0, 0).between(0, 6).tolist(), 0
    steps: list[list[int]] = [[], []]
    for document in order:
        room += lengths[document]
        steps[int(room > 100)].append(document)
    assert displacement(steps, [100, 100], lengths, 0) == (0.0, 0.0, 0.0)


def test_a_late_document_counts_with_its_tokens():
    lengths, tokens = np.full(8, 50), [100, 100, 100, 100]
    order = Permutation(8, 3, 0, 0).between(0, 8).tolist()
    late = [order[1:3], order[3:5], order[5:7], [order[7], order[0]]]  # the first three steps late, others early by one
    found = displacement(late, tokens, lengths, 3)
    assert found.longest == 3
    assert found.moved == 1 / 8
    assert found.mean_steps == (3 + 3) / 8  # documents 2, 4 and 6 of the order come a step early


def test_documents_of_later_epochs_have_places_after_the_first():
    lengths = np.full(4, 50)
    first, second = (Permutation(4, 1, epoch, 0).between(0, 4) + 4 * epoch for epoch in (0, 1))
    steps = [first[:2].tolist(), first[2:].tolist(), second[:2].tolist(), second[2:].tolist()]
    assert displacement(steps, [100] * 4, lengths, 1) == (0.0, 0.0, 0.0)
