"""Which prompts a serving system prefills together: by count, by tokens, or by predicted seconds.

A forward pass over prompts has the same imbalance as a training step: a budget of tokens is not a fixed amount of work.
That costs time when data-parallel ranks run their passes in lock step (data-parallel attention beside experts that are
spread over all ranks), and when short prompts wait behind a long pass.

``PrefillPlanner.plan`` takes the waiting prompts and returns what every rank runs in the next pass. It holds no state,
so a scheduler can call it whenever ranks are free. With chunked prefill a prompt may be cut. Its next chunk attends all
keys before it, so a token costs more the deeper it lies, and ``workload`` cuts chunks of equal seconds instead of equal
tokens. Without chunked prefill, ``workload`` puts prompts of similar length into the same pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError, choose_from
from wlb.workload import Costs
from wlb.workload.costs import QUERY_TILE

Method = Literal["count", "tokens", "workload", "workload:shortest"]
METHODS: tuple[Method, ...] = get_args(Method)

_SIMILAR_FROM = 4  # token budgets of waiting prompts to search for similar lengths


class Prompt(NamedTuple):
    """A waiting prompt. The first ``done`` of its ``tokens`` are prefilled, and ``rank`` holds their keys.

    ``rounds`` counts the passes since it arrived.
    """

    number: int
    tokens: int
    done: int = 0
    rank: int | None = None
    rounds: int = 0


class Chunk(NamedTuple):
    """Tokens ``start`` to ``stop`` of a prompt."""

    prompt: int
    start: int
    stop: int


ChunkBatch = list[Chunk]


@dataclass
class _OpenBatch:
    """The batch of a rank in the pass being planned."""

    chunks: ChunkBatch = field(default_factory=list)
    tokens: int = 0
    attention_seconds: float = 0.0


@dataclass(frozen=True)
class PrefillPlanner:
    """Plans passes of at most ``token_budget`` tokens on each rank.

    - ``count``: prompts in order of arrival, up to ``prompts_per_batch`` per rank within the budget;
    - ``tokens``: prompts in order of arrival, each to the rank with the fewest tokens, until the budget is full;
    - ``workload``: no pass takes longer than a prompt as long as the budget, and ranks get equal predicted seconds;
    - ``workload:shortest``: the same, shortest remaining prompt first, except that prompts which have waited
      ``max_rounds`` passes go before all others.

    No prompt starves: the first three methods run the oldest waiting prompt in every pass, the last one the oldest
    that has waited ``max_rounds``. ``workload`` prices a rank's forward; see ``wlb.workload``.

    Raises ``UserError`` for an unknown method or sizes below 1.
    """

    workload: Costs
    token_budget: int
    method: Method = "workload"
    chunked: bool = True
    prompts_per_batch: int = 8
    max_rounds: int = 64

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"prefill method {self.method!r} is unknown; {choose_from(self.method, METHODS)}")
        for name in ("token_budget", "prompts_per_batch", "max_rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} must be at least 1")

    def plan(self, waiting: Sequence[Prompt], ranks: int = 1) -> list[ChunkBatch]:
        """The next batch of each of ``ranks`` ranks, from ``waiting`` in order of arrival.

        Raises ``UserError`` for a prompt over the budget without chunked prefill.
        """
        if waiting:
            self.check(max(waiting, key=lambda prompt: prompt.tokens))
        order = self._shortest_first(waiting) if self.method == "workload:shortest" else list(waiting)
        batches = [_OpenBatch() for _ in range(ranks)]
        if self._by_seconds and not self.chunked:
            self._place_whole(order, batches)
        else:
            self._fill(order, batches)
        return [batch.chunks for batch in batches]

    def batch_seconds(self, batch: Sequence[Chunk]) -> float:
        """Predicted seconds of one rank's part of a pass; 0 if empty."""
        if not batch:
            return 0.0
        _, starts, stops = np.array(batch, np.int64).T
        attention = self.workload.piece_seconds(starts, stops, "forward").sum()
        return float(attention + self.workload.linear_seconds((stops - starts).sum(), "forward"))

    @property
    def _by_seconds(self) -> bool:
        return self.method.startswith("workload")

    @cached_property
    def _seconds_budget(self) -> float:
        """Seconds of a prompt as long as the token budget."""
        return self.batch_seconds([Chunk(0, 0, self.token_budget)])

    def check(self, prompt: Prompt) -> None:
        """Raise ``UserError`` for a prompt that cannot be prefilled."""
        if not self.chunked and prompt.tokens > self.token_budget:
            raise UserError(
                f"prompt {prompt.number} has {prompt.tokens} tokens, over the token budget {self.token_budget}; "
                "raise the budget or turn chunked prefill on"
            )

    def _shortest_first(self, waiting: Sequence[Prompt]) -> list[Prompt]:
        overdue = [prompt for prompt in waiting if prompt.rounds >= self.max_rounds]
        others = [prompt for prompt in waiting if prompt.rounds < self.max_rounds]
        starts, stops = (np.array([row[column] for row in others], np.int64) for column in (2, 1))
        remaining = self.workload.piece_seconds(starts, stops, "forward") + self._token_seconds * (stops - starts)
        return overdue + [others[index] for index in np.argsort(remaining, kind="stable")]

    @cached_property
    def _token_seconds(self) -> float:
        """Seconds of a token outside attention."""
        return float(self.workload.linear_seconds(self.token_budget, "forward")) / self.token_budget

    def _fill(self, order: Sequence[Prompt], batches: list[_OpenBatch]) -> None:
        """Give each prompt in turn to the lightest rank that takes any of it, until one fits nowhere."""
        for prompt in order:
            places = batches if prompt.rank is None else [batches[prompt.rank]]
            for batch in sorted(places, key=self._load):  # nearly always the first
                if tokens := self._fitting(prompt, batch):
                    self._add(prompt, tokens, batch)
                    break
            else:
                if prompt.rank is None:
                    return  # no prompt overtakes another

    def _place_whole(self, order: Sequence[Prompt], batches: list[_OpenBatch]) -> None:
        """Take the first prompt and the most similar ones that fit on all ranks; longest first to the lightest rank."""
        capacity = len(batches) * self.token_budget
        if not order:
            return
        first, *others = _up_to(order, _SIMILAR_FROM * capacity)
        if self.method == "workload":
            others.sort(key=lambda prompt: abs(np.log(prompt.tokens / first.tokens)))
        chosen = _up_to(others, capacity - first.tokens)
        for prompt in [first, *sorted(chosen, key=lambda prompt: -prompt.tokens)]:
            fits = [batch for batch in batches if batch.tokens + prompt.tokens <= self.token_budget]
            if fits:
                self._add(prompt, prompt.tokens, min(fits, key=self._load))

    def _load(self, batch: _OpenBatch) -> float:
        if self.method == "count":
            return len(batch.chunks)
        if self.method == "tokens":
            return batch.tokens
        return batch.attention_seconds + self._token_seconds * batch.tokens

    def _fitting(self, prompt: Prompt, batch: _OpenBatch) -> int:
        """How many tokens of ``prompt`` the batch still takes."""
        left, room = prompt.tokens - prompt.done, self.token_budget - batch.tokens
        if self.method == "count" and len(batch.chunks) >= self.prompts_per_batch:
            return 0
        if not self.chunked:
            return left if left <= room else 0
        return self._within_seconds(prompt, min(left, room), batch) if self._by_seconds else min(left, room)

    def _within_seconds(self, prompt: Prompt, most: int, batch: _OpenBatch) -> int:
        """The most tokens within the seconds of a pass, in whole tiles or to the prompt's end; at least one tile."""
        if most == 0:
            return 0
        sizes = np.append(np.arange(QUERY_TILE, most, QUERY_TILE), most)
        attention = self.workload.piece_seconds(np.full_like(sizes, prompt.done), prompt.done + sizes, "forward")
        linear = self.workload.linear_seconds(batch.tokens + sizes, "forward")
        fitting = sizes[batch.attention_seconds + attention + linear <= self._seconds_budget]
        if fitting.size:
            return int(fitting[-1])
        return 0 if batch.chunks else int(sizes[0])

    def _add(self, prompt: Prompt, tokens: int, batch: _OpenBatch) -> None:
        chunk = Chunk(prompt.number, prompt.done, prompt.done + tokens)
        batch.chunks.append(chunk)
        batch.tokens += tokens
        batch.attention_seconds += float(self.workload.piece_seconds(chunk.start, chunk.stop, "forward"))


def poisson_arrivals(prompts: int, rate: float, seed: int = 0) -> NDArray[np.float64]:
    """Arrival times in seconds of ``prompts`` prompts, ``rate`` per second on average; shape (prompts,), ascending."""
    if not rate > 0:
        raise UserError(f"the arrival rate must be positive, got {rate} prompts a second")
    gaps: NDArray[np.float64] = np.random.default_rng(seed).exponential(1 / rate, prompts)
    return np.cumsum(gaps)


def _up_to(prompts: Sequence[Prompt], tokens: int) -> list[Prompt]:
    """The leading prompts that hold at most ``tokens`` tokens together."""
    ends = np.cumsum([prompt.tokens for prompt in prompts])
    return list(prompts[: int(np.searchsorted(ends, tokens, side="right"))])
