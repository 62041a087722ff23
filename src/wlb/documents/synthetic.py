"""Document lengths drawn at random, for trying the planners without a corpus.

The shape is that of the paper's input (WLB-LLM, Figure 3): most documents are short, a few reach the whole context
window. The paper publishes the figure, not its data; the parameters are this project's choice, not a fit. The median is
1/128 of the window: 1,024 tokens at 128K, the order of public web corpora (RefinedWeb: 625). In a heavy tail the number
of documents longer than t falls as 1/t; lengths beyond the window are set to it.
"""

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.token_count import MOST_TOKENS

_MOST_DOCUMENTS = 10_000_000  # drawn in one go, at about 40 bytes each


def sample_lengths(
    documents: int,
    context_window: int,
    seed: int = 0,
    *,
    median_fraction: float = 1 / 128,
    tail_share: float = 0.03,
    tail_start_fraction: float = 1 / 16,
) -> NDArray[np.int64]:
    """Lengths of ``documents`` random documents, 1 to ``context_window`` tokens; shape (documents,).

    The body is log-normal with median ``median_fraction * context_window``. A ``tail_share`` of documents comes from a
    Pareto tail instead, which starts at ``tail_start_fraction * context_window``. The same arguments give the same
    lengths. Raises ``UserError`` for counts below 1 or too large.
    """
    counts = ("documents", documents, _MOST_DOCUMENTS), ("context_window", context_window, MOST_TOKENS)
    for name, count, most in counts:
        if not 1 <= count <= most:
            raise UserError(f"synthetic lengths: {name} is {count}; it must be from 1 to {most}")
    random = np.random.default_rng(seed)
    body = median_fraction * context_window * np.exp(random.standard_normal(documents))  # sigma 1
    # 1 - u is in (0, 1], so the power is finite.
    tail = tail_start_fraction * context_window * (1 - random.random(documents)) ** -1.0
    lengths = np.where(random.random(documents) < tail_share, tail, body)
    return np.clip(np.rint(lengths), 1, context_window).astype(np.int64)
