"""A measured workload profile: a JSON file, and prices interpolated between its measurements.

Attention is interpolated in seconds per token, which is linear in the length if attention costs a d^2 + b d; the linear
part is interpolated directly. Beyond the longest measurement attention grows with the attended pairs and the linear
part with the tokens; below the shortest both are proportional to tokens. Queries over earlier keys are interpolated
bilinearly, which is exact for a q k + b q + c k + d of q queries and k keys, and proportionally beyond measurements.
"""

import json
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import AfterValidator, Field, ValidationError, model_validator

from wlb.errors import UserError
from wlb.files import replace_text
from wlb.settings import PositiveInt, Section, main_problem
from wlb.workload.base import Phase, Seconds
from wlb.workload.shapes import ModelShape

# A knot beyond every document, so that extrapolation becomes interpolation.
_FAR = 2.0**40


def _increasing(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if any(later <= earlier for earlier, later in pairwise(sizes)):
        raise ValueError("sizes must increase from one measurement to the next")
    return sizes


Name = Annotated[str, Field(min_length=1)]
Sizes = Annotated[tuple[PositiveInt, ...], Field(min_length=2), AfterValidator(_increasing)]  # tokens
PositiveSeconds = Annotated[float, Field(gt=0)]
Array = NDArray[np.float64]


class _Interpolated:
    """What ``at_knots`` makes of the ``measured`` seconds of each phase, at knots of one or two sizes (tokens)."""

    def __init__(self, knots: tuple[Array, ...], measured: Any, at_knots: Callable[[Array], Array]) -> None:
        forward, backward = (at_knots(np.array(s)) for s in (measured.forward_seconds, measured.backward_seconds))
        self.knots = knots
        self.seconds: dict[Phase, Array] = {"forward": forward, "backward": backward, "both": forward + backward}

    def at(self, sizes: Array, phase: Phase) -> Seconds:
        """Interpolate between the knots of a single size; shape of ``sizes``."""
        return np.asarray(np.interp(sizes, self.knots[0], self.seconds[phase]))


class Measurements(Section):
    """Seconds, over all layers on one GPU, at increasing sizes (tokens)."""

    tokens: Sizes
    forward_seconds: tuple[PositiveSeconds, ...]
    backward_seconds: tuple[PositiveSeconds, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("forward_seconds", "backward_seconds"):
            if (count := len(getattr(self, name))) != len(self.tokens):
                raise ValueError(f"{name} has {count} values for {len(self.tokens)} token counts")
        return self


class PrefixMeasurements(Section):
    """Seconds, over all layers on one GPU, of queries that attend only earlier keys.

    Rows are numbers of queries, columns numbers of keys (tokens, both increasing).
    """

    queries: Sizes
    keys: Sizes
    forward_seconds: tuple[tuple[PositiveSeconds, ...], ...]
    backward_seconds: tuple[tuple[PositiveSeconds, ...], ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("forward_seconds", "backward_seconds"):
            if [len(row) for row in getattr(self, name)] != [len(self.keys)] * len(self.queries):
                raise ValueError(
                    f"{name} must have {len(self.queries)} rows (queries) of {len(self.keys)} values (keys)"
                )
        return self

    def price(self, queries: ArrayLike, keys: ArrayLike, phase: Phase) -> Seconds:
        """Seconds of ``queries`` tokens over ``keys`` tokens; the shape that both broadcast to.

        Fewer queries than the fewest measured cost the same: kernels work on tiles, and a partial tile takes as long as
        a full one.
        """
        query_knots, key_knots = self._table.knots
        q = np.asarray(queries, dtype=np.float64)
        row, down = _between(query_knots, np.maximum(q, query_knots[0]))
        column, right = _between(key_knots, np.asarray(keys, dtype=np.float64))
        table = self._table.seconds[phase]
        above = (1 - right) * table[row, column] + right * table[row, column + 1]
        below = (1 - right) * table[row + 1, column] + right * table[row + 1, column + 1]
        return np.where(q > 0, (1 - down) * above + down * below, 0.0)

    @cached_property
    def _table(self) -> _Interpolated:
        """Seconds that never fall with more queries or keys, despite noise."""
        queries, keys = (np.array(tokens, dtype=np.float64) for tokens in (self.queries, self.keys))

        def extended(seconds: Array) -> Array:
            rising = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
            far_keys = rising[:, -1:] * (_FAR / keys[-1])
            wide = np.concatenate([np.zeros((len(queries), 1)), rising, far_keys], axis=1)
            return np.concatenate([wide, wide[-1:] * (_FAR / queries[-1])])

        return _Interpolated((np.append(queries, _FAR), np.concatenate([[0.0], keys, [_FAR]])), self, extended)


class WorkloadProfile(Section):
    """A measured profile file, and its prices for one GPU; unknown fields are refused.

    ``attention`` has one document of each length, ``linear`` one micro-batch of each number of tokens.
    """

    format: Literal["wlb-workload-profile"] = "wlb-workload-profile"
    version: Literal[2] = 2
    machine: Name
    versions: dict[str, str]
    dtype: Name
    clock: Name
    threads: PositiveInt  # of the CPU
    model: ModelShape
    tp: PositiveInt = 1
    cp: Literal[1] = 1
    attention: Measurements
    linear: Measurements
    prefix_attention: PrefixMeasurements

    def check(self, shape: ModelShape) -> None:
        """Raise ``UserError`` unless the measured model has ``shape``, except for the vocabulary."""
        measured, asked = ({**vars(one), "vocab_size": None} for one in (self.model, shape))
        differing = [f"{name} {measured[name]}, not {asked[name]}" for name in asked if measured[name] != asked[name]]
        if differing:
            raise UserError(
                f"the profile was measured with another model ({', '.join(differing)}); measure one of the job's model"
            )

    def attention_seconds(self, lengths: ArrayLike, phase: Phase = "both") -> Seconds:
        """W_a of each document alone; shape of ``lengths`` (tokens)."""
        d = np.asarray(lengths, dtype=np.float64)
        return d * self._attention_rates.at(d, phase)

    def piece_seconds(self, starts: ArrayLike, stops: ArrayLike, phase: Phase = "both") -> Seconds:
        """Attention of each piece of a document: queries ``starts`` to ``stops``, keys 0 to ``stops`` (tokens).

        As context-parallel ranks run it: W_a of the piece alone, plus its queries over the earlier keys.
        """
        start, stop = np.asarray(starts), np.asarray(stops)
        alone = self.attention_seconds(stop - start, phase)
        return alone + self.prefix_attention.price(stop - start, start, phase)

    def linear_seconds(self, tokens: ArrayLike, phase: Phase = "both") -> Seconds:
        """W_l of micro-batches of ``tokens`` tokens; shape of ``tokens``."""
        return self._linear_totals.at(np.asarray(tokens, dtype=np.float64), phase)

    @cached_property
    def _attention_rates(self) -> _Interpolated:
        """Seconds per token, which never fall with the length of a document.

        A short document may have cost more per token than a longer one because of a kernel launch, which documents of a
        packed micro-batch share; it is priced like the longer one. Prices then grow strictly with length, and splitting
        a document never makes it more expensive.
        """
        tokens = np.array(self.attention.tokens, dtype=np.float64)

        def rates(seconds: Array) -> Array:
            rising = np.minimum.accumulate((seconds / tokens)[::-1])[::-1]
            return np.append(rising, rising[-1] * (_FAR + 1) / (tokens[-1] + 1))

        return _Interpolated((np.append(tokens, _FAR),), self.attention, rates)

    @cached_property
    def _linear_totals(self) -> _Interpolated:
        """Seconds that never fall with the tokens of a micro-batch; 0 for no tokens."""
        tokens = np.array(self.linear.tokens, dtype=np.float64)

        def totals(seconds: Array) -> Array:
            rising = np.maximum.accumulate(seconds)
            return np.concatenate([[0.0], rising, [rising[-1] * _FAR / tokens[-1]]])

        return _Interpolated((np.concatenate([[0.0], tokens, [_FAR]]),), self.linear, totals)


def read_profile(path: str | Path) -> WorkloadProfile:
    """Read and validate a profile, from a file of its own or from ``profile`` in the results of a benchmark.

    Raises ``UserError`` that names the file and its first mistake.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"profile {path} does not exist; measure one with: wlb profile --out {path}") from None
    except OSError as error:
        raise UserError(f"profile {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"profile {path} is not valid JSON: {error}; wlb profile writes one") from None
    try:
        return WorkloadProfile.model_validate(content.get("profile", content) if isinstance(content, dict) else content)
    except ValidationError as error:
        problem = main_problem(error)
        mistake = ": ".join(filter(None, [".".join(problem.where), problem.what]))
        raise UserError(f"profile {path}: {mistake}; wlb profile writes one") from None


def write_profile(profile: WorkloadProfile, path: str | Path) -> None:
    """Write ``profile`` to ``path`` atomically; raises ``UserError`` if that is not possible."""
    try:
        replace_text(Path(path), profile.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise UserError(f"profile {path} cannot be written: {error.strerror}") from None


def _between(knots: Array, tokens: Array) -> tuple[NDArray[np.int64], Seconds]:
    """The knot before each value, and its relative distance to the next one."""
    before = np.clip(np.searchsorted(knots, tokens, side="right") - 1, 0, len(knots) - 2)
    return before, (tokens - knots[before]) / (knots[before + 1] - knots[before])
