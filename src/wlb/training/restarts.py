"""How often ``wlb train`` starts a job again whose ranks were killed or hung.

Restarts are counted between checkpoints: whenever the job has written a newer one since it was last started, all of
them are available again. So a job on a flaky machine runs for months, and one that dies at the same place every time
ends.
"""

from __future__ import annotations

from pathlib import Path

from wlb.config import JobConfig
from wlb.training.checkpoint import complete_checkpoints


class Restarts:
    """``training.max_restarts`` of them; none without ``checkpoint.dir``, as nothing would be kept."""

    def __init__(self, config: JobConfig) -> None:
        self._directory = config.checkpoint.dir if config.checkpoint.resume else None
        self._most = config.training.max_restarts if self._directory is not None else 0
        self._newest = self._newest_checkpoint()
        self.left = self._most

    @property
    def used_up(self) -> bool:
        """Whether there were restarts to begin with and none of them is left."""
        return self._most > 0 and self.left == 0

    def take(self) -> str | None:
        """Use one: where the job continues from, in words, or None if no restart is left."""
        newest = self._newest_checkpoint()
        if newest != self._newest:
            self.left, self._newest = self._most, newest
        if not self.left:
            return None
        self.left -= 1
        return f"checkpoint {newest.name}" if newest else "the first step, as there is no checkpoint yet"

    def _newest_checkpoint(self) -> Path | None:
        complete = complete_checkpoints(self._directory) if self._directory is not None else []
        return complete[-1] if complete else None
