"""``wlb-studies prefill`` as a user runs it."""

import json

import pytest

from studies.tests.cli.conftest import studies
from tests.workload.profiles import analytic_profile
from wlb.workload import model_shape
from wlb.workload.profile import write_profile
from wlb_studies.serving.policies import POLICIES

PROMPTS = "synthetic:300:16384:0"
PREFILL = ["prefill", PROMPTS, "--model", "550m"]


def outcome(*arguments: object) -> tuple[int, str, str]:
    done = studies(*arguments)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    write_profile(analytic_profile(model_shape("tiny")), path)
    return str(path)


def test_json_has_every_method_and_setting():
    more = ["--token-budget", "2048", "--dp", "4", "--load", "0.7", "--seed", "3", "--json"]
    status, out, _ = outcome(*PREFILL, *more)
    assert status == 0
    output = json.loads(out)
    assert [row["method"] for row in output["methods"]] == list(POLICIES)
    assert output["arrivals_per_second"] > 0
    assert (output["prompts"], output["dp"], output["pp"], output["seed"], output["gpus"]) == (300, 4, 1, 3, 8)
    assert all(row["p50_seconds"] <= row["p99_seconds"] for row in output["methods"])


def test_table_names_the_setting():
    options = ["--token-budget", "16384", "--whole", "--independent", "--methods", "tokens,workload,loongserve"]
    status, out, _ = outcome(*PREFILL, *options)
    assert status == 0
    for words in ("all at once", "chunked prefill off", "independent", "2 GPUs", "GPU-s", "kJ"):
        assert words in out


def test_a_measured_profile_prices_what_needs_no_other_layout(profile):
    priced = ["prefill", PROMPTS, "--profile", profile, "--token-budget", "2K", "--dp", 2, "--json"]
    status, out, err = outcome(*priced)
    assert status == 0
    output = json.loads(out)
    assert [row["method"] for row in output["methods"]] == [name for name in POLICIES if name != "dynamollm"]
    assert all(row["energy_joules"] is None for row in output["methods"])
    assert err.startswith("dynamollm is left out: ")
    status, out, err = outcome(*priced, "--methods", "tokens,dynamollm")
    assert (status, out) == (2, "")
    assert err.startswith("wlb-studies: error: dynamollm chooses degrees and clocks, and a measured profile prices")


def test_load_counts_every_stage_of_a_pipeline():
    """As many prompts arrive as the GPUs can do: with twice the stages, twice as many."""
    options = ["--token-budget", "2K", "--load", "0.5", "--methods", "tokens", "--json"]
    rates = [json.loads(outcome(*PREFILL, *options, "--pp", pp)[1])["arrivals_per_second"] for pp in (1, 2)]
    assert rates[1] == pytest.approx(2 * rates[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (PREFILL, "Missing option '--token-budget'"),
        ([*PREFILL, "--token-budget", "2048", "--whole"], "over the token budget 2048"),
        ([*PREFILL, "--token-budget", "2048", "--methods", "sequential"], "'sequential' is unknown; choose from count"),
        (
            [*PREFILL, "--token-budget", "2K", "--methods", "loongserve", "--whole"],
            "--chunked/--whole has no effect on loongserve (got --whole); leave it out",
        ),
        (
            [*PREFILL, "--token-budget", "2K", "--methods", "loongserve,dynamollm", "--independent"],
            "--lock-step/--independent has no effect on loongserve, dynamollm (got --independent); leave it out",
        ),
        ([*PREFILL, "--token-budget", "2K", "--seed", 1], "--seed has no effect without --load"),
        (
            [*PREFILL, "--token-budget", "2K", "--hardware", "cpu", "--methods", "dynamollm"],
            "only the watts of a100, h100, h200 are known; leave it out of --methods",
        ),
        ([*PREFILL, "--token-budget", "2K", "--micro-batches", 2], "No such option: --micro-batches"),
        ([*PREFILL, "--token-budget", "2K", "--dp", 600], "--dp 600 is over the 512 data-parallel ranks"),
        (
            ["prefill", "synthetic:100000:128K:0", "--model", "550m", "--token-budget", "2K", "--independent"],
            "passes of --token-budget 2048 with --dp 1, over the 20000 that are simulated; raise the budget, or give",
        ),
        (
            ["prefill", "synthetic:900000:8K:0", "--model", "550m", "--token-budget", "1K", "--dp", 256],
            "chunks of --token-budget 1024 with --dp 256, over the 1000000 that are simulated; raise the budget",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    status, out, err = outcome(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
