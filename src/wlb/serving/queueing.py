"""How long a queue makes a prompt wait before it is served."""

from __future__ import annotations

import math


def waiting_seconds(rate: float, mean: float, square: float, servers: int, share: float) -> float:
    """What only a ``share`` of arrivals waits longer than, for ``servers`` that take from one queue; inf if overloaded.

    ``rate`` arrivals a second (Poisson) take ``mean`` seconds, ``square`` on average when squared. The mean wait is
    that of M/M/c times (1 + CV^2) / 2 (Lee and Longton 1959; exact for one server), and those who wait do so for an
    exponential time (exact for M/M/c).
    """
    load = rate * mean
    if load >= servers:
        return math.inf
    waiting = _share_waiting(load, servers)
    if waiting <= share:
        return 0.0
    mean_of_waiting = square / mean / 2 / (servers - load)
    return mean_of_waiting * math.log(waiting / share)


def _share_waiting(load: float, servers: int) -> float:
    """Erlang C, from Erlang B's recursion over the number of servers."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))
