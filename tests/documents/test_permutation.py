"""The order of an epoch: every document once, as random as one wants, the same everywhere."""

import numpy as np
import pytest
from numpy.typing import NDArray

from wlb.documents.permutation import Permutation

TEN_BILLION = 10**10
WRAP = 2**64 - 1


class ByHand:
    """The same network in Python's whole numbers, one position at a time; it also goes backwards."""

    def __init__(self, size: int, seed: int, *key: int) -> None:
        self.size = size
        bits = max(8, (size - 1).bit_length())
        self.low, self.high = bits - bits // 2, bits // 2
        keys = np.random.SeedSequence(seed, spawn_key=key).generate_state(12, np.uint64)
        self.rounds = list(enumerate(keys.tolist()))

    def __call__(self, number: int, *, backwards: bool = False) -> int:
        while True:
            high, low = number >> self.low, number & (1 << self.low) - 1
            for round_, key in self.rounds[::-1] if backwards else self.rounds:
                if round_ % 2:
                    low ^= self._mixed(high ^ key) >> 64 - self.low
                else:
                    high ^= self._mixed(low ^ key) >> 64 - self.high
            number = high << self.low | low
            if number < self.size:
                return number

    @staticmethod
    def _mixed(number: int) -> int:
        product = number * 0xBF58476D1CE4E5B9 & WRAP
        return (product ^ product >> 32) * 0x94D049BB133111EB & WRAP


def order_of(size: int, *key: int) -> NDArray[np.int64]:
    return Permutation(size, *key).between(0, size)


def test_every_document_has_one_place():
    sizes = [*range(1, 1100), *(2**bits + off for bits in (11, 12, 13, 16) for off in (-1, 0, 1))]
    for size in sizes:
        order = order_of(size, size % 7, 3)
        assert np.array_equal(np.sort(order), np.arange(size)), size


@pytest.mark.parametrize("size", [300, 2**20 - 1, 2**33 + 1, TEN_BILLION])
def test_agrees_with_the_network_by_hand_which_can_be_reversed(size):
    """What has an inverse is a bijection, of sizes too, that cannot be gone through."""
    permutation, by_hand = Permutation(size, 5, 2, 1), ByHand(size, 5, 2, 1)
    positions = np.r_[0, 1, size - 2, size - 1, np.random.default_rng(0).integers(0, size, 200)]
    documents = permutation(positions)
    assert [by_hand(position) for position in positions.tolist()] == documents.tolist()
    assert [by_hand(document, backwards=True) for document in documents.tolist()] == positions.tolist()


def test_runs_are_those_of_the_whole_order():
    for size in (10, 5000, 9000):
        permutation, whole = Permutation(size, 1, 2), order_of(size, 1, 2)
        for start, stop in ((0, 0), (0, 1), (3, 67), (4090, 4160), (4095, 8195), (size - 1, size + 64), (0, size)):
            assert np.array_equal(permutation.between(start, stop), whole[start:stop])


def surprise(counts: NDArray[np.int64]) -> float:
    """Of counts that ought to be equal: chi-squared, in standard deviations from its mean."""
    freedom = counts.size - 1
    return float((((counts - counts.mean()) ** 2).sum() / counts.mean() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("size", [5, 64, 256, 300])
def test_places_and_neighbours_are_uniform_over_keys(size):
    """With 4 rounds instead of 12 this fails, by several standard deviations for neighbours."""
    orders = np.array([order_of(size, seed, epoch, 0) for seed in range(30) for epoch in range(50)])
    for place in (0, 1, size // 2, size - 1):
        assert surprise(np.bincount(orders[:, place], minlength=size)) < 4.5
    for apart in (1, size // 2):  # documents that follow each other, and those half an epoch apart
        distances = (orders[:, apart:] - orders[:, :-apart]) % size
        assert surprise(np.bincount(distances.ravel(), minlength=size)[1:]) < 4.5
    halves = 2 * orders[:, :-1] // size * 2 + 2 * orders[:, 1:] // size
    pairs = np.bincount(halves.ravel(), minlength=4)
    both, one = pairs[[0, 3]].sum(), pairs[[1, 2]].sum()
    low, high = -(-size // 2), size // 2
    expected = (low * (low - 1) + high * (high - 1)) / (size * (size - 1))
    assert both / (both + one) == pytest.approx(expected, abs=5 * np.sqrt(0.25 / halves.size))


def test_the_order_is_pinned():
    """It must be the same on every platform and version, or a continued job would repeat and lose documents."""
    assert order_of(1, 0, 0, 0).tolist() == [0]
    assert order_of(2, 0, 0, 0).tolist() == [0, 1]
    assert order_of(10, 0, 0, 0).tolist() == [7, 5, 8, 0, 9, 3, 2, 6, 4, 1]
    places = np.array([0, 1, 2, 64, 4095, 4096, 5_000_000_000, TEN_BILLION - 1])
    assert Permutation(TEN_BILLION, 7, 3, 2)(places).tolist() == [
        6292555546,
        1374921527,
        7043737585,
        5683092291,
        1276043056,
        9856258194,
        3395809938,
        6065147906,
    ]
