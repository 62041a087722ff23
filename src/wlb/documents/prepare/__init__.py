"""Documents into a token store: read, tokenise, write, and account for every document.

``prepare_store`` streams: a corpus gives batches of raw documents, worker processes tokenise them, and this process
writes the results in their order, so the store is the same for any number of workers and memory does not grow with
the corpus. Documents that cannot be taken are counted by reason; in = out + rejects, in the report and in the sidecar.

On many machines ``prepare_parts`` comes first, in any number of processes or on Ray: each task of the corpus becomes a
part on the disk (``parts.py``), and ``prepare_store`` makes the same store of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.lengths import ReadLengths
from wlb.documents.prepare.batches import (
    Batch,
    Reject,
    TokenizedBatch,
    documents_of,
    encode_text,
    map_in_order,
    tokenize_batch,
)
from wlb.documents.prepare.chat import ChatFormat
from wlb.documents.prepare.on_ray import cluster, map_on_ray
from wlb.documents.prepare.parts import StoreParts, TaskShard, parts_directory, write_part
from wlb.documents.prepare.sources import Corpus, CorpusTask
from wlb.documents.prepare.tokenization import HuggingFaceTokenizer, Tokenizer, train_bpe
from wlb.documents.store.writer import TokenStoreWriter, check_target, store_files, token_type
from wlb.errors import UserError
from wlb.terminal import number_of, tell

_MOST_COUNTED = 20_000  # documents that are tokenised to know their lengths, and those of a batch


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What became of a corpus. ``rejects`` maps a reason (see ``batches.Reject``) to a number of documents."""

    documents_in: int
    documents_out: int
    rejects: dict[str, int]
    skipped_files: int
    tokens: int
    text_bytes: int
    vocab_size: int
    end_token: int
    files: list[str]
    labelled_tokens: int | None = None  # of conversations

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


OnProgress = Callable[[int], None]


def _ignore(source_bytes: int) -> None:
    pass


def train_tokenizer(corpus: Corpus, vocab_size: int, on_progress: OnProgress = _ignore) -> HuggingFaceTokenizer:
    """A byte-level BPE of at most ``vocab_size`` tokens, trained on all documents of a corpus."""

    def texts() -> Iterator[str]:
        for batch in corpus.batches():
            yield from (text for text in documents_of(batch) if not isinstance(text, Reject))
            on_progress(batch.progress)

    return train_bpe(texts(), vocab_size)


def prepare_store(
    corpus: Corpus,
    prefix: Path,
    tokenizer: Tokenizer,
    *,
    chat: ChatFormat | None = None,
    save_tokenizer: bool = False,
    workers: int = 1,
    overwrite: bool = False,
    on_progress: OnProgress = _ignore,
) -> PrepareReport:
    """Write the documents of ``corpus`` to the token store ``prefix``, each followed by the end token.

    With ``chat``, they are conversations, and the store has a mask in which only the assistant's tokens are labels.
    ``save_tokenizer`` keeps a trained tokenizer beside the store; ``on_progress`` is called with the bytes of source
    used up by each batch. The store appears at the end, whole, or not at all. Where ``prepare_parts`` has begun the
    store, it is made of the parts, after those that are missing are made too. Raises ``UserError`` when the store
    exists (without ``overwrite``), cannot be written, a source is damaged, no document is left, or the parts were begun
    with other arguments.
    """
    if workers < 1:
        raise UserError(f"--workers must be at least 1, got {workers}")
    check_target(prefix, overwrite)
    parts = None
    if parts_directory(prefix).exists():
        parts = prepare_parts(corpus, prefix, tokenizer, chat=chat, workers=workers, overwrite=overwrite)
    definition = tokenizer.definition if save_tokenizer and isinstance(tokenizer, HuggingFaceTokenizer) else None
    tokenize, dtype = _tokenize(tokenizer, chat), token_type(tokenizer.vocab_size)
    size, masked = tokenizer.vocab_size, chat is not None
    with (
        TokenStoreWriter(
            prefix, vocab_size=size, tokenizer_json=definition, masked=masked, overwrite=overwrite
        ) as writer,
        closing(parts.batches(dtype) if parts else map_in_order(tokenize, corpus.batches(), workers)) as batches,
    ):
        rejects, text_bytes = _write(batches, writer, corpus, on_progress)
        report = PrepareReport(
            documents_in=writer.documents + rejects.total(),
            documents_out=writer.documents,
            rejects=dict(sorted(rejects.items())),
            skipped_files=parts.skipped_files if parts else corpus.skipped_files,
            tokens=writer.tokens,
            text_bytes=text_bytes,
            vocab_size=size,
            end_token=tokenizer.end_token,
            files=[str(path) for path in store_files(prefix, definition is not None, masked)],
            labelled_tokens=writer.labelled_tokens if masked else None,
        )
        counts = {key: value for key, value in report.to_json().items() if key != "files"}
        writer.details = counts | {"tokenizer": tokenizer.identity, "source": corpus.description}
    if parts:
        parts.remove()
    return report


def prepare_parts(
    corpus: Corpus,
    prefix: Path,
    tokenizer: Tokenizer,
    *,
    chat: ChatFormat | None = None,
    shard: TaskShard = TaskShard(1, 1),
    ray: str | None = None,
    workers: int | None = 1,
    overwrite: bool = False,
    on_progress: OnProgress = _ignore,
) -> StoreParts:
    """Make those parts of the store ``prefix`` that are missing and that ``shard`` is to make, each from one task.

    ``workers`` processes of this machine do so, or the Ray cluster at the address ``ray`` (see ``cluster``), on all
    its cores or ``workers`` of them; its nodes must have the files of ``corpus`` and ``prefix`` under the same paths.
    ``on_progress`` is called with the bytes of source of the parts that ``shard`` has. Raises ``UserError`` as
    ``prepare_store`` does.
    """
    tasks = [*corpus.tasks()]
    chosen = shard.chosen(len(tasks))
    parts = StoreParts(prefix, tasks)
    if not chosen:  # the other shards may have made the store already
        return parts
    check_target(prefix, overwrite)
    make = partial(_make_part, tokenize=_tokenize(tokenizer, chat))
    with nullcontext() if ray is None else cluster(ray):
        parts.begin(_settings(corpus, tokenizer, chat), corpus.skipped_files)
        missing = {*parts.missing()}
        on_progress(sum(tasks[number].bytes for number in chosen if number not in missing))
        todo = [(parts.path(number), tasks[number]) for number in chosen if number in missing]
        with closing(
            map_in_order(make, todo, workers or 1) if ray is None else map_on_ray(make, todo, workers)
        ) as done:
            for source_bytes in done:
                on_progress(source_bytes)
    return parts


def _make_part(item: tuple[Path, CorpusTask], tokenize: Callable[[Batch], TokenizedBatch]) -> int:
    path, task = item
    write_part(path, map(tokenize, task.batches()))
    return task.bytes


def text_lengths(corpus: Corpus, tokenizer: Tokenizer, chat: ChatFormat | None = None) -> ReadLengths:
    """Tokens of the documents of ``corpus``, as they would be in a store; of a large one, of the first documents.

    Notes on stderr say what was left out. Raises ``UserError`` where there are no documents.
    """
    lengths: list[NDArray[np.int64]] = []
    rejects: Counter[str] = Counter()
    tokenize, batches = _tokenize(tokenizer, chat), iter(corpus.batches())
    while (count := sum(map(len, lengths))) < _MOST_COUNTED and (batch := next(batches, None)) is not None:
        tokenized = tokenize(batch)
        lengths.append(tokenized.lengths)
        rejects.update(tokenized.rejects)
    if not count:
        raise _nothing_left(corpus, rejects)
    left_out = [describe_rejects(rejects)] if rejects else []
    if corpus.skipped_files:
        left_out.append(f"{number_of(corpus.skipped_files, 'file')} of other kinds")
    if left_out:
        tell(f"wlb: note: {corpus.name}: left out {', '.join(left_out)}")
    name = corpus.name
    if next(batches, None) is not None:
        name = f"the beginning of {name}"
        tell(f"wlb: note: lengths are those of the first {number_of(count, 'document')} of {corpus.name}")
    return ReadLengths(name, np.concatenate(lengths))


def _nothing_left(corpus: Corpus, rejects: Counter[str]) -> UserError:
    if not rejects:
        return UserError("the sources contain no documents")
    why = f"no documents are left of {rejects.total()}: {describe_rejects(rejects)}"
    if rejects[Reject.NO_FIELD]:
        why += f"; {corpus.described_fields()}"
    return UserError(why)


def _settings(corpus: Corpus, tokenizer: Tokenizer, chat: ChatFormat | None) -> dict[str, Any]:
    """What decides about the tokens of a store, beside the files of the corpus."""
    template = chat and hashlib.sha256(repr((chat.template, chat.special_tokens, chat.marks)).encode()).hexdigest()
    return {"source": corpus.description, "tokenizer": tokenizer.identity, "chat": template}


def _tokenize(tokenizer: Tokenizer, chat: ChatFormat | None) -> Callable[[Batch], TokenizedBatch]:
    encode = partial(encode_text if chat is None else chat.encode, tokenizer=tokenizer)
    return partial(tokenize_batch, encode=encode, end_token=tokenizer.end_token, dtype=token_type(tokenizer.vocab_size))


def _write(
    batches: Iterable[TokenizedBatch], writer: TokenStoreWriter, corpus: Corpus, on_progress: OnProgress
) -> tuple[Counter[str], int]:
    """Rejects by reason, and the bytes of text that were written. Raises ``UserError`` where none are."""
    rejects: Counter[str] = Counter()
    text_bytes = 0
    for batch in batches:
        writer.add_documents(batch.tokens, batch.lengths, batch.mask)
        rejects.update(batch.rejects)
        text_bytes += batch.text_bytes
        on_progress(batch.progress)
    if not writer.documents:
        raise _nothing_left(corpus, rejects)
    return rejects, text_bytes


def describe_rejects(rejects: dict[str, int]) -> str:
    """Rejects by reason, in words."""
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(rejects.items())) or "none"
