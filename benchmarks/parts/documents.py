"""Document lengths that benchmarks pack: given or drawn, real ones, and mixtures made to be hard.

A packer meets documents as a stream of as many tokens as steps need, dealt a few at a time. The standard library is
that of the running Python, a document for each definition, with 8 tokens for each byte, so that one of 16 KiB fills a
window of 128K; longer ones are split.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.lengths import read_lengths
from wlb.documents.prepare.sources import StdlibCorpus
from wlb.documents.segments import Segment, split_overlong
from wlb.documents.synthetic import sample_lengths
from wlb_studies.filling import documents_filling

Lengths = NDArray[np.int64]

_STDLIB_WINDOW = 16_384  # bytes
_AT_ONCE = 64  # documents, as the training loop feeds its packer


def add_length_options(parser: argparse.ArgumentParser, documents: int) -> None:
    parser.add_argument("--lengths", metavar="FILE", help="document lengths (.json, .txt, .npy, .parquet, .idx)")
    parser.add_argument("--documents", type=int, default=documents, help="synthetic documents, without --lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context-window", type=int, default=131_072)


def chosen_lengths(options: argparse.Namespace) -> Lengths:
    """By the options of ``add_length_options``."""
    if options.lengths is not None:
        return read_lengths(options.lengths)
    return sample_lengths(options.documents, options.context_window, options.seed)


def described(options: argparse.Namespace, lengths: Lengths) -> dict[str, Any]:
    return {
        "lengths": f"synthetic, seed {options.seed}" if options.lengths is None else "given with --lengths",
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "context_window": options.context_window,
        "seed": options.seed,
    }


def first_steps(lengths: Lengths, tokens: int) -> Lengths:
    """``lengths`` from the front, over and over if need be, up to ``tokens`` tokens."""
    stream = np.tile(lengths, math.ceil(tokens / int(lengths.sum())))
    return stream[: documents_filling(stream, tokens)]


def segments(lengths: Lengths) -> list[Segment]:
    """Whole documents; a document's id is its position."""
    return [Segment(document, 0, length) for document, length in enumerate(lengths.tolist())]


def batched(lengths: Lengths) -> Iterator[list[Segment]]:
    """``segments``, as many at a time as a packer gets."""
    stream = segments(lengths)
    for first in range(0, len(stream), _AT_ONCE):
        yield stream[first : first + _AT_ONCE]


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


def split(lengths: Lengths, window: int) -> Lengths:
    """``lengths``, those over the window split."""
    pieces, _ = split_overlong(segments(lengths), window, "split")
    return np.array([piece.length for piece in pieces], np.int64)


def _stdlib_lengths(window: int) -> Lengths:
    """Bytes of the definitions, scaled to ``window`` and shuffled."""
    texts = (text for batch in StdlibCorpus().batches() for text in batch if isinstance(text, str))
    lengths = np.array([len(text.encode()) for text in texts if text], np.int64)
    scaled = np.maximum(1, lengths * window // _STDLIB_WINDOW)
    return split(np.random.default_rng(0).permutation(scaled), window)
