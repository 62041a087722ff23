"""``python -m wlb.training CONFIG``: one rank of a job, for ``torchrun`` or alone; see ``worker``."""

import signal

if __name__ == "__main__":
    # Blocked until the rank listens, or Python's own handlers would print a traceback from the middle of the import.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
    from wlb.training.worker import main

    main()
