"""The power of a GPU at a share of its full clock, and its speed there.

Dynamic power is C V^2 f (CMOS). Up to a transition clock the voltage stays at its floor, so power grows linearly with
the clock; above it the voltage rises too, and power grows faster. Measurements on A40, A100, H100 and H200 show this
shape: linear, and nonlinear from a transition frequency on (arXiv 2607.00819). The transition clock and the lowest
voltage are assumed here, which makes the transition the most efficient clock.

Hosts, switches and cooling are left out, and every kernel draws the same power.
"""

from dataclasses import dataclass

TRANSITION_CLOCK = 0.6  # assumed, as a share of the full clock
_FLOOR_VOLTAGE = 0.75  # assumed, as a share of the voltage at the full clock


@dataclass(frozen=True)
class GpuPower:
    """Watts of one GPU while it waits, and while it computes at full clock."""

    idle_watts: float
    full_watts: float

    def watts(self, clock: float) -> float:
        """Watts of a GPU that computes at ``clock``, a share of its full clock."""
        rise = max(0.0, (clock - TRANSITION_CLOCK) / (1 - TRANSITION_CLOCK))
        voltage = _FLOOR_VOLTAGE + (1 - _FLOOR_VOLTAGE) * rise
        return self.idle_watts + (self.full_watts - self.idle_watts) * clock * voltage**2

    def joules(self, gpus: int, seconds: float, computing: dict[float, float]) -> float:
        """Joules of ``gpus`` GPUs over ``seconds``; ``computing`` has the GPU-seconds of compute at each clock."""
        dynamic = sum(gpu_seconds * (self.watts(clock) - self.idle_watts) for clock, gpu_seconds in computing.items())
        return self.idle_watts * gpus * seconds + dynamic


# Quoted: maximum thermal design power in the data sheets of A100 80GB SXM, H100 SXM and H200 SXM. Assumed: a prefill
# draws it, since prompts push a GPU to its limit (POLCA, arXiv 2308.12908). Quoted: the chapter on power capping in
# NVIDIA's DGX B200 user guide shows a GPU limited to 700 W that draws 64 W. Assumed: that is an idle Hopper, and an
# idle A100 draws the same share of its limit.
_IDLE_WATTS = 64.0
POWER: dict[str, GpuPower] = {
    "a100": GpuPower(idle_watts=_IDLE_WATTS * 400 / 700, full_watts=400.0),
    "h100": GpuPower(idle_watts=_IDLE_WATTS, full_watts=700.0),
    "h200": GpuPower(idle_watts=_IDLE_WATTS, full_watts=700.0),
}
