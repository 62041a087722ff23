"""The page of ``wlb-studies page``: it says what ``wlb check`` says, to this machine only, on a desk and on a phone."""

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import wlb_studies
from studies.tests.browser import BROWSER, tab
from studies.tests.cli.conftest import studies
from tests.cli.conftest import printed_both, run
from tests.limits import HUNG_SECONDS
from tests.report.test_browser import area, pixels_of
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.report.answer import about, columns_of
from wlb.simulate.estimate import CHECKED

testing = pytest.importorskip("streamlit.testing.v1", reason="no streamlit (wlb-studies[page]): the page not shown")
in_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on the PATH: the page not shown")

LENGTHS = json.dumps(sample_lengths(600, 4096, 0).tolist())
JOB = {"model": "tiny", "hardware": "cpu", "gpus": "4", "window": "4K"}
OPTIONS = {"--model": "tiny", "--hardware": "cpu", "--gpus": "4", "--context-window": "4K"}
WORDS = [word for option in OPTIONS.items() for word in option]
GREEN, RED = (0x1B, 0x9E, 0x6B), (0xD6, 0x45, 0x45)


@pytest.fixture(autouse=True)
def own_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit leaves its script in place of ``__main__``, which all processes forked later would import."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def shown(**chosen: Any) -> Any:
    """The page after it has answered, with what is ``chosen`` in its address."""
    page = testing.AppTest.from_file(Path(wlb_studies.__file__).with_name("page.py"), default_timeout=HUNG_SECONDS)
    page.query_params.update(JOB | {name: str(value) for name, value in chosen.items()})
    return page.run()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "lengths.json"
    path.write_text(LENGTHS)
    return path


@pytest.fixture(scope="module")
def app() -> Any:
    return importlib.import_module("wlb_studies.page")


@pytest.fixture(scope="module")
def answered(app: Any, file: Path) -> Any:
    return app.answered(app.Asked(str(file), tuple(OPTIONS.items())), 0.0)


def test_the_answer_is_that_of_check(answered: Any, file: Path):
    read, found, _ = answered
    out, checked = printed_both("check", file, *WORDS)
    assert json.loads(json.dumps(found.to_json())) == checked
    assert out.startswith(f"{read[0]}\n\n{found.verdict}\n")


def test_the_page_shows_the_answer(answered: Any, file: Path):
    page, (read, found, _) = shown(lengths=file), answered
    verdict = found.verdict
    assert not page.exception
    assert not page.error
    assert [info.value for info in page.info] == [verdict.headline]
    assert [text.value for text in page.text][: len(verdict.reasons)] == verdict.reasons
    assert page.table[0].value.to_dict("list") == columns_of(verdict)
    assert [metric.value for metric in page.metric] == [
        f"{verdict.speed(verdict.fastest):.2f}x",
        f"{verdict.systems[verdict.fastest].token_delay:.2f}",
        f"{found.gpu_hours_a_day:,.0f}",
    ]
    command, config = (code.value for code in page.code)
    assert command == f"wlb check {file} {' '.join(WORDS)}"
    assert config == found.config.rstrip()
    assert page.text[-1].value == "\n\n".join([*read, *about(found)])
    assert "simulated" in page.header[0].value


def test_steps_are_drawn_on_one_clock_and_of_equal_tokens(app: Any, answered: Any):
    """So their lengths differ as the speeds do."""
    _, found, steps = answered
    verdict = found.verdict
    chart = app.steps_chart(steps, verdict).to_dict()
    whole = {row["system"]: row["end"] for row in chart["data"]["values"] if row["what"] == app.WAITING}
    before, after = whole.values()
    assert before == steps[verdict.base].seconds == chart["encoding"]["x"]["scale"]["domain"][1]
    assert before / after == pytest.approx(verdict.speed(verdict.fastest))
    for row in chart["data"]["values"]:
        assert 0 <= row["start"] <= row["end"] <= whole[row["system"]]
    computing = sum(row["end"] - row["start"] for row in chart["data"]["values"] if row["what"] == app.COMPUTING)
    assert (
        0.5 < computing / sum(whole[row["system"]] for row in chart["data"]["values"] if row["what"] == app.WAITING) < 1
    )


def test_it_opens_with_an_example(app: Any, monkeypatch: pytest.MonkeyPatch):
    """Which is the job of the command that the page shows, and so its answer is that of ``wlb check``."""
    asked: list[Any] = []

    def ask(space: Any, lengths: Any, presets: Any = CHECKED, steps: Any = None, **_: Any) -> Any:
        asked.append((space, lengths.tolist(), [*presets], steps))
        raise UserError("asked")

    monkeypatch.setattr("wlb.simulate.estimate.estimate", ask)
    monkeypatch.setattr(app, "estimate", ask)
    with pytest.raises(UserError, match="asked"):
        app.answered.__wrapped__(app.EXAMPLE, 0.0)
    words = [word for option in app.EXAMPLE.options for word in option]
    assert run("check", app.EXAMPLE.lengths, *words, "--json").stderr == "wlb: error: asked\n"
    assert asked[0] == asked[1]
    page = shown(lengths="-")
    assert not page.info  # a mistake in the address leaves no example beside it
    assert len(page.error) == 1


def test_a_dropped_file_keeps_its_name():
    page = shown(lengths="nowhere.json", batch="32K")
    page.file_uploader[0].set_value(("my lengths.json", LENGTHS.encode(), "application/json"))
    page.run()
    assert not page.error
    assert page.code[0].value == f"wlb check 'my lengths.json' {' '.join(WORDS)}"
    assert page.code[1].value.startswith("# Computed for the documents of my lengths.json")
    page.file_uploader[0].set_value(("my lengths.json", b"[5, 0]", "application/json"))
    (error,) = page.run().error
    assert error.value.endswith(r"my lengths\.json\: entry 1 is 0\; a document has 1 to 2147483647 tokens")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "lengths - is standard input, which the page does not read; name a file"),
        ({"--model": "gpt-0"}, "unknown model 'gpt-0'"),
        ({"--batch-tokens": "2K"}, "--batch-tokens 2048 is smaller than one context window of 4096 tokens; raise it"),
        ({"--hardware": "h10"}, "h10"),
    ],
)
def test_what_is_wrong_is_refused(app: Any, wrong: dict[str, str], said: str):
    asked = app.Asked("synthetic:200:4K:0" if wrong else "-", tuple((OPTIONS | wrong).items()))
    with pytest.raises(UserError, match=re.escape(said)):
        app.answered(asked, 0.0)


def test_what_is_wrong_is_one_line_of_plain_text():
    page = shown(lengths="<b>*:red[x]*</b>.json")
    assert not page.exception
    assert not page.info
    (error,) = page.error
    assert (
        re.sub(r"\\(.)", r"\1", error.value)
        == "lengths <b>*:red[x]*</b>.json does not exist; name a file of lengths or a token store"
    )
    assert not re.search(r"(?<!\\)[<>*:\[\]]", error.value)


def test_the_command_refuses_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the page was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = studies("page", "--port", port)
    assert (refused.returncode, refused.stdout) == (2, "")
    said = f"port {port} cannot be used: Address already in use; give another with --port"
    assert refused.stderr == f"wlb-studies: error: {said}\n"
    monkeypatch.setitem(sys.modules, "streamlit", None)
    missing = studies("page")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.endswith("streamlit is not installed; run: pip install 'wlb-studies[page]'\n")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a server, which Ctrl-C ends."""
    command = [sys.executable, "-m", "wlb_studies", "page", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.match(r"wlb-studies page: (http://127\.0\.0\.1:\d+/[\w-]{22})  ", process.stdout.readline())
        assert found
        awaited(lambda: status(f"{found[1]}/_stcore/health") == 200)
        yield found[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(HUNG_SECONDS) == 0


def awaited(condition: Callable[[], Any]) -> Any:
    limit = time.monotonic() + HUNG_SECONDS
    while not (found := condition()):
        assert time.monotonic() < limit, "hung"
        time.sleep(0.1)
    return found


def status(url: str) -> int:
    """Of the answer to a request; 0 where nobody listens."""
    try:
        with urllib.request.urlopen(url) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_others_are_refused(address: str):
    """Other users of this machine do not know the key, and other sites are not the page's."""
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect
    from websockets.typing import Origin

    root = address.rpartition("/")[0]
    stream = f"{address}/_stcore/stream".replace("http:", "ws:")
    assert [status(f"{where}/") for where in (address, root, f"{root}/another-key")] == [200, 404, 404]
    assert status(f"{root}/_stcore/health") == 404
    with connect(stream, origin=Origin(root)):
        pass
    for url, origin in (
        (stream, "http://evil.example"),
        (stream.replace(address.rpartition("/")[2], "another-key"), root),
    ):
        with pytest.raises(InvalidStatus):
            connect(url, origin=Origin(origin))


@in_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 2400), (390, 3600)])
def test_it_fits_a_desk_and_a_phone(address: str, tmp_path: Path, width: int, height: int):
    with tab(tmp_path, f"{address}/?{urlencode(JOB | {'lengths': 'synthetic:600:4K:0'})}", width, height) as opened:
        opened.until("document.body?.innerText.includes('What was simulated')")
        opened.until("document.querySelectorAll('.stVegaLiteChart svg, .stVegaLiteChart canvas').length == 1")
        command = f"wlb check synthetic:600:4K:0 {' '.join(WORDS)}"
        opened.until(f"document.querySelector('[data-testid=stCode] code')?.textContent.trim() == {command!r}")
        assert "plain-4d loses" in opened.value("document.body.innerText")
        assert opened.value("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
        scrolled = "[...document.querySelectorAll('[data-testid=stMain]')].map(e => e.scrollWidth - e.clientWidth)"
        assert opened.value(scrolled) == [0]
        opened.screenshot(tmp_path / "page.png")
        pixels = pixels_of(tmp_path / "page.png")
        assert area(pixels, GREEN) > 5000
        assert area(pixels, RED) > 100
        assert opened.failures == []
        own = (address, address.replace("http:", "ws:"), "data:", "blob:")
        assert [url for url in opened.requests if not url.startswith(own)] == []
