"""Reads the tokens of a planned micro-batch from a token store.

A plan numbers documents as ``epoch * documents_in_store + index_in_store``; the store has them by the index.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from wlb.attention.slices import SliceOf
from wlb.documents.segments import Segment
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.packing.plan import MicroBatch
from wlb.runtime.batch import Batch
from wlb.runtime.loss import IGNORE_LABEL

_REQUESTS = 16  # simultaneous requests of a rank to a server of token stores

_T = TypeVar("_T")


class TokenSource(Protocol):
    """The part of a token store that a batch needs; ``lengths_of`` returns the tokens of each given document."""

    def __len__(self) -> int: ...

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]: ...

    def read(self, document: int, start: int = 0, length: int | None = None) -> NDArray[Any]: ...

    def loss_mask(self, document: int, start: int, length: int) -> NDArray[np.bool_] | None: ...


def make_batch(micro_batch: MicroBatch, store: TokenSource) -> Batch:
    """Read a micro-batch's tokens.

    The label of a token is the next token of its document, even if the segment ends before the document. The last token
    of a document has no label, nor has a token whose next token the loss mask leaves out. A micro-batch without
    segments becomes one token without a label. It runs through the model with loss and gradient zero, so that all ranks
    run equally many micro-batches.
    """
    if not micro_batch.segments:
        zero = torch.zeros(1, dtype=torch.int64)
        return Batch(zero, torch.full_like(zero, IGNORE_LABEL), zero.clone(), (1,), is_empty=True)
    segment_lengths = np.array(micro_batch.lengths, dtype=np.int64)
    ends = np.cumsum(segment_lengths)
    tokens = np.empty(ends[-1], dtype=np.int64)
    labels = np.empty(ends[-1], dtype=np.int64)
    indices = np.array([segment.document for segment in micro_batch.segments]) % len(store)
    starts = np.array([segment.start for segment in micro_batch.segments])
    sizes = segment_lengths + (starts + segment_lengths < store.lengths_of(indices))  # with the token that follows
    runs = _all_of(store, store.read, indices, starts, sizes)
    masks = _all_of(store, store.loss_mask, indices, starts + 1, sizes - 1)
    for length, end, run, mask in zip(segment_lengths, ends, runs, masks, strict=True):
        tokens[end - length : end] = run[:length]
        following = labels[end - length : end - length + len(run) - 1]
        following[:] = run[1:]
        if mask is not None:
            following[~mask] = IGNORE_LABEL
        if len(run) == length:
            labels[end - 1] = IGNORE_LABEL
    position_ids = np.arange(ends[-1]) - np.repeat(ends - segment_lengths, segment_lengths)
    slice_of = None
    if micro_batch.is_slice:
        document, start, length = micro_batch.segments[0]
        position_ids[:length] += micro_batch.earlier
        slice_of = SliceOf(document, start - micro_batch.earlier, micro_batch.earlier, length)
    ids, labels_T, position_ids_T = map(torch.from_numpy, (tokens, labels, position_ids))
    return Batch(ids, labels_T, position_ids_T, tuple(micro_batch.lengths), slice_of)


def read_batch(micro_batch: MicroBatch, store: TokenStore, vocab_size: int | None = None) -> Batch:
    """``make_batch`` from a store that must not change while it is in use.

    Raises ``UserError`` if a file of the documents has changed since the store was opened, and for a token at or over
    ``vocab_size``, if that is given.
    """
    documents = np.array([segment.document for segment in micro_batch.segments], np.int64) % len(store)
    store.check_unchanged(documents)
    batch = make_batch(micro_batch, store)
    store.check_unchanged(documents)
    if vocab_size is not None and (largest := int(torch.maximum(batch.tokens, batch.labels).max())) >= vocab_size:
        named = ", ".join(str(segment.document) for segment in micro_batch.segments)
        raise UserError(
            f"token {largest} is outside the vocabulary of model.vocab_size = {vocab_size}; raise it, or prepare the "
            f"documents with the tokenizer of the model: the token is in one of {named}"
        )
    return batch


def labels_of_segments(segments: Sequence[Segment] | NDArray[np.int64], store: TokenSource) -> NDArray[np.int64]:
    """Labelled tokens of each of ``segments``: all but the last of a document, and what a loss mask leaves out."""
    documents, starts, lengths = np.array(segments, dtype=np.int64).reshape(-1, 3).T
    indices = documents % len(store)
    labelled = lengths - (starts + lengths >= store.lengths_of(indices))
    for number, mask in enumerate(_all_of(store, store.loss_mask, indices, starts + 1, labelled)):
        if mask is not None:
            labelled[number] = np.count_nonzero(mask)
    return labelled


def _all_of(store: TokenSource, read: Callable[[int, int, int], _T], *places: NDArray[np.int64]) -> Iterable[_T]:
    """``read`` at each of ``places``, in order; many at once for a store at a URL, whose server takes time."""
    numbers = [column.tolist() for column in places]
    if not getattr(store, "is_remote", False):
        return map(read, *numbers)
    with ThreadPoolExecutor(_REQUESTS) as requests:
        return [*requests.map(read, *numbers)]
