"""Strict types and frozen classes for sections of a configuration and options of packers."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from wlb.errors import UserError, choose_from
from wlb.token_count import MOST_TOKENS, parse_tokens, whole_number


def _plain_integer(value: object) -> object:
    """Convert integers of NumPy to ``int``; leave everything else unchanged."""
    return value if (number := whole_number(value)) is None else number


def _tokens(value: object) -> object:
    return parse_tokens(value) if isinstance(value, str) else _plain_integer(value)


def check_path(path: object) -> object:
    if isinstance(path, str) and not path.strip():
        raise ValueError("the path is empty; name one, or leave the setting out")  # it would mean the working directory
    if isinstance(path, str) and "\0" in path:
        raise ValueError("no path holds a null character")
    return path


# Planned together: four times the 15,360 sequences of a DeepSeek-V3 step (arXiv 2412.19437, section 4.2).
MOST_MICRO_BATCHES = 65_536
# In a context-parallel group; shards are priced rank by rank, and groups in practice have a few dozen ranks.
MOST_RANKS = 512

# Strict: true is no number of processes, and no learning rate; a whole number is a Number too. The bounds of integers
# are those of the int32 and int64 that they end up in.
PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True), BeforeValidator(_plain_integer)]
MicroBatchCount = Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES, strict=True), BeforeValidator(_plain_integer)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True), BeforeValidator(_plain_integer)]
Tokens = Annotated[
    int,
    Field(ge=1, le=MOST_TOKENS, strict=True, json_schema_extra={"format": "tokens"}),
    BeforeValidator(_tokens),  # "128K" and "1M" too
]
Number = Annotated[float, Field(strict=True)]
NonEmptyPath = Annotated[Path, BeforeValidator(check_path)]


def one_of(names: Iterable[str]) -> tuple[BeforeValidator, FieldInfo]:
    """The validator and schema of a setting with the values ``names``."""
    known = [*names]

    def check(value: object) -> object:
        if value not in known:
            raise ValueError(choose_from(value, known))
        return value

    return BeforeValidator(check), Field(json_schema_extra={"enum": [*known]})


class Section(BaseModel):
    """The base of every section: it refuses unknown keys and is frozen after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def of(cls, settings: Any, *section: str, strict: bool | None = None) -> Self:
        """Validate ``settings`` of ``section``. Raises ``UserError`` for the first mistake."""
        try:
            return cls.model_validate(settings, strict=strict)
        except ValidationError as error:
            problem = main_problem(error)
        where = ".".join(filter(None, (*section, *problem.where)))
        if problem.kind == "extra_forbidden":
            *outer, key = problem.where
            table: Any = cls
            for name in outer:
                kinds = table.model_fields[name].annotation
                table = next(kind for kind in (kinds, *get_args(kinds)) if hasattr(kind, "model_fields"))  # or None
            kind = "setting" if "." in where else "section"
            raise UserError(f"{where} is not a {kind}; {choose_from(key, table.model_fields)}")
        shown = f" = {problem.value!r}" if not isinstance(problem.value, dict) else ""
        raise UserError(f"{where}{shown}: {problem.what}" if where else problem.what)

    def changed(self, **settings: Any) -> Self:
        """A copy with other ``settings``, validated as a whole. Raises ``UserError`` for invalid ones."""
        return self.of({name: getattr(self, name) for name in self.model_fields_set} | settings)


# pydantic's words, and ours for a user who writes TOML or options.
_PLAIN = {
    "Value error, ": "",
    "Field required": "must be set",
    ", unable to parse string as an integer": "",
    ", unable to parse string as a number": "",
    "Extra inputs are not permitted": "is unknown",
    "Input should be": "must be",
    "a valid integer, got a number with a fractional part": "a whole number",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean, unable to interpret input": "true or false",
    "a valid boolean": "true or false",
    "a valid tuple": "a list",
    "a valid string": "text",
    "Tuple should have": "must have",
    " after validation": "",
    "Input is not a valid path for <class 'pathlib.Path'>": "must be a path",
    "False, True": "false, true",
}


class Problem(NamedTuple):
    """The mistake in the setting ``where``: the ``kind`` of pydantic, and ``what`` pydantic says of the value."""

    where: tuple[str, ...]
    kind: str
    what: str
    value: object


def main_problem(error: ValidationError) -> Problem:
    """The mistake to report: a typo first, because it explains missing keys; for unions the deepest match.

    If no alternative of a union matches, the message names them all.
    """
    # Defaults that depend on another setting are missing where any setting is wrong.
    problems = [problem for problem in error.errors() if problem["type"] != "default_factory_not_called"]
    first = min(problems, key=lambda problem: (problem["type"] != "extra_forbidden", -len(problem["loc"])))
    place = _place(first)
    messages = [in_plain_words(problem["msg"]) for problem in problems if _place(problem) == place]
    where = tuple(part for part in place if isinstance(part, str))
    what = " or ".join(dict.fromkeys(messages)).replace("or must be", "or")
    if first["type"] == "missing" and isinstance(place[-1], int):
        what = f"entry {place[-1]} {what}"
    return Problem(where, first["type"], what, first["input"])


def in_plain_words(message: str) -> str:
    """What pydantic says of a value, in the words of a user."""
    message = re.sub(r"a (valid )?dictionary or (an )?instance of \w+", "an object", message)
    for pydantics, plain in _PLAIN.items():
        message = message.replace(pydantics, plain)
    return message


def _place(problem: ErrorDetails) -> list[int | str]:
    """The names of sections and setting and the indices of lists, without names of union alternatives."""
    alternative = re.compile(r".*\[|constrained-").match  # "literal['auto']", "constrained-float"
    *parts, last = problem["loc"] or ("",)
    own = [last] if problem["type"] == "extra_forbidden" or not alternative(str(last)) else []
    return [*(part for part in parts if not (isinstance(part, str) and alternative(part))), *own]
