"""Optional dependencies."""

import signal
from pathlib import Path

import pytest

from wlb.errors import UserError, require


def test_a_missing_dependency_is_named_with_its_extra():
    with pytest.raises(UserError, match=r"nowhere is not installed; run: pip install 'wlb-llm\[data\]'"):
        require("nowhere.at.all", "data")


def test_ctrl_c_that_an_import_swallows_is_raised_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "swallowing.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    done = True\n"
        "except KeyboardInterrupt:\n"
        "    done = False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            require("swallowing", "train")
        assert require("swallowing", "train").done, "the import itself is not interrupted"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
