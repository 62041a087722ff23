"""Stores opened as one: documents are counted through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wlb.documents.store.mixture import StoreMixture, document_lengths, open_stores
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.errors import UserError


def write(prefix: Path, documents: list[list[int]], **details: Any) -> Path:
    with TokenStoreWriter(prefix, vocab_size=50, details=details) as writer:
        for tokens in documents:
            writer.add(tokens)
    return prefix


def test_documents_are_counted_through_the_stores(tmp_path):
    prefixes = [write(tmp_path / "a", [[1, 2, 3], [4]]), write(tmp_path / "b", [[5, 6]])]
    mixture = open_stores(prefixes)
    assert isinstance(mixture, StoreMixture)
    assert mixture.lengths_of(np.array([2, 0, 1, 2])).tolist() == [2, 3, 1, 2]
    of_stores = document_lengths(mixture)
    assert isinstance(of_stores, list)
    assert [of_store[:].tolist() for of_store in of_stores] == [[3, 1], [2]]
    assert [mixture.read(document).tolist() for document in range(len(mixture))] == [[1, 2, 3], [4], [5, 6]]
    assert mixture.read(0, 1, 2).tolist() == [2, 3]
    ids = np.array([0, 2, 3 + 1, 300 + 2])  # of epochs 0, 0, 1 and 100
    assert mixture.tokens_by_store(ids, np.array([1, 10, 100, 1000])) == (101, 1010)
    assert mixture.vocab_size == 50
    with pytest.raises(UserError, match="document 1 is not in"):
        mixture.read(3)


def test_one_store_is_itself(tmp_path):
    assert isinstance(open_stores([write(tmp_path / "a", [[1]])]), TokenStore)


def test_identity_follows_the_stores_and_their_order(tmp_path):
    a, b = write(tmp_path / "a", [[1]]), write(tmp_path / "b", [[2]])
    assert open_stores([a, b]).identity != open_stores([b, a]).identity


def test_stores_of_different_tokenizers_are_refused(tmp_path):
    prefixes = [write(tmp_path / name, [[1]], tokenizer={"kind": "huggingface", "sha256": name}) for name in "ab"]
    with pytest.raises(UserError, match=r"b was prepared with another tokenizer than .*a; prepare all"):
        open_stores(prefixes)
