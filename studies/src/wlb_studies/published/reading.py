"""Files of published measurements: this project's own, ``measurements.json``, and others in its format.

A file is a JSON object. ``rows`` are whole training steps: table, repository, commit, path, hardware, model, layout,
``metric`` and ``value``. ``kernels`` are tables of kernels and collectives, each with its source. ``runs`` are measured
batches: path, commit and config of a run, and for each batch the lengths of its ``documents`` and its ``ms``. A file
may have one of the three, or all. In the project's own, rows that have much in common name it by number: what is in
``shared`` at that place is theirs too.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from wlb.errors import UserError

_SECTIONS = {"rows": list, "kernels": dict, "runs": list}
_TEXTS = ("table", "repo", "commit", "path", "model", "metric")  # of every row


def read_measurements(path: Path | None = None) -> dict[str, Any]:
    """What ``path`` holds, by default the project's own measurements.

    What a row, table or run lacks is for its prediction to say. Raises ``UserError`` for a file that cannot be read, is
    not JSON, or is in another format altogether.
    """
    if path is None:
        return _checked(json.loads((files(__package__) / "measurements.json").read_text(encoding="utf-8")))
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UserError as error:
        raise UserError(f"{path} {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None


def _checked(document: Any) -> dict[str, Any]:
    known = isinstance(document, dict) and bool(document.keys() & _SECTIONS.keys())
    if not known or not all(isinstance(document.get(name, kind()), kind) for name, kind in _SECTIONS.items()):
        raise UserError(
            "holds no published measurements; give a JSON object with a list of rows, an object of tables, kernels, or "
            "a list of runs"
        )
    shared = document.get("shared")
    return {**document, "rows": [_whole_row(row, shared) for row in document.get("rows", [])]}


def _whole_row(row: Any, shared: Any) -> dict[str, Any]:
    """``row`` with what it shares with others, and with texts where texts belong."""
    if not isinstance(row, dict):
        return {"note": f"no object: {row!r}"[:80]}
    place = row.get("shared")
    if isinstance(shared, list) and type(place) is int and 0 <= place < len(shared) and isinstance(shared[place], dict):
        row = {**shared[place], **row}
    texts = {name: str(row[name]) for name in _TEXTS if row.get(name) is not None}
    return {name: value for name, value in row.items() if name != "shared"} | texts
