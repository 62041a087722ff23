"""Nothing that comes from outside becomes an element or an attribute."""

from hypothesis import given
from hypothesis import strategies as st

from tests.report.html.reader import read
from wlb.report.html.markup import Markup, join, table, tag


@given(st.text(), st.text())
def test_text_and_attributes_come_back_as_they_were(content, value):
    reader = read(tag("p", content, title=value))
    assert reader.elements == [("p", {"title": value})]
    assert reader.text == content


@given(st.lists(st.text()))
def test_joined_text_has_no_elements(parts):
    reader = read(join(parts))
    assert reader.elements == []
    assert reader.text == "".join(parts)


def test_markup_is_not_escaped_twice():
    inner = tag("b", "a < b")
    assert isinstance(inner, Markup)
    assert tag("p", inner, " & c") == "<p><b>a &lt; b</b> &amp; c</p>"


def test_names_numbers_and_void_elements():
    assert tag("rect", x=1.0, stroke_width=0.125, class_="a") == '<rect x="1" stroke-width="0.12" class="a"></rect>'
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'


def test_cells_of_tables_are_escaped():
    reader = read(table({"<i>": ["<b>"], "<a>": ["<u>"]}, caption="<s>"))
    assert {name for name, _ in reader.elements} == {"p", "div", "table", "thead", "tbody", "tr", "th", "td"}
