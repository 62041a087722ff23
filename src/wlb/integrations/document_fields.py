"""Reads the token ids of a document, and which of them it learns.

A document is an array of token ids, or a dictionary with ``input_ids`` as in a data set. A token is not learnt where
``labels`` is -100, or where ``completion_mask``, ``loss_mask`` or ``assistant_masks`` is 0. Labels are not shifted.
``attention_mask`` is 0 for padding at either end, which is cut off. ``position_ids`` must count from 0. A field may be
None. Text, single numbers, and lists or dictionaries of text are ignored. Any other field is refused, because packing
would lose it.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from wlb.errors import UserError
from wlb.runtime.loss import IGNORE_LABEL

Document = Sequence[int] | NDArray[Any] | Tensor | Mapping[str, Any]

LOSS_MASKS = ("completion_mask", "loss_mask", "assistant_masks")
_OF_TOKENS = ("input_ids", "labels", "attention_mask", "position_ids", *LOSS_MASKS)
FIELDS = (*_OF_TOKENS, "length", "lengths")
_MARKED, _MARKED_TOKENS = 64, 16  # documents that processes and states compare, and tokens of each of them


def check_documents(documents: Any, name: str) -> None:
    """Raise ``UserError`` unless ``documents`` is a sequence or stream of documents: for a path, function or loader."""
    kind = type(documents).__name__
    is_iterable, is_indexed = hasattr(documents, "__iter__"), hasattr(documents, "__getitem__")
    if isinstance(documents, Mapping):
        names = ", ".join(map(str, documents))
        what, remedy = f"a {kind} of {names}", "one split, or Dataset.from_dict(...) of columns"
    elif isinstance(documents, str | Path):
        what, remedy = f"the path {documents}", 'datasets.load_dataset("json", data_files=...)["train"], tokenised'
    elif callable(documents) and not is_iterable and not is_indexed:
        what, remedy = f"the function {getattr(documents, '__name__', kind)}", "its result"
    elif not is_indexed and (hasattr(documents, "__len__") or not is_iterable):
        what, remedy = f"of type {kind}", "a list or an iterator of single documents, or a loader's data set"
    else:
        return
    raise UserError(f"{name} is {what}, not a sequence of documents; give {remedy}")


def ids_and_labels(document: Document, name: str = "a document") -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids of ``document`` without padding, and their labels: the tokens themselves, or -100. Both (tokens,).

    Raises ``UserError`` for an empty document, negative ids, and fields that disagree or that packing would lose.
    """
    fields = document if isinstance(document, Mapping) else {"input_ids": document}
    _check_fields(fields, name)
    given = {field: _numbers(fields[field], field, name) for field in _OF_TOKENS if fields.get(field) is not None}
    for field, values in given.items():
        if len(values) != (tokens := len(given["input_ids"])):
            raise UserError(f"{name} has {tokens} input_ids and {len(values)} {field}; give equally many")
        if field.endswith(("_mask", "_masks")) and len(wrong := values[(values < 0) | (values > 1)]):
            raise UserError(f"{name} has {field} with the value {wrong[0]}; give 0 or 1 for each token")
    (places,) = given.get("attention_mask", np.ones(tokens)).nonzero()
    if len(places) and places[-1] - places[0] >= len(places):
        raise UserError(f"{name} has attention_mask zeros between its tokens; only padding at the ends can be cut off")
    kept = slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0)
    given = {field: values[kept] for field, values in given.items()}
    ids, labels = given["input_ids"], given.get("labels", given["input_ids"]).copy()
    for mask in LOSS_MASKS:
        if mask in given:
            labels[given[mask] == 0] = IGNORE_LABEL
    if len(ids) == 0:
        raise UserError(f"{name} has no tokens; leave empty documents out")
    for what, numbers in (("input_ids", ids), ("labels", labels[labels != IGNORE_LABEL])):
        if numbers.min(initial=0) < 0:
            raise UserError(f"{name} has {numbers.min()} in {what}; give token ids, and -100 for tokens not to learn")
    if "labels" in given:
        learnt = labels != IGNORE_LABEL
        shifted = learnt[:-1].any() and np.array_equal(labels[:-1][learnt[:-1]], ids[1:][learnt[:-1]])
        if shifted and not np.array_equal(labels[learnt], ids[learnt]):
            raise UserError(f"{name} has labels shifted to the next token; give the label of a token at its own place")
    if not np.array_equal(given.get("position_ids", np.arange(len(ids))), np.arange(len(ids))):
        raise UserError(f"{name} has position_ids that do not count from 0; give single documents without them")
    return ids, labels


def token_count(document: Document, name: str = "a document") -> int:
    """Tokens of ``document`` without padding. Raises ``UserError`` for fields that packing would lose."""
    if (kind := type(document).__name__) == "str" or not hasattr(document, "__len__"):
        raise UserError(f"{name} is of type {kind}; give token ids, or a dictionary with input_ids")
    if not isinstance(document, Mapping):
        return len(document)
    _check_fields(document, name)
    padded = document.get("attention_mask") is not None
    return len(ids_and_labels(document, name)[0]) if padded else len(document["input_ids"])


def mark_of(ids: NDArray[Any]) -> int:
    """A checksum of up to 16 evenly spaced token ids of a document, with the first and the last; 32 bits."""
    return zlib.crc32(ids[_spaced(len(ids), _MARKED_TOKENS)].astype("<i8").tobytes())


def marks_of_some(read: Callable[[int], Document], lengths: NDArray[np.int64]) -> list[int]:
    """Marks of up to 64 documents, evenly spaced. Raises ``UserError`` if they do not have ``lengths`` tokens."""
    marks = []
    for number in _spaced(len(lengths), _MARKED).tolist():
        ids, _ = ids_and_labels(read(number), f"document {number}")
        if len(ids) != lengths[number]:
            one = f"document {number} has {len(ids)} tokens, and lengths say {lengths[number]}"
            raise UserError(f"{one}; give the lengths of this data set, in its order")
        marks.append(mark_of(ids))
    return marks


def _spaced(count: int, most: int) -> NDArray[np.int64]:
    """Up to ``most`` of the numbers below ``count``, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _check_fields(fields: Mapping[str, Any], name: str) -> None:
    if fields.get("input_ids") is None:
        others = ", ".join(field for field in fields if fields[field] is not None)
        raise UserError(f"{name} has no input_ids, only {others or 'empty fields'}; tokenise it first")
    for field in fields:
        if field not in FIELDS and _may_be_input(fields[field]):
            remedy = "remove the column if the model does not need it, or train such data without wlb"
            raise UserError(f"{name} has {field}, which packing would lose; {remedy}")


def _may_be_input(value: Any) -> bool:
    """Whether ``value`` could be a tensor for the model; text and single numbers could not."""
    if value is None or isinstance(value, (str, Number, np.bool_)) or getattr(value, "ndim", None) == 0:
        return False
    if isinstance(value, Mapping):
        return any(map(_may_be_input, value.values()))
    if isinstance(value, (list, tuple)):
        return any(isinstance(part, (Number, np.bool_)) or _may_be_input(part) for part in value)
    return True


def _numbers(value: Any, field: str, name: str) -> NDArray[np.int64]:
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    except ValueError:
        raise UserError(f"{name} has rows of different lengths in {field}; give one number for each token") from None
    if array.ndim != 1:
        raise UserError(f"{name} has {field} of shape {array.shape}; give one number for each token")
    if array.size and array.dtype.kind not in "iub":
        raise UserError(f"{name} has {field} of type {array.dtype}; give whole numbers")
    return array.astype(np.int64, copy=False)
