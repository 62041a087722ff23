"""The documents of an experiment, and how a data loader cuts them before anyone packs them.

One corpus serves all context windows of an experiment, because a corpus does not change with the window. Without a file
it is this project's synthetic one (``wlb.documents.synthetic``) with its 128K parameters; where longer windows are
simulated, its tail goes on to the longest.

The paper's systems get global batches from a data loader: full windows, of which Plain-4D trains each as it is, while
the others pack their documents anew (Algorithm 1 and section 7.1). A document that does not fit into a window has been
cut by then, for all systems alike. ``cut_by_loader`` does the same, so that every system computes the same attention.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wlb.documents.lengths import read_lengths
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.reproduce.experiment import Documents, Settings

_128K = 131_072
_DOCUMENTS = 100_000
# The sampler's defaults at 128K, in tokens.
_MEDIAN_TOKENS = _128K / 128
_TAIL_START_TOKENS = _128K / 16


def corpus(settings: Settings, longest: int = _128K) -> Documents:
    """The lengths in the user's file, or synthetic ones of up to ``longest`` tokens."""
    if settings.lengths is not None:
        return Documents(read_lengths(settings.lengths), settings.lengths)
    lengths = sample_lengths(
        _DOCUMENTS,
        longest,
        settings.seed,
        median_fraction=_MEDIAN_TOKENS / longest,
        tail_start_fraction=_TAIL_START_TOKENS / longest,
    )
    return Documents(lengths, f"synthetic, {_DOCUMENTS:,} documents of up to {longest:,} tokens, seed {settings.seed}")


def grown_corpus(settings: Settings, context_window: int) -> Documents:
    """Synthetic documents whose lengths grow with the window."""
    lengths = sample_lengths(_DOCUMENTS, context_window, settings.seed)
    return Documents(lengths, f"synthetic, {_DOCUMENTS:,} documents for {context_window:,} tokens")


def cut_by_loader(lengths: NDArray[np.int64], context_window: int, seed: int) -> NDArray[np.int64]:
    """Pieces of documents in a random order that fill one window after another; the last, short window is left out.

    Raises ``UserError`` where the documents do not fill a window.
    """
    ends = np.cumsum(np.random.default_rng(seed).permutation(lengths))
    whole = int(ends[-1]) // context_window * context_window
    if whole == 0:
        raise UserError(f"the documents hold {ends[-1]} tokens, less than one window of {context_window}; give more")
    cuts = np.union1d(ends[ends <= whole], np.arange(0, whole + 1, context_window))
    pieces: NDArray[np.int64] = np.diff(cuts)
    return pieces
