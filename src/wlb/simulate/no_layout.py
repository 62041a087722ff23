"""The error for a job that no layout can run: what is in the way, and which other numbers work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from wlb.errors import UserError
from wlb.job.memory.walk import gib
from wlb.settings import MOST_MICRO_BATCHES, MOST_RANKS
from wlb.simulate.space import SearchSpace
from wlb.terminal import number_of

_MOST_DOUBLINGS = 5  # of the GPUs, in search of more memory
_FARTHEST = 64  # how many GPUs more or fewer are tried
_LEAST_WINDOW = 1024

Holds = Callable[[SearchSpace], bool]


def no_memory(space: SearchSpace, tried: int, fits: Holds) -> UserError:
    """The error where all of ``tried`` layouts are too large; ``fits`` says whether another space has one that fits."""
    doubled = (space.gpus << power for power in range(1, _MOST_DOUBLINGS + 1))
    gpus = next((one for one in doubled if fits(replace(space, gpus=one))), None)
    windows = (space.context_window >> power for power in range(1, space.context_window.bit_length()))
    window = next((one for one in windows if one >= _LEAST_WINDOW and fits(_with_window(space, one))), None)
    helps = [
        *([f"on {gpus:,} GPUs"] if gpus else []),
        *([f"with --context-window {window}"] if window else []),
        *([f"without {_options(space)}"] if space.fixed and fits(replace(space, fixed=())) else []),
    ]
    nothing = "neither more GPUs nor a shorter window helps; give a smaller --model or --hardware with more memory"
    remedy = f"it fits {' or '.join(helps)}" if helps else nothing
    return UserError(
        f"no layout of {_given(space)} with {gib(space.hardware.memory_bytes)} GiB each fits this model and window of "
        f"{space.context_window} tokens ({tried} tried); {remedy}"
    )


def no_division(space: SearchSpace, largest_tp: int, largest_pp: int, runs: Holds) -> UserError:
    """The error where no layout divides the global batch; ``runs`` says whether another space has one that does."""
    windows = number_of(space.global_batch, "window")
    step = f"a step of {windows} of {space.context_window} tokens (--batch-tokens)"
    tp = math.gcd(largest_tp, space.hardware.node_size)
    most = tp * MOST_RANKS * space.global_batch
    if space.gpus > most:
        return UserError(
            f"{step} cannot use {_given(space)}: dp x pp is at most the {windows}, cp at most {MOST_RANKS} and tp at "
            f"most {tp}, which makes {most:,} GPUs; give fewer GPUs or a larger --batch-tokens"
        )
    fewer, more = (
        next((gpus for gpus in tried if runs(replace(space, gpus=gpus))), None)
        for tried in (
            range(space.gpus - 1, max(0, space.gpus - 1 - _FARTHEST), -1),
            range(space.gpus + 1, space.gpus + 1 + _FARTHEST),
        )
    )
    works = " or ".join(f"{gpus:,}" for gpus in (fewer, more) if gpus)
    batches = (_multiple(space.global_batch, size) for size in range(2, space.gpus + 1) if space.gpus % size == 0)
    batch = next((one for one in sorted(batches) if runs(replace(space, global_batch=one))), None)
    helps = [
        *([f"use {works} GPUs"] if works else []),
        *([f"use --batch-tokens {batch * space.context_window} ({number_of(batch, 'window')})"] if batch else []),
        *([f"leave out {_options(space)}"] if space.fixed and runs(replace(space, fixed=())) else []),
    ]
    rules = (
        "dp must divide the windows and leave each rank at least pp of them, tp must divide a node "
        f"({space.hardware.node_size} GPUs) and the heads, cp is at most {MOST_RANKS} and pp at most {largest_pp}"
    )
    remedy = ", or ".join(helps) or "use another number of GPUs or another --batch-tokens"
    return UserError(f"{_given(space)} cannot share {step}: {rules}; {remedy}")


def _given(space: SearchSpace) -> str:
    fixed = ", ".join(f"{name} = {size}" for name, size in space.fixed)
    return number_of(space.gpus, "GPU") + (f" with {fixed}" if fixed else "")


def _with_window(space: SearchSpace, window: int) -> SearchSpace:
    windows = min(space.batch_tokens // window, MOST_MICRO_BATCHES)
    return replace(space, context_window=window, global_batch=windows)


def _multiple(number: int, size: int) -> int:
    """The least multiple of ``size`` from ``number`` on."""
    return -(-number // size) * size


def _options(space: SearchSpace) -> str:
    """The options that fixed some sizes."""
    spelled = {"weights": "--sharding"}
    return " and ".join(spelled.get(name, f"--{name.replace('_', '-')}") for name, _ in space.fixed)
