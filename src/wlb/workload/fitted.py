"""Prices fitted to measured seconds of micro-batches and the documents in them.

A micro-batch of documents of d tokens takes ``square * sum(d^2) + token * sum(d) + fixed`` seconds, forward and
backward (after WLB-LLM, section 4.1, which profiles W_a and W_l). If ranks wait for each other in every micro-batch, a
job can measure only the slowest of them.
"""

from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.errors import UserError
from wlb.workload.base import Seconds
from wlb.workload.profile import Measurements, PrefixMeasurements, WorkloadProfile
from wlb.workload.shapes import ModelShape

Array = NDArray[np.float64]

LEAST_SAMPLES = 8  # fewest micro-batches to fit prices to
_ROUNDS = 8  # of finding the slowest rank, the outliers and the scale of errors
_FAR_OFF = 4.0  # standard deviations (estimated by the median) beyond which a measurement is left out
_SHORT = 0.1  # of the mean micro-batch: measurements of shorter ones are no more exact than at this length
_KNOTS = 2 ** np.arange(6, 21)  # tokens at which a profile holds the fitted curve
_LEAST_SECONDS = 1e-12  # of a document, if its tokens explain nothing
_BACKWARD = 2 / 3  # share of the backward if both directions were measured together


@dataclass(frozen=True)
class FittedPrices:
    """Seconds, forward and backward, of a micro-batch on one rank; ``r_squared`` is the explained part of the variance.

    ``r_squared`` is negative if the prices explain less than the mean does.
    """

    square: float  # for each squared token of a document
    token: float
    fixed: float  # for each micro-batch
    r_squared: float

    def __str__(self) -> str:
        return f"{self.square:.3g} d^2 + {self.token:.3g} d + {self.fixed:.3g} s, R2 {self.r_squared:.3f}"

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        """Seconds that each document adds, forward and backward, always positive; shape of ``lengths`` (tokens)."""
        d = np.asarray(lengths, np.float64)
        return np.asarray(self.square * d**2 + self.token * d + _LEAST_SECONDS)

    def seconds(self, lengths: ArrayLike) -> float:
        """Seconds of a micro-batch of documents of ``lengths`` tokens."""
        return float(self.document_seconds(lengths).sum()) + self.fixed

    def profile(self, model: ModelShape, *, threads: int = 1, **origin: Any) -> WorkloadProfile:
        """These prices as a profile of this ``origin`` (its other fields), for ``wlb check`` and ``training.profile``.

        Forward and backward were measured together; they are divided 1 : 2, like their operations.
        """
        tokens, d = tuple(_KNOTS.tolist()), _KNOTS.astype(np.float64)

        def both(seconds: Array) -> dict[str, Any]:
            floored = np.maximum(seconds, _LEAST_SECONDS)
            forward, backward = (1 - _BACKWARD) * floored, _BACKWARD * floored
            return {"forward_seconds": forward.tolist(), "backward_seconds": backward.tolist()}

        return WorkloadProfile(
            **origin,
            threads=threads,
            model=model,
            attention=Measurements(tokens=tokens, **both(self.square * d**2)),
            linear=Measurements(tokens=(1, *tokens), **both(self.token * np.array([1.0, *d]) + self.fixed)),
            prefix_attention=PrefixMeasurements(queries=tokens, keys=tokens, **both(2 * self.square * d[:, None] * d)),
        )


def fit_prices(
    squares: ArrayLike, tokens: ArrayLike, seconds: ArrayLike, *, micro_batches: ArrayLike = 1
) -> FittedPrices:
    """The non-negative prices that explain the ``seconds`` of micro-batches with the least relative errors.

    ``squares`` and ``tokens`` are sum(d^2) and sum(d) over the documents of each, of shape (micro-batches,), or
    (micro-batches, ranks) if ranks run micro-batches at the same time and wait for the slowest. Where ranks wait only
    at the end of a step, each entry sums over several ``micro_batches``, of the same shape. Raises ``UserError`` with
    fewer than ``LEAST_SAMPLES`` of them.
    """
    measured = np.asarray(seconds, np.float64)
    count = len(measured)
    if count < LEAST_SAMPLES:
        raise UserError(f"prices need at least {LEAST_SAMPLES} measured micro-batches; only {count} were measured")
    given = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (squares, tokens, micro_batches)))
    terms = np.stack([np.reshape(a, (count, -1)) for a in given], axis=-1)  # (micro-batches, ranks, terms)
    prices = _least_squares(terms.mean(axis=1), measured)
    for _ in range(_ROUNDS):
        slowest = np.take_along_axis(terms, (terms @ prices).argmax(axis=1)[:, None, None], axis=1)[:, 0]
        scale = np.maximum(slowest @ prices, _SHORT * measured.mean())
        errors = (slowest @ prices - measured) / scale
        spread = 1.4826 * np.median(np.abs(errors - np.median(errors)))
        kept = np.abs(errors - np.median(errors)) <= _FAR_OFF * spread + 1e-12
        found = _least_squares(slowest[kept] / scale[kept, None], measured[kept] / scale[kept])
        if np.allclose(found, prices, rtol=1e-6):
            break
        prices = found
    explained = (terms @ prices).max(axis=1)
    unexplained = float(((explained - measured)[kept] ** 2).sum())
    variance = float(((measured[kept] - measured[kept].mean()) ** 2).sum())
    square, token, fixed = prices.tolist()
    return FittedPrices(square, token, fixed, 1 - unexplained / max(variance, 1e-30))


def _least_squares(terms: Array, seconds: Array) -> Array:
    """Non-negative prices of the three terms; 0 for terms that do not explain enough (Schwarz criterion)."""
    count, floor = len(seconds), 1e-12 * float((seconds**2).sum())
    best, least = np.zeros(3), np.inf
    for chosen in chain.from_iterable(combinations(range(3), size) for size in (1, 2, 3)):
        scale = np.abs(terms[:, chosen]).max(axis=0)
        prices, *_ = np.linalg.lstsq(terms[:, chosen] / scale, seconds, rcond=None)
        error = float(((terms[:, chosen] / scale @ prices - seconds) ** 2).sum())
        criterion = count * np.log(error + floor) + len(chosen) * np.log(count)
        if (prices >= 0).all() and criterion < least:
            best, least = np.zeros(3), criterion
            best[list(chosen)] = prices / scale
    return best
