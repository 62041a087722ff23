"""``wlb-studies packing`` and ``wlb-studies thresholds`` as a user runs them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from studies.tests.cli.conftest import studies

SYNTHETIC = "synthetic:4500:4096:0"
SIZE = ["--context-window", "4096", "--micro-batches", "4"]


def test_compare_accounts_for_every_document_and_ranks_the_methods():
    result = studies("packing", SYNTHETIC, *SIZE, "--json")
    assert result.returncode == 0, result.stderr
    rows = {row["method"]: row for row in json.loads(result.stdout)["methods"]}
    for row in rows.values():
        assert row["documents_in"] == row["documents_out"] == 4500
        assert row["tokens_in"] == row["tokens_out"]
        assert row["steps"] > 10
        assert row["planning_ms_per_step"] > 0
    assert rows["variable_length"]["imbalance_degree"] < rows["fixed_greedy:8"]["imbalance_degree"]
    assert rows["fixed_greedy:8"]["imbalance_degree"] < rows["fixed_greedy"]["imbalance_degree"]
    assert rows["sequential"]["mean_token_delay"] == 0
    assert rows["sequential"]["attention_kept"] < 1 == rows["variable_length"]["attention_kept"]
    for row in rows.values():
        equal_work = row["work_rate_arranged"] / rows["sequential"]["work_rate"]
        assert row["speed_at_equal_work"] == pytest.approx(equal_work)
        assert 0 < row["busy_share_arranged"] <= 1


def test_dimensions_methods_and_steps_are_respected(tmp_path: Path):
    picture = tmp_path / "comparison.png"
    methods = "sequential,fixed_solver,variable_length:1"
    size = ["--context-window", "4096", "--micro-batches", "4", "--dp", "2", "--pp", "2"]
    result = studies(
        "packing",
        SYNTHETIC,
        *size,
        "--methods",
        methods,
        "--steps",
        "3",
        "--solver-seconds",
        "0.2",
        "--plot",
        picture,
        "--json",
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["methods"]
    assert [row["method"] for row in rows] == methods.split(",")
    assert rows[0]["steps"] == 3
    assert rows[1]["optimality_gap"] >= 0
    assert rows[0]["optimality_gap"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_table_shows_every_method_whole():
    result = studies("packing", SYNTHETIC, *SIZE, "--methods", "sequential,variable_length:1")
    assert result.returncode == 0, result.stderr
    assert "variable_length:1" in result.stdout
    assert "all 4,500 documents" in result.stdout
    assert result.stderr == ""
    rows = re.findall(r"^ (\S.*?) {2,}(\d\.\d\dx)", result.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == ["sequential", "sequential, arranged", "variable_length:1"]
    assert rows[0][1] == "1.00x"


@pytest.mark.parametrize(("narrow", "width"), [(True, 80), (False, 120)])
def test_table_fits_the_terminal(narrow: bool, width: int, monkeypatch, capsys):
    from wlb.cli import console
    from wlb_studies.cli.packing import show_comparison
    from wlb_studies.packing import MethodResult, SimulatedSteps

    simulated = dict.fromkeys(("as_packed", "arranged"), SimulatedSteps(0.5, 0.5, 0.5, 0.5))
    values: dict[str, Any] = dict.fromkeys(MethodResult.__dataclass_fields__, 0.5)
    values |= simulated | {"method": "fixed_solver", "longest_delay": 23}
    monkeypatch.setattr(console, "stdout", Console(width=width))
    show_comparison([MethodResult(**values)], "title")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert "speedup" in lines[3]
    assert ("cost" in lines[3]) is not narrow


def test_overlong_documents_are_counted(tmp_path: Path):
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps([10_000, *[500] * 100]))
    result = studies("packing", lengths, *SIZE, "--methods", "variable_length", "--overlong", "truncate", "--json")
    output = json.loads(result.stdout)
    assert output["overlong"] == {"policy": "truncate", "documents": 1, "pieces": 1, "tokens_dropped": 10_000 - 4096}
    assert output["methods"][0]["tokens_in"] == 4096 + 100 * 500


@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
def test_steps_count_what_is_left_of_overlong_documents(tmp_path: Path, policy: str):
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps([9000, 700, 200] * 300))
    arguments = ["--methods", "sequential", "--steps", "10", "--overlong", policy, "--json"]
    result = studies("packing", lengths, *SIZE, *arguments)
    assert json.loads(result.stdout)["methods"][0]["steps"] == 10


def test_tune_shows_the_tuned_setting_beside_other_methods():
    size = [*SIZE, "--dp", "2", "--pp", "2", "--steps", "12"]
    result = studies("thresholds", SYNTHETIC, *size, "--methods", "sequential,fixed_greedy", "--json")
    output = json.loads(result.stdout)
    rows = {row["method"]: row for row in output["methods"]}
    assert list(rows) == ["sequential", "fixed_greedy", "variable_length, tuned", "balanced"]
    tuned, untuned = rows["variable_length, tuned"], rows["balanced"]
    assert tuned["imbalance_degree"] == pytest.approx(output["best"]["imbalance_degree"], rel=0.05)
    assert tuned["documents_in"] == tuned["documents_out"]
    as_fast = untuned["tokens_per_second_arranged"] >= 0.99 * tuned["tokens_per_second_arranged"]
    ours = as_fast and untuned["mean_token_delay"] <= 0.35
    assert output["recommended"]["method"] == ("balanced" if ours else "variable_length")
    assert output["recommended"]["max_length_factor"] == output["best"]["max_length_factor"]


def test_tune_recommends_within_the_bounds():
    bounds = ["--max-length-factor", "1.5", "--max-token-delay", "0.3"]
    result = studies("thresholds", SYNTHETIC, *SIZE, *bounds, "--steps", "12", "--json")
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    assert output["best"]["mean_token_delay"] <= 0.3
    assert output["best"]["max_length_factor"] <= 1.5
    front = output["trade_off"]
    assert output["best"] in front
    assert [trial["mean_token_delay"] for trial in front] == sorted(trial["mean_token_delay"] for trial in front)


def test_tune_prints_a_configuration_that_loads(tmp_path: Path):
    size = ["--context-window", "16384", "--micro-batches", "4", "--steps", "12"]
    result = studies("thresholds", "synthetic:3000:16384:0", *size, "--max-delay", "7")
    section = result.stdout.partition("[packing]")[2].partition("\nnext: ")[0]
    config = tmp_path / "job.toml"
    config.write_text('[data]\nstore = "somewhere"\n[packing]' + section)
    from wlb.job.config_file import load_config

    assert load_config(config).packing.method == "balanced"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", *SIZE], "missing.json"),
        ([SYNTHETIC, *SIZE, "--methods", "best_fit"], "'best_fit' is unknown"),
        ([SYNTHETIC, *SIZE, "--methods", "sequential:2"], "takes no argument"),
        ([SYNTHETIC, *SIZE, "--methods", ""], "--methods '' has an empty name"),
        ([SYNTHETIC, *SIZE, "--methods", "fixed_greedy:x"], "'x' is not a whole number"),
        ([SYNTHETIC, *SIZE, "--methods", "variable_length:9"], "9 outlier queues"),
        ([SYNTHETIC, *SIZE, "--model", "8t"], "8t"),
        ([SYNTHETIC, *SIZE, "--dp", "3"], "a global batch of 4 windows cannot be dealt evenly to --dp 3 ranks"),
        ([SYNTHETIC, *SIZE, "--overlong", "ignore"], "'ignore' is unknown"),
        ([SYNTHETIC, "--context-window", "1000000", "--micro-batches", "64"], "give more documents"),
        ([SYNTHETIC, *SIZE, "--plot", "no/such/folder/picture.png"], "picture.png"),
        ([SYNTHETIC, "--context-window", "0", "--micro-batches", "4"], "--context-window"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_two(arguments: list[str], message: str):
    result = studies("packing", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        (["--micro-batches", 2], "pp 2 dp 1"),
        (["--micro-batches", 2, "--dp", 2], "pp 1 dp 2"),
    ],
)
def test_a_pipeline_has_as_many_ranks_as_micro_batches_fill(sizes: list[object], layout: str):
    result = studies("packing", "synthetic:4500:4K", "--context-window", "4K", "--steps", "1", *map(str, sizes))
    assert result.returncode == 0, result.stderr
    assert f" {layout}\n" in result.stdout
