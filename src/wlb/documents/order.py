"""The order of documents over epochs, with a few integers of state.

Every epoch visits every document of a store once. The order follows from seed, epoch and store alone
(``wlb.documents.permutation``), so any rank can go to a position (epoch, cursor) directly.

In a mixture the next document comes from the store that is furthest behind, which has the fewest tokens taken for its
weight. Every store has its own epochs: a store that runs out begins its next epoch while the others go on. An epoch of
the mixture ends when every store has finished one in it. A single store is a mixture of one.

Document ids count through all stores: document i of a store, with ``first`` documents in the stores before it, has the
id ``epoch * documents of all stores + first + i``, with the epoch of its store. No id is used twice.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from wlb.documents.permutation import Permutation
from wlb.documents.segments import OverlongReport, split_overlong
from wlb.documents.store.files import StoreSetting, StoreSource, refuse_twice, source_name, source_parts
from wlb.documents.store.reader import DocumentLengths, Lengths
from wlb.errors import UserError
from wlb.settings import NonNegativeInt, Number, Section, Tokens
from wlb.terminal import number_of
from wlb.token_count import MOST_TOKENS


class MixtureStore(Section):
    """One store of a mixture; a file has one [[data.mixture]] per store."""

    store: StoreSetting = Field(description="The token store, named as in data.store")
    weight: Number = Field(gt=0, le=1e9, description="Relative share of the trained tokens")


class DataConfig(Section):
    """Which documents to train on."""

    store: StoreSetting | None = Field(
        None, description="The token store: a prefix, a URL, or a directory, glob or list of shards"
    )
    mixture: tuple[MixtureStore, ...] = Field((), description="Several stores with weights, instead of store")
    context_window: Tokens = Field(4096, description="Most tokens that attention spans")
    overlong: Literal["split", "truncate", "drop", "error"] = Field(
        "split", description="What to do with longer documents"
    )
    seed: NonNegativeInt = Field(0, description="Seed of the document order")
    shuffle: bool = Field(True, description="Shuffle the documents again in every epoch")

    @property
    def stores(self) -> tuple[str | tuple[str, ...], ...]:
        """The name of each store, in the order in which document ids count them."""
        return tuple(part.store for part in self.mixture) if self.store is None else (self.store,)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(part.weight for part in self.mixture)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.store is None and not self.mixture:
            raise ValueError("data.store is missing and has no default; set it, or [[data.mixture]]")
        if self.store is not None and self.mixture:
            raise ValueError("data.store and data.mixture both say what to train on; leave one out")
        refuse_twice([path.removesuffix(".idx") for part in self.mixture for path in source_parts(part.store)])
        return self


_CHECKED = 1 << 14  # documents checked at a time


class ByIdentity:
    """Lengths as a key of a cache, equal only to themselves."""

    def __init__(self, lengths: DocumentLengths) -> None:
        self.lengths = lengths

    def __hash__(self) -> int:
        return id(self.lengths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.lengths is other.lengths


class DocumentStream:
    """An endless stream of documents, taken a few at a time and never across the end of an epoch.

    ``lengths`` are tokens per document of one store, or a sequence of these for the stores of ``config.mixture``; they
    are read when a document is taken. The stream skips empty documents, and applies ``data.overlong`` to those longer
    than the context window. Raises ``UserError`` if a store leaves nothing to train on, and ``ValueError`` if lengths
    and stores differ in number.
    """

    def __init__(self, lengths: DocumentLengths, config: DataConfig) -> None:
        of_stores = lengths if isinstance(lengths, Sequence) else [lengths]
        for of_store, store in zip(of_stores, config.stores, strict=True):
            check_trainable(of_store, config, store)
        self._config = config
        self._firsts: list[int] = np.cumsum([0, *map(len, of_stores)]).tolist()
        self._stores = [_StoreOrder(of_store, config, number) for number, of_store in enumerate(of_stores)]
        self._weights = config.weights or (1.0,)
        self._tokens = [0] * len(of_stores)  # taken from each store since these weights came into force
        self._overlong = OverlongReport()  # of all documents taken, over all epochs
        self.begin(0)

    @property
    def epoch_is_over(self) -> bool:
        """Whether every store has finished an epoch."""
        return not self._unfinished

    def take(self, documents: int) -> NDArray[np.int64]:
        """The segments of the next ``documents`` documents of this epoch, or of as many as remain.

        Shape (segments, 3): document, start, length.
        """
        taken: list[NDArray[np.int64]] = [np.empty((0, 3), np.int64)]
        while documents > 0 and not self.epoch_is_over:
            number = min(range(len(self._stores)), key=lambda number: self._tokens[number] / self._weights[number])
            store = self._stores[number]
            if store.is_over:
                store.begin(store.epoch + 1)
            first = self._firsts[number] + store.epoch * self._firsts[-1]
            chosen, lengths = store.take(documents if len(self._stores) == 1 else 1)
            documents -= len(chosen)
            segments = self._segments(chosen + first, lengths)
            self._tokens[number] += int(segments[:, 2].sum())
            taken.append(segments)
            if store.is_over:
                self._unfinished.discard(number)
        return np.concatenate(taken)

    def _segments(self, documents: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """``documents`` without empty ones, and with ``data.overlong`` applied."""
        whole = np.stack([documents, np.zeros_like(documents), lengths], axis=1)[lengths > 0]
        if len(whole) and whole[:, 2].max() > self._config.context_window:
            whole, report = split_overlong(whole, self._config.context_window, self._config.overlong)
            self._overlong += report
        return whole

    def next_epoch(self) -> None:
        """Begin the next epoch; each store continues where it is."""
        self.epoch += 1
        self._unfinished = set(range(len(self._stores)))

    def begin(self, epoch: int) -> None:
        """Go to the first document of ``epoch`` of every store, in the order that the configuration asks for."""
        for store in self._stores:
            store.begin(epoch)
        self.epoch = epoch  # of the next documents; once it is over, of the last ones
        self._unfinished = set(range(len(self._stores)))  # stores that have yet to finish an epoch in this one

    def state_dict(self) -> dict[str, Any]:
        return {
            "documents": self._firsts[-1],
            "stores": [store.state_dict() for store in self._stores],
            "weights": list(self._weights),
            "tokens": list(self._tokens),
            "epoch": self.epoch,
            "unfinished": sorted(self._unfinished),
            "overlong": asdict(self._overlong),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue on the same stores, in the order that each epoch began with.

        If the weights have changed, shares count from here on.
        """
        for store, saved in zip(self._stores, state["stores"], strict=True):
            store.load_state_dict(saved)
        same = state["weights"] == list(self._weights)
        self._tokens = list(state["tokens"]) if same else [0] * len(self._stores)
        self.epoch = state["epoch"]
        self._unfinished = set(state["unfinished"])
        self._overlong = OverlongReport(**state["overlong"])


class _StoreOrder:
    """The position in the order of one store, the ``number``-th of a mixture."""

    def __init__(self, lengths: Lengths, config: DataConfig, number: int) -> None:
        self._lengths, self._config, self._number = lengths, config, number
        self.begin(0)

    def begin(self, epoch: int) -> None:
        self.epoch, self._cursor = epoch, 0
        self._seed, self._shuffle = self._config.seed, self._config.shuffle  # of this epoch
        self._order: Permutation | None = None  # of this epoch; made when first needed

    @property
    def is_over(self) -> bool:
        return self._cursor == len(self._lengths)

    def take(self, documents: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The next documents of this epoch, or as many as remain, and their tokens."""
        if self._order is None and self._shuffle:
            self._order = Permutation(len(self._lengths), self._seed, self.epoch, self._number)
        first, self._cursor = self._cursor, min(self._cursor + documents, len(self._lengths))
        order = np.arange if self._order is None else self._order.between
        chosen = order(first, self._cursor)
        return chosen, self._lengths[chosen]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "cursor": self._cursor, "seed": self._seed, "shuffle": self._shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._cursor, self._order = state["epoch"], state["cursor"], None
        self._seed, self._shuffle = state["seed"], state["shuffle"]


def check_trainable(lengths: Lengths, config: DataConfig, store: StoreSource | None = None) -> None:
    """Raise ``UserError`` if the documents of ``store`` leave nothing to train on, or if ``data.overlong`` refuses one.

    ``store`` defaults to the first one of ``config``. Reads all lengths if ``data.overlong`` is "error", otherwise only
    up to the first document that can be trained.
    """
    store, window = source_name(store or config.stores[0]), config.context_window
    limit = window if config.overlong == "drop" else MOST_TOKENS
    found = False
    for first in range(0, len(lengths), _CHECKED):
        chunk = lengths[np.arange(first, min(first + _CHECKED, len(lengths)))]
        long = np.flatnonzero(chunk > window)
        if config.overlong == "error" and long.size:
            where = f" of {store}" if config.mixture else ""
            raise UserError(
                f"document {first + long[0]}{where} has {chunk[long[0]]} tokens, over context_window = {window}; "
                "raise it or set overlong = 'split'"
            )
        found = found or bool(((chunk > 0) & (chunk <= limit)).any())
        if found and config.overlong != "error":
            return
    if not found:
        dropped = f" or dropped as longer than context_window = {window}" * (config.overlong == "drop")
        documents = number_of(len(lengths), "document")
        raise UserError(f"nothing to train on in {store}: it has {documents}, all empty{dropped}")
