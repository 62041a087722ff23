"""Every kind of source gives the documents that were put into it, and names what it could not take."""

import ast
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import in_turn
from tests.documents.prepare.corpora import compressed
from wlb.documents.prepare.raw_files import Reject
from wlb.documents.prepare.sources import (
    CorpusShard,
    FileCorpus,
    stdlib_documents,
    stdlib_files,
    stdlib_root,
)
from wlb.errors import UserError

PIECES = [
    "import os\n",
    "x = 1; y = 2\n",
    "\n",
    "# a comment\n",
    "def f():\n    return 1\n",
    "@decorated(\n    1)\nclass C:\n    x = '''\ndef g():\n'''\n",
    "async def g():\n    def inner(): pass\n",
    "if x:\n    def h(): pass\n",
    "\f\n",
    "s = 'é\u2028'\n",
]
shares = st.sampled_from([1, 2, 7, 40])
documents = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30), max_size=20)


def read(*sources, shards=1, **options):
    corpus = FileCorpus(sources, **options)
    every = [CorpusShard(number, shards) for number in range(1, shards + 1)]
    return [text for shard in every for batch in corpus.batches(shard) for text in batch]


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.jsonl.zst", "d.ndjson", "d.json", "d.json.gz"])
def test_json_lines_give_their_texts(tmp_path, name):
    @given(documents.filter(bool), st.sampled_from(["\n", "\r\n"]), st.booleans(), shares)
    def same(texts, newline, escape, count):
        body = newline.join(json.dumps({"id": 1, "text": t}, ensure_ascii=escape) for t in texts)
        path = compressed(tmp_path / name, (body + newline * escape).encode())
        assert read(path, shards=count) == texts
        bare = compressed(tmp_path / f"bare-{name}", "".join(f"{json.dumps(text)}\n" for text in texts).encode())
        assert read(bare) == texts

    same()


def test_parquet_gives_its_texts(tmp_path):
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]

    @given(documents, st.sampled_from(kinds), shares)
    def same(texts, kind, count):
        path = tmp_path / "d.parquet"
        pq.write_table(pa.table({"body": pa.array(texts).cast(kind)}), path, row_group_size=7)
        assert read(path, text_field="body", shards=count) == texts

    same()


@pytest.mark.parametrize("name", ["d.txt", "d.txt.gz", "d.txt.zst", "README", "d.weird"])
def test_a_text_file_is_one_document_or_one_per_line(tmp_path, name):
    text = "one\r\ntwo\n\fthree\x00\n\n"
    lines = ["one", "two", "\fthree\x00", Reject.BLANK_LINE]
    for encoding in ("utf-8", "utf-8-sig"):
        path = compressed(tmp_path / name, text.encode(encoding))
        assert read(path, documents="files") == [text]
        assert read(path, documents="lines") == lines
        with pytest.raises(
            UserError, match=f"{name} has several lines; give --documents lines if .* --documents files"
        ):
            read(path)
    assert read(compressed(path, b"one line\n\n")) == ["one line\n\n"]  # which is the same either way


def test_lines_are_documents_however_they_are_divided(tmp_path):
    lines = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), min_size=1).filter(str.strip)

    @given(st.lists(lines, max_size=20), shares)
    def same(texts, count):
        path = compressed(tmp_path / "d.txt", "".join(f"{text}\n" for text in texts).encode())
        assert read(path, documents="lines", shards=count) == texts

    same()


def test_what_is_one_document_is_said(tmp_path):
    for name in ("a.txt", "b.md", "c.py"):
        (tmp_path / name).write_text("one\ntwo\n")
    assert FileCorpus([tmp_path]).name == f"{tmp_path} (one document per file)"
    assert FileCorpus([tmp_path], documents="lines").name == f"{tmp_path} (one document per line)"
    (tmp_path / "d.jsonl").write_text('{"text": "one"}\n')
    corpus = FileCorpus([tmp_path / "b.md", tmp_path / "d.jsonl"])
    assert corpus.name == f"{tmp_path / 'b.md'} and 1 more (one document per file or line)"


def test_bad_lines_are_rejected_by_reason(tmp_path):
    path = tmp_path / "d.jsonl"
    lines = {
        b'{"text": "good"}': "good",
        b'{"text": ""}': Reject.EMPTY,
        b'{"text": "half \\ud800"}': Reject.UNDECODABLE,
        b'{"text": "\xff"}': Reject.UNDECODABLE,
        b"  ": Reject.BLANK_LINE,
        b'{"text": "cut': Reject.BAD_JSON,
        b"[" * 100_000: Reject.BAD_JSON,
        b"9" * 10_000: Reject.BAD_JSON,
        b'{"body": "x"}': Reject.NO_FIELD,
        b"[1]": Reject.NOT_TEXT,
        b'{"text": 5}': Reject.NOT_TEXT,
        b'{"text": null}': Reject.NOT_TEXT,
        b'{"text": "last, without a newline"}': "last, without a newline",
    }
    path.write_bytes(b"\n".join(lines))
    assert read(path) == list(lines.values())


def test_bad_cells_and_files_are_rejected_by_reason(tmp_path):
    raw = pa.array([b"good", b"\xff", b"", None], pa.binary())
    pq.write_table(pa.table({"text": raw}), tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.txt").write_bytes(b"")
    expected = ["good", Reject.UNDECODABLE, Reject.EMPTY, Reject.NOT_TEXT, Reject.UNDECODABLE, Reject.EMPTY]
    assert read(tmp_path) == expected
    cells = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"\xff"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": cells}), tmp_path / "strings.parquet")
    assert read(tmp_path / "strings.parquet") == ["ok", Reject.UNDECODABLE]


def test_directories_are_read_in_order_of_names(tmp_path):
    for name in ("b.py", "a/z.md", "a/y.jsonl", "c.txt", ".git/config.txt", "d.png", "e.json", "a/.hidden.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": name}) if name.endswith("jsonl") else name)
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    corpus = FileCorpus([tmp_path])
    texts = [text for batch in corpus.batches() for text in batch]
    assert texts == ["a/y.jsonl", "a/z.md", "b.py", "c.txt"]
    # .git, d.png, e.json, .hidden.txt, broken.txt, again; the second walk does not count again.
    assert corpus.skipped_files == 6
    assert read(tmp_path / "c.txt", tmp_path / "d.png", tmp_path / "b.py") == ["c.txt", "d.png", "b.py"]


def test_batches_are_bounded(tmp_path):
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "x" * 900}) + "\n") * 5000)
    compressed(tmp_path / "b.jsonl.gz", (json.dumps({"text": "y" * 90}) + "\n").encode() * 5000)
    for i in range(300):
        (tmp_path / f"c{i}.txt").write_text("z" * 10_000)
    batches = list(FileCorpus([tmp_path]).batches())
    assert len(batches) > 6
    assert max(sum(map(len, batch)) for batch in batches) < 1.1 * 2**20


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("d.jsonl.gz", lambda whole: whole[:-20]),
        ("d.jsonl.gz", lambda whole: b"plain text"),
        ("d.jsonl.zst", lambda whole: whole[:-5]),
        ("d.jsonl.zst", lambda whole: b"plain text"),
        ("d.txt.zst", lambda whole: whole[:-5]),
        ("d.parquet", lambda whole: whole[: len(whole) // 2]),
        ("d.parquet", lambda whole: b""),
    ],
)
def test_damaged_containers_are_errors_of_the_file(tmp_path, name, damage):
    path = tmp_path / name
    content = "".join(json.dumps({"text": os.urandom(30).hex()}) + "\n" for _ in range(300))
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": content.splitlines()}), path)
    else:
        compressed(path, content.encode())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=rf"{name} (is|cannot)") as caught:
        read(path, documents="files" if ".txt" in name else None)
    assert "\n" not in str(caught.value)


@in_turn(
    ("name", "content", "options", "message"),
    [
        ("d.csv", b"id,text\n1,one\n", {"documents": "lines"}, r"d\.csv is a table; save it as Parquet or JSON Lines"),
        ("d.tsv.gz", b"id\ttext\n", {"documents": "lines"}, r"d\.tsv\.gz is a table"),
        (
            "d.json",
            b'[{"text": "one"}]',
            {},
            r"d\.json is a JSON list; write an entry per line: cat .* \| jq -c '\.\[\]' ",
        ),
        ("d.json.gz", b'[\n {"text": "one"}\n]', {}, r"d\.json\.gz is a JSON list; .*: zcat "),
        ("d.txt", b"messages", {"chat": True}, r"--chat reads conversations from JSON .*, and .*d\.txt is neither"),
        ("u.txt", "one".encode("utf-16"), {"documents": "lines"}, "u.txt is UTF-16; convert it first: iconv -f UTF-16"),
    ],
)
def test_files_of_other_kinds_are_refused_with_the_remedy(tmp_path, name, content, options, message):
    with pytest.raises(UserError, match=message):
        read(compressed(tmp_path / name, content), **options)


def test_missing_empty_and_unsuitable_sources(tmp_path):
    with pytest.raises(UserError, match=r"source .*nowhere does not exist"):
        FileCorpus([tmp_path / "nowhere"])
    (tmp_path / "picture.png").write_bytes(b"")
    with pytest.raises(UserError, match="holds no text, JSON Lines or Parquet files; name other"):
        FileCorpus([tmp_path])
    pq.write_table(pa.table({"length": [1, 2]}), tmp_path / "n.parquet")
    with pytest.raises(UserError, match=r"no column 'text', only length; choose one with --text-field"):
        read(tmp_path / "n.parquet")
    with pytest.raises(UserError, match=r"column 'length' of .* holds int64, not text"):
        read(tmp_path / "n.parquet", text_field="length")


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(["", "z = 3", "def z(): pass"]))
def test_definitions_partition_a_module(tmp_path_factory, pieces, last_line):
    path = tmp_path_factory.getbasetemp() / "module.py"
    source = "".join(pieces) + last_line
    path.write_text(source)
    documents = stdlib_documents(path)
    assert "".join(documents) == source
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for document in documents:
        nodes = ast.parse(document).body
        # One definition alone, or statements without any.
        assert len(nodes) == 1 or not any(isinstance(node, kinds) for node in nodes)
    definitions = [n for n in ast.parse(source).body if isinstance(n, kinds)]
    assert len(documents) >= len(definitions)


def test_comments_and_decorators_go_with_what_follows(tmp_path):
    path = tmp_path / "m.py"
    path.write_text("# top\nimport os\n\n# about f\n@d\ndef f(): pass\n# end\n")
    assert stdlib_documents(path) == ["# top\nimport os\n", "\n# about f\n@d\ndef f(): pass\n# end\n"]
    path.write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    assert stdlib_documents(path) == ["# coding: latin-1\nx = 'é'\n"]


def test_files_are_source_and_prose_without_tests_or_packages():
    root = stdlib_root()
    files = [path.relative_to(root) for path in stdlib_files(root)]
    assert {Path("ast.py"), Path("json/decoder.py"), Path("pydoc_data/topics.py")} <= set(files)
    assert {path.suffix for path in files} <= {".py", ".txt"}
    assert files == list(dict.fromkeys(files))
    for path in files:
        assert not {"test", "tests", "site-packages"} & set(path.parts)
        assert not path.name.startswith("_sysconfigdata_")
    articles = stdlib_documents(root / "pydoc_data/topics.py")
    assert len(articles) > 50
    assert not any(article.lstrip().startswith(("'", "{")) for article in articles)


def test_conversations_are_read_from_json_and_parquet(tmp_path):
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 3
    rows = [{"id": 1, "messages": chat} for chat in chats]
    (tmp_path / "d.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    for name in ("d.json", "d.parquet"):
        assert read(tmp_path / name, text_field="messages", chat=True) == chats
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    assert read(tmp_path / "d.jsonl", chat=True) == chats
    invalid = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    pq.write_table(pa.table({"messages": invalid}), tmp_path / "bad.parquet")
    assert read(tmp_path / "bad.parquet", text_field="messages", chat=True) == [Reject.UNDECODABLE]
    pq.write_table(pa.table({"messages": [{"messages": chats[0]}]}), tmp_path / "struct.parquet")
    assert read(tmp_path / "struct.parquet", text_field="messages", chat=True) == [Reject.NOT_MESSAGES]
