import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import in_turn
from wlb.documents.prepare.tokenization import BytesTokenizer, HuggingFaceTokenizer, load_tokenizer, train_bpe
from wlb.errors import UserError

TEXTS = ["the quick brown fox jumps over the lazy dog " * 3, "def main():\n    return 0\n" * 5, "naïve café " * 4]
END = "<|endoftext|>"
_OF_WORDS = tokenizers.models.WordLevel({"stop": 0, "go": 1}, unk_token="go")
WORDS = tokenizers.Tokenizer(_OF_WORDS).to_str().encode()  # of which no token ends a document
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 300)


@pytest.fixture
def saved(tmp_path, bpe):
    (tmp_path / "tokenizer.json").write_text(bpe.definition)
    return tmp_path


@given(unicode_text)
def test_bytes_are_the_utf8_bytes(text):
    tokenizer = BytesTokenizer()
    assert bytes(tokenizer.encode(text).tolist()).decode() == text
    assert tokenizer.end_token == 256 < tokenizer.vocab_size


@given(unicode_text)
def test_bpe_decodes_to_the_text(bpe, text):
    ids = bpe.encode(text)
    decoder = tokenizers.Tokenizer.from_str(bpe.definition)
    assert decoder.decode(ids.tolist(), skip_special_tokens=False) == text
    assert ids.size == 0 or ids.max() < bpe.vocab_size


def test_a_quoted_end_token_does_not_end_the_document(bpe):
    assert bpe.end_token == 0
    assert 0 not in bpe.encode(f"a {END} b {END}")


def test_nothing_is_added_truncated_or_padded(bpe):
    backend = tokenizers.Tokenizer.from_str(bpe.definition)
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $A {END}", special_tokens=[(END, 0)]
    )
    changed = HuggingFaceTokenizer(backend.to_str(), END, "changed")
    np.testing.assert_array_equal(changed.encode(TEXTS[0]), bpe.encode(TEXTS[0]))


def test_training_is_deterministic_and_pickles(bpe):
    assert train_bpe(iter(TEXTS), 300).definition == bpe.definition
    copy = pickle.loads(pickle.dumps(bpe))
    np.testing.assert_array_equal(copy.encode(TEXTS[2]), bpe.encode(TEXTS[2]))
    assert copy.identity == bpe.identity


def test_files_and_directories_load_the_same(saved, bpe):
    by_file, by_directory = load_tokenizer(str(saved / "tokenizer.json")), load_tokenizer(str(saved))
    for tokenizer in (by_file, by_directory):
        assert tokenizer.identity["sha256"] == bpe.identity["sha256"]
        assert (tokenizer.end_token, tokenizer.vocab_size) == (0, bpe.vocab_size)
    assert str(saved) not in json.dumps(by_file.identity)


@pytest.mark.parametrize("eos", ["fox", {"content": "fox", "lstrip": False}])
def test_the_configured_end_token_comes_first(tmp_path, eos):
    vocabulary = {END: 0, "fox": 1, "the": 7}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="the"))
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).end_token == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert load_tokenizer(str(tmp_path)).end_token == 1
    assert load_tokenizer(str(tmp_path), "the").end_token == 7
    # Ids have gaps: 3 tokens, but the largest id is 7.
    assert load_tokenizer(str(tmp_path)).vocab_size == 8


@in_turn(
    ("files", "name", "end_token", "message"),
    [
        ({}, "gpt5", None, "'gpt5' is neither 'bytes' nor an existing file"),
        ({}, "bytes", END, "no effect for bytes"),
        ({"a/tokenizer.json": b"{}"}, "a", None, "is not a tokenizer.json"),
        ({"b/tokenizer.json": b"\xff\xfe"}, "b", None, "is not UTF-8 text"),
        ({"c/tokenizer.model": b"x"}, "c", None, "holds no tokenizer.json"),
        ({"tokenizer_config.json": b"{"}, ".", None, r"tokenizer_config\.json is not valid JSON"),
        ({"words.json": WORDS}, "words.json", None, "does not say which token ends a document; name it with --end-to"),
        ({"words.json": WORDS}, "words.json", "halt", "'halt' is not in the vocabulary"),
    ],
)
def test_what_is_no_tokenizer_is_refused(saved, monkeypatch, files, name, end_token, message):
    monkeypatch.chdir(saved)
    for path, content in files.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(name, end_token)


def test_vocabularies_too_small_never_reached_or_of_other_text():
    with pytest.raises(UserError, match=r"--train-bpe 256: give 257 to"):
        train_bpe(TEXTS, 256)
    assert train_bpe(["ab"], 1000).vocab_size < 1000
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({END: 0}, unk_token="[UNK]"))
    with pytest.raises(UserError, match=r"tokenizer words cannot encode a document: .*UNK"):
        HuggingFaceTokenizer(backend.to_str(), END, "words").encode("hello")
