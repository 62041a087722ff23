"""``python -m wlb`` is the ``wlb`` command."""

from wlb.cli.app import main

if __name__ == "__main__":
    main()
