"""Measured seconds over lengths and token counts: a JSON file, and how it is read.

``WorkloadProfile`` is the file, ``MeasuredSeconds`` the prices that pass through its measurements. Attention is
interpolated as seconds per token, which is a straight line between two lengths if attention costs a d^2 + b d; the
linear part is interpolated as it is. Beyond the longest measurement attention grows with the attended pairs and the
linear part with the tokens; below the shortest both are proportional. ``PrefixTable`` prices queries over the keys
before them: bilinearly between measurements, which is exact for any a q k + b q + c k + d of q queries and k keys, and
in proportion beyond them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from wlb.errors import UserError
from wlb.files import replace_text
from wlb.workload.base import Phase, Seconds
from wlb.workload.shapes import ModelShape

# Knot of the tables beyond every document: extrapolation becomes interpolation.
_FAR = 2.0**40

PositiveInt = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Measurements(BaseModel):
    """Seconds, over all layers on one GPU, at increasing sizes (tokens)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: Annotated[tuple[PositiveInt, ...], Field(min_length=2)]
    forward_seconds: tuple[PositiveSeconds, ...]
    backward_seconds: tuple[PositiveSeconds, ...]

    @model_validator(mode="after")
    def _check(self) -> Measurements:
        _check_increasing("tokens", self.tokens)
        for name in ("forward_seconds", "backward_seconds"):
            count = len(getattr(self, name))
            if count != len(self.tokens):
                raise ValueError(f"{name} has {count} values for {len(self.tokens)} token counts")
        return self


class PrefixMeasurements(BaseModel):
    """Seconds, over all layers on one GPU, of queries that attend keys which all come before them.

    Rows are numbers of queries, columns numbers of keys (tokens, both increasing).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    queries: Annotated[tuple[PositiveInt, ...], Field(min_length=2)]
    keys: Annotated[tuple[PositiveInt, ...], Field(min_length=2)]
    forward_seconds: tuple[tuple[PositiveSeconds, ...], ...]
    backward_seconds: tuple[tuple[PositiveSeconds, ...], ...]

    @model_validator(mode="after")
    def _check(self) -> PrefixMeasurements:
        for name in ("queries", "keys"):
            _check_increasing(name, getattr(self, name))
        for name in ("forward_seconds", "backward_seconds"):
            rows = getattr(self, name)
            if len(rows) != len(self.queries) or any(len(row) != len(self.keys) for row in rows):
                raise ValueError(
                    f"{name} must have {len(self.queries)} rows (queries) of {len(self.keys)} values (keys)"
                )
        return self

    def table(self) -> PrefixTable:
        """Prices that pass through the measurements."""
        return prefix_table(self.queries, self.keys, np.array(self.forward_seconds), np.array(self.backward_seconds))


class WorkloadProfile(BaseModel):
    """A measured profile file; unknown fields are refused.

    ``attention`` has one document of each length, ``linear`` one micro-batch of each number of tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["wlb-workload-profile"] = "wlb-workload-profile"
    version: Literal[2] = 2
    machine: Annotated[str, Field(min_length=1)]
    versions: dict[str, str]
    dtype: Annotated[str, Field(min_length=1)]
    clock: Annotated[str, Field(min_length=1)]
    threads: PositiveInt  # of the CPU
    model: ModelShape
    tp: PositiveInt = 1
    cp: Literal[1] = 1
    attention: Measurements
    linear: Measurements
    prefix_attention: PrefixMeasurements

    def check(self, shape: ModelShape) -> None:
        """Raise ``UserError`` unless a model of ``shape``, with any vocabulary, has these prices."""
        ours, theirs = (replace(one, vocab_size=1) for one in (shape, self.model))
        if ours != theirs:
            measured, asked = vars(theirs), vars(ours)
            differing = ", ".join(
                f"{name} {measured[name]}, not {asked[name]}" for name in asked if measured[name] != asked[name]
            )
            raise UserError(
                f"the profile was measured with another model ({differing}); measure one of the job's model"
            )

    def seconds(self) -> MeasuredSeconds:
        """Prices that pass through the measurements."""
        attention_tokens = np.array(self.attention.tokens, dtype=np.float64)
        linear_tokens = np.array(self.linear.tokens, dtype=np.float64)
        attention = [_rates(attention_tokens, s) for s in _phases(self.attention)]
        linear = [_totals(linear_tokens, s) for s in _phases(self.linear)]
        return MeasuredSeconds(
            attention_tokens=np.append(attention_tokens, _FAR),
            attention_rates=_by_phase(*attention),
            linear_tokens=np.concatenate([[0.0], linear_tokens, [_FAR]]),
            linear_totals=_by_phase(*linear),
            prefix_attention=self.prefix_attention.table(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTable:
    """Measured seconds of queries over keys that all come before them, of every phase; ``prefix_table`` makes it.

    Fewer queries than were measured cost as much as the fewest: kernels work on tiles, and a tile that is not full
    takes as long as a full one.
    """

    queries: NDArray[np.float64]  # (query knots,)
    keys: NDArray[np.float64]  # (key knots,)
    seconds: dict[Phase, NDArray[np.float64]]  # (query knots, key knots) each

    def price(self, queries: ArrayLike, keys: ArrayLike, phase: Phase) -> Seconds:
        """Seconds of ``queries`` tokens over ``keys`` tokens; the shape that both broadcast to."""
        q, k = (np.asarray(tokens, dtype=np.float64) for tokens in (queries, keys))
        row, down = _between(self.queries, np.maximum(q, self.queries[0]))
        column, right = _between(self.keys, k)
        table = self.seconds[phase]
        above = (1 - right) * table[row, column] + right * table[row, column + 1]
        below = (1 - right) * table[row + 1, column] + right * table[row + 1, column + 1]
        return np.where(q > 0, (1 - down) * above + down * below, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSeconds:
    """Measured seconds of one GPU, interpolated."""

    attention_tokens: NDArray[np.float64]  # (knots,)
    attention_rates: dict[Phase, NDArray[np.float64]]  # seconds per token of a document, (knots,) each
    linear_tokens: NDArray[np.float64]  # (knots,)
    linear_totals: dict[Phase, NDArray[np.float64]]  # seconds, (knots,) each
    prefix_attention: PrefixTable

    def attention_seconds(self, lengths: ArrayLike, phase: Phase = "both") -> Seconds:
        """W_a of each document alone; shape of ``lengths`` (tokens)."""
        d = np.asarray(lengths, dtype=np.float64)
        seconds: Seconds = d * np.interp(d, self.attention_tokens, self.attention_rates[phase])
        return seconds

    def piece_seconds(self, starts: ArrayLike, stops: ArrayLike, phase: Phase = "both") -> Seconds:
        """Attention of each piece of a document: queries ``starts`` to ``stops``, keys 0 to ``stops`` (tokens).

        As context-parallel ranks run it: W_a of the piece alone, and what its queries cost over the keys before it.
        """
        start, stop = np.asarray(starts), np.asarray(stops)
        alone = self.attention_seconds(stop - start, phase)
        return alone + self.prefix_attention.price(stop - start, start, phase)

    def linear_seconds(self, tokens: ArrayLike, phase: Phase = "both") -> Seconds:
        """W_l of micro-batches of ``tokens`` tokens; shape of ``tokens``."""
        count = np.asarray(tokens, dtype=np.float64)
        return np.asarray(np.interp(count, self.linear_tokens, self.linear_totals[phase]))

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        """W_a plus W_l at the rate of the largest micro-batch measured; shape of ``lengths``."""
        d = np.asarray(lengths, dtype=np.float64)
        token_seconds = self.linear_totals["both"][-1] / _FAR
        rates = np.interp(d, self.attention_tokens, self.attention_rates["both"])
        seconds: Seconds = d * (rates + token_seconds)
        return seconds


def prefix_table(
    queries: ArrayLike, keys: ArrayLike, forward: NDArray[np.float64], backward: NDArray[np.float64]
) -> PrefixTable:
    """A table of measured seconds, raised where noise made more work look cheaper."""
    q, k = (np.asarray(tokens, dtype=np.float64) for tokens in (queries, keys))
    seconds = _by_phase(_extend(forward, q, k), _extend(backward, q, k))
    return PrefixTable(np.append(q, _FAR), np.concatenate([[0.0], k, [_FAR]]), seconds)


def read_profile(path: str | Path) -> WorkloadProfile:
    """Read and validate a profile, alone in its file or as ``profile`` in a benchmark's results.

    Raises ``UserError`` that names the file and its first mistake.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"profile {path} does not exist; measure one with: wlb profile --out {path}") from None
    except UnicodeDecodeError:
        raise UserError(f"profile {path} cannot be read: it is not text") from None
    except OSError as error:
        raise UserError(f"profile {path} cannot be read: {error.strerror}") from None
    try:
        return WorkloadProfile.model_validate_json(_profile_in(text))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise UserError(f"profile {path}: {where + ': ' if where else ''}{problem['msg']}") from None


def _profile_in(text: str) -> str:
    try:
        content = json.loads(text)
    except ValueError:
        return text  # validation says where it is no JSON
    return json.dumps(content["profile"]) if isinstance(content, dict) and "profile" in content else text


def write_profile(profile: WorkloadProfile, path: str | Path) -> None:
    """Write ``profile`` to ``path``, whole or not at all; raises ``UserError`` where that is not possible."""
    try:
        replace_text(Path(path), profile.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise UserError(f"profile {path} cannot be written: {error.strerror}") from None


def _check_increasing(name: str, sizes: Sequence[int]) -> None:
    if any(later <= earlier for earlier, later in pairwise(sizes)):
        raise ValueError(f"{name} must increase from one measurement to the next")


def _phases(measurements: Measurements) -> tuple[Sequence[float], Sequence[float]]:
    return measurements.forward_seconds, measurements.backward_seconds


def _by_phase(forward: NDArray[np.float64], backward: NDArray[np.float64]) -> dict[Phase, NDArray[np.float64]]:
    return {"forward": forward, "backward": backward, "both": forward + backward}


def _rates(tokens: NDArray[np.float64], seconds: Sequence[float]) -> NDArray[np.float64]:
    """Attention seconds per token, never falling with length.

    A short document that was measured to cost more per token than a longer one paid for a launch, which in a
    packed micro-batch it shares; it is priced like the longer one. Prices then grow strictly with length, and
    splitting a document never makes it dearer.
    """
    rates = np.array(seconds) / tokens
    rising = np.minimum.accumulate(rates[::-1])[::-1]
    far = rising[-1] * (_FAR + 1) / (tokens[-1] + 1)
    return np.append(rising, far)


def _totals(tokens: NDArray[np.float64], seconds: Sequence[float]) -> NDArray[np.float64]:
    """Linear seconds, never falling with tokens, from none for no tokens."""
    rising = np.maximum.accumulate(np.array(seconds))
    return np.concatenate([[0.0], rising, [rising[-1] * _FAR / tokens[-1]]])


def _extend(
    seconds: NDArray[np.float64], queries: NDArray[np.float64], keys: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Measured seconds, never falling with more work, with a column for no keys and knots far beyond all sizes."""
    rising = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
    far_keys = rising[:, -1:] * (_FAR / keys[-1])
    wide = np.concatenate([np.zeros((len(queries), 1)), rising, far_keys], axis=1)
    return np.concatenate([wide, wide[-1:] * (_FAR / queries[-1])])


def _between(knots: NDArray[np.float64], tokens: NDArray[np.float64]) -> tuple[NDArray[np.int64], Seconds]:
    """The knot before each value, and how far it is on the way to the next."""
    before = np.clip(np.searchsorted(knots, tokens, side="right") - 1, 0, len(knots) - 2)
    return before, (tokens - knots[before]) / (knots[before + 1] - knots[before])
