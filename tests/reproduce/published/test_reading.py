"""Published measurements as files: the project's own, other people's, and what is refused."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest

from wlb.errors import UserError
from wlb.reproduce.published.reading import read_measurements

ROW = {
    "table": "t",
    "repo": "owner/name",
    "commit": "c",
    "path": "p",
    "model": "llama3-8b",
    "metric": "ms/step",
    "value": 3,
}
RUN = {"path": "a.json", "config": {"mode": "d2"}, "batches": [{"documents": [[3, 4], []], "ms": 1.5}]}
KERNELS = {"nccl": {"repo": "owner/name", "commit": "c", "path": "p", "rows": [{"ms": 1}]}}


def written(tmp_path, document):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(document))
    return path


def test_the_projects_own_is_small_and_every_figure_has_a_source():
    assert len((files("wlb.reproduce.published") / "measurements.json").read_bytes()) < 400_000
    own = read_measurements()
    assert len(own["rows"]) == 427
    sources = [*own["rows"], *own["kernels"].values()]
    for of_one in sources:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+( \(\w+\))?", of_one["repo"])
        assert re.fullmatch(r"[0-9a-f]{40}", of_one["commit"])
        assert of_one["path"]
    assert all(re.fullmatch(r"[0-9a-f]{40}", run["commit"]) and run["path"] for run in own["runs"])
    assert {run["config"]["mode"] for run in own["runs"]} == {"baseline", "wlbllm", "d2"}


@pytest.mark.parametrize("document", [{"rows": [ROW]}, {"meta": {}, "runs": [RUN]}, {"kernels": KERNELS}])
def test_either_format_is_recognised_by_its_keys(tmp_path, document):
    assert read_measurements(written(tmp_path, document)) == {"rows": [], **document}


def test_rows_share_what_they_have_in_common(tmp_path):
    short = {"shared": 1, "model": "7b", "value": 4}
    document = {"shared": [{}, {key: ROW[key] for key in ROW if key != "value"}], "rows": [short]}
    assert read_measurements(written(tmp_path, document))["rows"] == [{**ROW, "model": "7b", "value": 4}]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "holds no published measurements"),
        ({"meta": {}}, "holds no published measurements"),
        ({"rows": {}}, "rows is not a list"),
        ({"rows": [3]}, r"rows\[0\] is not an object"),
        ({"rows": [{**ROW, "repo": None}]}, r"rows\[0\].repo is not a text: None"),
        ({"rows": [ROW, {**ROW, "value": "fast"}]}, r"rows\[1\].value is not a number: 'fast'"),
        ({"rows": [{**ROW, "shared": -1}]}, r"rows\[0\].shared = -1 is no place"),
        ({"kernels": {"nccl": {"rows": []}}}, "kernels is not an object of tables"),
        ({"runs": [{**RUN, "path": 3}]}, r"runs\[0\] is not an object with a path"),
        ({"runs": [{**RUN, "batches": [{"documents": [[0]], "ms": 1}]}]}, r"runs\[0\].batches\[0\] is not an object"),
    ],
)
def test_a_file_of_another_format_is_refused(tmp_path, document, message):
    with pytest.raises(UserError, match=message) as refused:
        read_measurements(written(tmp_path, document))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_json_or_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "broken.json").write_text('{"rows": [')
    with pytest.raises(UserError, match="is not valid JSON"):
        read_measurements(tmp_path / "broken.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_measurements(tmp_path / "missing.json")
