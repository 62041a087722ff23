"""Shadow mode: measures what balanced steps would gain, while a job trains without change.

``fields`` reads the documents of a batch, ``live`` measures the time of each micro-batch, and ``gain`` fits prices to
the times and plans the same documents again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def shadow(
    loader_or_model: Any,
    *,
    every: int = 100,
    lengths: Callable[[Any], Any] | None = None,
    tensorboard: Any = None,
    profile: str | Path | None = None,
    model: Any = None,
) -> Any:
    """Measure what balanced steps would gain in the loop that trains with ``loader_or_model``; ``wlb.shadow``.

    Every process calls it. It returns the loader itself, with its state and batches, in a class derived from its own
    that measures; or a ``Shadow``, for a model and for what has no such class, as a list. ``gain`` of each is the
    latest result, on the first process. Measuring raises nothing: it prints a failure and stops. Only
    ``accelerator.prepare`` of the loader is an error, because it makes another one.

    Args:
        every: Optimizer steps between reports: a line on stdout, and values for the active W&B run.
        lengths: A function of a batch (for a model: of its arguments by name) that returns the tokens of each document,
            for batches without fields that tell them.
        tensorboard: A ``SummaryWriter`` for the values.
        profile: A file for the fitted prices, which ``wlb check --profile`` takes.
        model: The model of the profile: a name, ``ModelShape`` or Hugging Face config; defaults to the watched model.

    Raises:
        UserError: An argument has the wrong type or range, ``model`` has no known shape, or a ``profile`` needs one.
    """
    from wlb.shadow_mode.live import Shadow  # with torch, which ``import wlb`` does not need

    return Shadow(loader_or_model, every, lengths, tensorboard, profile, model).in_place()
