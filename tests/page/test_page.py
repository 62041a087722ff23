"""The page of ``wlb serve``: it says what ``wlb check`` says, to its own page only, and stops when nobody listens."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from tests.cli.conftest import run
from tests.limits import HUNG_SECONDS
from tests.programs import forked
from tests.report.test_browser import BROWSER
from tests.training.processes import reserved_port
from tests.web import running
from wlb.errors import UserError
from wlb.page import server
from wlb.page.answer import PageQuestion
from wlb.page.server import MOST_BYTES, PageServer, serve_on

LENGTHS = json.dumps([4096, 600, 1500, 900, 3000, 700, *range(20, 100, 10)] * 6).encode()  # which elastic runs faster
JOB = {"model": "tiny", "hardware": "cpu", "gpus": "2", "window": "4K", "batch": "auto"}
OPTIONS = ("--model", "tiny", "--hardware", "cpu", "--gpus", 2, "--context-window", 4096)
FIRST = JOB | {"lengths": "</script><b>"}


@pytest.fixture(scope="module")
def page() -> Iterator[PageServer]:
    with PageServer(0, FIRST) as made, running(made):
        yield made


def sent(page: PageServer, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
    """Status and text of the answer to a ``path`` below the key; ``headers`` replace those of the page itself."""
    address = f"127.0.0.1:{page.server_port}"
    connection = http.client.HTTPConnection(address, timeout=HUNG_SECONDS)
    own = {"Host": address, "Origin": f"http://{address}", "Content-Length": str(len(body))} | headers
    try:
        connection.putrequest(method, f"/{page.key}{path}", skip_host=True)
        for name, value in own.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def asked(page: PageServer, **question: Any) -> dict[str, Any]:
    """The last of each part of the answer."""
    body = json.dumps(JOB | question).encode()
    status, text = sent(page, "POST", "/check", body)
    assert status == 200, text
    return {kind: part for line in text.splitlines() for kind, part in json.loads(line).items()}


def dropped(page: PageServer, name: str, content: bytes = LENGTHS) -> str:
    status, text = sent(page, "POST", f"/lengths?{quote(name)}", content)
    assert status == 200, text
    assert json.loads(text)["name"] == name
    return str(json.loads(text)["lengths"])


def test_the_verdict_is_that_of_check(page: PageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = dropped(page, "my lengths.json")
    found = asked(page, lengths=path)
    (tmp_path / "my lengths.json").write_bytes(LENGTHS)
    monkeypatch.chdir(tmp_path)
    checked = run("check", "my lengths.json", *OPTIONS, "--json")
    assert found["verdict"]["check"] == json.loads(checked.stdout)
    assert found["verdict"]["check"]["config"].startswith("# For documents as in my lengths.json")
    read = unescape(re.sub("<.*?>", "", found["read"]["html"]))
    assert run("check", "my lengths.json", *OPTIONS).stdout.startswith(f"{read}\n")
    assert read in unescape(found["verdict"]["html"])
    assert found["verdict"]["command"] == f"wlb check 'my lengths.json' {' '.join(map(str, OPTIONS))}"
    assert {"pipeline-chart", "lengths"} <= {*re.findall(r'<svg[^>]* id="([\w-]+)"', found["pictures"]["html"])}
    assert "done" in found
    assert asked(page, lengths=path)["verdict"] == found["verdict"]
    key = PageQuestion.of(JOB | {"lengths": path}, "my lengths.json"), server._stamp(path)
    assert {*page.known(key)} == {"verdict", "pictures"}


def test_a_global_batch_that_is_given_is_that_of_the_command(page: PageServer, tmp_path: Path):
    path = dropped(page, "lengths.json")
    found = asked(page, lengths=path, batch="8K")
    assert found["verdict"]["command"].endswith(" --batch-tokens 8192")
    assert "8,192 tokens a step, 2 windows of 4,096" in found["verdict"]["html"]
    words = found["verdict"]["command"].replace("lengths.json", path).split()[1:]
    assert found["verdict"]["check"]["systems"] == json.loads(run(*words, "--json").stdout)["systems"]
    few = asked(page, lengths=path, batch="2K")
    assert few["error"]["text"] == "a global batch of 2048 tokens holds no window of 4096; raise it"


def test_where_little_is_gained_the_page_has_no_configuration(page: PageServer):
    """One keeps what one has; the part of the page is hidden where the TOML is empty."""
    path = dropped(page, "even.json", json.dumps([4096] * 24).encode())
    found = asked(page, lengths=path, gpus="1", batch="16K")["verdict"]
    assert (found["check"]["winner"], found["check"]["config"]) == ("plain-4d", "")
    assert "Keep what you have: no preset is at least 5% faster" in found["html"]
    assert "GPU-hours" not in found["html"]
    assert 'at("recommended").hidden = !part.check.config;' in page.page.decode()


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "said"),
    [
        ("GET", "/", {"Host": "evil.example"}, 403, "this page is at http://127.0.0.1:"),
        ("GET", "/", {"Host": "evil.example:{port}"}, 403, "this page is at"),
        ("GET", "/", {"Host": "localhost:{port}"}, 200, "<!doctype html>"),
        ("GET", "/check", {}, 404, "nothing here"),
        ("POST", "/check", {"Origin": "http://evil.example"}, 403, "only"),
        ("POST", "/check", {"Origin": "null"}, 403, "only"),
        ("POST", "/check", {"Host": "evil.example", "Origin": "http://evil.example"}, 403, "this page is at"),
        ("POST", "/lengths?a.json", {"Content-Length": str(MOST_BYTES + 1)}, 413, "over the 67,108,864 that are read"),
        ("POST", "/lengths?a.json", {"Content-Length": "many"}, 413, "many bytes"),
        ("POST", "/lengths?a.json", {"Content-Length": "9" * 5000}, 413, "over the 67,108,864 that are read"),
        ("POST", "/lengths?..", {}, 400, "'..' is no name of a file"),
        ("POST", "/check", {}, 400, "no JSON object"),
        ("POST", "/", {}, 404, "nothing here"),
    ],
)
def test_others_are_refused(page: PageServer, method: str, path: str, headers: dict[str, str], status: int, said: str):
    named = {name: value.format(port=page.server_port) for name, value in headers.items()}
    found, text = sent(page, method, path, b"", **named)
    assert found == status
    assert said in text
    assert text.count("\n") == 0 or status == 200
    assert page.key not in text


def test_who_does_not_know_the_key_is_refused(page: PageServer):
    """As other users of this machine, who reach its ports but may not read what the server may."""
    address = f"127.0.0.1:{page.server_port}"
    for method, path in (
        *(("GET", path) for path in ("/", "/no-key/", f"/{page.key}", "/check")),
        *(("POST", path) for path in ("/check", "/lengths?a.json", "/no-key/check", "//check")),
    ):
        connection = http.client.HTTPConnection(address, timeout=HUNG_SECONDS)
        connection.request(method, path, b"{}", {"Origin": f"http://{address}"})
        response = connection.getresponse()
        assert (response.status, page.key in response.read().decode()) == (404, False), path
        connection.close()


def test_what_is_wrong_is_one_line(page: PageServer):
    for question, said in (
        ({"lengths": dropped(page, "bad.json", b"[5, 0]")}, "bad.json: entry 1 is 0; a document has 1 to 2147483647"),
        ({"lengths": dropped(page, "bad.npy", b"none")}, "bad.npy is not a NumPy array"),
        (
            {"lengths": dropped(page, "my docs.jsonl", b'{"text": "Once"}\n')},
            "wlb check 'my docs.jsonl' --tokenizer bytes",
        ),
        ({"lengths": "nowhere.json"}, "lengths nowhere.json does not exist"),
        ({"lengths": "synthetic:200:4K", "gpus": "1009"}, "no layout"),
        ({"lengths": "synthetic:200:4K", "model": "gpt-0"}, "unknown model 'gpt-0'"),
    ):
        found = asked(page, **question)
        assert "verdict" not in found
        assert found["error"]["text"].startswith(said) or said in found["error"]["text"]
        assert "\n" not in found["error"]["text"]
        assert str(page.folder) not in found["error"]["text"]
    for wrong, said in (
        ({"lengths": "-"}, "standard input"),
        ({"lengths": ""}, "lengths is missing"),
        ({"lengths": "a.json", "gpus": "0"}, "gpus '0' is no whole number of at least 1"),
        ({"lengths": "a.json", "window": "4KB"}, "not a number of tokens"),
        ({"lengths": "a.json", "batch": "0"}, "'0' is not a number of tokens"),
        ({"lengths": "a.json", "batch": ""}, "batch is missing; give one"),
        ({"lengths": ["a.json"]}, "lengths is missing"),
    ):
        status, text = sent(page, "POST", "/check", json.dumps(JOB | wrong).encode())
        assert (status, said in text) == (400, True), text


def test_hanging_up_ends_the_simulation(page: PageServer, tmp_path: Path):
    """Reading a pipe that nobody writes to takes for ever."""
    os.mkfifo(tmp_path / "lengths.txt")
    before = {*multiprocessing.active_children()}
    address = f"127.0.0.1:{page.server_port}"
    body = json.dumps(JOB | {"lengths": str(tmp_path / "lengths.txt")})
    connection = http.client.HTTPConnection(address)
    connection.request("POST", f"/{page.key}/check", body, {"Origin": f"http://{address}"})
    (worker,) = awaited(lambda: {*multiprocessing.active_children()} - before)
    connection.close()
    # Its exit code is for whoever asks first: the server.
    awaited(lambda: not Path(f"/proc/{worker.pid}").exists())


def awaited(condition: Any) -> Any:
    limit = time.monotonic() + HUNG_SECONDS
    while not (found := condition()):
        assert time.monotonic() < limit, "hung"
        time.sleep(0.02)
    return found


def test_the_command_serves_until_ctrl_c():
    with reserved_port() as port, forked("-m", "wlb", "serve", "--no-browser", "--port", port) as program:
        said = program.stdout.readline()
        shown = re.fullmatch(rf"wlb serve: http://127\.0\.0\.1:{port}(/[\w-]{{22}}/)  \(Ctrl-C ends it\)\n", said)
        assert shown, said
        connection = http.client.HTTPConnection(f"127.0.0.1:{port}", timeout=HUNG_SECONDS)
        connection.request("GET", shown[1])
        assert '"lengths": "synthetic:20000:128K:0"' in connection.getresponse().read().decode()
        with pytest.raises(UserError, match=f"port {port} cannot be used: Address already in use; give another"):
            serve_on(port, FIRST)
        program.send_signal(signal.SIGINT)
        assert program.communicate() == ("\n", "")
        assert program.returncode == 0


def test_without_a_port_the_next_free_one_is_taken(page: PageServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "_FIRST_PORT", page.server_port)
    with serve_on(None, FIRST) as other:
        assert page.server_port < other.server_port < page.server_port + 20
        assert "</script><b>" not in other.page.decode()


def test_answers_are_forgotten_in_order(page: PageServer):
    for number in range(100):
        page.remember(number, {"verdict": {}})
    assert page.known(0) == {}
    assert page.known(99) == {"verdict": {}}


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on the PATH: the page of wlb serve not shown")
def test_a_browser_sends_a_file_and_shows_its_verdict_on_a_phone(
    page: PageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sentence = asked(page, lengths=dropped(page, "lengths.json"))["verdict"]["check"]["verdict"]
    choosing = b"\nsend(new File([%b], 'lengths.json'));\n" % json.dumps(LENGTHS.decode()).encode()
    monkeypatch.setattr(page, "page", page.page.replace(b"\nask();\n", choosing))
    text = opened(page.url + "?" + urlencode(JOB), tmp_path)
    assert f'<p class="verdict">{sentence}</p>' in unescape(text)
    assert all(f'id="{chart}"' in text for chart in ("where-chart", "pipeline-chart", "lengths"))
    assert 'preset = "' in re.search(r'id="toml">([^<]*)', text)[1]  # type: ignore[index]
    assert '<p id="error" class="warning" role="alert" hidden="">' in text
    # What was shown, without its scripts, says in a frame of 360 pixels how wide it is.
    still = re.sub("<script.*?</script>", "", text, flags=re.DOTALL)
    measured = "<script>parent.document.title = [innerWidth, document.documentElement.scrollWidth]</script>"
    frame = f'<iframe style="border:0;width:360px;height:9999px" srcdoc="{escape(still + measured)}"></iframe>'
    (tmp_path / "still.html").write_text(f"<!doctype html><title>unknown</title>{frame}", encoding="utf-8")
    assert "<title>360,360</title>" in opened((tmp_path / "still.html").as_uri(), tmp_path)


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on the PATH: the page of wlb serve not shown")
def test_a_browser_shows_what_is_wrong_as_text(page: PageServer, tmp_path: Path):
    hostile = "<img src=x onerror=alert(1)>.json"
    text = opened(page.url + "?" + urlencode(JOB | {"lengths": hostile}), tmp_path)
    (shown,) = re.findall(r'<p id="error" class="warning" role="alert">([^<]*)</p>', text)
    assert unescape(shown) == f"lengths {hostile} does not exist"
    assert "<img" not in text


def opened(url: str, folder: Path) -> str:
    """The page at ``url`` after its requests are answered."""
    result = subprocess.run(
        [
            str(BROWSER),
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}"),
            *("--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom", url),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return result.stdout
