"""Prices that know how a micro-batch is sharded say what its group spends; W_a + W_l alone does not."""

import numpy as np
import pytest

from wlb.job.prices import sharded_prices
from wlb.sharding import price_shards
from wlb.sharding.latency import group_seconds
from wlb.workload import hardware_preset, make_workload, model_shape

WINDOW = 65_536
H100 = hardware_preset("h100")


def mixes(seed):
    """Micro-batches of about a window, with and without long documents."""
    random = np.random.default_rng(seed)
    for _ in range(40):
        long = (random.random(random.integers(0, 3)) * WINDOW).astype(int).clip(1)
        short = (random.pareto(1, random.integers(20, 60)) * WINDOW // 256 + 1).astype(int).clip(1, WINDOW // 8)
        yield np.concatenate([long, short])


def spent(micro_batches, cp, strategy, workload):
    return group_seconds(price_shards(micro_batches, cp, strategy, workload), workload).both


def misjudged(seconds, micro_batches, prices):
    """What prices do not explain of micro-batches' seconds, up to scale and a cost that all have alike."""
    priced = np.array([prices.document_seconds(lengths).sum() for lengths in micro_batches])
    return np.std(seconds - np.polyval(np.polyfit(priced, seconds, 1), priced)) / seconds.mean()


@pytest.mark.parametrize(("model", "tp", "cp"), [("30b", 8, 4), ("llama3-8b", 1, 8)])
def test_micro_batches_cost_what_their_documents_add_up_to(model, tp, cp):
    workload = make_workload(model, H100, tp=tp)
    micro_batches = [lengths for seed in range(4) for lengths in mixes(seed)]
    seconds = spent(micro_batches, cp, "per_document", workload)
    known = misjudged(seconds, micro_batches, sharded_prices(workload, cp, "per_document", WINDOW))
    alone = misjudged(seconds, micro_batches, make_workload(model, H100, tp=tp, cp=cp))
    assert known < 0.9 * alone


def test_one_rank_shares_nothing():
    shape = model_shape("7b")
    prices = sharded_prices(make_workload(shape, H100, tp=8), 1, "balanced", WINDOW)
    lengths = [1, 1000, WINDOW]
    assert np.array_equal(prices.document_seconds(lengths), make_workload(shape, H100, tp=8).document_seconds(lengths))


@pytest.mark.parametrize("window", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("strategy", ["per_sequence", "balanced"])
def test_windows_too_short_to_probe_still_give_prices(window, strategy):
    prices = sharded_prices(make_workload("tiny", "cpu"), 2, strategy, window)
    seconds = prices.document_seconds(np.arange(1, window + 1))
    assert (seconds > 0).all()
    assert np.isfinite(seconds).all()


def test_the_longest_window_is_priced_at_once():
    """Uneven slices of a document of 2**31 tokens are no smaller than tells them apart."""
    prices = sharded_prices(make_workload("tiny"), 4, "balanced", 2**31 - 1)
    assert 0 < prices.document_seconds([2**30])[0] < prices.document_seconds([2**31 - 1])[0]
