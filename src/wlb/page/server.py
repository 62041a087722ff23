"""The server of the page: this machine only, only who knows its address, and only what its own page sends.

It reads files with the rights of who started it, and other users of the machine reach its port too, so the address has
a key. Another site could have its visitor's browser send requests here. So the ``Host`` must be this machine by name,
which a foreign name that resolves to it is not, and whatever computes or writes is a POST whose ``Origin`` is the page.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import secrets
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from wlb.errors import UserError
from wlb.markup import Markup, tag
from wlb.page.answer import PageQuestion, answer
from wlb.report.html.page import style
from wlb.workload import HARDWARE, MODEL_SHAPES

MOST_BYTES = 64 << 20  # of a dropped file: lengths of some ten million documents
_MOST_QUESTION = 64 << 10
_LONGEST_NAME = 200  # bytes: file systems have 255
_ADDRESS = "127.0.0.1"
_FIRST_PORT, _PORTS = 8448, 20  # that are tried where none is asked for
_REMEMBERED = 64  # questions with their answers

_WORK = multiprocessing.get_context("forkserver")  # a process is forked from one that has imported everything


class PageServer(ThreadingHTTPServer):
    """Serves the page, which begins with the job ``first``, until ``server_close``; ``port`` 0 is any free one."""

    daemon_threads = True

    def __init__(self, port: int, first: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="wlb-serve-")
        super().__init__((_ADDRESS, port), _Handler)  # which closes itself where the port is taken
        self.folder = Path(self._folder.name)
        self.key = secrets.token_urlsafe(16)
        self.nonce = secrets.token_urlsafe(16)
        self.page = _page(first, self.nonce)
        self.starting = threading.Lock()
        self._answers: dict[Any, dict[str, dict[str, Any]]] = {}

    @property
    def url(self) -> str:
        return f"http://{_ADDRESS}:{self.server_port}/{self.key}/"

    def server_close(self) -> None:
        super().server_close()
        self._folder.cleanup()

    def store(self, name: str, content: bytes) -> Path:
        """The path of a dropped file, which keeps its ``name``: the ending says how it is read."""
        if Path(name).name in ("", "..") or "\0" in name or len(name.encode()) > _LONGEST_NAME:
            raise UserError(f"{name[:40]!r} is no name of a file; rename it")
        path = self.folder / hashlib.sha256(content).hexdigest()[:16] / Path(name).name
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise UserError(f"{name} cannot be kept in {self.folder}: {error.strerror}; name its path") from None
        return path

    def shown(self, text: str) -> str:
        """``text`` with dropped files by their names."""
        before, *others = text.split(f"{self.folder}/")
        return before + "".join(other.partition("/")[2] for other in others)

    def known(self, key: Any) -> dict[str, dict[str, Any]]:
        return dict(self._answers.get(key, {}))

    def remember(self, key: Any, parts: dict[str, dict[str, Any]]) -> None:
        """Keep the parts of an answer, of the last questions only."""
        with self.starting:
            self._answers.pop(key, None)
            self._answers[key] = dict(parts)
            while len(self._answers) > _REMEMBERED:
                del self._answers[next(iter(self._answers))]


def serve_on(port: int | None, first: dict[str, str]) -> PageServer:
    """The server on ``port``, or on the first of some that is free. Raises ``UserError`` where it is not."""
    ports = range(_FIRST_PORT, _FIRST_PORT + _PORTS) if port is None else [port]
    for one in ports:
        try:
            server = PageServer(one, first)
        except OSError as error:
            said = error.strerror
            continue
        _WORK.set_forkserver_preload(["wlb.page.answer"])
        forkserver.ensure_running()  # and importing, while the browser opens
        return server
    raise UserError(f"port {ports[-1]} cannot be used: {said}; give another with --port")


def _page(first: dict[str, str], nonce: str) -> bytes:
    def choices(names: Any) -> Markup:
        return Markup("".join(tag("option", name) for name in names))

    marks = {
        "STYLE": style(),
        "NONCE": nonce,
        "MODELS": choices(MODEL_SHAPES),
        "HARDWARE": choices(HARDWARE),
        "MOST_BYTES": str(MOST_BYTES),
        "FIRST": json.dumps(first).replace("<", "\\u003c"),
    }
    text = files("wlb.page").joinpath("page.html").read_text(encoding="utf-8")
    for mark, value in marks.items():
        text = text.replace(f"%{mark}%", value)
    return text.encode()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "wlb", ""

    def do_GET(self) -> None:
        if self._is_foreign():
            return
        path = urlsplit(self.path).path
        if path == "/favicon.ico":
            self._begin(204)
        elif self._asked(path) == "":
            self._begin(200, "text/html; charset=utf-8")
            self.wfile.write(self.server.page)
        else:
            self._refuse(404, "there is nothing here; the page is where wlb serve says")

    def do_POST(self) -> None:
        if self._is_foreign():
            return
        if self.headers.get("Origin") != f"http://{self.headers['Host']}":
            self._refuse(403, "requests come from the page of wlb serve only")
            return
        url = urlsplit(self.path)
        asked = self._asked(url.path)
        most = {"lengths": MOST_BYTES, "check": _MOST_QUESTION}.get(asked or "")
        size = self.headers.get("Content-Length", "")
        if most is None:
            self._refuse(404, "there is nothing here")
        elif not size.isdecimal() or len(size) > 20 or int(size) > most:
            limit = "name its path instead, this page reads files of this machine"
            self._refuse(413, f"{size or 'unknown'} bytes are over the {most:,} that are read; {limit}")
        else:
            content = self.rfile.read(int(size))
            try:
                (self._store if asked == "lengths" else self._check)(content, unquote(url.query))
            except UserError as error:
                self._refuse(400, str(error))

    def _store(self, content: bytes, name: str) -> None:
        path = str(self.server.store(name, content))
        self._begin(200, "application/json")
        self.wfile.write(json.dumps({"lengths": path, "name": self.server.shown(path)}).encode())

    def _check(self, content: bytes, _: str) -> None:
        """Write the parts of the answer as lines of JSON, as they come; the browser hangs up to cancel."""
        try:
            asked = json.loads(content)
        except ValueError:
            asked = None
        if not isinstance(asked, dict):
            raise UserError("the question is no JSON object")
        question = PageQuestion.of(asked, self.server.shown(str(asked.get("lengths"))))
        key = None if (stamp := _stamp(question.lengths)) is None else (question, stamp)
        parts = self.server.known(key)
        self._begin(200, "application/x-ndjson")
        try:
            for kind, part in parts.items():
                self._write(kind, part)
            for kind, part in self._computed(question, parts):
                self._write(kind, part)
                if kind in ("verdict", "pictures"):
                    parts[kind] = part
                    if key is not None:
                        self.server.remember(key, parts)
        except OSError:
            pass  # the page asks something else by now, or is closed

    def _computed(self, question: PageQuestion, parts: dict[str, dict[str, Any]]) -> Any:
        """What a process of its own sends; it is killed when the browser hangs up."""
        receiver, sender = _WORK.Pipe(duplex=False)
        worker = _WORK.Process(target=answer, args=(sender, question, dict(parts)), daemon=True)
        with self.server.starting:
            worker.start()
        sender.close()
        try:
            while receiver in connection.wait([receiver, self.connection]):
                kind, part = receiver.recv()
                yield kind, part
                if kind in ("done", "error"):
                    return
        except EOFError:
            yield "error", {"text": "the simulation was killed, perhaps for memory; ask for fewer GPUs or documents"}
        finally:
            worker.kill()
            worker.join()
            receiver.close()

    def _write(self, kind: str, part: dict[str, Any]) -> None:
        shown = {name: part[name] for name in ("html", "check", "command", "text") if name in part}
        if kind == "error":
            shown["text"] = self.server.shown(shown["text"])
        self.wfile.write(json.dumps({kind: shown}).encode() + b"\n")

    def _asked(self, path: str) -> str | None:
        """What of the page ``path`` names; None without the key."""
        key, slash, asked = path.removeprefix("/").partition("/")
        return asked if slash and secrets.compare_digest(key.encode(), self.server.key.encode()) else None

    def _is_foreign(self) -> bool:
        """Refuse a request whose ``Host`` is not this machine by name: DNS rebinding ends here."""
        port = self.server.server_port
        if self.headers.get("Host") in {f"{name}:{port}" for name in (_ADDRESS, "localhost")}:
            return False
        self._refuse(403, f"this page is at http://{_ADDRESS}:{port} only")
        return True

    def _refuse(self, status: int, why: str) -> None:
        self._begin(status, "text/plain; charset=utf-8")
        self.wfile.write(self.server.shown(why).encode())

    def _begin(self, status: int, kind: str = "text/plain") -> None:
        nonce = self.server.nonce
        policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'"
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
        }.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Requests are no news in the terminal."""


def _stamp(lengths: str) -> tuple[int, ...] | None:
    """What changes when the documents do; None where that cannot be told, and nothing is remembered."""
    if lengths.startswith("synthetic:"):
        return ()
    for path in (Path(lengths), Path(f"{lengths}.idx")):
        try:
            if path.is_file():
                status = path.stat()
                return status.st_mtime_ns, status.st_size
        except (OSError, ValueError):
            return None
    return None
