"""``python -m wlb.training CONFIG``: one rank of a job, for ``torchrun``, ``wlb train`` or alone; see ``worker``."""

import signal

if __name__ == "__main__":
    # Ctrl-C ends a rank at once. Python's own handler would wait for the running collective to return, and
    # would show a traceback from the middle of the imports below, which take seconds.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher holds it back while it starts ranks
    from wlb.training.worker import main

    main()
