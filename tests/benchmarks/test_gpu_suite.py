"""The GPU suite runs all of its code on a CPU at toy sizes; what it writes is what its rows are made of."""

import json
from itertools import product
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks import gpu_suite
from benchmarks.parts.gpu import steps
from tests.programs import finished
from wlb.sharding import STRATEGIES
from wlb.workload.profile import read_profile

torch = pytest.importorskip("torch")

LARGEST_FILE = 200_000  # bytes; that of full sizes has about five times the numbers of this one


def _forked(command: list[str], **_: Any) -> CompletedProcess[str]:
    """What the suite runs in a process of its own, ``wlb train``, in one that need not import torch."""
    return finished(*command[1:])


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "gpu_suite.json"
    with mock.patch.object(steps, "subprocess", mock.Mock(run=_forked)):
        assert gpu_suite.main(["--device", "cpu", "--quick", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def results(smoke):
    return json.loads(smoke.read_text())


def test_every_section_has_results(smoke, results):
    assert list(results["sections"]) == [*gpu_suite.SECTIONS]
    for section in results["sections"].values():
        assert section["problem"] is None
        assert section["rows"]
    assert results["versions"]["torch"] == torch.__version__
    assert len(smoke.read_text()) < LARGEST_FILE / 5
    assert str(smoke.parent) not in smoke.read_text(), "results name no paths"


def test_attention_is_as_exact_as_float32(results):
    rows = results["sections"]["exactness"]["rows"]
    assert len({(row["segments"], row["heads"]) for row in rows}) == 18
    assert all(row["largest"] < 1e-5 for row in rows)


def test_steps_repeat_and_ranks_work_together(results):
    step, exchange, levels = (results["sections"][name]["rows"] for name in ("step", "exchange", "levels"))
    assert [row["same bits twice"] for row in step] == [True, True]  # on a CPU in any case
    assert all(row["mfu"] > 0 and row["predicted_bytes"] > 0 for row in step)
    assert [(row["ranks"], row["strategy"]) for row in exchange] == [(2, "per_sequence"), (2, "per_document")]
    assert [row["steps"] for row in levels] == ["level steps", "lock step"]


def test_experts_are_as_exact_as_float32(results):
    rows = results["sections"]["experts"]["rows"]
    assert {(row["experts"], row["kernel"]) for row in rows} == set(product((8, 32, 128), ("grouped", "one by one")))
    assert all(row["error"] < 1e-4 and row["tflops"] > 0 for row in rows)


def test_flops_are_those_of_the_pairs(results):
    rows = results["sections"]["kernel"]["rows"]
    assert {row["heads"] for row in rows} == {"4/2 x 32", "4/1 x 32"}
    for row in rows:
        queries, keys = row["queries"], row["keys"]
        pairs = queries * (queries + 1) / 2 if row["kind"] == "documents" else queries * keys
        assert row["forward_tflops"] * row["forward_seconds"] * 1e12 == pytest.approx(4 * 4 * 32 * pairs, rel=1e-3)


def test_profile_is_read_from_the_results(smoke, results):
    profile = read_profile(smoke)
    assert list(profile.attention.tokens) == results["profile"]["attention"]["tokens"]


def test_imbalance_is_that_of_the_ranks(results):
    rows = {(row["cp"], row["strategy"]): row for row in results["sections"]["sharding"]["rows"]}
    assert set(rows) == {(cp, strategy) for cp in (2, 4) for strategy in STRATEGIES}
    for (cp, _), row in rows.items():
        seconds, base = (np.array(r["measured_seconds"]) for r in (row, rows[cp, "per_sequence"]))
        assert seconds.shape == (2, cp)
        assert row["imbalance"]["measured"] == pytest.approx((seconds.max(1) / seconds.mean(1)).mean(), rel=1e-3)
        over = row["over per_sequence"]
        assert over["measured"] == pytest.approx(seconds.max(1).sum() / base.max(1).sum(), rel=1e-3)
        assert set(over) == {"measured", "cpu preset", "profile"}


def test_errors_are_those_of_the_comparisons(results):
    rows = {(row["what"], row["workload"]): row for row in results["errors"]}
    assert len(results["comparisons"]) == 5
    for comparison in results["comparisons"]:
        measured = np.array(comparison["measured"])
        assert (measured > 0).all()
        for workload, predicted in comparison["predicted"].items():
            row, errors = rows[comparison["what"], workload], np.abs(np.array(predicted) / measured - 1)
            assert row["count"] == len(measured)
            assert row["median"] == pytest.approx(np.median(errors), abs=1e-3)
            assert row["p90"] == pytest.approx(np.quantile(errors, 0.9), abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PyTorch finds no CUDA device"),
        (["--device", "cpu"], "add --quick"),
        (["--sections", "kernel,speed"], "unknown section 'speed'; choose from exactness"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_suite.main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_section_that_fails_does_not_stop_the_others(monkeypatch, capsys, tmp_path):
    def fail(setting, workloads):
        raise RuntimeError("out of luck")

    monkeypatch.setitem(gpu_suite.SECTIONS, "exactness", fail)
    out = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--quick", "--sections", "kernel,exactness", "--out", str(out)]
    assert gpu_suite.main(arguments) == 1
    sections = json.loads(out.read_text())["sections"]
    assert sections["exactness"]["problem"] == "RuntimeError: out of luck"
    assert sections["kernel"]["rows"]
    assert "out of luck" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_sections_run_on_a_gpu(tmp_path):
    out = tmp_path / "gpu_suite.json"
    done = finished("-m", "benchmarks.gpu_suite", "--quick", "--out", out)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert "gpu" in results["machine"]
    assert results["profile"]["clock"] == "CUDA events"
    assert all(section["rows"] for section in results["sections"].values())
