"""The benchmark of large corpora runs on written and on virtual indexes, and they plan alike."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROBE = """
from pathlib import Path
from corpora import _VirtualStore, _write
from wlb.documents.store.reader import TokenStore
_write(Path("STORE"), 1200000)
written, virtual = TokenStore.open("STORE"), _VirtualStore(1200000)
assert (written.lengths == virtual.lengths).all()
assert written.tokens == virtual.tokens
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(*arguments: str) -> None:
    finished = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=BENCHMARKS)
    assert finished.returncode == 0, finished.stderr


def test_a_small_run_measures_every_corpus(tmp_path):
    out = tmp_path / "corpora.json"
    run(
        "corpora.py", "--documents", "100000", "3000000000", "--on-disk", "100000", "--shards", "300", "--out", str(out)
    )
    results = json.loads(out.read_text())
    assert results["shards"]["documents"] == 300 * 100
    assert results["shards"]["handles"] <= 300 + 2 * 128
    small, large = results["rows"]
    assert (small["documents"], large["documents"]) == (100_000, 3_000_000_000)
    assert large["index"] == "virtual"
    assert all(row["first_step"]["cpu_seconds"] > 0 and row["private_mib"] > 0 for row in (small, large))


def test_a_virtual_store_is_what_would_be_written(tmp_path):
    run("-c", PROBE.replace("STORE", str(tmp_path / "store")))
