"""Reports in a real browser: headless Chromium, if there is one, shows them without errors or requests."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.conftest import write_run
from wlb.report.measured import measured_report
from wlb.report.run_directory import read_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on the PATH: reports not shown")

LIGHT_PAGE, DARK_PAGE = (255, 255, 255), (0x15, 0x18, 0x1C)
LIGHT_AFTER = (0x1B, 0x7F, 0x5C)
LIGHT_WAITING, DARK_WAITING = (0xE0, 0x31, 0x31), (0xEF, 0x53, 0x50)


def show(page: Path, *, dark: bool = False) -> tuple[np.ndarray[Any, Any], list[str], list[str]]:
    """The page as an array of pixels, what it wrote to the console, and the addresses that it asked for."""
    folder = page.parent
    picture, log = folder / "screenshot.png", folder / "net.json"
    result = subprocess.run(
        [
            str(BROWSER),
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
            *("--enable-logging=stderr", f"--log-net-log={log}", f"--user-data-dir={folder / 'profile'}"),
            *([f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1040,3000"]),
            *(f"--screenshot={picture}", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert picture.exists(), result.stderr
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    addresses = {str(event.get("params", {}).get("url", "")) for event in events}
    return (
        pixels_of(picture),
        console,
        sorted(a for a in addresses if a.startswith(("http", "ws")) and "127.0.0.1" in a),
    )


def pixels_of(picture: Path) -> np.ndarray[Any, Any]:
    from matplotlib.image import imread

    return np.asarray(np.rint(imread(picture)[:, :, :3] * 255), int)


def area(pixels: np.ndarray[Any, Any], colour: tuple[int, int, int]) -> int:
    return int(np.all(pixels == colour, axis=2).sum())


@pytest.mark.parametrize("dark", [False, True])
def test_a_hostile_report_is_drawn_without_errors_or_requests(hostile_page: str, tmp_path: Path, dark: bool):
    path = tmp_path / "report.html"
    path.write_text(hostile_page, errors="xmlcharrefreplace")
    assert path.stat().st_size < 6e6
    pixels, console, requests = show(path, dark=dark)
    assert (console, requests) == ([], [])
    assert tuple(pixels[0, 0]) == (DARK_PAGE if dark else LIGHT_PAGE)
    assert area(pixels, DARK_WAITING if dark else LIGHT_WAITING) > 300


def test_a_report_on_runs_is_drawn(tmp_path: Path):
    before, after = (read_run(write_run(tmp_path / name, seconds=s)) for name, s in (("plain", 3.0), ("balanced", 2.0)))
    path = tmp_path / "report.html"
    path.write_text(measured_report(after, before)[0])
    pixels, console, requests = show(path)
    assert (console, requests) == ([], [])
    assert area(pixels, LIGHT_AFTER) > 1000


def test_errors_and_requests_would_be_seen(tmp_path: Path):
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><img src='http://127.0.0.1:9/x'><script>nowhere()</script>")
    _, console, requests = show(path)
    assert any("nowhere is not defined" in line for line in console)
    assert requests == ["http://127.0.0.1:9/x"]
