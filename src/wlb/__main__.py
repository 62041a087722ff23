"""The ``wlb`` command, also as ``python -m wlb``: Ctrl-C is one line whenever it comes, during imports too."""

import sys

_INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


def main() -> None:
    """Run the command line; exits as ``wlb.cli.app.main`` does, and with 130 after Ctrl-C."""
    try:
        from wlb.cli.app import main as run  # takes a good part of a second, so it is imported here

        run()
    except KeyboardInterrupt:
        print("wlb: interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
