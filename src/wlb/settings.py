"""What sections of a configuration and options of packers are made of: strict types, frozen classes.

Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from wlb.errors import UserError
from wlb.token_count import MOST_TOKENS, parse_tokens


def _plain_integer(value: object) -> object:
    """NumPy's integers as Python's; everything else as it is."""
    return index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def _tokens(value: object) -> object:
    return parse_tokens(value) if isinstance(value, str) else _plain_integer(value)


def check_path(path: object) -> object:
    if isinstance(path, str) and not path.strip():
        raise ValueError("the path is empty; name one, or leave the setting out")  # it would mean the working directory
    if isinstance(path, str) and "\0" in path:
        raise ValueError("no path holds a null character")
    return path


# Of what is planned together: four times the 15,360 sequences of a DeepSeek-V3 step (arXiv 2412.19437, section 4.2).
MOST_MICRO_BATCHES = 65_536
# Of a context-parallel group; shards are priced rank by rank, and groups in use have some dozens.
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
    """The validator and schema of a setting that is one of ``names``, with the errors of a ``Literal`` of them."""
    known = [*names]
    expected = " or ".join([", ".join(map(repr, known[:-1])), repr(known[-1])])

    def check(value: object) -> object:
        if value not in known:
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return value

    return BeforeValidator(check), Field(json_schema_extra={"enum": [*known]})


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def changed(self, **settings: Any) -> Self:
        """The same with other ``settings``, validated as a whole. Raises ``UserError`` for what they may not be."""
        try:
            return self.model_validate({name: getattr(self, name) for name in self.model_fields_set} | settings)
        except ValidationError as error:
            problem = main_problem(error)
            raise UserError(f"{'.'.join(problem.where)} = {problem.value!r} cannot be: {problem.what}") from None


class Problem(NamedTuple):
    """What is wrong with the setting named by ``where``: pydantic's ``kind``, and in words what is allowed.

    ``others`` counts the other values that are wrong.
    """

    where: tuple[str, ...]
    kind: str
    what: str
    value: object
    others: int


# Pydantic's words, and ours.
_PLAIN_WORDS = {
    r"^Value error, ": "",
    r"^Field required": "is missing",
    r"(Input|List|Tuple|String|Value) should (be|have)": r"must \2",
    r" after validation, not \d+": "",
    r"greater than or equal to": "at least",
    r"less than or equal to": "at most",
    r"a valid integer(, (unable to|got a)[^(]*\b)?": "a whole number",
    r"a valid (number|string)(, unable to [^(]*\b)?": r"a \1",
    r"a valid boolean(, unable to [^(]*\b)?": "true or false",
    r"a valid (tuple|list|array)": "a list",
}


def plainly(message: str) -> str:
    """What pydantic says of a value, as people say it: "must be at least 1"."""
    for theirs, ours in _PLAIN_WORDS.items():
        message = re.sub(theirs, ours, message)
    return message


def main_problem(error: ValidationError) -> Problem:
    """The one to tell of: a typo, which explains what is missing, or of a union the alternative that fits deepest.

    Pydantic reports each alternative of a union that does not fit. Those are one problem, and a word that the setting
    also takes, such as "auto", is named with it.
    """

    def precedence(problem: ErrorDetails) -> tuple[bool, int, bool]:
        return problem["type"] != "extra_forbidden", -len(problem["loc"]), problem["type"] == "literal_error"

    # Defaults that depend on another setting are missing where any setting is wrong.
    problems = [problem for problem in error.errors() if problem["type"] != "default_factory_not_called"]
    first = min(problems, key=precedence)
    place = _place(first)
    same = [problem for problem in problems if _place(problem) == place[: len(_place(problem))]]
    what = plainly(first["msg"])
    if first["type"] not in ("literal_error", "value_error"):
        words = [p["ctx"]["expected"] for p in same if p["type"] == "literal_error" and _place(p) == place]
        what = ", or ".join([what, *words])
    others = {_place(problem) for problem in problems} - {_place(problem) for problem in same}
    where = tuple(part for part in place if isinstance(part, str))
    return Problem(where, first["type"], what, first["input"], len(others))


def _place(problem: ErrorDetails) -> tuple[int | str, ...]:
    """Names of sections and setting, and places in lists, without what a union calls its alternatives."""

    def is_alternative(part: int | str) -> bool:  # "literal['auto']", "constrained-float"
        return isinstance(part, str) and ("[" in part or part.startswith("constrained-"))

    return tuple(part for part in problem["loc"] if not is_alternative(part))
