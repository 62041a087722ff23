"""How often ``wlb train`` starts a job again whose ranks were killed or hung.

Restarts are counted between checkpoints: whenever the job has written a newer one than it was last started from, all of
them are available again. So a job on a flaky machine runs for months, and one that dies at the same place every time
ends. A damaged checkpoint does not count, as the job does not continue from it.
"""

from __future__ import annotations

from wlb.config import JobConfig
from wlb.errors import UserError
from wlb.training.checkpoint.files import step_of
from wlb.training.checkpoint.resuming import newest_checkpoint


class Restarts:
    """``training.max_restarts`` of them; none without ``checkpoint.dir``, as nothing would be kept.

    ``refusal`` says why ``take`` has given none, in words; None where there were none to begin with.
    """

    def __init__(self, config: JobConfig) -> None:
        self._config = config.checkpoint
        resumes = config.checkpoint.dir is not None and config.checkpoint.resume
        self._most = config.training.max_restarts if resumes else 0
        self._started_from = 0  # step of the checkpoint; unknown of the first start, which has used no restart
        self.left = self._most
        self.refusal: str | None = None

    def take(self) -> str | None:
        """Use one: where the job continues from, in words, or None if it is not to be started again."""
        if not self._most:
            return None
        try:
            newest = newest_checkpoint(self._config, contents=True)
        except UserError as error:
            self.refusal = str(error)
            return None
        step = step_of(newest) if newest else 0
        if step > self._started_from:
            self.left = self._most
        if not self.left:
            self.refusal = "there was no newer checkpoint since the last restart, and no restart is left"
            return None
        self.left -= 1
        self._started_from = step
        return f"checkpoint {newest.name}" if newest else "the first step, as there is no checkpoint yet"
