"""The step from raw input to tokens, which worker processes take over.

A ``Batch`` is a handful of raw items (lines, file paths, table cells) and the function that makes texts of one: reading
and decoding happen where tokenising does. ``tokenize_batch`` turns it into a ``TokenizedBatch``: all tokens in
one array, the length of every document, and how many documents were rejected and why. ``map_in_order`` does so on
several processes: results come in the order of the items, with a bounded number under way.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

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


@dataclass(frozen=True, slots=True)
class Batch:
    """Raw items, ``texts`` which gives the documents of one item, and ``progress``: their bytes of source.

    A document is a ``str``, a list of messages in a corpus of conversations, or a ``Reject``.
    """

    items: list[Any]
    texts: Callable[[Any], Iterable[Any]]
    progress: int


@dataclass(frozen=True, slots=True)
class TokenizedBatch:
    """Documents one after another in ``tokens``, each with its end token; ``lengths`` has one entry for each.

    ``mask`` says of every token whether it is a label; None where all are.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    rejects: Counter[str]
    text_bytes: int
    progress: int
    mask: NDArray[np.bool_] | None = None


def documents_of(batch: Batch) -> Iterator[str | Reject]:
    """The documents of a batch, in order: their text, or why there is none."""
    for item in batch.items:
        for text in batch.texts(item):
            if isinstance(text, Reject):
                yield text
            elif not text:
                yield Reject.EMPTY
            elif not is_unicode(text):
                yield Reject.UNDECODABLE
            else:
                yield text


def tokenize_batch(batch: Batch, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> TokenizedBatch:
    """Tokenise a batch; documents that give no tokens are rejected too."""
    rejects: Counter[str] = Counter()
    pieces: list[NDArray[Any]] = []
    lengths: list[int] = []
    text_bytes = 0
    end = np.array([tokenizer.end_token], dtype)
    for text in documents_of(batch):
        if isinstance(text, Reject):
            rejects[text.value] += 1
            continue
        tokens = tokenizer.encode(text)
        if not tokens.size:
            rejects[Reject.NO_TOKENS.value] += 1
            continue
        pieces += (tokens.astype(dtype), end)
        lengths.append(tokens.size + 1)
        text_bytes += len(text.encode())
    joined = np.concatenate(pieces) if pieces else np.empty(0, dtype)
    return TokenizedBatch(joined, np.array(lengths, np.int64), rejects, text_bytes, batch.progress)


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


def is_unicode(text: str) -> bool:
    """Whether ``text`` can be written in UTF-8."""
    # JSON may escape half of a surrogate pair, which no encoding can write.
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
