"""Tokenizers as ``wlb prepare`` needs them: text in, token ids out, and one id that ends every document.

``load_tokenizer`` takes ``bytes`` (the 256 byte values, then the end token), a Hugging Face ``tokenizer.json``, or a
directory that holds one. ``train_bpe`` trains a new one on text. Tokenizers can be pickled for worker processes.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError, require

# The usual names of the token that ends a document, tried if no configuration names it.
_END_TOKEN_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eod|>", "<｜end▁of▁sentence｜>", "[EOS]")
# Byte-level BPE starts from all 256 bytes and the end token.
_SMALLEST_BPE, _LARGEST_BPE = 257, 2**20  # several times the largest in use


class Encoded(NamedTuple):
    """A document, its tokens without the end token, and which of them are labels (None if all are)."""

    text: str
    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_] | None = None


class BytesTokenizer:
    """UTF-8 bytes as tokens 0 to 255; 256 ends a document. Needs no vocabulary file."""

    vocab_size = 257  # every id is below this
    end_token = 256  # ends a document; ``encode`` does not append it
    special_tokens: tuple[str, ...] = ()  # names of tokens that are not text

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes this tokenizer from others: kind, name and the sha256 of its definition."""
        return {"kind": "bytes", "name": "bytes", "end_token": "256"}

    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids of ``text``, shape (tokens,). Raises ``UnicodeEncodeError`` for text that UTF-8 cannot encode."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Token ids of ``text``, recognising special tokens, and which of them begin inside ``spans``.

        ``spans`` are ascending pairs of character positions, each [first, end). Both results: shape (tokens,).
        """
        tokens = self.encode(text)
        starts_character = (tokens & 0xC0) != 0x80  # bytes 10xxxxxx continue a character of UTF-8
        return tokens, _inside(np.cumsum(starts_character) - 1, spans)


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A tokenizer defined by the text of a ``tokenizer.json`` of Hugging Face ``tokenizers``.

    ``encode`` treats special tokens in the text as plain text (a document that quotes ``<|endoftext|>`` does not end
    there), adds nothing around it, and ignores the file's truncation and padding.
    """

    definition: str
    end_token_name: str
    name: str

    @property
    def vocab_size(self) -> int:
        # Ids may have gaps, so the number of tokens is not enough.
        vocabulary = _parsed(self.definition, self.name).get_vocab(with_added_tokens=True)
        return 1 + max(int(token) for token in vocabulary.values())

    @property
    def end_token(self) -> int:
        return int(_parsed(self.definition, self.name).token_to_id(self.end_token_name))

    @property
    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256(self.definition.encode()).hexdigest()
        return {"kind": "huggingface", "name": self.name, "sha256": digest, "end_token": self.end_token_name}

    @property
    def special_tokens(self) -> tuple[str, ...]:
        added = json.loads(self.definition).get("added_tokens") or []
        return tuple(token["content"] for token in added if token.get("special"))

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array(self._encoding(text, is_plain=True).ids, np.int64)

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        encoding = self._encoding(text, is_plain=False)
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        return np.array(encoding.ids, np.int64), _inside(starts, spans)

    def _encoding(self, text: str, is_plain: bool) -> Any:
        """Encode; with ``is_plain``, without character offsets and special tokens."""
        backend = _parsed(self.definition, self.name, encode_special_tokens=is_plain)
        try:
            if is_plain:  # the fast variant computes no offsets and exists for batches only
                return backend.encode_batch_fast([text], add_special_tokens=False)[0]
            return backend.encode(text, add_special_tokens=False)
        except Exception as error:  # tokenizers raises bare Exception, for a word without an id and no unknown token
            raise UserError(
                f"tokenizer {self.name} cannot encode a document: {error}; choose another --tokenizer"
            ) from None


Tokenizer: TypeAlias = BytesTokenizer | HuggingFaceTokenizer


def _inside(positions: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which of ``positions`` lie in one of ``spans``, in ascending order."""
    edges = np.array(spans, np.int64).reshape(-1)
    inside: NDArray[np.bool_] = np.searchsorted(edges, positions, side="right") % 2 == 1
    return inside


def load_tokenizer(source: str, end_token: str | None = None) -> Tokenizer:
    """The tokenizer named ``bytes``, or the one in a ``tokenizer.json`` or in a directory that holds one.

    ``end_token`` names the token that ends documents; by default ``eos_token`` of a ``tokenizer_config.json`` beside
    the file, or else a well-known name. Raises ``UserError`` if there is no such file or token.
    """
    if source == "bytes":
        if end_token is not None:
            raise UserError(f"--end-token {end_token!r} has no effect for bytes, where token 256 ends documents")
        return BytesTokenizer()
    path = Path(source) / "tokenizer.json" if os.path.isdir(source) else Path(source)
    try:
        definition = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if os.path.isdir(source):
            raise UserError(f"{source} holds no tokenizer.json; save the tokenizer in the fast format first") from None
        raise UserError(
            f"tokenizer {source!r} is neither 'bytes' nor an existing file or directory; download one first: "
            "hf download MODEL tokenizer.json tokenizer_config.json --local-dir DIR"
        ) from None
    except OSError as error:
        raise UserError(f"tokenizer {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text, so it is not a tokenizer.json; name another --tokenizer") from None
    name = path.resolve().parent.name if path.name == "tokenizer.json" else path.name
    return HuggingFaceTokenizer(definition, _find_end_token(definition, path, end_token), name)


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Train a byte-level BPE of at most ``vocab_size`` tokens; ``<|endoftext|>`` has id 0.

    The same texts in the same order give the same tokenizer. Memory grows with the number of distinct words.
    Raises ``UserError`` for a vocabulary below 257 or over a million.
    """
    if not _SMALLEST_BPE <= vocab_size <= _LARGEST_BPE:
        raise UserError(f"--train-bpe {vocab_size}: give {_SMALLEST_BPE} to {_LARGEST_BPE} tokens")
    tokenizers = require("tokenizers", "data")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_TOKEN_NAMES[0]],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(backend.to_str(), _END_TOKEN_NAMES[0], f"bpe-{backend.get_vocab_size()}")


def _find_end_token(definition: str, path: Path, wanted: str | None) -> str:
    candidates = [*_END_TOKEN_NAMES] if wanted is None else [wanted]
    if wanted is None and path.name == "tokenizer.json":
        candidates.insert(0, named_tokens(tokenizer_config(path.parent)).get("eos_token", ""))
    backend = _parsed(definition, str(path))
    for candidate in candidates:
        if backend.token_to_id(candidate) is not None:
            return candidate
    if wanted is not None:
        raise UserError(f"--end-token {wanted!r} is not in the vocabulary of {path}; name a token that is")
    raise UserError(f"{path} does not say which token ends a document; name it with --end-token")


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """The content of ``tokenizer_config.json``; empty without one. Raises ``UserError`` if it is not JSON."""
    path = directory / "tokenizer_config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(
            f"{path} is not valid JSON; mend it, or remove it and name the end token with --end-token"
        ) from None
    return config if isinstance(config, dict) else {}


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like; older files describe a token with an object of properties."""
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    plain = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: token for name, token in plain.items() if isinstance(token, str)}


@lru_cache
def _parsed(definition: str, name: str, encode_special_tokens: bool = False) -> Any:
    tokenizers = require("tokenizers", "data")
    try:
        backend = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(
            f"{name} is not a tokenizer.json: {str(error).splitlines()[0]}; name another --tokenizer"
        ) from None
    backend.encode_special_tokens = encode_special_tokens
    backend.no_truncation()
    backend.no_padding()
    return backend
