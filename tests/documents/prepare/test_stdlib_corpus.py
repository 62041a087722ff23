from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.documents.prepare.batches import documents_of
from wlb.documents.prepare.sources import StdlibCorpus
from wlb.documents.prepare.stdlib_corpus import stdlib_documents, stdlib_files, stdlib_root

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


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(["", "z = 3", "def z(): pass"]))
def test_definitions_partition_a_module(tmp_path_factory, pieces, last_line):
    path = tmp_path_factory.getbasetemp() / "module.py"
    source = "".join(pieces) + last_line
    path.write_text(source)
    documents = stdlib_documents(path, "definition")
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
    assert stdlib_documents(path, "definition") == ["# top\nimport os\n", "\n# about f\n@d\ndef f(): pass\n# end\n"]
    assert stdlib_documents(path, "module") == [path.read_text()]


def test_declared_encodings_are_followed(tmp_path):
    path = tmp_path / "m.py"
    path.write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    assert stdlib_documents(path, "module") == ["# coding: latin-1\nx = 'é'\n"]


def test_files_are_source_and_prose_without_tests_or_packages():
    root = stdlib_root()
    files = [path.relative_to(root) for path in stdlib_files(root)]
    assert {Path("ast.py"), Path("json/decoder.py"), Path("pydoc_data/topics.py")} <= set(files)
    assert {path.suffix for path in files} <= {".py", ".txt"}
    assert files == list(dict.fromkeys(files))
    for path in files:
        assert not {"test", "tests", "site-packages"} & set(path.parts)
        assert not path.name.startswith("_sysconfigdata_")


def test_reference_articles_are_prose_documents():
    (topics,) = (path for path in stdlib_files(stdlib_root()) if path.name == "topics.py")
    documents = stdlib_documents(topics, "definition")
    assert len(documents) > 50
    assert not any(document.lstrip().startswith(("'", "{")) for document in documents)


@pytest.mark.parametrize("unit", ["definition", "module"])
def test_the_whole_library_reads(unit):
    corpus = StdlibCorpus(unit)
    documents = [len(text) for batch in corpus.batches() for text in documents_of(batch)]
    assert len(documents) > {"definition": 5000, "module": 500}[unit]
    # Heavy-tailed, as pre-training corpora are: that is why it is the default corpus.
    assert max(documents) > 50 * sorted(documents)[len(documents) // 2]
