"""Print the tables of ``wlb reproduce`` as Markdown, to paste into the documentation.

python scripts/markdown_tables.py results/rivals.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

Value = str | float | None


def main(paths: list[str]) -> None:
    for path in paths:
        for table in json.loads(Path(path).read_text(encoding="utf-8"))["tables"]:
            print(f"### {table['title']}\n")
            names = [column["name"] for column in table["columns"]]
            print(_row(names))
            print(_row(["---"] * len(names)))
            for row in table["rows"]:
                print(_row([_text(value) for value in row]))
            print()


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value: Value) -> str:
    """Three digits, or two places after the point where that is more."""
    if value is None:
        return "-"
    if isinstance(value, str | int):
        return f"{value}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


if __name__ == "__main__":
    main(sys.argv[1:])
