"""Types of prices, and the prices that packing needs."""

from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Direction = Literal["forward", "backward"]
Phase = Direction | Literal["both"]
Seconds = NDArray[np.float64]
Checkpointing = Literal["none", "keep_attention", "full"]  # of activations, by rising cost
TICKS = 1e9  # per second: sums of whole numbers are the same on every machine


def in_ticks(seconds: ArrayLike) -> NDArray[np.int64]:
    """``seconds`` as whole numbers, for plans that all machines make alike."""
    return np.rint(np.asarray(seconds) * TICKS).astype(np.int64)


class DocumentPrices(Protocol):
    """Prices that add up over the documents of a micro-batch."""

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        """Forward and backward of each document, over 0; shape of ``lengths`` (tokens)."""
