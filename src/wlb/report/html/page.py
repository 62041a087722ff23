"""The HTML file around the charts: one file without scripts that loads nothing, for screen, dark screen and paper.

A content security policy forbids the page to load or run anything, should something slip through the escaping.
"""

from collections.abc import Mapping, Sequence

from wlb.report.html.markup import Markup, join, tag

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

# Names and values of colours, light and dark. Series were chosen to differ in lightness as well as in hue.
_COLOURS = {
    "page": ("#ffffff", "#15181c"),
    "panel": ("#f5f6f8", "#1e2329"),
    "ink": ("#1c2126", "#e4e7eb"),
    "muted": ("#5b6570", "#9aa5b1"),
    "grid": ("#dfe3e8", "#343b44"),
    "before": ("#aab3bd", "#6b7682"),
    "after": ("#1b7f5c", "#3fb68b"),
    "count": ("#aab3bd", "#6b7682"),
    "tokens": ("#3b7dd8", "#5b9df0"),
    "attention": ("#d1602b", "#f08a54"),
    "forward": ("#c6d4e2", "#41566c"),
    "backward": ("#92acc6", "#637f9c"),
}
_PARTS = (
    ("#e03131", "#ef5350"),  # where time goes: three kinds of waiting in reds,
    ("#f0857d", "#c25b55"),
    ("#f7c6c1", "#8a4a47"),
    ("#3f4b57", "#b4bec8"),  # other overheads in greys,
    ("#74869a", "#8595a6"),
    ("#b9cadb", "#5a7590"),  # and computing in blue-grey
    ("#2f4b7c", "#7f9fd6"),  # from here on documents
    ("#3b7dd8", "#5b9df0"),
    ("#1b7f5c", "#3fb68b"),
    ("#8a5cc2", "#b48ae6"),
    ("#c9a227", "#e0c04f"),
)

_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:860px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:1rem;font-weight:500;color:var(--muted);margin:0 0 4px}
.verdict{font-size:1.3rem;line-height:1.35;font-weight:600;max-width:60ch;margin:0 0 12px}
section{min-width:0}
h2{font-size:1.3rem;margin:48px 0 4px;border-top:1px solid var(--grid);padding-top:24px}
p{margin:6px 0 12px;max-width:72ch}
.muted,figcaption{color:var(--muted);font-size:.9rem}
.label-simulated,.label-measured{display:inline-block;border:1px solid currentColor;border-radius:99px;padding:0 10px;
font-size:.8rem;color:var(--after)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(136px,1fr));gap:12px;margin:20px 0}
.facts div{background:var(--panel);border-radius:8px;padding:12px 14px}
.facts b{display:block;font-size:1.35rem;line-height:1.3}
.facts span{color:var(--muted);font-size:.85rem}
figure{margin:14px 0 22px}
.wide{overflow-x:auto}
.chart{display:block;width:100%;max-width:640px;height:auto;font-size:12px}
.chart path{shape-rendering:crispEdges}
.chart text{fill:var(--ink)}.chart .tick{fill:var(--muted);font-size:11px}
.chart .inside{font-size:9px;fill:var(--ink)}
details{color:var(--muted);font-size:.9rem}summary{cursor:pointer}
.grid{stroke:var(--grid)}.axis{stroke:var(--ink)}.whisker{stroke:var(--after);stroke-width:3;stroke-linecap:round}
polyline{fill:none;stroke-width:2}
table{border-collapse:collapse;width:100%;font-size:.88rem;margin:8px 0 20px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:5px 10px;border-bottom:1px solid var(--grid)}
th:first-child{text-align:left;font-weight:500;white-space:nowrap}
thead th{color:var(--muted);font-weight:500}
pre{background:var(--panel);border-radius:8px;padding:14px 16px;overflow-x:auto;font-size:.88rem;user-select:all}
.warning{border-left:4px solid var(--attention);padding-left:12px}
@media screen and (max-width:600px){main{padding:20px 14px 48px}.verdict{font-size:1.15rem}th,td{padding:4px 6px}
th:first-child{white-space:normal}.facts{grid-template-columns:1fr 1fr}}
@media screen and (min-width:1300px){main{max-width:1720px;display:grid;grid-template-columns:1fr 1fr;column-gap:56px}
table{font-size:.82rem}th,td{padding:5px 7px}
main>:not(section),#config{grid-column:1/-1}
.facts{grid-template-columns:repeat(4,minmax(0,300px))}}
@media print{body{font-size:11pt}main{max-width:none;padding:0}h2,thead,.muted:has(+.wide){break-after:avoid}
h2{margin-top:28px}
figure,#config,.facts,.verdict,tr{break-inside:avoid}pre{white-space:pre-wrap;overflow:visible}
p{orphans:3;widows:3}.wide{overflow:visible}details::details-content{content-visibility:visible;display:block}
table{font-size:8pt}th,td{padding:3px 5px}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


def page(title: str, sections: Sequence[Markup]) -> str:
    """The whole document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(_colour_rules() + _STYLE)),
    )
    body = tag("body", tag("main", tag("h1", title), *sections))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def section(identifier: str, heading: str, *content: str) -> Markup:
    return tag("section", tag("h2", heading), *content, id=identifier)


def paragraph(*content: str, **attributes: str) -> Markup:
    return tag("p", *content, **attributes)


def facts(values: Mapping[str, str]) -> Markup:
    """Large figures, by what they are."""
    return tag(
        "div", *(tag("div", tag("b", value), tag("span", name)) for name, value in values.items()), class_="facts"
    )


def _colour_rules() -> str:
    variables = dict(_COLOURS)
    variables |= {f"part-{n}": pair for n, pair in enumerate(_PARTS)}
    light, dark = ("".join(f"--{name}:{pair[scheme]};" for name, pair in variables.items()) for scheme in (0, 1))
    fills = join(
        Markup(f".{'' if name.startswith('part-') else 'fill-'}{name}{{fill:var(--{name})}}") for name in variables
    )
    strokes = "".join(f".stroke-{name}{{stroke:var(--{name})}}" for name in ("before", "after"))
    # Paper is white whatever the screen is.
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}{fills}{strokes}"
