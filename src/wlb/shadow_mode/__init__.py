"""Shadow mode: measures what balanced steps would gain, while a job trains without change.

``lengths`` reads the documents of a batch, ``live`` measures the time of each micro-batch, and ``gain`` fits prices to
the times and plans the same documents again.
"""

from wlb.shadow_mode.live import shadow as shadow

__all__ = ["shadow"]
