"""Document lengths that the planner benchmark packs: real ones, usual ones, and mixtures made to be hard.

Every corpus fills a given number of global batches. The standard library is that of the running Python, a document for
each definition, with 8 tokens for each byte, so that one of 16 KiB fills a window of 128K; longer ones are split.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from parts.streams import first_steps
from wlb.documents.lengths import read_lengths
from wlb.documents.overlong import split_overlong
from wlb.documents.prepare.batches import documents_of
from wlb.documents.prepare.sources import StdlibCorpus
from wlb.documents.segments import Segment
from wlb.documents.synthetic import sample_lengths

Lengths = NDArray[np.int64]

_STDLIB_WINDOW = 16_384  # bytes


def corpora(window: int, micro_batches: int, steps: int, seed: int) -> dict[str, Callable[[], Lengths]]:
    """Corpora that anybody has, by name, each of ``steps`` global batches of ``micro_batches`` windows when called."""
    batch = micro_batches * window
    random = np.random.default_rng(seed)

    def drawn(draw: Callable[[int], Lengths], mean: float) -> Callable[[], Lengths]:
        return lambda: first_steps(draw(math.ceil(steps * batch / mean) + 100), steps * batch)

    def two_modes(count: int) -> Lengths:
        return np.where(random.random(count) < 0.02, window * 3 // 4, window // 100)

    def one_giant(count: int) -> Lengths:
        short = window // 64
        step = [window, *[short] * ((micro_batches - 1) * window // short)]
        return np.tile(np.array(step, np.int64), steps)

    return {
        "synthetic": drawn(lambda count: sample_lengths(count, window, seed), window / 55),
        "standard library": lambda: first_steps(_stdlib_lengths(window), steps * batch),
        "no outliers": drawn(lambda count: random.integers(1, window // 8, count), window / 16),
        "only outliers": drawn(lambda count: random.integers(window // 4, window + 1, count), window * 5 / 8),
        "two modes": drawn(two_modes, window / 40),
        "all equal": drawn(lambda count: np.full(count, window * 2 // 5), window * 0.4),
        "one giant a step": drawn(one_giant, window),
    }


def given_corpus(source: str, window: int) -> Lengths:
    """All lengths of a file, those over the window split."""
    return _split(read_lengths(source), window)


def _stdlib_lengths(window: int) -> Lengths:
    """Bytes of the definitions, scaled to ``window`` and shuffled."""
    texts = (text for batch in StdlibCorpus().batches() for text in documents_of(batch) if isinstance(text, str))
    lengths = np.array([len(text.encode()) for text in texts if text], np.int64)
    scaled = np.maximum(1, lengths * window // _STDLIB_WINDOW)
    return _split(np.random.default_rng(0).permutation(scaled), window)


def _split(lengths: Lengths, window: int) -> Lengths:
    whole = [Segment(document, 0, length) for document, length in enumerate(lengths.tolist())]
    segments, _ = split_overlong(whole, window, "split")
    return np.array([segment.length for segment in segments], np.int64)
