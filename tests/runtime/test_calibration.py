"""Prices and speeds found in a job's own steps: right, the same on all ranks, and settled in spite of noise."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.cases import in_turn
from tests.training.distributed import run_ranks
from wlb.integrations.packed import PackedBatch, packed_batches
from wlb.runtime import calibration, level_step
from wlb.runtime.calibration import Calibration
from wlb.runtime.clock import Clock

RANKS, TIMED = 32, 40  # micro-batches of a rank in an interval
PRICES = np.array([6e-10, 2.5e-5, 0.01])
CPU = torch.device("cpu")


def timed(
    rng: np.random.Generator, speeds: NDArray[np.float64], noise: float, count: int = TIMED
) -> NDArray[np.float64]:
    """The rows of an interval: micro-batches of random documents, in seconds that are off by ``noise``."""
    lengths = rng.lognormal(8, 1.3, (len(speeds), count, 20)).clip(16, 32_768) * (rng.random((1, count, 20)) < 0.6)
    rows = np.stack([(lengths**2).sum(axis=2), lengths.sum(axis=2), np.ones((len(speeds), count))], axis=2)
    rows[..., 2] = rows @ PRICES / speeds[:, None] * np.exp(noise * rng.standard_normal((len(speeds), count)))
    return rows


def plan_by(found: Calibration, terms: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What plans go by: the seconds of micro-batches, and speeds."""
    return terms @ np.array(found.prices or (0, 1, 0)), np.array(found.speeds or [1.0] * RANKS)


@in_turn("seed", range(4))
def test_it_settles_in_spite_of_noise(seed: int):
    rng, speeds = np.random.default_rng(seed), np.ones(RANKS)
    speeds[3], speeds[5] = 0.9, 0.85
    found, updates = Calibration(1, RANKS, CPU), []
    for interval in range(103):
        rows = timed(rng, speeds, 0.1)
        terms = np.concatenate([rows[..., :2], np.ones_like(rows[..., :1])], axis=2)
        if found.update(rows):
            updates.append((interval, *plan_by(found, terms[0])))
    # As many micro-batches as are remembered come in 10 intervals; after that nothing changes, in no seed.
    assert len(updates) <= 5
    assert updates[-1][0] < calibration._REMEMBERED / TIMED
    predicted, used = plan_by(found, terms[0])
    assert predicted == pytest.approx(terms[0] @ PRICES, rel=0.03)
    assert used == pytest.approx(speeds, abs=0.03)
    for interval, _, later in updates[2:]:
        assert np.abs(later / updates[1][2] - 1).max() <= 0.06, interval


def test_a_rank_that_becomes_slow_shows_in_the_next_interval():
    rng, speeds = np.random.default_rng(0), np.ones(RANKS)
    found = Calibration(1, RANKS, CPU)
    for _ in range(30):
        found.update(timed(rng, speeds, 0.05))
    assert "all equal" in str(found)
    speeds[7] = 0.7
    assert found.update(timed(rng, speeds, 0.05))
    assert found.speeds is not None
    assert found.speeds[7] == pytest.approx(0.7, abs=0.03)
    assert [speed for rank, speed in enumerate(found.speeds) if rank != 7] == [1.0] * 31


def test_slow_ranks_that_time_few_micro_batches_are_found_and_corrected():
    rng, speeds = np.random.default_rng(0), np.where(np.arange(RANKS) % 4, 1.0, 0.85)
    found, counts = Calibration(1, RANKS, CPU), np.where(np.arange(RANKS) % 3, TIMED, 4)
    for most in (0.06, 0.04, 0.04):
        found.update(timed(rng, speeds, 0.05) * (np.arange(TIMED)[:, None] < counts[:, None, None]))
        assert np.array(found.speeds) == pytest.approx(speeds, abs=most)


def test_drift_from_interval_to_interval_is_no_news():
    rng, found = np.random.default_rng(0), Calibration(1, RANKS, CPU)
    changes = [found.update(timed(rng, np.exp(0.05 * rng.standard_normal(RANKS)), 0.1)) for _ in range(60)]
    assert sum(changes) <= 4


def test_exact_times_give_exact_prices_once():
    speeds = np.array([1.0, 1.0, 0.8])
    found, rng = Calibration(1, 3, CPU), np.random.default_rng(1)
    changed = [found.update(timed(rng, speeds, 0.0)) for _ in range(15)]
    assert changed[0]
    assert sum(changed[1:]) <= 1  # in the third digit, when as many are averaged as are remembered
    assert found.prices == pytest.approx(PRICES, rel=5e-3)
    assert found.speeds == (1.0, 1.0, 0.8)
    assert "speeds: rank 2 0.80" in str(found)


def test_what_says_nothing_changes_nothing():
    found = Calibration(1, 2, CPU)
    assert not found.update(np.zeros((2, TIMED, 3)))
    alike = np.broadcast_to([1e6, 1e3, 0.5], (2, TIMED, 3)) * np.exp(
        0.1 * np.random.default_rng(0).standard_normal((2, TIMED, 1))
    )
    assert not found.update(np.where([False, False, True], alike, [1e6, 1e3, 0.5]))
    assert (found.prices, found.speeds) == (None, None)


def test_a_state_continues_to_the_bit_and_prices_also_on_other_ranks():
    rng, speeds = np.random.default_rng(2), np.where(np.arange(RANKS) < 8, 0.85, 1.0)
    straight, kept = Calibration(1, RANKS, CPU), Calibration(1, RANKS, CPU)
    intervals = [timed(rng, speeds, 0.1) for _ in range(6)]
    for rows in intervals[:3]:
        straight.update(rows)
    kept.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert [kept.update(rows) for rows in intervals[3:]] == [straight.update(rows) for rows in intervals[3:]]
    assert kept.state_dict() == straight.state_dict()
    fewer = Calibration(1, 16, CPU)
    fewer.load_state_dict(straight.state_dict())
    assert (fewer.prices, fewer.speeds) == (straight.prices, None)


def _calibrated(steps: int) -> tuple[list[bool], dict[str, object]]:
    """Batches of one document; rank 1 takes twice as long. One in three is shared and not timed."""
    rank = torch.distributed.get_rank()
    found, now, changed = Calibration(2, 2, CPU), [0.0], []
    found._clock = Clock("made up", lambda: now[0])
    for _ in range(steps):
        for length in (100, 400, 900, 1600, 2500, 3600):
            with found.timing(SimpleNamespace(is_shared=length == 900, segment_lengths=(length,))):
                now[0] += 99.0 if length == 900 else (1e-6 * length**2 + 1e-3 * length) * (1 + rank)
        changed.append(found.end_step())
    return changed, found.state_dict()


def test_all_ranks_find_the_same():
    first, second = run_ranks(2, _calibrated, 4)
    assert first == second
    changed, state = first
    assert changed == [False, True, False, False]
    slow, fast = np.array(state["speeds"])[[1, 0]]
    assert fast / slow == pytest.approx(2, rel=0.02)
    square, token, _ = state["prices"]
    assert square * 1e6 == pytest.approx(token * 1e3, rel=0.01)


def stepped(shared: list[bool], every: int = 1, steps: int = 1) -> tuple[Calibration, list[bool]]:
    """What times ``steps`` level steps of a batch for each of ``shared``, and whether prices were known after each."""
    found, now, module, priced = Calibration(every, 1, CPU), [0.0], torch.nn.Linear(1, 1), []
    found._clock = Clock("made up", lambda: now[0])
    lengths = iter([100 * number for number in range(1, 1 + len(shared) * steps)])

    def loss_of(batch: Any) -> torch.Tensor:
        now[0] += 1e-6 * batch.segment_lengths[0] ** 2 + 1e-3 * batch.segment_lengths[0]
        loss: torch.Tensor = module(torch.ones(1)).sum()
        return loss

    for _ in range(steps):
        batches = [SimpleNamespace(is_shared=is_shared, segment_lengths=(next(lengths),)) for is_shared in shared]
        level_step(module, batches, loss_of, found)
        priced.append(found.prices is not None)
    return found, priced


@in_turn(
    ("shared", "timed"),
    [
        ([False] * 5, [200, 300, 400]),
        ([False, True, False, True, False], [300]),
        ([True, False, False, True], [200, 300]),
        ([False, True, False], []),
        ([False] * 2, []),
        ([False], []),
    ],
)
def test_a_level_step_times_what_is_neither_first_nor_last_nor_shared(shared: list[bool], timed: list[int]):
    found, _ = stepped(shared, every=2)
    assert [tokens for _, tokens, *_ in found._timed] == timed


def test_times_are_kept_until_they_are_enough():
    found, priced = stepped([False] * 5, steps=4)  # three are timed in each step
    assert priced == [False, False, True, True]
    assert found.prices == pytest.approx((1e-6, 1e-3, 0), rel=1e-2, abs=1e-9)
    assert len(found._timed) == 3


@pytest.mark.parametrize("shared", [[False] * 2, [False, True, True, False]])
def test_that_nothing_can_be_timed_is_said(shared: list[bool]):
    with pytest.warns(UserWarning, match="wlb: calibrate = 2 found no micro-batch to time: .*; raise micro_batches"):
        stepped(shared, every=2, steps=2)


def _own_lists(state: dict[str, Any] | None) -> list[tuple[list[float], dict[str, Any]]]:
    """Tokens of each rank's unshared micro-batches and the state, step by step; rank 1 takes twice as long."""
    rank, now = torch.distributed.get_rank(), [0.0]
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    documents = [np.ones(length, np.int64) for length in np.random.default_rng(0).integers(50, 400, 600)]
    sizes: dict[str, Any] = {"context_window": 512, "micro_batches": 8, "max_length_factor": 1.0}
    steps = packed_batches(
        documents,
        model="tiny",
        own_lists=True,
        calibrate=3,
        state=state,
        **sizes,
    )
    assert steps.calibration is not None
    steps.calibration._clock = Clock("made up", lambda: now[0])

    def loss_of(batch: PackedBatch) -> torch.Tensor:
        now[0] += sum(1e-6 * length**2 + 1e-3 * length for length in batch.segment_lengths) * (1 + rank)
        loss: torch.Tensor = module(torch.ones(1)).sum()
        return loss

    found = []
    for step in steps:
        level_step(module, step.batches, loss_of, steps.calibration)
        tokens = [0.0, 0.0]
        for micro_batch in step.plan.micro_batches:
            for member in micro_batch.ranks:
                tokens[member] += micro_batch.tokens / len(micro_batch.ranks)
        found.append((tokens, json.loads(json.dumps(steps.state_dict()))))
    return found


def test_packed_batches_give_a_slow_rank_less_and_resume_to_the_same_plans():
    straight, _ = run_ranks(2, _own_lists, None)
    shares = [slow / (fast + slow) for (fast, slow), _ in straight]
    assert shares[2] == pytest.approx(1 / 2, abs=0.05)
    assert shares[3] == pytest.approx(1 / 3, abs=0.05)
    for after in (3, 4):  # right after a calibration, and between two
        resumed, _ = run_ranks(2, _own_lists, straight[after - 1][1])
        assert [tokens for tokens, _ in resumed] == [tokens for tokens, _ in straight[after:]]
