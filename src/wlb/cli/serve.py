"""``wlb serve``: a page on this machine that shows the verdict of ``wlb check`` while sliders move."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from wlb.cli import options
from wlb.cli.console import stdout


def serve(
    lengths: Annotated[
        str,
        typer.Argument(metavar="LENGTHS", help="Document lengths to begin with, as in check; others can be dropped."),
    ] = "synthetic:20000:128K:0",
    port: Annotated[
        int | None, typer.Option(min=1, max=65_535, metavar="PORT", help="Port; default: the first free one from 8448.")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
) -> None:
    """Open a page on this machine that shows the verdict of wlb check while you choose model, window and GPUs.

    Drop a file of lengths on it, or name one. Nothing leaves this machine, no other can reach the page, and only who
    knows its address can open it. Ctrl-C ends it.

    Example: wlb serve lengths.json --port 8448 --no-browser
    """
    from wlb.page.server import serve_on

    first = {"lengths": lengths, "model": options.DEFAULT_MODEL, "hardware": "h100", "window": "auto", "batch": "auto"}
    with serve_on(port, first | {"gpus": str(options.DEFAULT_GPUS)}) as server:
        try:
            stdout.print(f"wlb serve: {server.url}  (Ctrl-C ends it)", markup=False, highlight=False, soft_wrap=True)
            if browser:
                webbrowser.open(server.url)
            server.serve_forever()
        except KeyboardInterrupt:
            stdout.print()
