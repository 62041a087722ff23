"""Files of published measurements: this project's own, ``measurements.json``, and others in its format.

A file is a JSON object. ``rows`` are whole training steps: table, repository, commit, path, hardware, model, layout,
``metric`` and ``value``. ``kernels`` are tables of kernels and collectives, each with its source. ``runs`` are measured
batches: path, commit and config of a run, and for each batch the lengths of its ``documents`` and its ``ms``. A file
may have one of the three, or all. In the project's own, rows that have much in common name it by number: what is in
``shared`` at that place is theirs too.
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from wlb.errors import UserError

_TEXTS = ("table", "repo", "commit", "path", "model", "metric")  # of every row


def read_measurements(path: Path | None = None) -> dict[str, Any]:
    """What ``path`` holds, by default the project's own measurements.

    Raises ``UserError`` for a file that cannot be read, is not JSON, or is not in the format above.
    """
    if path is None:
        return _checked(json.loads((files(__package__) / "measurements.json").read_text(encoding="utf-8")))
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _checked(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict) or not document.keys() & {"rows", "kernels", "runs"}:
        raise UserError("this holds no published measurements; give an object with rows, kernels or runs")
    shared = _list(document, "shared")
    rows = [_whole_row(row, shared, f"rows[{index}]") for index, row in enumerate(_list(document, "rows"))]
    kernels = document.get("kernels", {})
    if not isinstance(kernels, dict) or not all(_is_kernel_table(table) for table in kernels.values()):
        raise UserError("kernels is not an object of tables, each with repo, commit, path and rows")
    for index, run in enumerate(_list(document, "runs")):
        _check_run(run, f"runs[{index}]")
    return {**document, "rows": rows}


def _list(document: dict[str, Any], name: str) -> list[Any]:
    found = document.get(name, [])
    if not isinstance(found, list):
        raise UserError(f"{name} is not a list")
    return found


def _whole_row(row: Any, shared: list[Any], where: str) -> dict[str, Any]:
    """``row`` with what it shares with others."""
    if not isinstance(row, dict):
        raise UserError(f"{where} is not an object")
    if "shared" in row:
        place = row["shared"]
        if type(place) is not int or not 0 <= place < len(shared) or not isinstance(shared[place], dict):
            raise UserError(f"{where}.shared = {place!r} is no place of an object in shared")
        row = {**shared[place], **row}
    for name in _TEXTS:
        if not isinstance(row.get(name), str):
            raise UserError(f"{where}.{name} is not a text: {row.get(name)!r}")
    if not _is_number(row.get("value")):
        raise UserError(f"{where}.value is not a number: {row.get('value')!r}")
    return {name: value for name, value in row.items() if name != "shared"}


def _is_kernel_table(table: Any) -> bool:
    return (
        isinstance(table, dict)
        and all(isinstance(table.get(name), str) for name in ("repo", "commit", "path"))
        and isinstance(table.get("rows"), list | dict)
    )


def _check_run(run: Any, where: str) -> None:
    if not isinstance(run, dict) or not isinstance(run.get("path"), str) or not isinstance(run.get("config"), dict):
        raise UserError(f"{where} is not an object with a path and a config")
    for index, batch in enumerate(_list(run, "batches")):
        if not isinstance(batch, dict) or not _is_number(batch.get("ms")) or not _are_lengths(batch.get("documents")):
            raise UserError(f"{where}.batches[{index}] is not an object with ms and documents, lists of lengths")


def _are_lengths(documents: Any) -> bool:
    return isinstance(documents, list) and all(
        isinstance(of_list, list) and all(type(length) is int and length > 0 for length in of_list)
        for of_list in documents
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
