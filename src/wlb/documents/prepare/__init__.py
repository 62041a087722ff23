"""Make a token store: read documents, tokenise them, write them, and account for every one.

``prepare_store`` streams: a corpus yields batches of raw documents, worker processes tokenise them, and this process
writes the results in order. So the store is the same for any number of workers, and a document takes at most 12 bytes
of memory. Rejected documents are counted by reason: in = out + rejects, in the report and in the sidecar.

On many machines each process makes the store of one shard of the corpus; ``prepare_shards`` does so on Ray. A glob of
these stores trains as one, with the documents in the same order.
"""

import glob
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.prepare.chat import ChatFormat
from wlb.documents.prepare.raw_files import Reject
from wlb.documents.prepare.sources import Batch, Corpus, CorpusShard
from wlb.documents.prepare.tokenization import Encoded, HuggingFaceTokenizer, Tokenizer, train_bpe
from wlb.documents.prepare.workers import cluster, map_in_order, map_on_ray
from wlb.documents.store.writer import TokenStoreWriter, store_files, token_type
from wlb.errors import UserError
from wlb.terminal import number_of, tell

_ADDED = ("documents_in", "documents_out", "tokens", "text_bytes")  # summed over the reports of shards
_MOST_COUNTED = 20_000  # documents to tokenise for their lengths; the last batch may exceed it


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What became of a corpus. ``rejects`` maps a reason (see ``Reject``) to a number of documents."""

    documents_in: int
    documents_out: int
    rejects: dict[str, int]
    skipped_files: int
    tokens: int
    text_bytes: int
    vocab_size: int
    end_token: int
    files: list[str]
    labelled_tokens: int | None = None  # for conversations only

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class TokenizedBatch:
    """Documents one after another in ``tokens``, each with its end token; ``lengths`` has one entry per document.

    ``mask`` is True for tokens that are labels; None if all are.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    rejects: Counter[str]
    text_bytes: int
    mask: NDArray[np.bool_] | None = None


OnProgress = Callable[[int], Any]


def train_tokenizer(
    corpus: Corpus, vocab_size: int, on_progress: OnProgress = lambda documents: None
) -> HuggingFaceTokenizer:
    """A byte-level BPE of at most ``vocab_size`` tokens, trained on all documents of a corpus."""

    def texts() -> Iterator[str]:
        for batch in corpus.batches():
            yield from (text for text in batch if not isinstance(text, Reject))
            on_progress(len(batch))

    return train_bpe(texts(), vocab_size)


def prepare_store(
    corpus: Corpus,
    prefix: Path,
    tokenizer: Tokenizer,
    shard: CorpusShard | None = None,
    *,
    chat: ChatFormat | None = None,
    save_tokenizer: bool = False,
    workers: int = 1,
    overwrite: bool = False,
    on_progress: OnProgress = lambda documents: None,
) -> PrepareReport:
    """Write the documents of ``corpus`` to the token store ``prefix``, each followed by the end token.

    With ``chat``, documents are conversations, and the store gets a mask in which only the assistant's tokens are
    labels. ``save_tokenizer`` keeps a trained tokenizer beside the store. ``on_progress`` receives the number of
    documents just stored or rejected. With ``shard``, only the documents of that shard are written, to
    ``PREFIX-I-of-N``; a shard may be empty. The store appears at the end, whole, or not at all. Raises ``UserError`` if
    it exists (without ``overwrite``) or cannot be written, if a source is damaged, if every document is rejected, or if
    there are shards of another number.
    """
    if shard:
        _check_number(prefix, shard.of)
        prefix = shard.prefix(prefix)
    definition = tokenizer.definition if save_tokenizer and isinstance(tokenizer, HuggingFaceTokenizer) else None
    size, masked = tokenizer.vocab_size, chat is not None
    tokenize = partial(_tokenize, tokenizer=tokenizer, chat=chat, dtype=token_type(size))
    with (
        TokenStoreWriter(
            prefix, vocab_size=size, tokenizer_json=definition, masked=masked, overwrite=overwrite
        ) as writer,
        closing(map_in_order(tokenize, corpus.batches(shard), workers)) as batches,
    ):
        rejects, text_bytes = Counter[str](), 0
        for batch in batches:
            writer.add_documents(batch.tokens, batch.lengths, batch.mask)
            rejects.update(batch.rejects)
            text_bytes += batch.text_bytes
            on_progress(batch.lengths.size + batch.rejects.total())
        if not writer.documents and shard is None:
            raise _nothing_left(corpus, rejects)
        if not writer.documents:  # a shard is a range of bytes, in which no document may begin
            tell(f"wlb: note: shard {shard} has no documents; its store is empty, and a glob skips it")
        report = PrepareReport(
            documents_in=writer.documents + rejects.total(),
            documents_out=writer.documents,
            rejects=dict(sorted(rejects.items())),
            skipped_files=corpus.skipped_files,
            tokens=writer.tokens,
            text_bytes=text_bytes,
            vocab_size=size,
            end_token=tokenizer.end_token,
            files=[str(path) for path in store_files(prefix, definition is not None, masked)],
            labelled_tokens=writer.labelled_tokens if masked else None,
        )
        counts = {key: value for key, value in report.to_json().items() if key != "files"}
        writer.details = counts | {"tokenizer": tokenizer.identity, "source": corpus.description}
        if shard:
            writer.details["shard"] = str(shard)
    return report


def prepare_shards(
    corpus: Corpus,
    prefix: Path,
    tokenizer: Tokenizer,
    *,
    ray: str,
    shards: int | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = lambda documents: None,
    **options: Any,
) -> PrepareReport:
    """Run ``prepare_store`` for every shard on the Ray cluster at address ``ray`` (see ``cluster``); sum the reports.

    There are ``shards`` of them, by default one per core of the cluster. Existing shards are kept unless ``overwrite``
    is set, so the same call continues after a failure. All nodes must see the files of ``corpus`` and ``prefix`` under
    the same paths. Raises ``UserError`` as ``prepare_store`` does, and if all shards exist.
    """
    with cluster(ray) as cores:
        count = shards or cores
        _check_number(prefix, count)
        every = [CorpusShard(number + 1, count) for number in range(count)]
        todo = [shard for shard in every if overwrite or not Path(f"{shard.prefix(prefix)}.idx").exists()]
        if not todo:
            raise UserError(f"all {count} shards {prefix}-*-of-{count} exist; choose another --out or pass --overwrite")
        if len(todo) < count:
            tell(f"wlb: note: {count - len(todo)} of {count} shards exist and are kept; --overwrite replaces them")
        # Ray may repeat a shard whose process died after it had written the store.
        make = partial(prepare_store, corpus, prefix, tokenizer, overwrite=True, **options)
        reports = []
        with closing(map_on_ray(make, todo)) as done:
            for report in done:
                reports.append(report)
                on_progress(report.documents_in)
    reports.sort(key=lambda report: report.files)
    rejects = sum((Counter(report.rejects) for report in reports), Counter[str]())
    if len(todo) == count and not any(report.documents_out for report in reports):
        raise _nothing_left(corpus, rejects)
    return replace(
        reports[0],
        **{name: sum(getattr(report, name) for report in reports) for name in _ADDED},
        rejects=dict(sorted(rejects.items())),
        labelled_tokens=sum(report.labelled_tokens or 0 for report in reports) if options.get("chat") else None,
        files=[file for report in reports for file in report.files],
    )


def _check_number(prefix: Path, count: int) -> None:
    """Raise ``UserError`` if ``prefix`` has shards of another number, which a glob would train too."""
    for path in prefix.parent.glob(f"{glob.escape(prefix.name)}-[0-9]*-of-[0-9]*.idx"):
        if not path.stem.endswith(f"-of-{count}"):
            raise UserError(
                f"{path} belongs to another number of shards than {count}; remove those shards, or choose another --out"
            )


def text_lengths(corpus: Corpus, tokenizer: Tokenizer, chat: ChatFormat | None = None) -> tuple[str, NDArray[np.int64]]:
    """The name of ``corpus`` and the token counts that its documents would have in a store.

    Counts only the first documents of a large corpus; notes say what was left out. Raises ``UserError`` if there are
    no documents.
    """
    lengths: list[int] = []
    rejects: Counter[str] = Counter()
    batches = corpus.batches()
    dtype = token_type(tokenizer.vocab_size)
    for tokenized in (_tokenize(batch, tokenizer, chat, dtype) for batch in batches):
        lengths += tokenized.lengths.tolist()
        rejects.update(tokenized.rejects)
        if len(lengths) >= _MOST_COUNTED:
            break
    if not lengths:
        raise _nothing_left(corpus, rejects)
    skipped = f"{number_of(corpus.skipped_files, 'file')} of other kinds" if corpus.skipped_files else ""
    if left_out := ", ".join(filter(None, [_in_words(rejects), skipped])):
        tell(f"wlb: note: {corpus.name}: left out {left_out}")
    name = corpus.name
    if next(batches, None) is not None:
        name = f"the beginning of {name}"
        tell(f"wlb: note: counted only the first {number_of(len(lengths), 'document')} of {corpus.name}")
    return name, np.array(lengths, np.int64)


def _nothing_left(corpus: Corpus, rejects: Counter[str]) -> UserError:
    if not rejects:
        return UserError("the sources contain no documents; name other files")
    why = f"{number_of(rejects.total(), 'document')} read, none can be stored: {_in_words(rejects)}"
    return UserError(f"{why}; {corpus.described_fields() if rejects[Reject.NO_FIELD] else 'name other files'}")


def _tokenize(batch: Batch, tokenizer: Tokenizer, chat: ChatFormat | None, dtype: np.dtype[Any]) -> TokenizedBatch:
    """Tokenise the documents of a batch; in conversations the end token of a document is not a label."""
    rejects: Counter[str] = Counter()
    end, no_label = np.array([tokenizer.end_token], dtype), np.zeros(1, np.bool_)
    tokens: list[NDArray[Any]] = [np.empty(0, dtype)]
    masks: list[NDArray[np.bool_]] = []
    lengths: list[int] = []
    text_bytes = 0
    for document in batch:
        if isinstance(document, Reject):
            encoded: Encoded | Reject = document
        elif chat is not None:
            encoded = chat.encode(document, tokenizer)
        else:
            encoded = Encoded(document, ids) if (ids := tokenizer.encode(document)).size else Reject.NO_TOKENS
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


def _in_words(rejects: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(rejects.items()))
