"""What is trained of a document: its token ids, and which of them are to be learnt.

Documents are arrays of token ids, or dictionaries with ``input_ids`` as data sets have them. Every adapter reads them
here, so the collator and ``packed_batches`` learn the same tokens. Of a dictionary's other fields

- ``labels`` are as long as ``input_ids``, and -100 where a token is not to be learnt;
- ``completion_mask``, ``loss_mask`` and ``assistant_masks`` have a 1 for each token to be learnt and a 0 for others;
- ``attention_mask`` has a 0 for padding at the beginning or the end, which is cut off;
- ``position_ids`` must count from 0, as they do in any packed document.

Where there are several, a token is trained only if all of them allow it. Fields that are None count as absent. Text,
single numbers, and lists or dictionaries of text are not model input, and are ignored. Everything else is refused,
because packing would lose it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from wlb.errors import UserError
from wlb.runtime.batch import IGNORE_LABEL

Document = Sequence[int] | NDArray[Any] | Tensor | Mapping[str, Any]

LOSS_MASKS = ("completion_mask", "loss_mask", "assistant_masks")
FIELDS = ("input_ids", "labels", "attention_mask", "position_ids", "length", "lengths", *LOSS_MASKS)

_REMEDY = "remove the column where the model does not need it, else train such data without wlb"


def check_documents(documents: Any, name: str) -> None:
    """Raise ``UserError`` for a dictionary or a function in place of a sequence or stream of documents."""
    if isinstance(documents, Mapping):
        raise UserError(
            f"{name} is a {type(documents).__name__} of {', '.join(map(str, documents))}, and not a sequence of "
            "documents; give one of its splits, or of its columns datasets.Dataset.from_dict(...)"
        )
    if callable(documents) and not hasattr(documents, "__iter__") and not hasattr(documents, "__getitem__"):
        raise UserError(f"{name} is the function {getattr(documents, '__name__', documents)}; give what it returns")


def ids_and_labels(document: Document, name: str = "a document") -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids of ``document`` without padding, and their labels: the tokens themselves, or -100. Both (tokens,).

    Raises ``UserError``, calling the document ``name``, for fields that disagree or would be lost, for no tokens, and
    for negative ids.
    """
    fields = document if isinstance(document, Mapping) else {"input_ids": document}
    _check_fields(fields, name)
    ids = _whole_numbers(fields["input_ids"], "input_ids", name)
    labels = ids.copy()
    if (own := _as_long(fields, "labels", ids, name)) is not None:
        labels = own.copy()
    for mask in LOSS_MASKS:
        if (learnt := _flags(fields, mask, ids, name)) is not None:
            labels[~learnt] = IGNORE_LABEL
    kept = _without_padding(_flags(fields, "attention_mask", ids, name), name)
    if len(ids[kept]) == 0:
        raise UserError(f"{name} has no tokens; leave empty documents out")
    learnt_ids = labels[kept][labels[kept] != IGNORE_LABEL]
    for what, numbers in (("input_ids", ids[kept]), ("labels", learnt_ids)):
        if numbers.min(initial=0) < 0:
            raise UserError(f"{name} has {what} with {numbers.min()}; give token ids, and -100 for what is not learnt")
    positions = _as_long(fields, "position_ids", ids, name)
    if positions is not None and not np.array_equal(positions[kept], np.arange(len(ids[kept]))):
        raise UserError(
            f"{name} has position_ids that do not count from 0, as if it were several documents; give each document by "
            "itself, and no position_ids"
        )
    return ids[kept], labels[kept]


def token_count(document: Document, name: str = "a document") -> int:
    """Tokens of ``document`` without padding: its length for a planner. Raises ``UserError`` for lost fields."""
    if not isinstance(document, Mapping):
        return len(document)
    _check_fields(document, name)
    padded = document.get("attention_mask") is not None
    return len(ids_and_labels(document, name)[0]) if padded else len(document["input_ids"])


def chooses_labels(document: Document) -> bool:
    """Whether a field of ``document`` says which of its tokens are learnt; all but the first are otherwise."""
    return isinstance(document, Mapping) and any(document.get(name) is not None for name in ("labels", *LOSS_MASKS))


def _check_fields(fields: Mapping[str, Any], name: str) -> None:
    if fields.get("input_ids") is None:
        others = ", ".join(field for field in fields if fields[field] is not None)
        raise UserError(f"{name} has no input_ids, only {others or 'empty fields'}; tokenise it first")
    for field in fields:
        if field not in FIELDS and _may_be_input(fields[field]):
            raise UserError(f"{name} has {field}, which packed micro-batches would lose; {_REMEDY}")


def _may_be_input(value: Any) -> bool:
    """Whether a model could take ``value`` as a tensor; text and single numbers it could not."""
    if value is None or isinstance(value, (str, Number, np.bool_)) or getattr(value, "ndim", None) == 0:
        return False
    if isinstance(value, Mapping):
        return any(map(_may_be_input, value.values()))
    if isinstance(value, (list, tuple)):
        return any(isinstance(part, (Number, np.bool_)) or _may_be_input(part) for part in value)
    return True


def _whole_numbers(value: Any, field: str, name: str) -> NDArray[np.int64]:
    array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    if array.ndim != 1:
        raise UserError(f"{name} has {field} of shape {array.shape}; give one number for each token")
    if array.size and array.dtype.kind not in "iub":
        raise UserError(f"{name} has {field} of type {array.dtype}; give whole numbers")
    return array.astype(np.int64, copy=False)


def _as_long(fields: Mapping[str, Any], field: str, ids: NDArray[Any], name: str) -> NDArray[np.int64] | None:
    """The values of a field, one for each of ``ids``; None where it is absent."""
    if fields.get(field) is None:
        return None
    values = _whole_numbers(fields[field], field, name)
    if len(values) != len(ids):
        raise UserError(f"{name} has {len(ids)} input_ids and {len(values)} {field}; give as many of both")
    return values


def _flags(fields: Mapping[str, Any], field: str, ids: NDArray[Any], name: str) -> NDArray[np.bool_] | None:
    values = _as_long(fields, field, ids, name)
    if values is None:
        return None
    if len(values) and not 0 <= values.min() <= values.max() <= 1:
        wrong = values.min() if values.min() < 0 else values.max()
        raise UserError(f"{name} has {field} with the value {wrong}; give 0 or 1 for each token")
    return values.astype(np.bool_)


def _without_padding(attended: NDArray[np.bool_] | None, name: str) -> slice:
    """The tokens that are no padding. Raises ``UserError`` where they do not lie together."""
    if attended is None:
        return slice(None)
    (places,) = attended.nonzero()
    if len(places) == 0:
        return slice(0)
    if places[-1] - places[0] >= len(places):
        raise UserError(
            f"{name} has an attention_mask with zeros between its tokens; only padding at either end can be cut off"
        )
    return slice(int(places[0]), int(places[-1]) + 1)
