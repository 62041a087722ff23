"""The table of stacks is made of results, and results of tests that passed."""

import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from scripts.stacks import BEGIN, END, FEATURES, PAGE, RESULTS, STACKS, read, table

ROOT = Path(__file__).resolve().parent.parent


def test_the_table_is_that_of_the_results():
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert table(rows) == PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert {row["stack"] for row in rows} <= {*STACKS}
    assert all({*row["features"].values()} <= {"exact", "refused", "not run"} for row in rows)


def test_every_mark_names_a_feature():
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    marked = {
        name
        for text in texts
        for marks in re.findall(r"mark\.proves\((.*?)\)", text)
        for name in marks.split('"')[1::2]
    }
    assert marked == {*FEATURES}


def read_text(cases: str) -> tuple[Counter[str], dict[str, str]]:
    return read(ElementTree.ElementTree(ElementTree.fromstring(f"<testsuite>{cases}</testsuite>")))


def test_a_feature_is_exact_only_if_all_its_tests_passed():
    packed, own, resume, *_ = FEATURES
    cases = [(packed, ""), (packed, ""), (own, ""), (own, "<skipped/>"), (resume, ""), (resume, "<failure/>")]
    cases += [("OPT", '<properties><property name="refused" value="why"/></properties>')]
    proves = '<properties><property name="proves" value="{}"/></properties>{}'
    text = "".join(f"<testcase classname='tests'>{proves.format(*case)}</testcase>" for case in cases)
    counts, features = read_text(text)
    assert counts == {"passed": 5, "skipped": 1, "FAILED": 1}
    assert {name: verdict for name, verdict in features.items() if verdict != "not run"} == {
        packed: "exact",
        resume: "failed",
        "OPT": "refused",
    }
    assert {*read_text(text + "<testcase classname=''><error/></testcase>")[1].values()} == {"not run"}
