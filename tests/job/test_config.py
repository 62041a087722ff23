"""Mistakes in a configuration are told in one line that names the setting."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.cases import in_turn
from wlb.errors import UserError
from wlb.job.config import NO_BOUND, PRESETS, JobConfig
from wlb.job.config_file import load_config
from wlb.job.job import Job
from wlb.packing.options import METHODS
from wlb.schedules.layout import Layout
from wlb.sharding import STRATEGIES
from wlb.sharding.static import per_sequence
from wlb.simulate import simulate


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text('[data]\nstore = "store"\n')
    return path


@pytest.mark.parametrize(
    "override",
    [
        "training.betas=[0.9, 1.0]",
        "training.timeout_seconds=inf",
        "training.learning_rate=nan",
        "training.learning_rate=true",
        "training.gradient_clip=inf",
        "packing.max_length_factor=1e300",
        "parallel.dp=true",
        "data.context_window=99999999999999999999",
        "checkpoint.dir=",
        "packing.global_batch=65540",
        "model.rope_theta=1",
        "parallel.dp=１",
        "data.context_window=１K",
        'data.store="a\\u0000"',
    ],
)
def test_values_out_of_range_are_refused(config, override):
    with pytest.raises(UserError, match=override.partition("=")[0].replace(".", r"\.")) as refusal:
        load_config(config, [override])
    assert "\n" not in str(refusal.value)


def test_dp_follows_from_the_processes_beside_sizes_that_count_all_ranks(config):
    given = ['parallel.dp="auto"', "parallel.ep=4", "parallel.pool=4", "parallel.tp=2"]
    found = load_config(config, given, auto_dp=lambda processes: 8 // processes)
    assert (found.parallel.dp, found.parallel.ep, found.parallel.pool) == (4, 4, 4)


def test_an_override_sets_one_setting(config):
    for more in ("data.seed=1\nshuffle = false", "training.seed=1\n[data]\nseed = 2"):
        with pytest.raises(
            UserError, match=r"sets more than (data|training)\.seed; give each setting a --set of its own"
        ):
            load_config(config, [more])
    assert load_config(config, ["training.betas=[0.8,\n0.9]"]).training.betas == (0.8, 0.9)
    for endless in ("9" * 5000, "[" * 5000):
        with pytest.raises(UserError, match=r"training\.seed = .*must be a whole number"):
            load_config(config, [f"training.seed={endless}"])


def test_tokens_may_have_a_binary_unit(config):
    job = load_config(
        config,
        [
            "data.context_window=128K",
            "packing.method=variable_length",
            'packing.outlier_thresholds=["24k", 73728]',
        ],
    )
    assert job.data.context_window == 131072
    assert job.packing.outlier_thresholds == (24576, 73728)
    assert '"context_window":131072' in job.model_dump_json()
    for wrong in ("data.context_window=128KB", 'packing.outlier_thresholds=["128KB"]'):
        with pytest.raises(UserError, match=r"'128KB' is not a number of tokens .* 128K or 1M"):
            load_config(config, ["packing.method=variable_length", wrong])


def test_an_option_that_the_method_does_not_read_is_refused(config):
    for method, read in METHODS.items():
        for option in {option for other in METHODS.values() for option in other} - read.keys():
            value = next(other[option] for other in METHODS.values() if option in other)
            value = {"outlier_thresholds": [64], "global_batch": 8}.get(option, value)
            with pytest.raises(UserError) as refusal:
                load_config(config, [f"packing.method={method}", f"packing.{option}={json.dumps(value)}"])
            readers = ", ".join(other for other, read in METHODS.items() if option in read)
            said = f"has no effect with method '{method}', only with {readers}; leave it out"
            assert re.search(rf"packing\.{option} = .*: {re.escape(said)}", str(refusal.value))
            assert " more" not in str(refusal.value)  # no other value is wrong
    with pytest.raises(UserError, match=r"packing\.window = 8: has no effect with method 'balanced'"):
        load_config(config, ["packing.window=8"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.dp=4", "parallel.pool=3"], "does not divide dp x cp = 4; give 1 or 2 or 4, or leave it out"),
        (["parallel.pool=4"], "does not divide dp x cp = 1; give 1, or leave it out"),
        (["preset=plain-4d", "packing.global_batch=1", "parallel.dp=2"], "must be a multiple of parallel.dp = 2"),
        (["preset=plain-4d", "parallel.dp=2147483647"], "must be a multiple of parallel.dp = 2147483647"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(config, overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(config, ["packing.global_batch=4", *overrides])


def test_a_mixture_names_a_store_once(tmp_path):
    twice = [{"store": "a", "weight": 1.0}, {"store": ["b", "a.idx"], "weight": 2.0}]
    with pytest.raises(UserError, match="a token store is named twice, as a and as a; name it once"):
        JobConfig.of({"data": {"mixture": twice}})


def test_options_of_a_preset_go_with_its_method(config):
    for preset in PRESETS:
        for method, read in METHODS.items():
            packing = load_config(config, [f"preset={preset}", f"packing.method={method}"]).packing
            own = PRESETS[preset].get("packing", {})
            for option in read:
                usual = own.get(option, read[option]) if own.get("method") == method else read[option]
                assert getattr(packing, option) == usual, (preset, method, option)
            assert (packing.assignment, packing.order) == (
                own.get("assignment", "balanced"),
                own.get("order", "fastest"),
            )
    packing = load_config(config, ["preset=wlb-llm", "packing.outlier_thresholds=[64]"]).packing
    assert (packing.outlier_thresholds, packing.max_delay) == ((64,), NO_BOUND)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_length_factor=true", "max_length_factor = True: must be a number or 'auto'"),
        ("outlier_thresholds=many", "outlier_thresholds = 'many': must be a list"),
        ("outlier_thresholds=[64, 16]", "outlier_thresholds = [64, 16]: thresholds must rise"),
        ("outlier_thresholds=[0]", "outlier_thresholds = 0: must be greater than or equal to 1"),
    ],
)
def test_what_fits_no_alternative_is_one_mistake_that_names_all(config, override, message):
    with pytest.raises(UserError) as refusal:
        load_config(config, ["packing.method=variable_length", f"packing.{override}"])
    assert str(refusal.value) == f"config {config}: packing.{message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "data: must be set"),
        ('[dat]\nstore = "store"\n', "dat is not a section; did you mean data?"),
        ("data = 3\n", "data = 3: must be an object"),
        ('[data]\nstore = "store"\n[training]\nbetas = [0.9]\n', "training.betas = [0.9]: entry 1 must be set"),
    ],
)
def test_what_is_missing_is_told(tmp_path, text, message):
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(UserError) as refusal:
        load_config(path)
    assert str(refusal.value).startswith(f"config {path}: {message}")


def test_a_baseline_is_a_layout_of_as_many_processes(config):
    pooled = ["parallel.dp=2", "parallel.cp=2", "packing.global_batch=4"]
    sizes = ["baseline.pp=2", "baseline.dp=2", "baseline.activation_checkpointing=full"]
    baseline = load_config(config, [*pooled, *sizes]).baseline
    assert baseline is not None
    assert (baseline.layout, baseline.activation_checkpointing) == (Layout(pp=2, dp=2), "full")
    assert load_config(config, pooled).baseline is None
    with pytest.raises(
        UserError, match=r"\[baseline\] is a job of 8 processes and \[parallel\] of 4; give both the same"
    ):
        load_config(config, [*pooled, *sizes, "baseline.tp=2"])
    with pytest.raises(UserError, match=r"baseline\.pool is not a setting"):
        load_config(config, [*pooled, *sizes, "baseline.pool=2"])


def test_mistakes_in_a_baseline_name_it(config):
    """Its sizes have the names of [parallel], and are checked as those are."""
    interleaved = ["parallel.dp=2", "baseline.dp=2", "baseline.virtual_pp=2"]
    for wrong, message in (
        (["baseline.schedule=1f1b"], "baseline: virtual_pp = 2 cannot run schedule = '1f1b'"),
        ([], "baseline: virtual_pp = 2 needs pp of at least 2"),
        (["baseline.dp=0"], "baseline.dp = 0: must be greater than or equal to 1"),
        (["baseline.activation_checkpointing=some"], "baseline.activation_checkpointing = 'some': "),
    ):
        with pytest.raises(UserError) as refusal:
            load_config(config, [*interleaved, *wrong])
        assert message in str(refusal.value)


def test_presets_differ_in_packing_and_sharding_only(config):
    jobs = {name: load_config(config, [f"preset={name}"]) for name in PRESETS}
    systems = {(job.packing.model_dump_json(), job.sharding.model_dump_json()) for job in jobs.values()}
    rest = {job.model_dump_json(exclude={"preset", "packing", "sharding"}) for job in jobs.values()}
    assert (len(systems), len(rest)) == (len(PRESETS), 1)


def test_a_new_sharding_strategy_is_a_line_in_the_registry(config, monkeypatch):
    sharded = []

    def toy(micro_batches, cp_size, workload):
        sharded.append(cp_size)
        return per_sequence(micro_batches, cp_size, workload)

    monkeypatch.setitem(STRATEGIES, "toy", toy)
    job = load_config(config, ["packing.method=fixed_greedy", "sharding.strategy=toy", "parallel.cp=2"])
    simulate(Job.from_config(job), np.array([4000, 3000, 2000, 1000] * 20), 1)
    assert set(sharded) == {2}
    known = "per_sequence, per_document, adaptive, balanced, toy"
    with pytest.raises(UserError, match=rf"sharding\.strategy = 'worst': .*'worst' is unknown; choose from {known}"):
        load_config(config, ["sharding.strategy=worst"])


@in_turn(
    ("overrides", "message"),
    [
        (["training.stepz=4"], "training.stepz is not a setting; did you mean steps?"),
        (["parallel.expert=2"], "parallel.expert is not a setting; choose from dp, pp, cp, tp, ep, virtual_pp,"),
        (["model.rope_scaling.faktor=4"], "model.rope_scaling.faktor is not a setting; did you mean factor?"),
        (["trainer.steps=4"], "trainer is not a section; did you mean training?"),
        (["training"], "--set 'training' is not of the form section.key=value"),
        (["training=4"], "--set "),
        (["=4"], "--set "),
        (["data.store.x=4"], "--set "),
        (["preset=worst"], "preset = 'worst': choose from plain-4d, "),
        (
            ["model.rope_scaling.rope_type=yarn", "model.rope_scaling.low_freq_factor=2"],
            "model.rope_scaling: low_freq_factor has no effect with rope_type = 'yarn'",
        ),
        (
            ["packing.method=fixed_greedy", "packing.max_delay=0"],
            "packing.max_delay = 0: must be greater than or equal to 1",
        ),
        (
            ["packing.max_delay=8"],
            "packing.max_delay = 8: has no effect with method 'balanced', only with fixed_greedy, "
            "variable_length; leave it out",
        ),
        (
            ["packing.method=fixed_greedy", "packing.window=16384", "packing.global_batch=8"],
            "= 131072 windows are packed together, over 65536; lower packing.window",
        ),
        (
            ["packing.method=variable_length", "packing.outlier_thresholds=[8192]", "data.context_window=4096"],
            "outlier_thresholds has 8192, over data.context_window = 4096: no document",
        ),
    ],
)
def test_settings_that_are_none_or_do_not_go_together_are_refused(config, overrides, message):
    with pytest.raises(UserError) as refusal:
        load_config(config, overrides)
    assert message in str(refusal.value)


def test_settings_up_to_the_limits_are_taken_and_depart_from_the_preset(config):
    job = load_config(
        config,
        [
            "preset=plain-4d",
            "sharding.strategy=per_document",
            "packing.order=pipeline",
            "training.betas=[0, 0.999]",
            "training.timeout_seconds=604800",
            "model.rope_scaling.factor=4",
        ],
    )
    assert (job.packing.method, job.packing.order, job.packing.assignment) == ("sequential", "pipeline", "arrival")
    assert job.model.rope_scaling is not None
    assert (job.sharding.strategy, job.training.betas, job.model.rope_scaling.factor) == (
        "per_document",
        (0.0, 0.999),
        4.0,
    )
    load_config(config, ["packing.method=fixed_greedy", "packing.window=16384", "packing.global_batch=4"])
    method = "packing.method=variable_length"
    load_config(config, [method, "packing.outlier_thresholds=[4096]", "data.context_window=4096"])
