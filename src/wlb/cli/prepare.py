"""``wlb prepare``: turns documents into a token store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, progress_bar, show_columns, show_next, stdout
from wlb.cli.groups import names_of, refuse_unused
from wlb.errors import UserError
from wlb.os_limits import usable_cores
from wlb.terminal import number_of

if TYPE_CHECKING:
    from wlb.documents.prepare import PrepareReport
    from wlb.documents.prepare.sources import Corpus
    from wlb.documents.prepare.tokenization import Tokenizer


def prepare(
    context: typer.Context,
    sources: list[Path] = typer.Argument(
        None,
        metavar="SOURCE",
        help="Files or directories: text, JSON Lines (.jsonl, .ndjson, .json), Parquet; also .gz and .zst.",
        show_default=False,
    ),
    stdlib: bool = typer.Option(
        False, "--stdlib", help="Take source and prose of this Python's standard library instead of SOURCE."
    ),
    out: Path | None = typer.Option(
        None, "--out", metavar="PREFIX", help="Store to make: PREFIX.bin, PREFIX.idx, PREFIX.json.", show_default=False
    ),
    check: str | None = typer.Option(
        None, "--check", metavar="STORE", help="Read all of an existing store and say whether it is whole; make none."
    ),
    tokenizer: str | None = typer.Option(
        None, metavar="bytes|FILE|DIR", help="Bytes (default), a tokenizer.json, or a directory that holds one."
    ),
    bpe_size: int | None = typer.Option(
        None, "--train-bpe", metavar="VOCAB", help="Train a byte-level BPE of VOCAB tokens on the sources and use it."
    ),
    end_token: str | None = typer.Option(
        None, metavar="TOKEN", help="Token that ends a document, where the tokenizer does not say."
    ),
    workers: int | None = typer.Option(
        None,
        metavar="N",
        min=1,
        max=1024,
        help="Tokenising processes (default: one for bytes, else one per core); with --ray shards, one per core.",
    ),
    shard: str | None = typer.Option(
        None, metavar="I/N", help="Write only the I-th of N shares, to PREFIX-I-of-N, as an element of a job array."
    ),
    ray: str | None = typer.Option(
        None,
        metavar="auto|local|ADDRESS",
        help="Write all shares on a Ray cluster: the running one, a new one on this machine, or that at ADDRESS.",
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing store."),
    *,
    text: options.TextOptions,
    json: options.Json = False,
) -> None:
    """Turn documents into a token store that training and planning read.

    The store is in Megatron's .bin/.idx format, with one end token after every document. It appears whole or not at
    all, and documents that cannot be taken are counted by reason.

    With --shard and --ray there is a store of each share, PREFIX-I-of-N. Train them as one by the glob 'PREFIX-*-of-N'.

    Example: wlb prepare corpus/ more.jsonl.zst --out data/corpus --train-bpe 32000
    """
    if check is not None:
        refuse_unused(context, context.params.keys() - {"check", "json"}, "has no effect with --check")
        _check(check, json)
        return
    if out is None:
        raise UserError("--out is missing; name the store to make, or one to --check")
    import numpy as np

    from wlb.documents.lengths import what_was_read
    from wlb.documents.prepare import prepare_shards, prepare_store
    from wlb.documents.prepare.chat import CHATML, ChatFormat
    from wlb.documents.prepare.sources import CorpusShard
    from wlb.documents.store.index import read_index
    from wlb.documents.store.writer import check_target, store_files

    chosen_shard = None if shard is None else CorpusShard.parse(shard)
    target = out
    if chosen_shard is not None:
        check_target(out, overwrite=True)  # of which PREFIX-I-of-N would no longer be a directory
        target = chosen_shard.prefix(out)
        refuse_unused(context, ["ray"], "runs all shards at once")
        refuse_unused(
            context, ["bpe_size"], "learns from all documents; make a tokenizer first and name it in --tokenizer"
        )
    check_target(target, overwrite)
    if stdlib:
        refuse_unused(context, names_of(options.TextOptions), "has no effect with --stdlib")
    if text.chat:
        refuse_unused(context, ["bpe_size"], "learns from text, not from conversations")
    if ray is not None:  # processes of Ray have working directories of their own
        sources, out = [path.absolute() for path in sources or []], out.absolute()
    corpus = _corpus(sources or [], stdlib, text, target)
    chosen = _tokenizer(corpus, tokenizer, bpe_size, end_token)
    chat_format = ChatFormat.of_tokenizer(tokenizer, chosen.special_tokens) if text.chat else None
    # Bytes cost less to tokenise than to send to another process.
    cores = workers or (1 if chosen.identity["kind"] == "bytes" else usable_cores())
    # The tokenizer of a store that is replaced stays if it is used again.
    stays = ray is None and Path(tokenizer or "").resolve() == store_files(target)[-2].resolve()
    with _progress("tokenising") as on_progress:
        asked: dict[str, Any] = {
            "chat": chat_format,
            "save_tokenizer": bpe_size is not None or stays,
            "overwrite": overwrite,
            "on_progress": on_progress,
        }
        if ray is not None:
            report = prepare_shards(corpus, out, chosen, ray=ray, shards=workers, **asked)
        else:
            report = prepare_store(corpus, out, chosen, shard=chosen_shard, workers=cores, **asked)
    if json:
        emit_json(report.to_json())
        return
    indexes = [path for path in report.files if path.endswith(".idx")]
    stdout.print(what_was_read(corpus.name, np.concatenate([read_index(path).lengths() for path in indexes])))
    made = f"{out}-*" if ray is not None else report.files[-1].removesuffix(".idx")
    _show(report, made)
    if "missing_field" in report.rejects and ray is None:  # else another process knows which
        stdout.print(corpus.described_fields())
    if chat_format is not None and chat_format.template == CHATML:
        stdout.print("the tokenizer has no chat template: conversations are written as ChatML")
    if report.documents_out:
        show_next("check", made)


def _check(source: str, json: bool) -> None:
    from wlb.documents.store.reader import TokenStore

    store = TokenStore.open(source)
    store.check_content()
    if json:
        emit_json({"store": source, "documents": len(store), "tokens": store.tokens})
    else:
        stdout.print(f"{source} is whole: {number_of(len(store), 'document')}, {number_of(store.tokens, 'token')}")
        show_next("check", source)


def _corpus(sources: list[Path], stdlib: bool, text: options.TextOptions, out: Path) -> "Corpus":
    """The documents to read. Raises ``UserError`` if the store in ``out`` would overwrite one of the sources."""
    from wlb.documents.prepare.sources import StdlibCorpus
    from wlb.documents.store.writer import store_files

    if stdlib == bool(sources):
        raise UserError("name files or directories to prepare, or else --stdlib" + ", not both" * stdlib)
    if stdlib:
        return StdlibCorpus()
    corpus = text.corpus(sources)
    targets = {path.resolve() for path in store_files(out)}
    for path, _ in corpus.files:
        if path.resolve() in targets:
            raise UserError(f"source {path} would be overwritten by the store; choose another --out")
    return corpus


def _tokenizer(corpus: "Corpus", source: str | None, bpe_size: int | None, end_token: str | None) -> "Tokenizer":
    from wlb.documents.prepare import train_tokenizer
    from wlb.documents.prepare.tokenization import load_tokenizer

    if bpe_size is None:
        return load_tokenizer("bytes" if source is None else source, end_token)
    if source is not None or end_token is not None:
        given = "--tokenizer" if source is not None else "--end-token"
        raise UserError(f"--train-bpe makes its own tokenizer and end token; leave out {given}")
    with _progress("training BPE") as on_progress:
        return train_tokenizer(corpus, bpe_size, on_progress)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int], None]]:
    with progress_bar() as bar:
        yield partial(bar.advance, bar.add_task(f"{what}, documents", total=None))


def _show(report: "PrepareReport", made: str) -> None:
    rows = {"in": (f"{report.documents_in:,}", "")}
    rows |= {f"rejected: {reason.replace('_', ' ')}": (f"{count:,}", "") for reason, count in report.rejects.items()}
    rows["out"] = (f"{report.documents_out:,}", f"{report.tokens:,}")
    if report.labelled_tokens is not None:
        rows["labels"] = ("", f"{report.labelled_tokens:,}")
    documents, tokens = zip(*rows.values(), strict=True)
    title = f"Token store {made}"
    show_columns({"": [*rows], "documents": documents, "tokens": tokens}, title=title)
    skipped = f"; skipped {number_of(report.skipped_files, 'file')} of other kinds" if report.skipped_files else ""
    stdout.print(f"vocabulary {report.vocab_size:,}, end token {report.end_token}{skipped}")
