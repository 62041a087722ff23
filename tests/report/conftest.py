"""One small piece of evidence, and run directories as a training job writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wlb.documents.synthetic import sample_lengths
from wlb.report.evidence import Evidence
from wlb.report.predicted import predicted_report
from wlb.simulate.estimate import estimate, question_of

HOSTILE = "</title><script>alert(1)</script><img src='http://127.0.0.1:9/x' onerror=\"alert(2)\">&amp;.json"
WINDOW = 8192


@pytest.fixture(scope="session")
def evidence() -> Evidence:
    """Of a job with a hostile name, to which best is worth a change."""
    lengths = sample_lengths(3000, WINDOW, seed=1)
    sizes = {"dp": 2, "pp": 2, "cp": 2, "tp": 8}
    question = question_of("7b", "h100", 64, lengths, context_window=WINDOW, batch_tokens=4 * WINDOW, fixed=sizes)
    question = replace(question, model=HOSTILE, priced_by={"model": HOSTILE}, assumed=[HOSTILE])
    return Evidence(lengths, estimate(question, lengths, steps=4, source=HOSTILE))


@pytest.fixture(scope="session")
def hostile_page(evidence: Evidence) -> str:
    return predicted_report(evidence, source=HOSTILE)


def write_run(directory: Path, *, seconds: float = 2.0, host: str = "node0", diagnosed: bool = True) -> Path:
    """A run directory of 20 steps on a mesh of pp 2, dp 2, cp 1, tp 1."""
    directory.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "tokens": 8000 + 10 * step,
            "step_seconds": 60.0 if step == 1 else seconds + 0.01 * (step % 3),
            "data_wait_seconds": 0.001,
            "imbalance_degree": 1.2,
            "token_delay": 0.25,
            "mfu": 0.41 * 2.0 / seconds,
        }
        for step in range(1, 21)
    ]
    (directory / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if diagnosed:
        (directory / "diagnosis.json").write_text(json.dumps(diagnosis(host)))
    return directory


def diagnosis(host: str) -> dict[str, Any]:
    compute = [1.0, 1.2, 0.9, 0.9]
    factor = {"predicted": 1.05, "measured": 1.1}
    unmeasured = {"predicted": 1.0, "measured": None}
    return {
        "steps": 10,
        "last_step": 20,
        "step_seconds": 2.0,
        "mean_compute_seconds": 1.0,
        "slowest_over_mean": 1.2,
        "imbalance": {"tp": unmeasured, **dict.fromkeys(("cp", "pp", "dp", "micro_batches"), factor)},
        "causes": [{"what": "straggler", "cost": 0.2, "text": f"rank 1 (host {host}) is slow"}],
        "ranks": [
            {
                "rank": rank,
                "host": host,
                "process": 100 + rank,
                "device": "cpu",
                "pp": rank // 2,
                "dp": rank % 2,
                "cp": 0,
                "tp": 0,
                "compute_seconds": compute[rank],
                "normalised": compute[rank],
                "core_wait_seconds": 0.25,
                "data_wait_seconds": 0.01,
            }
            for rank in range(4)
        ],
    }
