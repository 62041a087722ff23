"""A corpus in shards: stores that are the one store, in order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.documents.prepare.test_sources import compressed
from wlb.documents.prepare import prepare_store
from wlb.documents.prepare.sources import CorpusShard, FileCorpus
from wlb.documents.prepare.tokenization import BytesTokenizer
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError


def write_corpus(directory: Path) -> FileCorpus:
    """Of every kind of file."""
    directory.mkdir()
    lines = "".join(json.dumps({"text": f"{i} " * (i % 90)}) + "\n" for i in range(200)).encode()
    (directory / "a.jsonl").write_bytes(lines + b'{oops\n{"text": "' + b"x" * 5000 + b'"}\n')
    compressed(directory / "b.jsonl.gz", lines)
    table = arrow.table({"text": [f"cell {i} " * 20 for i in range(100)]})
    parquet.write_table(table, directory / "c.parquet", row_group_size=30, compression="none")
    for i in range(30):
        (directory / f"d{i}.txt").write_text(f"text {i} " * 40 * (i % 3))
    (directory / "e.png").write_bytes(b"")
    return FileCorpus([directory])


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


def test_shards_are_the_store_in_order(tmp_path, corpus):
    prepare_store(corpus, tmp_path / "alone", BytesTokenizer())
    alone = TokenStore.open(tmp_path / "alone")
    for count in (1, 3, 11):
        shards = [CorpusShard(number, count) for number in range(1, count + 1)]
        reports = [
            prepare_store(
                corpus, tmp_path / f"s{count}", BytesTokenizer(), shard=shard, workers=1 + (shard.number == 3)
            )
            for shard in reversed(shards)
        ]
        store = TokenStore.open(tmp_path / f"s{count}-*-of-{count}")
        assert sum(report.documents_out for report in reports) == len(store)
        assert np.array_equal(store.lengths, alone.lengths)
        tokens = b"".join((tmp_path / f"s{count}-{index}-of-{count}.bin").read_bytes() for index in range(1, count + 1))
        assert tokens == (tmp_path / "alone.bin").read_bytes()


def test_a_shard_is_made_whole_or_not_at_all_and_once(tmp_path, corpus):
    prefix, shard = tmp_path / "s", CorpusShard(2, 3)
    prepare_store(corpus, prefix, BytesTokenizer(), shard=shard)
    assert sorted(path.name for path in tmp_path.glob("s*")) == ["s-2-of-3.bin", "s-2-of-3.idx", "s-2-of-3.json"]
    assert json.loads((tmp_path / "s-2-of-3.json").read_text())["shard"] == "2/3"
    with pytest.raises(UserError, match=r"s-2-of-3\.bin exists; choose another --out or pass --overwrite"):
        prepare_store(corpus, prefix, BytesTokenizer(), shard=shard)
    with pytest.raises(UserError, match=r"s-2-of-3\.idx is one of another number of shards than 4; remove those, or"):
        prepare_store(corpus, prefix, BytesTokenizer(), shard=CorpusShard(1, 4))


def test_shards_in_which_no_document_begins_are_empty(tmp_path):
    (tmp_path / "d.txt").write_text("one")
    (tmp_path / "bad.jsonl").write_text("{")
    for number in (1, 2):
        report = prepare_store(
            FileCorpus([tmp_path / "d.txt"]), tmp_path / "s", BytesTokenizer(), shard=CorpusShard(number, 2)
        )
        assert report.documents_out == 2 - number
    assert TokenStore.open(tmp_path / "s-*").lengths.tolist() == [4]
    with pytest.raises(UserError, match=r"s-2-of-2\.idx holds no documents"):
        TokenStore.open(tmp_path / "s-2-of-2")
    with pytest.raises(UserError, match="no documents are left of 1: 1 bad json"):
        prepare_store(FileCorpus([tmp_path / "bad.jsonl"]), tmp_path / "t", BytesTokenizer(), shard=CorpusShard(1, 1))


def test_shards_are_named():
    for text in ("1/1", "3/100"):
        assert str(CorpusShard.parse(text)) == text
    for text in ("0/3", "4/3", "3", "a/b", "-1/3", "1/0", "slurm"):
        with pytest.raises(UserError, match=f"--shard {text} is not I/N with I from 1 to N"):
            CorpusShard.parse(text)
