"""Read a TOML file and ``section.key=value`` overrides into a ``JobConfig``, and write a configuration as TOML.

Every mistake becomes a ``UserError`` that names the key, the value and what is allowed.
"""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.job.config import JobConfig, ParallelConfig


def load_config(path: Path, overrides: Iterable[str] = (), *, auto_dp: Callable[[int], int] | None = None) -> JobConfig:
    """Read a TOML file, apply ``section.key=value`` overrides and validate.

    ``auto_dp`` turns the processes of one data-parallel rank into the value of ``parallel.dp = "auto"``; without it,
    "auto" is refused. Override values are TOML (``[1, 2]``, ``true``, ``1e-3``); anything else is a string. Relative
    paths stay relative to the working directory. Raises ``UserError`` for every mistake.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"config {path} does not exist; name the TOML file of a job, such as configs/tiny.toml"
        ) from None
    except OSError as error:
        raise UserError(f"config {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # bad TOML, bad UTF-8, or a number with too many digits
        raise UserError(f"config {path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply_override(document, override)
    document = _with_decided_dp(document, auto_dp)
    try:
        return JobConfig.of(document)
    except UserError as error:
        raise UserError(f"config {path}: {error}") from None


def to_toml(top: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], remark: str) -> str:
    """A configuration as TOML, with a comment above it."""
    comment = "".join(letter if letter.isprintable() else "?" for letter in remark)  # TOML has no control characters
    lines = [f"# {comment}", *(f"{key} = {_toml(value)}" for key, value in top.items())]
    for name, settings in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in settings.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """JSON's numbers, lists and strings are valid TOML, except for one control character that TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _with_decided_dp(document: dict[str, Any], auto_dp: Callable[[int], int] | None) -> dict[str, Any]:
    """``document`` with a number for ``parallel.dp``."""
    given = document.get("parallel")
    if not isinstance(given, dict) or given.get("dp") != "auto":
        return document
    if auto_dp is None:
        raise UserError(
            "parallel.dp = 'auto' follows from the number of started processes, and here none are; give a number: "
            "--set parallel.dp=N"
        )
    alone = ParallelConfig.of(given | {"dp": 1, "pool": "auto", "ep": 1}, "parallel")  # those two count ranks of dp
    return document | {"parallel": given | {"dp": auto_dp(alone.layout.world_size)}}


def _apply_override(document: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    *sections, key = name.strip().split(".")
    if not (separator and all((*sections, key)) and (sections or key == "preset")):
        raise UserError(f"--set {override!r} is not of the form section.key=value or preset=NAME")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # a number with too many digits is another ValueError
        parsed = {"value": text}
    value = parsed.pop("value")
    if parsed:
        raise UserError(f"--set {override!r} sets more than {name.strip()}; give each setting a --set of its own")
    table = document
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override!r}: [{section}] is not a section of the config")
    table[key] = value
