"""The ``wlb`` command, also ``python -m wlb``: Ctrl-C and SIGTERM print one line, even during imports."""

import gc
import signal
import sys
from importlib import import_module
from typing import NoReturn

_INTERRUPTED = 128 + signal.SIGINT  # exit statuses after a signal, as shells have them
_TERMINATED = 128 + signal.SIGTERM


class _EndedBySignal(SystemExit):
    """SIGTERM in the main thread; worker processes that inherit the handler exit without a message."""


def main(module: str = "wlb.cli.app") -> None:
    """Run the command line of ``module``; exits as its ``main`` does, with 130 after Ctrl-C, with 143 after SIGTERM."""
    signal.signal(signal.SIGTERM, _terminate)
    gc.set_threshold(50_000, 20, 50)  # planning makes a million tuples and no cycles
    try:
        import_module(module).main()  # importing takes a good part of a second, in which Ctrl-C may come
    except KeyboardInterrupt:
        print("wlb: interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except _EndedBySignal:
        print("wlb: terminated", file=sys.stderr)
        raise


def _terminate(*_: object) -> NoReturn:
    raise _EndedBySignal(_TERMINATED)


if __name__ == "__main__":
    main()
