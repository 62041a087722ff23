"""Shadow mode: what balanced steps would gain, measured while a job trains as it is.

``lengths`` reads the documents of a batch, ``live`` measures how long each micro-batch takes, and ``gain`` fits prices
to that and plans the same documents anew.
"""

from wlb.shadow_mode.live import Shadow as shadow

__all__ = ["shadow"]
