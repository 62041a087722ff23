"""Prices and rank speeds that a job measures in its own level steps.

Each rank times the micro-batches that it runs alone. It leaves out shared micro-batches, the first of a step, which
waits for weights, and the last, which reduces gradients. No collective runs inside the others, so their wall time shows
the cost of documents and the speed of the rank. Every few steps the ranks gather these times, and each rank computes
the same results from them:

1. Prices (``wlb.workload.fitted``), from the seconds of all ranks, scaled to a rank of speed 1.
2. The speed of each rank: its median of predicted over measured seconds, relative to ranks of speed 1.

Both are averaged over intervals. Plans change if an average differs from the planned value by more than a dead band and
more than noise explains, inside an interval and between intervals. They also change three times while the averages
collect samples. So plans settle.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.runtime.clock import clock_of
from wlb.runtime.collectives import gathered_rows, warn
from wlb.workload.fitted import LEAST_SAMPLES, fit_prices

Array = NDArray[np.float64]
MeasuredPrices = tuple[float, float, float]  # ``square``, ``token`` and ``fixed`` of ``FittedPrices``

_MOST_TIMED, _MOST_GATHERED = 256, 2**15  # newest micro-batches of a rank, and of all ranks
_REMEMBERED = 400  # micro-batches of a rank in the average of its speed; prices average those of all ranks
_PRICE_BAND, _SPEED_BAND = 0.02, 0.03
_LEAST_EXPLAINED = 0.5  # share of the variance that prices must explain
_ERRORS = 5.0  # standard errors of noise; so rare that hundreds of ranks and intervals cause no false alarm
_LIKELY = 3.0  # the same for a slow rank if plans change anyway, because missing one delays all others
_LEAST_TIMED = 16  # micro-batches of a rank in an interval that can show a change of its speed
_DRIFT_PART = 0.2  # weight of one interval in the average variance between intervals
_MEDIAN_ERROR = 1.2533  # standard error of a median, over that of a mean
_ROUNDS = 3  # of fitting prices and speeds in turn


class Calibration:
    """Times this rank's batches and, every ``every`` steps, finds ``prices`` and ``speeds`` for all ``ranks``.

    The processes of ``group`` (by default all) are the ranks of a level step, in order. ``prices`` are None until they
    are known; ``speeds`` are None while all are equal. Raises ``UserError`` unless ``every`` is a whole number >= 1.
    """

    def __init__(self, every: int, ranks: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        if type(every) is not int or every < 1:
            raise UserError(f"calibrate = {every!r} is not a whole number of steps; give one, or 0 for never")
        self.prices: MeasuredPrices | None = None
        self.speeds: tuple[float, ...] | None = None
        self._every, self._device, self._group, self._clock = every, device, group, clock_of(device)
        self._steps, self._in_step = 0, False
        most = min(_MOST_TIMED, -(-_MOST_GATHERED // ranks))
        self._timed = deque[tuple[float, float, Any, Any]]([], most)  # sum(d^2), sum(d), begin and end
        self._mean_prices, self._price_count = np.zeros(3), 0
        self._drift, self._price_drift = 0.0, 0.0  # variances between intervals that noise inside them does not explain
        self._mean_logs, self._counts = np.zeros(ranks), np.zeros(ranks, np.int64)  # logarithms of speeds

    @contextmanager
    def timing(self, batch: Any) -> Iterator[None]:
        """Time what runs inside for ``batch``, a ``Batch``, unless other ranks share it."""
        start = self._clock.mark()
        yield
        stop = self._clock.mark()
        if not batch.is_shared:
            lengths = np.array(batch.segment_lengths, np.float64)
            self._timed.append((float((lengths**2).sum()), float(lengths.sum()), start, stop))

    def begin_step(self) -> None:
        """Begin a step that the caller measures. Raises ``UserError`` if the previous step has not ended."""
        if self._in_step:
            raise UserError("calibrate: the last step was not measured; call level_step(..., steps.calibration)")
        self._in_step = True

    def end_step(self) -> bool:
        """Gather and evaluate the times if due; returns whether ``prices`` or ``speeds`` changed.

        Every rank calls it after every step. Plans use the results from the next step on. Too few times are kept until
        there are enough. Warns once on the first rank if there are none.
        """
        self._steps, self._in_step = self._steps + 1, False
        if self._steps % self._every:
            return False
        rows = [number for *sums, start, stop in self._timed for number in (*sums, self._clock.between(stop, start))]
        rows += [0.0] * (3 * (self._timed.maxlen or 0) - len(rows))
        found = gathered_rows(rows, torch.float64, self._device, self._group).unflatten(1, (-1, 3)).numpy()
        if (count := np.count_nonzero(found[..., 2] > 0)) >= LEAST_SAMPLES:
            self._timed.clear()
        elif not count:
            waits = "ranks wait for others in the first, the last and shared ones"
            waits += "; raise micro_batches, or in wlb train lower packing.max_length_factor"
            warn(f"calibrate = {self._every} found no micro-batch to time: {waits}", self._group)
        return self.update(found)

    def update(self, rows: Array) -> bool:
        """``end_step`` with the gathered ``rows``, shape (ranks, micro-batches, 3): sum(d^2), sum(d) and seconds.

        Rows without seconds are ignored; fewer than ``LEAST_SAMPLES`` rows change nothing.
        """
        timed = rows[..., 2] > 0
        rank, counts, (squares, tokens, seconds) = np.nonzero(timed)[0], timed.sum(axis=1), rows[timed].T
        if len(rank) < LEAST_SAMPLES:
            return False
        terms, mine = np.stack([squares, tokens, np.ones_like(tokens)], axis=1), counts > 0
        logs, ratios = self._mean_logs.copy(), np.full(timed.shape, np.nan)
        for _ in range(_ROUNDS):
            fitted = fit_prices(squares, tokens, seconds * np.exp(logs)[rank])
            found = np.array([fitted.square, fitted.token, fitted.fixed])
            ratios[timed] = np.log(terms @ found / seconds)
            medians = np.nanmedian(ratios[mine], axis=1)
            logs[mine] = medians - np.median(medians - self._mean_logs[mine])
        noise = 1.4826 * float(np.nanmedian(np.abs(ratios[mine] - medians[:, None])))
        priced = fitted.r_squared >= _LEAST_EXPLAINED and self._average_prices(found, terms, noise)
        differ, news = self._average_speeds(logs, counts, noise)
        return (news or priced) and self._take(differ)

    def _average_speeds(self, logs: Array, counts: NDArray[np.int64], noise: float) -> tuple[NDArray[np.bool_], bool]:
        """Average the speeds; returns which ranks have a speed of their own, and whether plans must change."""
        off, before, inside = logs - self._mean_logs, self._counts, (_MEDIAN_ERROR * noise) ** 2 / np.maximum(1, counts)
        if ((counts > 0) & (before > 0)).any():
            seen = (1.4826 * float(np.median(np.abs(off)))) ** 2 - float(np.median(inside))
            self._drift += _DRIFT_PART * (max(0.0, seen) - self._drift)
        changed = (np.abs(off) > _band(_SPEED_BAND, inside + self._drift)) & (counts >= _LEAST_TIMED)
        self._counts = counts + np.where(changed, 0, np.minimum(before, np.maximum(0, _REMEMBERED - counts)))
        part = counts / np.maximum(1, self._counts)  # weight of the new interval in the average
        self._mean_logs = self._mean_logs + off * part
        used = np.ones(len(counts)) if self.speeds is None else np.array(self.speeds)
        variance = np.where(counts > 0, (inside + self._drift) * part, np.inf)
        lag, known = np.log(used) - self._mean_logs, used != 1
        news, slow = np.abs(lag) > _band(_SPEED_BAND, variance), lag > _band(_SPEED_BAND, variance, _LIKELY)
        fuller = known.any() and _fuller(before[known].min(), self._counts[known].min(), _REMEMBERED)
        return known | news | slow, bool(news.any() or fuller)

    def _average_prices(self, found: Array, terms: Array, noise: float) -> bool:
        """Average the prices; returns whether plans must change, for micro-batches of ``terms`` or a longer average."""
        before, most = self._price_count, _REMEMBERED * len(self._counts)
        inside = 3 * noise**2 / len(terms)  # the errors of three fitted prices add up
        if before:
            off = float(np.log((terms @ found).sum() / (terms @ self._mean_prices).sum()))
            self._price_drift += _DRIFT_PART * (max(0.0, off**2 - inside) - self._price_drift)
        self._price_count = min(before + len(terms), max(most, len(terms)))
        part = len(terms) / self._price_count
        self._mean_prices = self._mean_prices + (found - self._mean_prices) * part
        now, used = terms @ self._mean_prices, terms @ (self.prices or (0.0, 0.0, 0.0))
        band = _band(_PRICE_BAND, (inside + self._price_drift) * part)
        return _fuller(before, self._price_count, most) or bool(np.abs(now - used).sum() > band * used.sum())

    def _take(self, differ: NDArray[np.bool_]) -> bool:
        """Plan by the averages, with speed 1 for ranks that do not ``differ``; returns whether anything changed."""
        earlier, alike = (self.prices, self.speeds), np.where(differ, 0, self._counts)
        level = float(self._mean_logs @ alike) / max(1, int(alike.sum()))  # of ranks of speed 1
        self._mean_logs, self._mean_prices = self._mean_logs - level, self._mean_prices * np.exp(-level)
        speeds = np.where(differ, np.round(np.exp(self._mean_logs), 2), 1.0)
        self.speeds = None if (speeds == 1).all() else tuple(speeds.tolist())
        if self._price_count:
            square, token, fixed = (float(f"{price:.3g}") for price in self._mean_prices)
            self.prices = square, token, fixed
        return (self.prices, self.speeds) != earlier

    def __str__(self) -> str:
        """The prices and speeds in use, in one line."""
        square, token, fixed = self.prices or (0.0, 0.0, 0.0)
        prices = f"{square:.3g} d^2 + {token:.3g} d s a document, {fixed:.3g} s a micro-batch"
        other = [f"rank {rank} {speed:.2f}" for rank, speed in enumerate(self.speeds or ()) if speed != 1]
        return f"{prices if self.prices else 'prices as before'}; speeds: {', '.join(other) or 'all equal'}"

    def state_dict(self) -> dict[str, Any]:
        """What plans use and what it is averaged from; what was timed since the last exchange is not in it."""
        return {
            "steps": self._steps,
            "prices": self.prices,
            "speeds": self.speeds,
            "mean_prices": self._mean_prices.tolist(),
            "price_count": self._price_count,
            "drifts": [self._drift, self._price_drift],
            "mean_logs": self._mean_logs.tolist(),
            "counts": self._counts.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; with another number of ranks, prices are kept and speeds dropped."""
        self._steps, (square, token, fixed) = state["steps"], state["prices"] or (0.0, 0.0, 0.0)
        self.prices, self._in_step = (square, token, fixed) if state["prices"] else None, False
        self._mean_prices, self._price_count = np.array(state["mean_prices"]), state["price_count"]
        self._drift, self._price_drift = state["drifts"]
        if len(state["counts"]) == len(self._counts):
            self.speeds = tuple(state["speeds"]) if state["speeds"] else None
            self._mean_logs, self._counts = np.array(state["mean_logs"]), np.array(state["counts"])


def _band(dead: float, variance: Any, errors: float = _ERRORS) -> Any:
    """Differences up to this do not change plans: ``dead``, or what noise of ``variance`` explains."""
    return np.maximum(dead, errors * np.sqrt(variance))


def _fuller(before: int, now: int, most: int) -> bool:
    """Whether an average has just reached a ninth, a third or all of the ``most`` micro-batches that it covers."""
    return any(before < most / part <= now for part in (9, 3, 1))
