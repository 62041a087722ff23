"""A random order of any number of documents that takes no memory: arithmetic maps a position to a document.

A Feistel network with keyed rounds permutes all numbers of as many bits as the document count needs. A result beyond
the last document is permuted again until it is a document (cycle walking: Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002), at most twice on average. Keys come from ``numpy.random.SeedSequence``, whose results NumPy
promises to keep, so the order is the same on every platform and version. Levanter (marin-community/marin#1800),
TensorFlow and Grain shuffle in the same way.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Chi-squared tests over many keys (of positions, of neighbours, and of documents half an epoch apart) reject 6 rounds
# and pass 8; 12 leave a margin of half as many again.
_ROUNDS = 12
# Halves of fewer bits have too few functions to be random, whatever the number of rounds; TensorFlow takes 16 bits.
_LEAST_BITS = 8
_BLOCK = 4096  # positions computed together; for only a few, NumPy's call overhead dominates
_HELD = 256  # blocks, of the latest permutations: a search plans the same documents in every layout
# The multipliers of SplitMix64's finaliser (Stafford's Mix13): each bit of the input changes half of the high ones.
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Permutation:
    """An order of ``size`` documents that follows from ``seed`` and ``key``.

    ``permutation(positions)`` returns the documents at ``positions``, whole numbers below ``size`` in any order; both
    are int64 arrays of one dimension. ``between`` returns the documents in a range of positions.
    """

    def __init__(self, size: int, seed: int, *key: int) -> None:
        self._made_from = size, seed, key
        self._size = np.uint64(size)
        bits = max(_LEAST_BITS, (size - 1).bit_length())
        self._widths = bits // 2, bits - bits // 2
        self._keys = np.random.SeedSequence(seed, spawn_key=key).generate_state(_ROUNDS, np.uint64)
        self._whole: NDArray[np.int64] | None = None
        if size <= 1 << _LEAST_BITS:  # few documents would need many turns in a network of 8 bits
            drawn = self._encrypted(np.arange(1 << _LEAST_BITS, dtype=np.uint64))
            self._whole = drawn[drawn < self._size].view(np.int64)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._whole is not None:
            return self._whole[positions]
        drawn = self._encrypted(positions.astype(np.uint64))
        outside = np.flatnonzero(drawn >= self._size)
        while outside.size:
            drawn[outside] = self._encrypted(drawn[outside])
            outside = outside[drawn[outside] >= self._size]
        return drawn.view(np.int64)

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """The documents at positions ``start`` to ``stop``, or to the last one."""
        stop = min(stop, int(self._size))
        parts = [
            _block(*self._made_from, block)[max(start - block, 0) : stop - block]
            for block in range(start - start % _BLOCK, stop, _BLOCK)
        ]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _encrypted(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The network itself. The halves change each other in turn, so they may differ in width."""
        high_bits, low_bits = self._widths
        high, low = numbers >> np.uint64(low_bits), numbers & np.uint64((1 << low_bits) - 1)
        for round_, key in enumerate(self._keys):
            changed, by, bits = (low, high, low_bits) if round_ % 2 else (high, low, high_bits)
            mixed = (by ^ key) * _MIX[0]  # wraps
            mixed ^= mixed >> np.uint64(32)
            mixed *= _MIX[1]
            mixed >>= np.uint64(64 - bits)
            changed ^= mixed
        return (high << np.uint64(low_bits)) | low


@lru_cache(maxsize=_HELD)
def _block(size: int, seed: int, key: tuple[int, ...], first: int) -> NDArray[np.int64]:
    return Permutation(size, seed, *key)(np.arange(first, min(first + _BLOCK, size)))
