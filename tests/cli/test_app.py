"""What every command has in common."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_ctrl_c_while_the_command_line_is_imported_is_one_line(tmp_path: Path):
    """A module that interrupts its own import stands for the Ctrl-C."""
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-m", "wlb", "--help"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 130
    assert result.stderr == "wlb: interrupted\n"


def test_tokens_have_units_on_the_way_in_and_none_on_the_way_out(wlb):
    size = ["--context-window", "1K", "--micro-batches", 2]
    status, out, _ = wlb("compare", "synthetic:500:1k", *size, "--methods", "sequential", "--json")
    assert status == 0
    assert json.loads(out)["context_window"] == 1024


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "synthetic:500:1K", "--micro-batches", 2, "--context-window"],
        ["compare", "synthetic:500:1K", "--prefill", "--token-budget"],
        ["tune", "synthetic:500:1K", "--micro-batches", 2, "--context-window"],
        ["shard", "synthetic:500:1K", "--cp", 2, "--context-window"],
        ["simulate", "--search", "--gpus", 8, "--context-window"],
        ["simulate", "--search", "--gpus", 8, "--batch-tokens"],
        ["report", "synthetic:500:1K", "--context-window"],
        ["profile", "--out", "profile.json", "--max-length"],
    ],
)
@pytest.mark.parametrize("wrong", ["0", "4KB", "9" * 30])
def test_what_is_no_number_of_tokens_is_refused_by_option(wlb, arguments, wrong):
    status, out, err = wlb(*arguments, wrong)
    assert (status, out) == (2, "")
    assert err.startswith(f"wlb: error: Invalid value for '{arguments[-1]}': '{wrong}' is no number of tokens")
    assert err.count("\n") == 1
