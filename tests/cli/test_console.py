"""Tables are shown whole, however wide the terminal is."""

import pytest
from rich.console import Console
from rich.table import Table

from wlb.cli import console

WORDS = ["makespan, L_max 1.5, arranged, balanced", "variable_length, L_max 1, adaptive"]


def table(*headings: str, folds: bool) -> Table:
    shown = Table()
    for heading in headings:
        shown.add_column(heading, no_wrap=not folds)
    for words in WORDS:
        shown.add_row(*[words] * len(headings))
    return shown


@pytest.mark.parametrize("width", [1000, 130, 80, 30, 5])
def test_no_word_is_cut(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(console, "stdout", Console(width=width))
    console.print_table(table("a", "b", folds=True))
    output = capsys.readouterr().out
    assert "…" not in output
    for words in WORDS:
        for word in words.split():
            assert output.count(word) >= 2


def test_what_may_not_wrap_stays_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(console, "stdout", Console(width=40))
    console.print_table(table("a", "b", folds=False))
    lines = capsys.readouterr().out.splitlines()
    for words in WORDS:
        assert any(line.count(words) == 2 for line in lines)


def test_title_and_notes_have_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(console.stdout, "width", 80)
    note = "a note of 64 columns, which is far wider than the [narrow] table"
    console.show_columns({"a": ["1"]}, title=note, notes={"a": f"{note}\n{note} and a path/{'x' * 20}/of/its.own"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == note
    assert lines[-3:] == [note, f"{note} and a", f"  path/{'x' * 20}/of/its.own"]
