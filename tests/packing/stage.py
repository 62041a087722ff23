"""Made-up prices of documents on the ranks of a stage, for tests of level steps."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Prices:
    """Attention by the square of the length; a group of several ranks loses a twentieth by sharing."""

    fixed: float = 1e-3  # of a micro-batch
    token: float = 1e-5
    least: float = 0.0  # of a micro-batch

    def document_seconds(self, lengths: ArrayLike) -> NDArray[np.float64]:
        tokens = np.asarray(lengths)
        return np.asarray(self.token * tokens + 1e-10 * tokens.astype(np.float64) ** 2)

    def beginning(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(self.fixed + 1e-7 * lengths, np.float64)

    def shared(self, lengths: NDArray[np.int64], ranks: int) -> NDArray[np.float64]:
        return np.maximum(self.least, self.fixed + 1.05 * self.document_seconds(lengths) / ranks)
