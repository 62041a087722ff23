"""The tables of pages that ``make figures`` writes show the results in the repository."""

import re

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


def test_every_result_is_kept_whole() -> None:
    assert {path.stem for path in figures.DIRECTORY.glob("*.json")} >= {*figures.RESULTS}
    for name in figures.RESULTS:
        document = figures.result(name)
        assert all(table["rows"] for table in document["tables"]), name
