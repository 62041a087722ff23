"""The job of a prefill simulation: the prompts, GPUs and prices that every policy gets."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.workload import Costs, ModelShape, make_workload
from wlb.workload.hardware import Hardware
from wlb_studies.serving.power import GpuPower


@dataclass(frozen=True)
class PrefillJob:
    """Prompts of ``lengths`` tokens arriving at ``arrivals`` seconds (ascending), and dp x pp x tp x cp GPUs.

    ``workload`` prices a GPU in a group of ``tp`` x ``cp``. ``model`` and ``hardware`` are its sources, or None if it
    was measured. ``power`` is None if a GPU's watts are unknown.
    """

    lengths: NDArray[np.int64]
    arrivals: NDArray[np.float64]
    workload: Costs
    token_budget: int  # of a rank in one pass
    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    chunked: bool = True
    lock_step: bool = True
    model: ModelShape | None = None
    hardware: Hardware | None = None
    power: GpuPower | None = None

    @property
    def gpus(self) -> int:
        return self.dp * self.pp * self.tp * self.cp

    @property
    def prompts_per_batch(self) -> int:
        """The number of mean-length prompts that fill a budget."""
        return max(1, int(self.token_budget / self.lengths.mean()))

    def instance(self, tp: int, clock: float = 1.0) -> Costs:
        """Prices of a GPU in a group of ``tp``, at a share of its full clock.

        Raises ``UserError`` if only a measured profile of another layout is known.
        """
        if self.model is not None and self.hardware is not None:
            return make_workload(self.model, self.hardware.computing_at(clock), tp)
        if (tp, 1, 1.0) != (self.tp, self.cp, clock):
            raise UserError(
                f"the profile was measured with tp = {self.tp} and cp = {self.cp}, and cannot price another layout; "
                "give --model and --hardware instead"
            )
        return self.workload
