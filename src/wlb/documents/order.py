"""Which document comes next: the order of documents over epochs, as a few integers of state.

Every epoch visits every document once, in an order that follows from seed, epoch and store alone
(``wlb.documents.permutation``), so a position in the order is (epoch, cursor) and any rank can go there directly,
whatever the number of documents. Document ids count up over the
whole history, ``epoch * documents in the store + index in the store``; an id is never used twice. In a mixture of
stores (``wlb.documents.mixture``) documents are counted through all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from wlb.documents.overlong import OverlongReport, split_overlong
from wlb.documents.permutation import Permutation
from wlb.documents.segments import Segment
from wlb.documents.store.index import MAX_DOCUMENT_TOKENS
from wlb.documents.store.lengths import Lengths, chunks
from wlb.documents.store.sources import StoreSetting, StoreSource, source_name, source_parts
from wlb.errors import UserError
from wlb.settings import NonNegativeInt, Number, Section, Tokens
from wlb.terminal import number_of


class MixtureStore(Section):
    """One store of a mixture and its share of the trained tokens. In a file each is a [[data.mixture]]."""

    store: StoreSetting = Field(description="The token store, as data.store names it")
    weight: Number = Field(gt=0, le=1e9, description="Its relative share of the tokens")


class DataConfig(Section):
    """Which documents, and what happens to those longer than the context window."""

    store: StoreSetting | None = Field(
        None,
        description="The token store: its prefix, a path or a URL, or its shards: a directory, a glob or a list; "
        "required without a mixture",
    )
    mixture: tuple[MixtureStore, ...] = Field((), description="Several stores with weights, instead of store")
    context_window: Tokens = Field(4096, description="Longest run of tokens attention may span")
    overlong: Literal["split", "truncate", "drop", "error"] = Field(
        "split", description="What happens to documents longer than the context window"
    )
    seed: NonNegativeInt = Field(0, description="Seed of the document order")
    shuffle: bool = Field(True, description="Shuffle documents anew in every epoch")

    @property
    def stores(self) -> tuple[Path | tuple[Path, ...], ...]:
        """What names each store, in the order in which their documents are counted."""
        return tuple(part.store for part in self.mixture) if self.store is None else (self.store,)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(part.weight for part in self.mixture)

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.store is None and not self.mixture:
            raise ValueError("data.store is missing and has no default; set it, or [[data.mixture]]")
        if self.store is not None and self.mixture:
            raise ValueError("data.store and data.mixture both say what to train on; leave one out")
        spelled: dict[str, Path] = {}
        for store in (path for part in self.mixture for path in source_parts(part.store)):
            first = spelled.setdefault(os.path.realpath(f"{str(store).removesuffix('.idx')}.idx"), store)
            if first is not store:
                raise ValueError(f"data.mixture names a store twice, as {first} and as {store}; add up its weights")
        return self


_Between = Callable[[int, int], NDArray[np.int64]]  # the documents from one place in an epoch to another


class StorePlace(NamedTuple):
    """Of a store in a mixture: its number, the index of its first document, and the documents of all stores."""

    number: int
    first: int
    documents: int


class DocumentStream:
    """An endless stream of documents, taken a few at a time and never across the end of an epoch.

    ``lengths`` are tokens per document of the store, read when a document is taken. Empty documents are passed over;
    those longer than the context window meet ``data.overlong``. In a mixture, ``among`` is the place of the store.
    Raises ``UserError`` if nothing is left to train on.
    """

    def __init__(self, lengths: Lengths, config: DataConfig, among: StorePlace | None = None) -> None:
        self._lengths = lengths
        self._config = config
        self._place = among or StorePlace(0, 0, len(lengths))
        check_trainable(lengths, config, config.stores[self._place.number])
        self._epoch = 0
        self._cursor = 0
        self._overlong = OverlongReport()  # of all documents taken, over all epochs
        self._seed, self._shuffle = config.seed, config.shuffle  # of this epoch
        self._between: _Between | None = None  # documents by their place in this epoch, once they are asked for

    @property
    def epoch(self) -> int:
        """That the next documents are of, or the last ones were where it is over."""
        return self._epoch

    @property
    def epoch_is_over(self) -> bool:
        return self._cursor == len(self._lengths)

    def take(self, documents: int) -> list[Segment]:
        """The segments of the next ``documents`` documents of this epoch, or of as many as remain."""
        if self._between is None:
            self._between = self._ordered()
        stop = min(self._cursor + documents, len(self._lengths))
        chosen = self._between(self._cursor, stop)
        self._cursor = stop
        lengths = self._lengths[chosen]
        ids = chosen[lengths > 0] + self._place.first + self._epoch * self._place.documents
        segments = [
            Segment(document, 0, length)
            for document, length in zip(ids.tolist(), lengths[lengths > 0].tolist(), strict=True)
        ]
        segments, report = split_overlong(segments, self._config.context_window, self._config.overlong)
        self._overlong += report
        return segments

    def next_epoch(self) -> None:
        self.begin(self._epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "documents": self._place.documents,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "overlong": asdict(self._overlong),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an epoch of the same documents, in the order that it began with."""
        self._epoch, self._cursor, self._between = state["epoch"], state["cursor"], None
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._overlong = OverlongReport(**state["overlong"])

    def begin_after(self, state: dict[str, Any]) -> None:
        """Begin the first epoch of these documents with ids above all that the documents of ``state`` can have had."""
        self.begin(-(-ids_used(state) // self._place.documents))
        self._overlong = OverlongReport(**state["overlong"])

    def begin(self, epoch: int) -> None:
        """Go to the first document of ``epoch``, in the order that the configuration asks for."""
        self._epoch, self._cursor, self._between = epoch, 0, None
        self._seed, self._shuffle = self._config.seed, self._config.shuffle

    def _ordered(self) -> _Between:
        """The documents of this epoch by their place in it."""
        if not self._shuffle:
            return np.arange
        return Permutation(len(self._lengths), self._seed, self._epoch, self._place.number).between


def ids_used(state: dict[str, Any]) -> int:
    """Document ids from this one on were not used up to the ``state`` of a stream."""
    epochs: int = 1 + max(part["epoch"] for part in state.get("stores", [state]))
    documents: int = state["documents"]
    return epochs * documents


def check_trainable(lengths: Lengths, config: DataConfig, store: StoreSource | None = None) -> None:
    """Raise ``UserError`` where documents of ``lengths`` of ``store`` leave nothing to train on, or one is refused.

    ``store`` is by default the first of ``config``. All lengths are read where ``data.overlong`` refuses long ones;
    otherwise up to the first document that is trained.
    """
    store, window = source_name(store or config.stores[0]), config.context_window
    limit = window if config.overlong == "drop" else MAX_DOCUMENT_TOKENS
    refuses, found = config.overlong == "error", False
    for first, chunk in chunks(lambda start, stop: lengths[start:stop], len(lengths)):
        if refuses and (chunk > window).any():
            place = int(np.argmax(chunk > window))
            where = f" of {store}" if config.mixture else ""
            raise UserError(
                f"document {first + place}{where} has {chunk[place]} tokens, over data.context_window = {window}; "
                "raise it or set data.overlong = 'split'"
            )
        found = found or bool(((chunk > 0) & (chunk <= limit)).any())
        if found and not refuses:
            break
    if not found:
        dropped = f" or dropped as longer than data.context_window = {window}" * (config.overlong == "drop")
        raise UserError(
            f"nothing to train on in token store {store}: each of {number_of(len(lengths), 'document')} is empty"
            f"{dropped}"
        )
