import gzip
import io
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import in_turn
from wlb.documents.lengths import assumed_window, described_window, read_lengths, what_was_read
from wlb.documents.store.reader import TokenStoreWriter
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.terminal import number_of

LIMIT = 2**31 - 1


def save(directory, name, lengths):
    path = directory / name
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(lengths))
        case ".txt":
            path.write_text("".join(f"{n}\n" for n in lengths))
        case ".csv":
            path.write_text("name,length\n" + "".join(f'"a, b",{n}\n' for n in lengths))
        case ".tsv":
            path.write_text("name\tlength\n" + "".join(f"a, b\t{n}\n" for n in lengths))
        case ".jsonl":
            path.write_text("".join(f'{{"length": {n}}}\n' for n in lengths))
        case ".npy":
            np.save(path, np.array(lengths))
        case ".parquet":
            pq.write_table(pa.table({"other": ["x"] * len(lengths), "length": lengths}), path)
    return path


@pytest.mark.parametrize("name", ["l.json", "l.txt", "l.npy", "l.parquet", "l.csv", "l.tsv", "l.jsonl"])
def test_every_kind_of_file_gives_the_same(tmp_path, name):
    @given(st.lists(st.integers(1, LIMIT), min_size=1, max_size=50))
    def same(lengths):
        path = save(tmp_path, name, lengths)
        result = read_lengths(path)
        assert result.dtype == np.int64
        assert result.tolist() == lengths
        if name != "l.parquet":
            for ending, compress in ((".gz", gzip.compress), (".zst", pa.Codec("zstd").compress)):
                (compressed := Path(f"{path}{ending}")).write_bytes(compress(path.read_bytes()))
                assert read_lengths(compressed).tolist() == lengths

    same()


def test_other_ways_to_write_lengths(tmp_path, monkeypatch):
    for name, text in (("one.csv", "tokens\n3\n9\n"), ("l.jsonl", '3\n{"input_ids": [1,2]}\n\n')):
        (tmp_path / name).write_text(text)
    assert read_lengths(tmp_path / "one.csv").tolist() == [3, 9]
    assert read_lengths(tmp_path / "l.jsonl").tolist() == [3, 2]
    (tmp_path / "l.json").write_text('[3, {"input_ids": [1, 2]}]')
    assert read_lengths(tmp_path / "l.json").tolist() == [3, 2]
    for name in ("tokens", "input_ids"):
        pq.write_table(pa.table({name: [[1, 2], [], [3]]}).slice(0, 1), tmp_path / "l.parquet")
        assert read_lengths(tmp_path / "l.parquet").tolist() == [2]
    (tmp_path / "n.csv").write_text("id,num_tokens\n1,8\n")
    assert read_lengths(tmp_path / "n.csv").tolist() == [8]
    (tmp_path / "l.csv").write_text(f"length,text\n7,{'x' * 200_000}\n")
    assert read_lengths(tmp_path / "l.csv").tolist() == [7]
    (tmp_path / "l.csv").write_text("length,length\n3,5\n\n4,6\n")  # the first of two columns, blank lines left out
    assert read_lengths(tmp_path / "l.csv").tolist() == [3, 4]
    (tmp_path / "WINDOWS.TXT").write_text("5\r\n6\r\n", encoding="utf-8-sig")
    assert read_lengths(str(tmp_path / "WINDOWS.TXT")).tolist() == [5, 6]
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeff3\n9\n"))
    assert read_lengths("-").tolist() == [3, 9]
    monkeypatch.setattr("sys.stdin", io.StringIO("3\nx\n"))
    with pytest.raises(UserError, match="standard input: line 2 is 'x'"):
        read_lengths("-")


@in_turn(
    ("name", "content", "message"),
    [
        ("l.csv", "id,n\na,3\nb,9\n", "has no column 'length' (--length-column names another), but id, n; if"),
        ("l.jsonl", '{"n": 3, "length": "x"}\n{"n": [1,2,3,4,5,6,7,8,9]}\n', "line 1 is 'x'; a whole number is needed"),
        ("l.json", '[{"n": 3}, {"n": 9}]', "entry 0 has no column 'length' (--length-column names another), but n"),
        ("l.parquet", None, "has no column 'length' (--length-column names another), but n"),
        ("l.txt", "3\n", None),
        ("l.npy", "", None),
        ("synthetic:9:4K:0", "", None),
    ],
)
def test_a_column_that_has_lengths_under_another_name(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is None:
        pq.write_table(pa.table({"n": [3, 9]}), name)
    else:
        Path(name).write_text(content)
    if message is None:
        message = f"--length-column n is for tables, and {name} has no columns; leave it out"
        with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
            read_lengths(name, column="n")
        return
    assert read_lengths(name, column="n").tolist() == [3, 9]
    with pytest.raises(UserError, match=re.escape(message)):
        read_lengths(name)
    with pytest.raises(UserError, match=r" has no column 'm', but (id, )?n(, length)?; name one of those$"):
        read_lengths(name, column="m")


def test_stores_are_read_by_prefix_and_index_with_empty_documents(tmp_path):
    prefix = tmp_path / "corpus.v1"
    with TokenStoreWriter(prefix, vocab_size=10) as writer:
        for length in (0, 3, 1, 0, 9):
            writer.add([1] * length)
    assert read_lengths(prefix).tolist() == [0, 3, 1, 0, 9]
    assert read_lengths(str(tmp_path / "corpus.v1.idx")).tolist() == [0, 3, 1, 0, 9]
    (tmp_path / "corpus.v1.bin").unlink()
    assert read_lengths(prefix).tolist() == [0, 3, 1, 0, 9]
    with TokenStoreWriter(tmp_path / "void", vocab_size=10) as writer:
        writer.add([])
    with pytest.raises(UserError, match="holds no document with tokens"):
        read_lengths(tmp_path / "void")


def test_synthetic_source():
    np.testing.assert_array_equal(read_lengths("synthetic:100:4096:3"), sample_lengths(100, 4096, 3))
    np.testing.assert_array_equal(read_lengths("synthetic:100:4096"), sample_lengths(100, 4096, 0))
    np.testing.assert_array_equal(read_lengths("synthetic:100:4k:3"), sample_lengths(100, 4096, 3))


@pytest.mark.parametrize(
    ("name", "where"),
    [("l.json", "entry 2"), ("l.txt", "line 3"), ("l.npy", "entry 2"), ("l.parquet", "row 2")],
)
@pytest.mark.parametrize("bad", [0, -7, LIMIT + 1])
def test_lengths_out_of_range_are_named(tmp_path, name, where, bad):
    with pytest.raises(UserError, match=rf"{where} is ('-7'; a whole number|{bad}; a document has 1 to {LIMIT})"):
        read_lengths(save(tmp_path, name, [1, 2, bad, 4, 0]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.json", b"[1, 2.5]", "entry 1 is '2.5'; a whole number"),
        ("l.json", b"[true]", "entry 0 is 'True'"),
        ("l.json", b'[1, "5"]', "entry 1 is '5'"),
        ("l.json", b'{"lengths": [1]}', "a list of lengths is needed"),
        ("l.json", b"[1, 2", "not valid JSON"),
        ("l.json", b"[" * 100_000, "not valid JSON"),
        ("l.json", b"[]", "holds no document lengths"),
        ("l.txt", b"", "holds no document lengths"),
        ("l.txt", b"5\n\n7\n", "line 2 is ''"),
        ("l.txt", b"5\n6.0\n", "line 2 is '6.0'"),
        ("l.txt", "5\n１２\n".encode(), "line 2 is '１２'"),
        ("l.txt", b"9" * 5000, "line 1 is '9999"),
        ("l.txt", b"\xff\xfe\x00", "is UTF-16; convert it first"),
        ("l.txt", b"\xff5", "is not UTF-8"),
        ("l.json.gz", b"[5]", "is damaged or not a gzip file"),
        ("l.txt.gz", gzip.compress(b"5\n6\n", mtime=0)[:-9], "is damaged or not a gzip file"),
        ("l.npy", b"not numpy", "holds no NumPy array of numbers; write"),
        ("l.parquet", b"not parquet", "not a readable Parquet file"),
        ("l.idx", b"not an index", "not the index of a token store"),
        ("l.bed", b"1,2", "of an unknown kind"),
        ("l.csv", b"1,2", "has no column 'length' .*, but 1, 2"),
        (
            "l.csv",
            b"id\n1\n2\n",
            r"column 'length' \(--length-column names another\), but id; if it is text, save it as Par",
        ),
        ("l.csv", b"id,length\n1,5\n2,x\n", "line 3 is 'x'"),
        ("l.csv", b"id,length\n1,5\n2,0\n", "line 3 is 0; a document has 1 to"),
        ("l.csv", b"", "holds no document lengths"),
        ("l.csv", b"\nlength\n5\n", "has no column 'length' .*, but none"),
        ("l.csv", b'length\n"5\n', "not a CSV file: line 2: unexpected end of data"),
        ("l.jsonl", b"5\n{oops\n", "line 2 is not valid JSON"),
        ("l.jsonl", b'{"text": "a"}\n', "line 1 has no column 'length' .*, but text"),
        ("l.jsonl", b'5\n{"length": 2.5}\n', "line 2 is '2.5'"),
        ("l.json", b"[5, 99999999999999999999]", "entry 1 is 99999999999999999999; a document has 1 to"),
    ],
)
def test_wrong_content_is_one_clear_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_lengths(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "found", "options"),
    [
        ("d.txt", "Once upon\na time\n", "line 1 is 'Once upon'; a whole number is needed", " --documents lines"),
        (
            "d.jsonl",
            '{"text": "Once"}\n',
            "line 1 has no column 'length' (--length-column names another), but text",
            "",
        ),
        ("d.jsonl", '{"id": "1", "body": "Once"}\n', "but id, body", " --text-field body"),
        (
            "d.json",
            '{"text": "Once"}\n{"text": "more"}\n',
            "is not valid JSON: Extra data: line 2 column 1 (char 17)",
            "",
        ),
        ("d.md", "Once\nupon\n", "is of an unknown kind; lengths come from .json", ""),
        ("d", None, "is a directory; name a token store in it", ""),
    ],
)
def test_text_is_refused_with_the_option_that_counts_its_tokens(tmp_path, monkeypatch, name, content, found, options):
    monkeypatch.chdir(tmp_path)
    if content is None:
        Path(name).mkdir()
    else:
        Path(name).write_text(content)
    with pytest.raises(UserError) as caught:
        read_lengths(name)
    message = str(caught.value)
    assert found in message
    assert f"; if it is text, count its tokens with: wlb check {name}{options} --tokenizer bytes, or" in message
    assert f"wlb prepare {name}{options} --out STORE" in message
    assert "\n" not in message


CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet"])
def test_conversations_are_refused_with_the_options_that_read_them(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if name == "chats.jsonl":
        Path(name).write_text(json.dumps(CHAT))
    else:
        pq.write_table(pa.Table.from_pylist([CHAT]), name)
    with pytest.raises(UserError) as caught:
        read_lengths(name)
    assert str(caught.value).endswith(
        f"; if it holds conversations, count its tokens with: wlb check {name} --chat --tokenizer DIRECTORY, or store "
        f"them with: wlb prepare {name} --chat --tokenizer DIRECTORY --out STORE (DIRECTORY has the tokenizer)"
    )


def test_no_advice_is_to_tokenize_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in (
        ("l.dat", "5\n6\n"),
        ("l.json", "[5, 6"),
        ("l.csv", "length\nx\n"),
        ("l.jsonl", '{"length": "x"}'),
    ):
        Path(name).write_text(content)
        with pytest.raises(UserError) as caught:
            read_lengths(name)
        assert "if it is text" not in str(caught.value)
    Path("l.json").write_text('[{"body": "Once"}]')
    with pytest.raises(
        UserError, match=r"; if it is text, write an entry per line: cat l.json \| jq -c '.\[\]' > NEW.jsonl"
    ):
        read_lengths("l.json")


@given(st.lists(st.one_of(st.integers(0, 9), st.integers(1, 300_000)), min_size=1).filter(any))
def test_what_was_read_and_the_window_are_those_of_the_documents(lengths):
    """95% by its definition: the least length that is enough."""
    trained = sorted(length for length in lengths if length)
    held = next(length for length in trained if sum(n for n in trained if n <= length) >= 0.95 * sum(trained))
    window = assumed_window(np.array(lengths))
    said = what_was_read("d.csv", np.array(lengths), window)
    empty = f" and {len(lengths) - len(trained)} empty" if len(trained) < len(lengths) else ""
    over = sum(length > window for length in lengths) or "none"
    assert said == (
        f"read d.csv: {number_of(len(trained), 'document')}{empty}, {number_of(sum(lengths), 'token')}; "
        f"median {trained[(len(trained) - 1) // 2]:,}, longest {trained[-1]:,}; "
        f"documents up to {held:,} cover 95% of tokens; {over} over the window of {window:,}"
    )
    assert window in [4096 << power for power in range(6)]
    assert held <= window or window == 131_072
    assert held > window // 2 or window == 4096


def test_one_outlier_does_not_choose_the_window():
    lengths = np.array([3000] * 1000 + [100_000])
    assert assumed_window(lengths) == 4096
    assert described_window(4096, lengths) == "--context-window 4096 (covers 96% of tokens)"
    lengths = np.array([200_000, 200_000, 1000])
    why = "(the longest default; covers 0% of tokens)"
    assert described_window(assumed_window(lengths), lengths) == f"--context-window 131072 {why}"


def test_what_was_read_may_be_empty():
    assert what_was_read("d", np.zeros(3, np.int64), 4096) == "read d: 0 documents and 3 empty, 0 tokens"
    assert assumed_window(np.zeros(3, np.int64)) == 4096


def test_wrong_parquet_columns(tmp_path):
    path = tmp_path / "l.parquet"
    for table, message in (
        (
            {"id": [1], "body": ["a"]},
            r"no column 'length' \(--length-column names another\), but id, body; if it is text",
        ),
        ({"length": ["a"]}, "holds string values; whole numbers are needed"),
        ({"length": [1.0, 2.5]}, "holds double values"),
        ({"length": [1, None, 3]}, "column 'length' of .* holds int64 values, some of them null"),
        ({"length": [[1], [2, 3]]}, "column 'length' of .* holds list.* values"),
        ({"input_ids": [[1], None]}, "column 'input_ids' of .* values, some of them null"),
    ):
        pq.write_table(pa.table(table), path)
        with pytest.raises(UserError, match=message):
            read_lengths(path)


@in_turn(
    ("source", "message"),
    [
        ("synthetic:10", "synthetic:DOCUMENTS:WINDOW"),
        ("synthetic:a:b", "synthetic:DOCUMENTS:WINDOW"),
        ("synthetic:1:2:3:4", "synthetic:DOCUMENTS:WINDOW"),
        ("synthetic:-1:5", "synthetic:DOCUMENTS:WINDOW"),
        ("synthetic:10:5:٣", "synthetic:DOCUMENTS:WINDOW"),
        ("synthetic:10:0", "'0' is not a number of tokens"),
        ("synthetic:10:4X", "'4X' is not a number of tokens"),
        ("l.json", r"l\.json does not exist"),
        ("l.idx", r"l\.idx does not exist"),
        ("corpus", "nor a token store corpus.idx exists; name a file of lengths"),
        (".", "is a directory; name a"),
        ("", "is empty"),
        ("a" * 5000, "cannot be read: File name too long"),
    ],
)
def test_sources_that_are_nothing(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        read_lengths(source)


@in_turn("dtype", ["uint16", "int32", ">i8", "uint64"])
def test_arrays_of_any_integer_type(tmp_path, dtype):
    np.save(tmp_path / "l.npy", np.array([5, 60000]).astype(dtype))
    assert read_lengths(tmp_path / "l.npy").tolist() == [5, 60000]


@in_turn(
    ("array", "message"),
    [
        (np.array([1.0, np.nan]), r"holds float64 values in shape \(2,\); write whole numbers"),
        (np.array([True]), "holds bool values"),
        (np.array([[1, 2]]), r"shape \(1, 2\)"),
        (np.array([None]), "no NumPy array of numbers; write"),
        (np.array([1, 2**64 - 5], np.uint64), "entry 1 is 18446744073709551611"),
    ],
)
def test_wrong_arrays(tmp_path, array, message):
    np.save(tmp_path / "l.npy", array, allow_pickle=True)
    with pytest.raises(UserError, match=message):
        read_lengths(tmp_path / "l.npy")
