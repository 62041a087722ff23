"""Reads the lengths of documents from batches of many kinds."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError

Lengths = NDArray[np.int64]

_FIELDS = {
    "ends": ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens"),
    "lengths": ("segment_lengths",),
    "positions": ("position_ids", "positions"),
    "mask": ("attention_mask",),
    "tokens": ("input_ids", "tokens", "input", "inputs"),
}


def fields_of(batch: Any) -> dict[str, Any]:
    """The fields of a batch that tell its document lengths; a batch is a dictionary, an object, or a tuple of these.

    Of the tokens it returns the shape. It ignores fields with more dimensions, such as image positions and pair masks.
    """
    if isinstance(batch, tuple | list):
        return next(filter(None, map(fields_of, batch)), {})
    if hasattr(batch, "dtype"):
        batch = {"tokens": batch}
    of = batch.get if isinstance(batch, Mapping) else lambda name: getattr(batch, name, None)
    named = ((kind, of(name)) for kind, names in _FIELDS.items() for name in reversed(names))
    found = {kind: value for kind, value in named if value is not None and getattr(value, "ndim", 1) <= 2}
    if "tokens" in found:
        found["tokens"] = np.shape(found["tokens"])
    packed = of("packed_seq_params")  # Megatron-Core's
    return found if packed is None else found | fields_of(packed)


def lengths_of(fields: Mapping[str, Any]) -> tuple[Lengths, Lengths]:
    """Tokens of each document with and without padding, from the result of ``fields_of``.

    A row with one document counts in full width; padding behind several documents counts as one more document. Raises
    ``UserError`` if no field tells the lengths.
    """
    arrays = {kind: np.atleast_2d(fields[kind]) for kind in ("positions", "mask") if kind in fields}
    shape = next(((1, *one)[-2:] for one in (fields.get("tokens"), *(a.shape for a in arrays.values())) if one), ())
    if "ends" in fields or "lengths" in fields:
        own = np.diff(np.ravel(fields["ends"])) if "ends" in fields else np.asarray(fields["lengths"])
        rows = [(own[own > 0], int(np.prod(shape)) if shape else int(own.sum()))]
    elif shape:
        places = np.broadcast_to(arrays.get("positions", np.arange(shape[1])), shape)
        mask = arrays.get("mask", np.ones(shape))
        kept = mask.astype(bool) if mask.shape == shape else np.ones(shape, bool)
        rows = [(_between_restarts(row[of_row]), shape[1]) for row, of_row in zip(places, kept, strict=True)]
    else:
        names = ", ".join(chain(*_FIELDS.values()))
        raise UserError(
            f"the batch has none of {names} to tell document lengths; give lengths, a function of the batch"
        )
    computed = [[width] if len(own) <= 1 else [*own, *filter(None, [width - own.sum()])] for own, width in rows]
    return np.array([length for row in computed for length in row], np.int64), np.concatenate([own for own, _ in rows])


def _between_restarts(positions: Lengths) -> Lengths:
    return np.diff(np.flatnonzero(np.diff(positions, prepend=positions[:1]) <= 0), append=len(positions))
