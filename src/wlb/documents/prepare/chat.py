"""Conversations as documents: a chat template turns messages into text, and the assistant's turns become labels.

A conversation is a list of objects with a ``role`` and a ``content``, as in chat datasets of Hugging Face. The template
is the tokenizer's own (Jinja, as ``transformers`` renders it), or ChatML if it has none. The model learns what the
template writes for an assistant's message after the generation prompt, including the end of the turn. Rendering the
conversation up to each such message finds these spans, so templates need no marks for them.

A conversation is rejected if the template changes earlier turns once later ones follow, as templates do that strip
reasoning: then no single text has all turns as they were generated.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn, Self

from wlb.documents.prepare.raw_files import Reject, as_text
from wlb.documents.prepare.tokenization import Encoded, Tokenizer, named_tokens, tokenizer_config
from wlb.errors import UserError, require

ChatMessage = Mapping[str, Any]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
# Marks that some templates put around the assistant's turns for transformers; not needed here.
_GENERATION_MARKS = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")


@dataclass(frozen=True)
class ChatFormat:
    """A chat template with the special tokens that it may name; no message may contain one of ``marks``."""

    template: str = CHATML
    special_tokens: tuple[tuple[str, str], ...] = ()
    marks: tuple[str, ...] = _CHATML_MARKS

    @classmethod
    def of_tokenizer(cls, source: str | None, marks: Sequence[str]) -> Self:
        """The format of the tokenizer in a directory or ``tokenizer.json``; ChatML if it has no template.

        ``marks`` are the tokenizer's special tokens.
        """
        chatml = cls(marks=(*_CHATML_MARKS, *marks))
        if source is None or source == "bytes":
            return chatml
        directory = Path(source) if Path(source).is_dir() else Path(source).parent
        config = tokenizer_config(directory)
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        beside = directory / "chat_template.jinja"
        if beside.is_file():
            template = beside.read_text(encoding="utf-8")
        if template is None:
            return chatml
        return cls(template, tuple(sorted(named_tokens(config).items())), tuple(marks))

    def encode(self, messages: Sequence[ChatMessage], tokenizer: Tokenizer) -> Encoded | Reject:
        """Tokenise a conversation, with a mask of the assistant's turns, or return why it cannot be trained."""
        if any(mark in message[part] for message in messages for part in ("role", "content") for mark in self.marks):
            return Reject.SPECIAL_TOKEN  # it would end the turn in which it is quoted
        if not any(message["role"] == "assistant" for message in messages):
            return Reject.NO_ASSISTANT
        _compiled(self.template)  # raises for an invalid template
        spans = []  # of characters: the assistant's turns
        try:
            text = self._text(messages)
            for number, message in enumerate(messages):
                if message["role"] == "assistant":
                    prompt = self._text(messages[:number], add_generation_prompt=True)
                    said = self._text(messages[: number + 1])
                    if not (text.startswith(said) and said.startswith(prompt)):
                        return Reject.REWRITTEN
                    spans.append((len(prompt), len(said)))
        except (require("jinja2", "data").TemplateError, TypeError, ValueError, ArithmeticError, LookupError):
            return Reject.TEMPLATE
        checked = as_text(text)
        return checked if isinstance(checked, Reject) else Encoded(text, *tokenizer.encode_spans(text, spans))

    def _text(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = False) -> str:
        text: str = _compiled(self.template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **dict(self.special_tokens)
        )
        return text


def as_messages(messages: Any) -> list[ChatMessage] | Reject:
    """``messages`` if they are a conversation."""
    if not isinstance(messages, list) or not messages:
        return Reject.NOT_MESSAGES
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return Reject.NOT_MESSAGES
    return messages


@lru_cache
def _compiled(template: str) -> Any:
    jinja, sandbox = require("jinja2", "data"), require("jinja2.sandbox", "data")

    def raise_exception(message: str) -> NoReturn:
        raise jinja.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    # The default date of Llama 3.1's template; today's date would change the store from day to day.
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": datetime(2024, 7, 26).strftime}
    try:
        return environment.from_string(_GENERATION_MARKS.sub(r"{#\1 \2#}", template))
    except (jinja.TemplateError, TypeError) as error:
        raise UserError(
            f"the tokenizer's chat template is not valid: {error}; correct it in the tokenizer's directory"
        ) from None
