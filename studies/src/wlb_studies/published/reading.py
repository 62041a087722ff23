"""Files of published measurements: this project's own, ``measurements.json``, and others in its format.

A file is a JSON object with ``rows``, ``kernels`` and ``runs``, or some of them. ``rows`` are whole training steps:
table, repo, commit, path, hardware, model, layout, ``metric`` and ``value`` (see ``whole_steps`` for further fields,
and ``pipeline_stages`` for seconds of stages).
``kernels`` are tables of kernels and collectives, each with its source. ``runs`` are measured batches: path, commit and
config of a run, and for each batch the lengths of its ``documents`` and its ``ms``. In the project's own file, rows
refer to common fields by their index in ``shared``.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from wlb.errors import UserError

_SECTIONS = {"rows": list, "kernels": dict, "runs": list}
_TEXTS = ("table", "repo", "commit", "path", "model", "metric")  # of every row


def read_measurements(path: Path | None = None) -> dict[str, Any]:
    """The content of ``path``, by default the project's own measurements.

    Predictions report what a row, table or run lacks. Raises ``UserError`` for a file that cannot be read, is not JSON,
    or is in another format.
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
        raise UserError(f"{path} is not valid JSON: {error}; give a JSON object with rows, kernels or runs") from None


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
    """``row`` with its shared fields, and with text in text fields."""
    if not isinstance(row, dict):
        return {"note": f"no object: {row!r}"[:80]}
    place = row.get("shared")
    if isinstance(shared, list) and type(place) is int and 0 <= place < len(shared) and isinstance(shared[place], dict):
        row = {**shared[place], **row}
    texts = {name: str(row[name]) for name in _TEXTS if row.get(name) is not None}
    return {name: value for name, value in row.items() if name != "shared"} | texts
