"""What every command has in common."""

import os
import subprocess
import sys
from pathlib import Path


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
