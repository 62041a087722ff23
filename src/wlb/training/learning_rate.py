"""The learning rate of every step: linear warm-up, then a cosine, or a plateau and a decay, or a plateau.

A function of the step's number and the configuration alone, so a resumed job needs no state to go on with it.
"""

from __future__ import annotations

import math

from wlb.config import TrainingConfig

_FINAL_FRACTION = 0.1  # of the peak learning rate, once it has fallen


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The learning rate of step 1, 2, ...: ``training.warmup_steps`` of linear warm-up, then ``training.lr_schedule``.

    - ``cosine`` falls to a tenth of the peak at the end;
    - ``wsd`` (warm-up, stable, decay; MiniCPM, arXiv 2404.06395, section 4.2) stays at the peak and falls in a straight
      line to a tenth over the last ``training.decay_fraction`` of all steps;
    - ``constant`` stays at the peak.

    The end is ``training.decay_steps`` or else ``training.steps``, and past it the rate stays where it has fallen to;
    without either it stays at the peak.
    """
    peak = config.learning_rate
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    last = config.decay_steps or config.steps
    if last is None or config.lr_schedule == "constant":
        return peak
    if config.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * _progress(step, config.warmup_steps, last)))
    else:
        left = 1 - _progress(step, max(config.warmup_steps, last * (1 - config.decay_fraction)), last)
    return peak * (_FINAL_FRACTION + (1 - _FINAL_FRACTION) * left)


def _progress(step: int, first: float, last: int) -> float:
    """0 up to step ``first``, 1 from step ``last`` on."""
    return min(1.0, max(0.0, step - first) / max(1.0, last - first))
