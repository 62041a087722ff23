"""The step from documents to tokens, which worker processes take over.

``tokenize_batch`` turns a ``Batch`` of documents into a ``TokenizedBatch``: all tokens in one array, the length of
every document, and how many documents were rejected and why. ``map_in_order`` does so on several processes: results
come in the order of the batches, with a bounded number under way.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from wlb.documents.prepare.tokenization import Tokenizer
from wlb.errors import UserError

T = TypeVar("T")
R = TypeVar("R")
# Under way per worker: one in work, one waiting so that it does not pause.
_IN_FLIGHT = 2


class Reject(StrEnum):
    """Why a document of the input is not in the store."""

    EMPTY = "empty"
    NO_TOKENS = "no_tokens"
    UNDECODABLE = "undecodable"
    BLANK_LINE = "blank_line"
    BAD_JSON = "bad_json"
    NO_FIELD = "missing_field"
    NOT_TEXT = "not_text"
    NOT_MESSAGES = "not_messages"
    NO_ASSISTANT = "no_assistant_message"
    SPECIAL_TOKEN = "special_token_in_message"
    TEMPLATE = "refused_by_chat_template"
    REWRITTEN = "rewritten_by_chat_template"


# Documents: each a ``str``, a list of messages in a corpus of conversations, or a ``Reject``.
Batch: TypeAlias = "list[Any]"


@dataclass(frozen=True, slots=True)
class TokenizedBatch:
    """Documents one after another in ``tokens``, each with its end token; ``lengths`` has one entry for each.

    ``mask`` says of every token whether it is a label; None where all are.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    rejects: Counter[str]
    text_bytes: int
    mask: NDArray[np.bool_] | None = None


class Encoded(NamedTuple):
    """A document, its tokens without the one that ends it, and which of them are labels; None where all are."""

    text: str
    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_] | None = None


def encode_text(text: str, tokenizer: Tokenizer) -> Encoded | Reject:
    """Tokenise a text, in which no token is special."""
    tokens = tokenizer.encode(text)
    return Encoded(text, tokens) if tokens.size else Reject.NO_TOKENS


def tokenize_batch(
    batch: Batch, encode: Callable[[Any], Encoded | Reject], end_token: int, dtype: np.dtype[Any]
) -> TokenizedBatch:
    """Tokenise the documents of a batch by ``encode``. An end token is no label of a document that has a mask."""
    rejects: Counter[str] = Counter()
    end, no_label = np.array([end_token], dtype), np.zeros(1, np.bool_)
    tokens: list[NDArray[Any]] = [np.empty(0, dtype)]
    masks: list[NDArray[np.bool_]] = []
    lengths: list[int] = []
    text_bytes = 0
    for document in batch:
        encoded = document if isinstance(document, Reject) else encode(document)
        if isinstance(encoded, Reject):
            rejects[encoded.value] += 1
            continue
        tokens += (encoded.tokens.astype(dtype), end)
        lengths.append(encoded.tokens.size + 1)
        text_bytes += len(encoded.text.encode())
        if encoded.mask is not None:
            masks += (encoded.mask, no_label)
    mask = np.concatenate(masks) if masks else None
    return TokenizedBatch(np.concatenate(tokens), np.array(lengths, np.int64), rejects, text_bytes, mask)


def map_in_order(function: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[R, None, None]:
    """``map(function, items)`` on ``workers`` processes; on this one when ``workers`` is 1.

    ``function`` is pickled once for each process. Items are taken as results are consumed, so memory does not grow
    with their number. Exceptions of ``function`` are raised here.
    """
    if workers == 1:
        yield from map(function, items)
        return
    # Spawned, not forked: this process may have threads (tokenizers has), which fork does not survive.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _start_worker, (function,))
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(_call, item))
            if len(pending) >= _IN_FLIGHT * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError("a worker process was killed, probably for lack of memory; try fewer --workers") from None
    finally:
        executor.shutdown(cancel_futures=True)


_function: Callable[[Any], Any]


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    # Ctrl-C reaches the whole process group; the main process ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _call(item: Any) -> Any:
    return _function(item)


def _leave_with_parent() -> None:
    # A worker waiting for work would not notice that the main process was killed.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
