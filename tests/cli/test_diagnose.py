"""``wlb diagnose`` shows what a job wrote, without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.cli.conftest import printed, refusal
from tests.training.observe.rows import EVEN, diagnosis_of, rows_of
from wlb.training.observe.diagnosis import FILE


def test_text_and_json(tmp_path):
    assert "has no diagnosis.json" in refusal("diagnose", tmp_path)
    uneven = EVEN.copy()
    uneven[:, 1] = 1.5
    (tmp_path / FILE).write_text(json.dumps(diagnosis_of(rows_of(uneven))))
    code = "import sys; sys.modules['torch'] = None; from wlb.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "diagnose", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0
    assert "slowest/mean" in done.stdout
    assert "packing.assignment" in done.stdout
    assert json.loads(printed("diagnose", tmp_path, "--json")) == json.loads((tmp_path / FILE).read_text())
