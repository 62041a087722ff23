"""Where the time of simulated steps goes.

A step is built up: first every GPU has the mean work and nothing else happens, then one cause after another is
modelled, in the order of ``CAUSES``. What each adds to the step is its share, so the shares sum to the step, and
nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CAUSES = {
    "compute": "the mean GPU's forward and backward: what balancing cannot remove",
    "recomputation": "forward again, for activation checkpointing",
    "bubbles": "filling and draining a perfectly balanced pipeline",
    "stages": "stages that hold different amounts of the model",
    "micro-batches": "micro-batches of one pipeline that differ",
    "dp ranks": "waiting for the slowest data-parallel rank",
    "cp ranks": "waiting for the slowest context-parallel rank, layer by layer",
    "tp collectives": "gathering and reducing activations over tensor-parallel ranks",
    "cp exchange": "keys and values under way that no computing hides, and their copies",
    "stage transfers": "activations under way between pipeline ranks",
    "weight gathers": "FSDP's weights under way that no computing hides",
    "gradient reduction": "FSDP's gradients under way that no computing hides",
    "optimizer": "clipping and AdamW",
}
EVERYTHING = frozenset(CAUSES)


def attributed(seconds_with: Callable[[frozenset[str]], Array]) -> tuple[Array, dict[str, Array]]:
    """The seconds of steps, shape (steps,), and the part of them that each cause adds.

    ``seconds_with`` gives what the steps take when only some of ``CAUSES`` are modelled.
    """
    names = [*CAUSES]
    seconds = [seconds_with(frozenset(names[:count])) for count in range(1, len(names) + 1)]
    return seconds[-1], dict(zip(names, np.diff(seconds, axis=0, prepend=0.0), strict=True))
