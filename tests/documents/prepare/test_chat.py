"""Conversations become text by a template, and exactly what the assistant says becomes labels."""

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from wlb.documents.prepare import prepare_store
from wlb.documents.prepare.chat import CHATML, ChatFormat
from wlb.documents.prepare.sources import FileCorpus
from wlb.documents.prepare.tokenization import BytesTokenizer, Tokenizer, load_tokenizer, train_bpe
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "naïve 2+2?"},
    {"role": "assistant", "content": "4 …"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "Yes."},
]
# As Llama 3 writes its turns, with the marks that transformers looks for.
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|turn|>{% endgeneration %}
    {%- else %}{{ message['content'] | trim }}<|turn|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"""


def tokenizer_directory(tmp_path: Path, template: str = TEMPLATE) -> Path:
    backend = tokenizers.Tokenizer.from_str(train_bpe(["sure? Yes. Be brief. " * 4], 300).definition)
    backend.add_special_tokens(["<|bos|>", "<|start|>", "<|end|>", "<|turn|>"])
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    settings = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|endoftext|>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def prepared(
    tmp_path: Path, lines: list[Any], tokenizer: Tokenizer, chat: ChatFormat
) -> tuple[TokenStore, dict[str, int]]:
    source = tmp_path / "chat.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = FileCorpus([source], "messages", chat=True)
    report = prepare_store(corpus, tmp_path / "store", tokenizer, chat=chat, overwrite=True)
    assert report.documents_in == len(lines)
    return TokenStore.open(tmp_path / "store"), report.rejects


def labels_of(store: TokenStore, document: int) -> list[int]:
    mask = store.loss_mask(document, 0, int(store.lengths[document]))
    assert mask is not None
    tokens: list[int] = store.read(document)[mask].tolist()
    return tokens


def test_chatml_labels_what_the_assistant_says_with_the_end_of_its_turns(tmp_path):
    store, rejects = prepared(tmp_path, [{"messages": CHAT}], BytesTokenizer(), ChatFormat.of_tokenizer(None, ()))
    assert rejects == {}
    text = bytes(store.read(0)[:-1].tolist()).decode()
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert bytes(labels_of(store, 0)).decode() == "4 …<|im_end|>\nYes.<|im_end|>\n"


def test_the_tokenizers_own_template_is_used_and_its_special_tokens_are_tokens(tmp_path):
    directory = tokenizer_directory(tmp_path)
    tokenizer = load_tokenizer(str(directory))
    chat = pickle.loads(pickle.dumps(ChatFormat.of_tokenizer(str(directory), tokenizer.special_tokens)))
    store, _ = prepared(tmp_path, [{"messages": CHAT}], tokenizer, chat)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens, turn = store.read(0).tolist(), backend.token_to_id("<|turn|>")
    assert tokens[0] == backend.token_to_id("<|bos|>")
    assert Counter(tokens)[turn] == len(CHAT)
    said = backend.decode(labels_of(store, 0), skip_special_tokens=False)
    assert said == "4 …<|turn|>Yes.<|turn|>"
    text = backend.decode(tokens, skip_special_tokens=False)
    assert text.endswith("sure?<|turn|><|start|>assistant<|end|>\n\nYes.<|turn|><|endoftext|>")


def test_a_template_file_beside_the_tokenizer_comes_first(tmp_path):
    directory = tokenizer_directory(tmp_path)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    assert ChatFormat.of_tokenizer(str(directory), ()).template.startswith("{% for m in")
    assert ChatFormat.of_tokenizer(str(directory), ()).template != CHATML
    assert ChatFormat.of_tokenizer("bytes", ()).template == CHATML


@pytest.mark.parametrize(
    ("line", "template", "reason"),
    [
        ({"messages": "hello"}, TEMPLATE, "not_messages"),
        ({"messages": [{"role": "user"}]}, TEMPLATE, "not_messages"),
        ({"text": "hello"}, TEMPLATE, "missing_field"),
        ({"messages": CHAT[:2]}, TEMPLATE, "no_assistant_message"),
        (
            {"messages": [{"role": "user", "content": "what is <|turn|>?"}, CHAT[-1]]},
            TEMPLATE,
            "special_token_in_message",
        ),
        ({"messages": CHAT}, "{{ raise_exception('no system message') }}", "refused_by_chat_template"),
        ({"messages": CHAT}, "{{ messages[0].content.index('nowhere') }}", "refused_by_chat_template"),
        ({"messages": CHAT}, "{{ messages[-1].content }}", "rewritten_by_chat_template"),
    ],
)
def test_what_cannot_be_labelled_is_counted(tmp_path, line, template, reason):
    directory = tokenizer_directory(tmp_path, template)
    tokenizer = load_tokenizer(str(directory))
    chat = ChatFormat.of_tokenizer(str(directory), tokenizer.special_tokens)
    with pytest.raises(UserError, match=f"1 document read, none can be stored: 1 {reason.replace('_', ' ')}"):
        prepared(tmp_path, [line], tokenizer, chat)


def test_a_broken_template_is_one_line(tmp_path):
    with pytest.raises(UserError, match="tokenizer's chat template is not valid"):
        ChatFormat("{% for %}").encode(CHAT, BytesTokenizer())


def test_characters_of_several_bytes_do_not_shift_the_mask():
    text = "é…x…é"
    tokens, mask = BytesTokenizer().encode_spans(text, [(1, 3)])
    assert bytes(tokens[mask].tolist()).decode() == "…x"
    assert mask.dtype == np.bool_
