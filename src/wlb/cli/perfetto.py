"""Opens a trace at ui.perfetto.dev: the page fetches the file from this machine, once, and keeps it in the browser."""

from __future__ import annotations

import threading
import webbrowser
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from wlb.cli.console import note

_SITE = "https://ui.perfetto.dev"
_PORT = 9001  # the only one of this machine that the site may fetch from
_FILE = "/trace.json"
_WAIT_SECONDS = 60.0  # for a browser to start and fetch the file


def open_trace(path: Path) -> None:
    """Open the trace in ``path`` in the browser; returns when it was fetched, or says that it was not."""
    fetched = threading.Event()
    try:
        server = ThreadingHTTPServer(("127.0.0.1", _PORT), partial(_OneFile, path.read_bytes(), fetched))
    except OSError as error:
        note(f"port {_PORT}, from which {_SITE} reads, cannot be used: {error.strerror}; open {path} there yourself")
        return
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened = webbrowser.open(f"{_SITE}/#!/?url=http://127.0.0.1:{_PORT}{_FILE}")
        if not (opened and fetched.wait(_WAIT_SECONDS)):
            note(f"no browser has fetched the trace; open {path} at {_SITE} yourself")
        server.shutdown()


class _OneFile(BaseHTTPRequestHandler):
    def __init__(self, content: bytes, fetched: threading.Event, *connection: object) -> None:
        self._content, self._fetched = content, fetched
        super().__init__(*connection)  # type: ignore[arg-type]  # answers the request

    def do_OPTIONS(self) -> None:
        """A browser asks whether a public site may read from this machine."""
        self._answer(HTTPStatus.NO_CONTENT, b"")

    def do_GET(self) -> None:
        if self.path != _FILE:
            self._answer(HTTPStatus.NOT_FOUND, b"")
            return
        self._answer(HTTPStatus.OK, self._content)
        self._fetched.set()

    def _answer(self, status: HTTPStatus, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Access-Control-Allow-Origin", _SITE)
        self.send_header("Access-Control-Allow-Private-Network", "true")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass
