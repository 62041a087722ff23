"""``wlb-studies page``: the verdict of ``wlb check`` in a browser, as you change the job."""

import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

import wlb_studies
from wlb.cli.console import stdout
from wlb.errors import UserError, require

_ADDRESS = "127.0.0.1"


def page(
    port: Annotated[
        int | None, typer.Option(min=1, max=65_535, metavar="PORT", help="Port of the page; default: any free one.")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
) -> None:
    """Open a page on this machine that shows the verdict of wlb check while you choose model, window and GPUs.

    Name or drop a file of lengths on the page. Nothing leaves this machine, no other machine can reach the page, and
    only someone who knows its address can open it. Ctrl-C stops it.

    Example: wlb-studies page
    """
    require("streamlit", "page", "wlb-studies")
    chosen, key = _free(port), secrets.token_urlsafe(16)
    stdout.print(f"wlb-studies page: http://{_ADDRESS}:{chosen}/{key}  (Ctrl-C ends it)", soft_wrap=True)
    settings = {
        "SERVER_ADDRESS": _ADDRESS,
        "SERVER_PORT": str(chosen),
        "SERVER_BASE_URL_PATH": key,  # other users of this machine can reach the port, but cannot see the environment
        "SERVER_ALLOWED_HOSTS": _ADDRESS,
        "SERVER_FILE_WATCHER_TYPE": "none",
        "SERVER_SHOW_EMAIL_PROMPT": "false",
        "BROWSER_GATHER_USAGE_STATS": "false",
        "CLIENT_TOOLBAR_MODE": "minimal",
        "CLIENT_SHOW_ERROR_DETAILS": "none",  # a traceback is for the terminal
        "LOGGER_HIDE_WELCOME_MESSAGE": "true",
    } | ({} if browser else {"SERVER_HEADLESS": "true"})
    environment = os.environ | {f"STREAMLIT_{name}": value for name, value in settings.items()}
    app = Path(wlb_studies.__file__).with_name("page.py")
    os.execve(sys.executable, [sys.executable, "-P", "-m", "streamlit", "run", str(app)], environment)


def _free(port: int | None) -> int:
    """``port``, or any free port. Raises ``UserError`` if ``port`` is taken."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((_ADDRESS, port or 0))
        except OSError as error:
            raise UserError(f"port {port} cannot be used: {error.strerror}; give another with --port") from None
        return int(tried.getsockname()[1])
