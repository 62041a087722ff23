"""The ``wlb-studies`` command, also as ``python -m wlb_studies``."""

from wlb.__main__ import main as run


def main() -> None:
    """Run the command line; interruption and termination work as in ``wlb``."""
    run("wlb_studies.app")


if __name__ == "__main__":
    main()
