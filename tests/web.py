"""A web server on this machine that fails when it is told to, and counts what is asked of it."""

import hashlib
import io
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import HTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Faults:
    """An application whose next answers to requests for ranges of ``.bin`` files are those in ``faults``, one each.

    "error" is the status 503, "short" half of what was asked for, and "cut" a connection that ends in the middle.
    """

    def __init__(self, application: Application) -> None:
        self._application = application
        self.faults: deque[str] = deque()
        self.gets: list[str] = []  # names of the files of which ranges were asked for

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        name = environ["PATH_INFO"].rpartition("/")[2]
        if environ["REQUEST_METHOD"] != "GET" or "HTTP_RANGE" not in environ:
            return self._application(environ, start_response)
        self.gets.append(name)
        fault = self.faults.popleft() if self.faults and name.endswith(".bin") else ""
        if fault == "error":
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if fault == "short":
            first, last = map(int, environ["HTTP_RANGE"].removeprefix("bytes=").split("-"))
            environ["HTTP_RANGE"] = f"bytes={first}-{(first + last) // 2}"
        answer = self._application(environ, start_response)
        return _cut(answer) if fault == "cut" else answer


def _cut(answer: Iterable[bytes]) -> Iterator[bytes]:
    content = b"".join(answer)
    yield content[: len(content) // 2]
    raise ConnectionAbortedError


def files_of(folder: Path) -> Application:
    """Serves the files of ``folder``, ranges of them too, with an ETag of their content."""

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = folder / environ["PATH_INFO"].strip("/")
        if not path.is_file():
            start_response("404 Not Found", [("Content-Length", "0")])
            return [b""]
        content, status = path.read_bytes(), "200 OK"
        headers = [("ETag", hashlib.sha256(content).hexdigest()[:8]), ("Accept-Ranges", "bytes")]
        if asked := environ.get("HTTP_RANGE"):
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            headers.append(("Content-Range", f"bytes {first}-{last}/{len(content)}"))
            content, status = content[first : last + 1], "206 Partial Content"
        start_response(status, [*headers, ("Content-Length", str(len(content)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else content]

    return serve


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Connections end as they are told to."""


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing is to be read in the output of tests."""

    def get_stderr(self) -> Any:
        return io.StringIO()


@contextmanager
def served(application: Application) -> Iterator[str]:
    """The URL of a server of ``application``."""
    with make_server("127.0.0.1", 0, application, _Server, _Handler) as server, running(server) as url:
        yield url


@contextmanager
def running(server: HTTPServer) -> Iterator[str]:
    """The URL of ``server``, which answers in a thread."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
