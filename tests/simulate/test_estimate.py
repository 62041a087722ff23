"""One number: every command says of a job what ``wlb check`` says, and what it assumes of it is said."""

import json
import os
import signal
import sys
import tomllib
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.workload.profiles import analytic_profile
from wlb.cli.app import app
from wlb.documents.store.writer import TokenStoreWriter
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.config_file import load_config
from wlb.job.job import Job
from wlb.simulate.estimate import CONFIGURED, _each, _Watched, config_of, estimate, fastest, judge_config
from wlb.simulate.job import simulated_job
from wlb.simulate.space import search_space
from wlb.simulate.verdict import BALANCED, BASELINE, PER_DOCUMENT, VARIANTS
from wlb.workload import MODEL_SHAPES


def wlb(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.exception or result.output
    return json.loads(result.stdout)


def random_job(seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    random = np.random.default_rng(seed)
    window = int(random.choice([4096, 16_384, 65_536]))
    gpus = int(random.choice([4, 8, 16]))
    fixed = {} if random.random() < 0.5 else {"dp": gpus // 2, "pp": 1, "cp": 1, "tp": 2, "weights": "gathered"}
    lengths = sample_lengths(3000, window, seed, median_fraction=float(random.choice([1 / 64, 1 / 16])))
    model = str(random.choice(["550m", "qwen2.5-7b", "llama3-8b"]))
    settings = {"model": model, "hardware": str(random.choice(["h100", "h200", "a100"])), "gpus": gpus}
    batch = int(random.choice([8, 16])) * max(1, gpus // 16) * window
    together = 2 * window if fixed else None
    given = {"batch_tokens": batch, "fixed": fixed, "micro_batch_tokens": together}
    return lengths, settings | {"context_window": window} | given


# `make test` tries a layout that is given and one that is found; `make test-all` more jobs of both kinds.
@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (0, *range(3, 40)))]
)
def test_the_configuration_that_check_prints_has_the_speed_that_it_says(tmp_path: Path, seed: int):
    """Of random jobs, in the layouts that are found and in one that is given, with much to gain and with little."""
    lengths, settings = random_job(seed)
    try:
        found = estimate(
            search_space(lengths=lengths, **settings), lengths, (BASELINE, BALANCED, PER_DOCUMENT), 2, source="x"
        )
    except UserError:  # no layout fits
        return
    jobs = {name: result.job for name, result in found.verdict.systems.items()}
    for preset in jobs.keys() - {BASELINE, *VARIANTS}:
        path = tmp_path / f"{preset}.toml"
        path.write_text(config_of(preset, jobs[preset], jobs[BASELINE], settings["model"], "x"))
        config = load_config(path)
        judged = judge_config(config, Job.from_config(config, settings["hardware"]), lengths, steps=2)
        assert judged.speeds(CONFIGURED) == found.verdict.speeds(preset)


def test_check_simulate_report_and_a_dry_run_give_one_number(tmp_path: Path):
    lengths = sample_lengths(1500, 8192, seed=1)
    store = tmp_path / "store"
    with TokenStoreWriter(store, vocab_size=300) as writer:
        writer.add_documents(np.zeros(lengths.sum(), np.uint16), lengths)
    asked = (store, "--gpus", 4, "--context-window", 8192, "--batch-tokens", "128K", "--model", "tiny")
    checked = wlb("check", *asked, "--steps", 3)
    assert checked["winner"] != "plain-4d"
    reported = wlb("report", *asked, "--steps", 3, "--out", tmp_path / "report.html")
    assert reported["systems"] == checked["systems"]
    config = tmp_path / "job.toml"
    config.write_text(checked["config"])
    assert (tmp_path / "report.job.toml").read_text() == checked["config"]
    simulated = wlb("simulate", config, "--steps", 3)
    assert (simulated["speedup"], simulated["spread"]) == (checked["speedup"], checked["spread"])
    assert simulated["factors"] == checked["factors"]
    assert simulated["lost"] == checked["lost"]
    assert wlb("train", config, "--dry-run")["speedup"] == wlb("simulate", config)["speedup"]


@pytest.mark.parametrize("name", ["my corpus", 'quote " \\ backslash ü', "line\n[baseline]\tand\x7f"])
def test_the_configuration_of_a_store_names_it_and_has_its_vocabulary(tmp_path: Path, name: str):
    """The vocabulary of the model, or that of the store in multiples which tensor-parallel ranks divide."""
    store = str(tmp_path / name)
    with TokenStoreWriter(tmp_path / name, vocab_size=33_001) as writer:
        for _ in range(9):
            writer.add(np.zeros(4096, np.int64))
    lengths = np.full(9, 4096)
    space = search_space("tiny", 2, 4096, lengths, batch_tokens=2 * 4096, source=store)
    job = fastest(space, BALANCED, lengths)
    path = tmp_path / "job.toml"
    path.write_text(config_of(BALANCED, job, fastest(space, BASELINE, lengths), "tiny", store), encoding="utf-8")
    config = load_config(path)
    assert (config.preset, str(config.data.store), config.data.context_window) == (BALANCED, store, 4096)
    assert config.model.vocab_size == job.shape.vocab_size == 33_024
    assert config.parallel.layout == job.layout
    assert config.packing.max_length_factor == job.packing.max_length_factor


@pytest.mark.parametrize(("layers", "name"), [(4, "tiny"), (9, "MODEL OF THE PROFILE")])
def test_the_configuration_of_a_measured_job_names_the_model_that_was_measured(layers: int, name: str):
    shape = replace(MODEL_SHAPES["tiny"], layers=layers, vocab_size=7)
    job = simulated_job(shape, 4096, micro_batches=2)
    measured = replace(job, profile=analytic_profile(shape)).with_length_factor(1.0)
    text = config_of(BALANCED, measured, job, "llama3-8b", "lengths.json")
    assert tomllib.loads(text)["model"]["name"] == name


def test_a_layout_that_is_given_is_kept_by_all_systems():
    asked = ("check", "synthetic:500:4K:0", "--model", "550m", "--context-window", "4K", "--steps", 1)
    found = wlb(*asked, "--batch-tokens", "32K", *("--dp", 1, "--pp", 2, "--cp", 2, "--tp", 2))
    for system in found["systems"]:
        if system["system"] not in VARIANTS:
            assert [system["layout"][size] for size in ("dp", "pp", "cp", "tp")] == [1, 2, 2, 2]
    searched = wlb(*asked, "--systems", "plain-4d,balanced", "--gpus", 4, "--tp", 2)
    assert {system["layout"]["tp"] for system in searched["systems"]} == {2}


def test_what_is_assumed_is_said_with_the_option_that_sets_it():
    asked = ("check", "synthetic:400:8192:0", "--gpus", 4, "--steps", 1, "--systems", "plain-4d")
    found = wlb(*asked)
    said = ", ".join(found["assumed"])
    for option in ("--model", "--hardware", "--context-window", "--batch-tokens"):
        assert f"{option} " in said
    assert "--gpus" not in said
    assert "(the documents have " in said  # fewer than the usual global batch
    given = ("--model", "7b", "--hardware", "h100", "--context-window", "8K", "--batch-tokens", "32K")
    assert wlb(*asked, *given)["assumed"] == []


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
def test_presets_are_shared_with_a_forked_process_and_what_it_cannot_do_is_done_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("wlb.simulate.estimate.usable_cores", lambda: 2)
    here, silent = os.getpid(), _Watched([], lambda known: None)
    for names in ("", "a", "ab", "abcde"):
        found = _each(lambda name: os.getpid() == here, names, silent)
        assert [*found] == [*names]
        assert sum(found.values()) == min(1, len(names))

    def dies_elsewhere(name: str) -> str:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return name

    def refuses(name: str) -> str:
        if name == "b":
            raise UserError("b is too many")
        return name

    def is_interrupted(name: str) -> str:
        if os.getpid() == here:
            raise KeyboardInterrupt
        signal.pause()
        return name

    assert _each(dies_elsewhere, "abc", silent) == {"a": "a", "b": "b", "c": "c"}
    with pytest.raises(UserError, match="b is too many"):
        _each(refuses, "abc", silent)
    with pytest.raises(KeyboardInterrupt):
        _each(is_interrupted, "abc", silent)
    assert not active_children()
