"""What is simulated is what is trained: the same configuration gives both the same shape, memory, plans and shards."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st

from tests.contract.one_job import (
    STEPS,
    Case,
    Documents,
    Refusal,
    case_of_job,
    decided,
    decided_by_batches,
    decided_by_dry_run,
    decided_by_simulator,
    decided_by_trainer,
    decided_in_lock_step,
    outcome,
    simulated_memory,
    simulated_plans,
    simulated_shape,
    simulated_shards,
    stored,
    trained_memory,
    trained_plans,
    trained_shape,
    trained_shards,
)
from tests.limits import examples
from wlb.documents.synthetic import sample_lengths
from wlb.job.config import PRESETS, JobConfig
from wlb.packing.options import METHODS
from wlb.report.evidence import Evidence
from wlb.simulate.estimate import estimate, question_of
from wlb.simulate.search import fastest_layout, search_space

WINDOW = 256
VOCABULARY = 512
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking would pack tens of thousands of steps
T = TypeVar("T")


def case_of(
    lengths: Any = (200, 30, 300, 7), vocabulary: int | None = VOCABULARY, hardware: str = "h100", **sections: Any
) -> Case:
    """A job of some steps; ``sections`` are those of its configuration, and ``preset``."""
    data = {"store": "documents", "context_window": WINDOW} | sections.pop("data", {})
    training = {"steps": STEPS} | sections.pop("training", {})
    config = JobConfig.model_validate({"data": data, "training": training} | sections)
    return Case(config, Documents(np.asarray(lengths, np.int64), vocabulary), hardware)


@st.composite
def _packing(draw: st.DrawFn, preset: str, dp: int, pp: int) -> dict[str, Any]:
    """What leaves [packing] to the preset, and what overrides it.

    Without ``fixed_solver``, which takes half a minute for 50 steps of hundreds of documents: it has examples.
    """
    per_rank = pp * draw(st.integers(1, 2))
    chosen: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "method": st.sampled_from(["sequential", "fixed_greedy", "variable_length", "makespan"]),
                "max_length_factor": st.sampled_from([1.0, 1.5, 2.25, "auto"]),
                "outlier_thresholds": st.sampled_from(["auto", [], [64], [32, 64]]),
                "max_delay": st.sampled_from([1, 5]),
                "delay_price": st.sampled_from([0.0, 0.5]),
                "lookahead": st.sampled_from([0.0, 1.0]),
                "token_spread": st.sampled_from([0.0, 1.0]),
                "early_release": st.booleans(),
                "window": st.integers(1, 2),
                "assignment": st.sampled_from(["arrival", "balanced"]),
                "order": st.sampled_from(["arrival", "pipeline", "makespan"]),
            },
        )
    )
    method = chosen.get("method", PRESETS[preset].get("packing", {}).get("method", "makespan"))
    others = {option for reads in METHODS.values() for option in reads} - METHODS[method].keys()
    return {name: value for name, value in chosen.items() if name not in others} | {"micro_batches": dp * per_rank}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Mostly jobs that can run."""
    heads = draw(st.sampled_from([2, 4]))
    model: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {"heads": st.just(heads), "kv_heads": st.sampled_from([heads, 2])},
            optional={
                "name": st.sampled_from(["tiny", "550m", "llama3-8b"]),
                "hidden": st.sampled_from([64, 96, 96, 130]),
                "layers": st.integers(4, 9),
                "head_dim": st.sampled_from([16, 32]),
                "ffn_hidden": st.sampled_from([96, 96, 99]),
                "vocab_size": st.sampled_from([VOCABULARY, 1000, 513]),
                "tied_embeddings": st.booleans(),
                "qkv_bias": st.booleans(),
                "qk_norm": st.booleans(),
            },
        )
    )
    dp, pp, cp, tp = draw(st.tuples(*map(st.sampled_from, ([1, 2], [1, 2, 4], [1, 2, 3], [1, 2]))))
    schedule = draw(st.sampled_from(["1f1b", "interleaved_1f1b"]))
    virtual_pp = draw(st.integers(1, 2)) if pp > 1 and schedule == "interleaved_1f1b" else 1
    training = draw(
        st.fixed_dictionaries(
            {"activation_checkpointing": st.sampled_from(["none", "selective", "full"])},
            optional={"dtype": st.sampled_from(["float32", "bfloat16"])},
        )
    )
    preset = draw(st.sampled_from(sorted(PRESETS)))
    sections: dict[str, Any] = {
        "preset": preset,
        "model": model,
        "parallel": {"dp": dp, "pp": pp, "cp": cp, "tp": tp, "virtual_pp": virtual_pp, "schedule": schedule},
        "packing": draw(_packing(preset, dp, pp)),
        "data": {
            "context_window": draw(st.sampled_from([64, WINDOW])),
            "overlong": draw(st.sampled_from(["split", "split", "truncate", "drop", "drop", "error"])),
            "seed": draw(st.integers(0, 9)),
            "shuffle": draw(st.booleans()),
        },
        "training": training,
        "checkpoint": draw(st.sampled_from([{}, {"dir": "checkpoints"}])),
    }
    strategy = draw(st.sampled_from([None, "per_sequence", "per_document", "adaptive", "hybrid"]))
    if strategy is not None:
        sections["sharding"] = {"strategy": strategy}
    lengths = draw(st.lists(st.integers(12, 300) | st.integers(12, 40) | st.just(0), min_size=2, max_size=60))
    # A store that does not name its vocabulary cannot be trained without model.vocab_size, but its lengths can be used.
    vocabulary = draw(st.sampled_from([VOCABULARY, None] if "vocab_size" in model else [VOCABULARY]))
    return case_of(lengths, vocabulary, draw(st.sampled_from(["cpu", "a100", "h100"])), **sections)


def assert_equal(trained: list[T] | Refusal, simulated: list[T] | Refusal) -> None:
    """Equal element by element, or both refused; fails with the first element that differs."""
    if isinstance(trained, Refusal) or isinstance(simulated, Refusal):
        assert trained == simulated
        return
    for index, (of_one, of_other) in enumerate(zip(trained, simulated, strict=True)):
        assert of_one == of_other, f"number {index}, as trained and as simulated"


@settings(deadline=None, max_examples=examples(30))
@given(cases())
@example(case_of(vocabulary=1000))
@example(case_of(model={"vocab_size": 500}))  # fewer than the store has
@example(case_of(model={"hidden": 130, "heads": 4}))
@example(case_of(model={"head_dim": 33}))
@example(case_of(model={"ffn_hidden": 99}, parallel={"tp": 2}))
@example(case_of(model={"vocab_size": 513}, parallel={"tp": 2}))
def test_the_shape_is_the_same(case: Case):
    simulated = outcome(simulated_shape, case)
    assume(
        not (isinstance(simulated, Refusal) and "a process needs" in simulated.message)
    )  # the next test is of memory
    assert outcome(trained_shape, case) == simulated


@settings(deadline=None, max_examples=examples(30))
@given(cases())
@example(case_of(model={"tied_embeddings": True}))
@example(case_of(training={"dtype": "float32"}))
@example(case_of(hardware="cpu"))
@example(case_of(hardware="cpu", checkpoint={"dir": "checkpoints"}))
@example(case_of(parallel={"cp": 2}, packing={"max_length_factor": "auto"}))
@example(case_of(model={"name": "70b"}))  # too large
@example(case_of(hardware="cpu", preset="elastic", model={"name": "550m"}, parallel={"dp": 1}))  # and with "auto"
def test_the_memory_estimate_is_the_same(case: Case):
    assert outcome(trained_memory, case) == outcome(simulated_memory, case)


@settings(deadline=None, max_examples=examples(7), phases=UNSHRUNK)
@given(cases())
@example(case_of(preset="plain-4d", parallel={"dp": 2, "pp": 2}))
@example(case_of(parallel={"dp": 2, "pp": 2, "cp": 2, "tp": 2}))
@example(case_of(packing={"method": "fixed_solver", "window": 2, "solver_nodes": 5}))
@example(case_of(data={"overlong": "error"}))
@example(case_of(lengths=(0, 0)))
def test_plans_are_the_same(case: Case):
    assert_equal(outcome(trained_plans, case), outcome(simulated_plans, case))


@settings(deadline=None, max_examples=examples(5), phases=UNSHRUNK)
@given(cases())
@example(case_of(parallel={"dp": 2, "pp": 2, "cp": 3, "tp": 2}))
def test_shards_are_the_same(case: Case):
    """Seconds of attention stand for where its pieces begin and end, and are sums in another order."""
    trained, simulated = outcome(trained_shards, case), outcome(simulated_shards, case)
    if not isinstance(trained, Refusal):
        trained = [row.approximately() for row in trained]
    assert_equal(trained, simulated)


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Jobs on CPUs, some with as little memory that L_max is less for it, and some that do not fit."""
    dp, cp = draw(st.sampled_from([(1, 1), (2, 2), (4, 1), (2, 3)]))
    pp, virtual_pp = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2)]))
    preset = draw(st.sampled_from(["elastic", "elastic", "elastic", "best", "wlb-llm", "plain-4d"]))
    packing: dict[str, Any] = {"micro_batches": dp * pp * draw(st.integers(1, 2)), "order": "pipeline"}
    if preset == "elastic":
        options = {
            "global_batch": st.integers(1, 9),
            "pool_micro_batches": st.just(2 * pp),
            "grouping": st.sampled_from(["even", "alike"]),
            "max_length_factor": st.just(9.0),
        }
        packing |= draw(st.fixed_dictionaries({}, optional=options))
    elif preset != "plain-4d":
        packing["max_length_factor"] = draw(st.sampled_from([1.5, "auto"]))
    return case_of(
        draw(st.lists(st.integers(50, WINDOW) | st.integers(50, 70), min_size=120, max_size=160)),
        hardware="cpu",
        preset=preset,
        model={"hidden": 32, "heads": 2, "kv_heads": 2, "layers": 4, "ffn_hidden": 48},
        parallel={
            "dp": dp,
            "cp": cp,
            "pp": pp,
            "virtual_pp": virtual_pp,
            "schedule": "interleaved_1f1b" if virtual_pp > 1 else "1f1b",
        },
        packing=packing,
        data={"seed": draw(st.integers(0, 9)), "shuffle": draw(st.booleans())},
        training={"memory_gib": draw(st.sampled_from([1.0, 0.012, 0.006, 0.003])), "device": "cpu"},
    )


@settings(deadline=None, max_examples=examples(15), phases=UNSHRUNK)
@given(small_cases())
def test_all_decide_the_same_job(case: Case):
    """Pools, micro-batches, L_max, grouping, schedule and memory; or all refuse. Batches are for loops in lock step."""
    with TemporaryDirectory() as folder:
        stored_case = stored(case, Path(folder))
        trained = outcome(decided_by_trainer, stored_case)
        assert outcome(decided_by_dry_run, stored_case) == trained
        assert outcome(decided_by_simulator, stored_case) == trained
        if case.config.parallel.pp == 1:
            assert outcome(decided_by_batches, stored_case) == outcome(decided_in_lock_step, stored_case)


def test_search_and_report_run_the_job_that_is_trained(tmp_path: Path):
    """In the layouts that they choose, ``elastic`` and ``best`` are what the trainer decides on there."""
    lengths = sample_lengths(400, 8192, 0, median_fraction=1 / 16)
    space = search_space("550m", 4, 8192, batch_tokens=2**15)
    question = question_of("550m", "h100", 4, lengths, context_window=8192, fixed={"tp": 1, "cp": 1, "pp": 2, "dp": 2})
    evidence = Evidence(lengths, estimate(question, lengths, ("plain-4d", "best", "elastic"), 1, source="x"))
    jobs = [fastest_layout(space, lengths, preset).job for preset in ("elastic", "best")]
    jobs += [evidence.systems[name].job for name in ("elastic", "best")]
    for number, job in enumerate(jobs):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert decided_by_dry_run(stored(case_of_job(job, "550m", lengths), folder)) == decided(job)
