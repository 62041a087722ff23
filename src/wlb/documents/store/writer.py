"""Writing a token store atomically.

While documents arrive, files end in ``.part``. At the end each is flushed to the disk and renamed, the index last,
because nothing without ``PREFIX.idx`` reads as a store. An old store that is replaced loses its index first.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.documents.store.index import read_index, write_index
from wlb.errors import UserError
from wlb.files import flush, move, open_locked, sync, write_synced
from wlb.token_count import MOST_TOKENS

SIDECAR_FORMAT = "wlb-token-store/1"
# Where megatron.core.datasets.indexed_dataset.DType.optimal_dtype changes from uint16 to int32.
_UINT16_VOCAB = 65500


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The token type for a vocabulary: uint16 below 65,500 ids, else int32, as Megatron-Core chooses."""
    return np.dtype("<u2") if vocab_size < _UINT16_VOCAB else np.dtype("<i4")


def store_files(prefix: Path, with_tokenizer: bool = True, with_mask: bool = True) -> list[Path]:
    """The files of a store in the order in which the writer makes them, the index last; ``prefix`` may have dots."""
    endings = ".bin", *[".mask"] * with_mask, ".json", *[".tokenizer.json"] * with_tokenizer, ".idx"
    return [Path(f"{prefix}{ending}") for ending in endings]


def check_target(prefix: Path, overwrite: bool) -> None:
    """Raise ``UserError`` if no store can be made at ``prefix``, or if one exists and ``overwrite`` is off."""
    if prefix.parts[:1] and prefix.parts[0].endswith(":"):
        raise UserError(f"{prefix} is a URL; make the store on a disk and copy its files there")
    with _disk_errors(prefix):
        if prefix.is_dir():
            raise UserError(f"{prefix} is a directory; name the store in it, such as {prefix / 'corpus'}")
        existing = next(path for path in (prefix.parent, *prefix.parent.parents) if os.path.exists(path))
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            why = "not writable" if existing.is_dir() else "not a directory"
            raise UserError(f"{existing} is {why}, so the store {prefix} cannot be made; choose another --out")
        for path in store_files(prefix):
            if path.exists() and not overwrite:
                raise UserError(f"{path} exists; choose another --out or pass --overwrite")


class TokenStoreWriter:
    """A context manager: add documents inside it; leaving it without an exception makes the store.

    ``details`` is merged into the sidecar, and may be filled until the end. ``tokenizer_json`` becomes
    ``PREFIX.tokenizer.json``. With ``masked``, documents come with a mask of the tokens that are labels, and the store
    has a ``PREFIX.mask``. Raises ``UserError`` if the store exists (and ``overwrite`` is off), if another process is
    writing it, and if the disk refuses.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        vocab_size: int,
        tokenizer_json: str | None = None,
        masked: bool = False,
        overwrite: bool = False,
    ) -> None:
        if vocab_size < 1:
            raise UserError(f"vocab_size is {vocab_size}; it must be at least 1")
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.details: dict[str, Any] = {}
        self.tokens = self.labelled_tokens = 0
        self._lengths = array("i")  # of all documents
        self._dtype = token_type(vocab_size)
        self._tokenizer_json = tokenizer_json
        self._masked = masked
        self._content, self._mask_content = hashlib.sha256(), hashlib.sha256()
        check_target(self.prefix, overwrite)
        self._targets = store_files(self.prefix)

    @property
    def documents(self) -> int:
        return len(self._lengths)

    def __enter__(self) -> Self:
        data, mask, sidecar, tokenizer, index = self._targets
        with _disk_errors(self.prefix), ExitStack() as opened:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._bin = opened.enter_context(_open_part(data))
            self._mask = opened.enter_context(_open_part(mask)) if self._masked else None
            for stale in (sidecar, tokenizer, index, *([] if self._masked else [mask])):
                _part(stale).unlink(missing_ok=True)  # of a killed run: we hold the locks, so nobody writes them
            self._files = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with _disk_errors(self.prefix):
                    self._commit()
        finally:
            # Delete parts while their locks are held. Closing flushes, which fails again on a full disk.
            for target in self._targets:
                _part(target).unlink(missing_ok=True)
            with suppress(OSError):
                self._files.close()

    def add(self, tokens: ArrayLike, mask: ArrayLike | None = None) -> None:
        """Append one document; ``mask`` as in ``add_documents``."""
        array = np.asarray(tokens)
        self.add_documents(array, np.array([array.size]), None if mask is None else np.asarray(mask, np.bool_))

    def add_documents(
        self, tokens: NDArray[Any], lengths: NDArray[np.int64], mask: NDArray[np.bool_] | None = None
    ) -> None:
        """Append documents of the given ``lengths``, whose tokens follow each other in ``tokens``.

        ``mask`` has the shape of ``tokens`` and is True for labels; without it, all tokens are labels.
        """
        self._check(tokens, lengths, mask)
        stored = np.ascontiguousarray(tokens, self._dtype).data
        with _disk_errors(self.prefix):
            self._bin.write(stored)
            if self._mask is not None:
                labels = np.ones(tokens.size, np.uint8) if mask is None else mask.astype(np.uint8)
                self._mask.write(labels.data)
                self._mask_content.update(labels.data)
                self.labelled_tokens += int(np.count_nonzero(labels))
        self._content.update(stored)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self.tokens += tokens.size

    def _check(self, tokens: NDArray[Any], lengths: NDArray[np.int64], mask: NDArray[np.bool_] | None) -> None:
        if lengths.sum() != tokens.size or (lengths < 0).any():
            raise ValueError(f"lengths sum to {lengths.sum()}, tokens are {tokens.size}")
        if mask is not None and (mask.shape != tokens.shape or not self._masked):
            raise ValueError(f"a mask of shape {mask.shape} for {tokens.size} tokens, masked = {self._masked}")
        if lengths.size and lengths.max() > MOST_TOKENS:
            raise UserError(
                f"document {self.documents + int(lengths.argmax())} has {lengths.max()} tokens; "
                f"the format holds at most {MOST_TOKENS}; split the document"
            )
        if tokens.size and tokens.dtype.kind not in "iu":
            raise UserError(f"tokens are of type {tokens.dtype}; give whole numbers")
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.vocab_size):
            bad = tokens.min() if tokens.min() < 0 else tokens.max()
            raise UserError(
                f"token {bad} is outside the vocabulary of {self.vocab_size}; raise vocab_size or correct the token"
            )

    def _commit(self) -> None:
        *others, index = self._targets
        _, _, sidecar, tokenizer = others
        for file in filter(None, (self._bin, self._mask)):
            flush(file)
        write_index(_part(index), self._dtype, np.frombuffer(self._lengths, np.int32))
        read_index(_part(index)).lengths()
        says = {
            "format": SIDECAR_FORMAT,
            "vocab_size": self.vocab_size,
            "documents": self.documents,
            "tokens": self.tokens,
            "token_type": self._dtype.name,
            "content_sha256": self._content.hexdigest(),
        }
        if self._masked:
            says |= {"mask_sha256": self._mask_content.hexdigest(), "labelled_tokens": self.labelled_tokens}
        write_synced(_part(sidecar), json.dumps(says | self.details, indent=2, sort_keys=True) + "\n")
        if self._tokenizer_json is not None:
            write_synced(_part(tokenizer), self._tokenizer_json)
        index.unlink(missing_ok=True)
        sync(index.parent)
        for target in others:
            if _part(target).exists():
                os.replace(_part(target), target)
            else:  # a file of the store that is replaced
                target.unlink(missing_ok=True)
        sync(index.parent)
        move(_part(index), index)


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def _open_part(target: Path) -> Any:
    descriptor = open_locked(_part(target))
    if descriptor is None:
        raise UserError(f"another process is writing {target}; wait for it or choose another --out")
    os.ftruncate(descriptor, 0)
    return os.fdopen(descriptor, "w+b", buffering=1 << 20)


@contextmanager
def _disk_errors(prefix: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"token store {prefix} cannot be written: {error.strerror}; choose another --out") from error
