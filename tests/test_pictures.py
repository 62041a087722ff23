"""``scripts/pictures.py`` draws every picture of the documentation, and says which figures are in them."""

import re
from pathlib import Path

from scripts.pictures import PICTURES, ROOT
from tests.test_rooms import GROUND, MAY_IMPORT

DRAWN = [name for name in PICTURES if name.endswith(".svg")]  # the others need a browser or a demo


def test_every_picture_is_drawn_by_the_script():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"images/([\w.-]+)", page.read_text(encoding="utf-8"))}
    assert named == {*PICTURES} == {path.name for path in (ROOT / "docs" / "images").iterdir()}


def test_a_picture_shows_the_figures_that_the_script_prints(tmp_path: Path):
    said = {name: PICTURES[name](tmp_path) for name in DRAWN}
    drawn = {name: (tmp_path / name).read_text(encoding="utf-8") for name in DRAWN}
    for name, figures in said.items():
        assert all(figure in drawn[name] for figure in re.findall(r"[\d.]+(?:x| s|%)", figures)), name
    for package in MAY_IMPORT.keys() | GROUND:
        assert package in drawn["house.svg"]
