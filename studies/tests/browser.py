"""A tab of headless Chromium that is told by the DevTools protocol what to do: for pages that change after loading."""

import base64
import itertools
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.limits import HUNG_SECONDS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Tab:
    """A page, its ``requests``, and what its scripts threw: ``failures``."""

    def __init__(self, socket: Any, width: int, height: int) -> None:
        self._socket, self._numbers = socket, itertools.count()
        self.requests: list[str] = []
        self.failures: list[str] = []
        for domain in ("Page", "Runtime", "Network", "DOM"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            told = json.loads(self._socket.recv())
            if told.get("id") == number:
                assert "error" not in told, told
                return dict(told["result"])
            if told.get("method") == "Network.requestWillBeSent":
                self.requests.append(told["params"]["request"]["url"])
            elif told.get("method") == "Network.webSocketCreated":
                self.requests.append(told["params"]["url"])
            elif told.get("method") == "Runtime.exceptionThrown":
                self.failures.append(str(told["params"]["exceptionDetails"]))

    def value(self, script: str) -> Any:
        """What the JavaScript expression ``script`` is."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, script: str) -> Any:
        """What ``script`` is once that is true."""
        limit = time.monotonic() + HUNG_SECONDS
        while not (found := self.value(script)):
            assert time.monotonic() < limit, self.value("document.body.innerText")
            time.sleep(0.2)
        return found

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def tab(folder: Path, url: str, width: int, height: int) -> Iterator[Tab]:
    """A tab that shows ``url``; the browser keeps its files in ``folder``, and ends afterwards."""
    from websockets.sync.client import connect

    options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
    own = ("--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", "about:blank")
    with subprocess.Popen([str(BROWSER), *options, *own], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            ports = (re.search(r"listening on ws://(127\.0\.0\.1:\d+)/", line) for line in process.stderr)
            address = next(filter(None, ports))[1]
            with urllib.request.urlopen(f"http://{address}/json") as answer:
                (target,) = [one for one in json.load(answer) if one["type"] == "page"]
            with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
                opened = Tab(socket, width, height)
                opened.call("Page.navigate", url=url)
                yield opened
        finally:
            process.kill()
