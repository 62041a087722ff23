"""Published measurements as files: the project's own, other people's, and what is refused."""

import json
import re
from importlib.resources import files

import pytest

from wlb.errors import UserError
from wlb_studies.published.experiment import predicted_rows
from wlb_studies.published.reading import read_measurements

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
    assert len((files("wlb_studies.published") / "measurements.json").read_bytes()) < 480_000
    own = read_measurements()
    assert len(own["rows"]) == 605
    sources = [*own["rows"], *own["kernels"].values()]
    for of_one in sources:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+( \(\w+\))?", of_one["repo"])
        assert re.fullmatch(r"[0-9a-f]{40}", of_one["commit"]) or re.match(r"(pull|issues)/\d+", of_one["path"])
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
    "document",
    [
        [],
        {"meta": {}},
        {"rows": {}},
        {"rows": [ROW], "kernels": []},
        {"runs": None},
    ],
)
def test_a_file_of_another_format_is_refused(tmp_path, document):
    message = "measured.json holds no published measurements; give a JSON object with a list of rows"
    with pytest.raises(UserError, match=message) as refused:
        read_measurements(written(tmp_path, document))
    assert "\n" not in str(refused.value)


def test_what_is_odd_has_a_reason_and_all_else_its_prediction(tmp_path):
    own = read_measurements()
    row = next(row for row in own["rows"] if row["repo"] == "mosaicml/llm-foundry")
    [table, kernels] = next(iter(own["kernels"].items()))
    run = {**own["runs"][0], "batches": own["runs"][0]["batches"][:2]}
    odd_rows = [3, {}, {**row, "commit": None}, {**row, "value": None}, {**row, "value": -1}, {**row, "gpus": True}]
    odd_batches = [None, {"ms": None}, {"documents": [[0]], "ms": 1}, {"documents": [[5]], "ms": 0}]
    odd_runs = [3, {**run, "batches": None}, *({**run, "config": run["config"] | {"tp_size": size}} for size in (3, 0))]
    first = kernels["rows"][0]
    odd_kernels = [{}, 3, first | {name: True for name in first if name.endswith("ms")}]
    document = {
        "rows": [row, *odd_rows, {**row, "gpus": float(row["gpus"])}],
        "kernels": {table: {**kernels, "rows": [first, *odd_kernels]}, "empty": {}, "none": None},
        "runs": [{**run, "batches": [*run["batches"], *odd_batches]}, *odd_runs],
    }
    found = predicted_rows(read_measurements(written(tmp_path, document)))
    predicted = [one.predicted_seconds is not None for one in found]
    kept = [True, *[False] * 6, True, True, *[False] * 5, True, True, *[False] * 4, *[False] * 6]
    assert predicted == kept
    assert found[0].predicted_seconds == found[7].predicted_seconds
    assert all(one.reason for one, there in zip(found, predicted, strict=True) if not there)


def test_a_file_that_is_no_json_or_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "broken.json").write_text('{"rows": [')
    with pytest.raises(UserError, match="is not valid JSON"):
        read_measurements(tmp_path / "broken.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_measurements(tmp_path / "missing.json")
