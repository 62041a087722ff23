"""One small piece of evidence, and run directories as a training job writes them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from wlb.documents.synthetic import sample_lengths
from wlb.report.evidence import Evidence
from wlb.report.predicted import predicted_report
from wlb.simulate.estimate import estimate
from wlb.simulate.space import search_space

HOSTILE = "</title><script>alert(1)</script><img src='http://127.0.0.1:9/x' onerror=\"alert(2)\">&amp;.json"
WINDOW = 8192


@pytest.fixture(scope="session")
def evidence() -> Evidence:
    """Of a job with a hostile name, to which best is worth a change."""
    lengths = sample_lengths(3000, WINDOW, seed=1)
    sizes = {"dp": 2, "pp": 2, "cp": 2, "tp": 1}
    space = search_space("550m", 8, WINDOW, lengths, batch_tokens=4 * WINDOW, fixed=sizes)
    space = replace(space, priced_by={"model": HOSTILE}, assumed=(HOSTILE,))
    return Evidence(lengths, estimate(space, lengths, steps=4, source=HOSTILE))


@pytest.fixture(scope="session")
def hostile_page(evidence: Evidence) -> str:
    return predicted_report(evidence, read=HOSTILE)


def write_run(directory: Path, *, seconds: float = 2.0) -> Path:
    """A run directory of 20 steps, whose slowest rank takes 1.44 times the mean one, and 1.21 times by its plans."""
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
            "slowest_rank": {"predicted": 1.21, "measured": 1.44},
        }
        for step in range(1, 21)
    ]
    (directory / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory
