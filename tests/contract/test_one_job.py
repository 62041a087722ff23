"""What is simulated is what is trained: the same configuration gives both the same shape, memory, plans and shards."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from tests.cases import in_turn
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
    simulated_shards,
    stored,
    trained_job,
    trained_shards,
    undecided,
)
from tests.limits import examples
from wlb.documents.synthetic import sample_lengths
from wlb.job.config import JobConfig
from wlb.report.evidence import Evidence
from wlb.simulate.estimate import estimate
from wlb.simulate.search import fastest_layout
from wlb.simulate.space import search_space

WINDOW = 256
VOCABULARY = 512
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking would pack tens of thousands of steps


def case_of(
    lengths: Any = (200, 30, 300, 7), vocabulary: int | None = VOCABULARY, hardware: str = "h100", **sections: Any
) -> Case:
    """A job of some steps; ``sections`` are those of its configuration, and ``preset``."""
    data = {"store": "documents", "context_window": WINDOW} | sections.pop("data", {})
    training = {"steps": STEPS} | sections.pop("training", {})
    config = JobConfig.model_validate({"data": data, "training": training} | sections)
    return Case(config, Documents(np.asarray(lengths, np.int64), vocabulary), hardware)


@in_turn(
    "case",
    [
        case_of(vocabulary=1000),
        case_of(vocabulary=None, model={"vocab_size": 1000}),
        case_of(model={"vocab_size": 500}),  # fewer than the store has
        case_of(model={"hidden": 130, "heads": 4}),
        case_of(model={"head_dim": 33}),
        case_of(model={"ffn_hidden": 99}, parallel={"tp": 2}),
        case_of(model={"vocab_size": 513}, parallel={"tp": 2}),
        case_of(model={"tied_embeddings": True}, training={"dtype": "float32"}),
        case_of(hardware="cpu", checkpoint={"dir": "checkpoints"}),
    ],
)
def test_the_job_is_the_same(case: Case):
    """Its shape, prices and settings, from which ``decide``, the planner and the memory model go on."""
    assert outcome(trained_job, case) == outcome(undecided, case)


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Jobs on CPUs, some with as little memory that L_max is less for it, and some that do not fit."""
    dp, cp = draw(st.sampled_from([(1, 1), (2, 2), (4, 1), (2, 3)]))
    pp, virtual_pp = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2)]))
    preset = draw(st.sampled_from(["balanced", "balanced", "wlb-llm", "plain-4d"]))
    packing: dict[str, Any] = {"global_batch": dp * pp * draw(st.integers(1, 2)), "order": "pipeline"}
    if preset == "balanced":
        options = {
            "global_batch": st.integers(1, 9),
            "rank_micro_batches": st.just(2 * pp),
            "grouping": st.sampled_from(["even", "slices"] if pp > 1 else ["even"]),
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
            "schedule": draw(st.sampled_from(["auto", "interleaved_1f1b" if virtual_pp > 1 else "1f1b"]))
            if pp > 1
            else "auto",
        },
        packing=packing,
        data={"seed": draw(st.integers(0, 9)), "shuffle": draw(st.booleans())},
        training={"memory_gib": draw(st.sampled_from([1.0, 0.012, 0.006, 0.003])), "device": "cpu"},
    )


@settings(deadline=None, max_examples=examples(5), phases=UNSHRUNK)
@given(small_cases())
@example(case_of(preset="plain-4d", parallel={"dp": 2, "pp": 2}))
@example(case_of(parallel={"dp": 2, "pp": 2, "cp": 3, "tp": 2}))
@example(case_of(packing={"method": "fixed_greedy", "window": 2}))
@example(
    case_of(
        (256, 40, 60, 230),  # of which some are cut
        packing={"grouping": "slices", "rank_micro_batches": 4, "global_batch": 2},
        parallel={"pp": 2, "cp": 2},
    )
)
@example(case_of(data={"overlong": "error"}))
@example(case_of(lengths=(0, 0)))
def test_plans_and_shards_are_the_same(case: Case):
    trained, simulated = outcome(trained_shards, case), outcome(simulated_shards, case)
    if isinstance(trained, Refusal) or isinstance(simulated, Refusal):
        assert trained == simulated
        return
    for index, (of_one, of_other) in enumerate(zip(trained, simulated, strict=True)):
        assert of_one == of_other, f"number {index}, as trained and as simulated"


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
    """In the layouts that they choose, jobs are what the trainer decides on there."""
    lengths = sample_lengths(400, 8192, 0, median_fraction=1 / 16)
    space = search_space("550m", 4, 8192, batch_tokens=2**15)
    space = search_space("550m", 4, 8192, lengths, fixed={"tp": 1, "cp": 1, "pp": 2, "dp": 2})
    evidence = Evidence(lengths, estimate(space, lengths, ("plain-4d", "balanced"), 1, source="x"))
    jobs = [fastest_layout(space, lengths, "balanced").job, evidence.systems["balanced"].job]
    for number, job in enumerate(jobs):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert decided_by_dry_run(stored(case_of_job(job, "550m", lengths), folder)) == decided(job)
