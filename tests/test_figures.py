"""The tables of pages that ``make figures`` writes show the results in the repository."""

import re
from typing import Any

import pytest

from scripts import figures


@pytest.mark.parametrize("name", figures.PAGES)
def test_tables_show_the_results(name: str) -> None:
    page = (figures.ROOT / name).read_text(encoding="utf-8")
    assert figures.written(page) == page, "run .venv/bin/python scripts/figures.py --tables"


def test_an_empty_pair_of_markers_is_filled_and_prose_between_pairs_stays() -> None:
    empty = "<!-- figures: {} -->\n\n<!-- end of figures -->\n"
    page = f"{empty.format('missing')}\nprose\n\n{empty.format('ratios')}"
    filled = figures.written(page)
    assert figures.missing() in filled
    assert figures.ratios() in filled
    assert "prose" in filled
    assert figures.written(filled) == filled


def test_every_table_is_in_a_page() -> None:
    pages = [(figures.ROOT / name).read_text(encoding="utf-8") for name in figures.PAGES]
    named = re.findall(r"<!-- figures: ([\w-]+) -->", "".join(pages))
    assert sorted(named) == sorted(figures.TABLES)
    assert "".join(pages).count("<!-- end of figures -->") == len(named)


def test_a_printed_table_says_what_is_quoted_and_leaves_out_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [("job", None, ".3f"), ("speed", "quoted", ".2f"), ("speed", "simulated", "+.1f")]
    table: dict[str, Any] = {"columns": [dict(zip(("name", "kind", "format"), one, strict=True)) for one in columns]}
    table["rows"] = [["small", 1.234, -1.0], ["large", None, 2.0]]
    monkeypatch.setattr(figures, "result", lambda name: {"tables": [{}, table]})
    said = ["| speed | job | speed, quoted |", "|---|---:|---:|", "| −1.0 | small | 1.23 |", "| +2.0 | large | |"]
    assert figures.printed("any", (2, 0, 1), table=1) == "\n".join(said)


def test_every_result_is_kept_whole() -> None:
    assert {path.stem for path in figures.DIRECTORY.glob("*.json")} >= {*figures.RESULTS}
    for name in figures.RESULTS:
        document = figures.result(name)
        assert all(table["rows"] for table in document.get("tables", [document])), name
