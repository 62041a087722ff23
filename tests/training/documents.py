"""Token sources for tests, in memory and picklable."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RandomDocuments:
    """Documents of the given lengths with random tokens; the part of a token store that batches need.

    Of the tokens a share of ``labelled``, at random places, may be labels.
    """

    lengths: NDArray[np.int64]
    vocab_size: int
    labelled: float = 1.0

    def __len__(self) -> int:
        return len(self.lengths)

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.lengths[documents]

    def loss_mask(self, document: int, start: int, length: int) -> NDArray[np.bool_] | None:
        if self.labelled == 1.0:
            return None
        assert start + length <= self.lengths[document], "asked past the end of a document"
        drawn = np.random.default_rng([document, 1]).random(int(self.lengths[document]))
        return drawn[start : start + length] < self.labelled

    def read(self, document: int, start: int = 0, length: int | None = None) -> NDArray[np.uint16]:
        assert 0 <= document < len(self.lengths)
        total = int(self.lengths[document])
        stop = total if length is None else start + length
        assert 0 <= start <= stop <= total, "read past the end of a document"
        tokens = np.random.default_rng(document).integers(0, self.vocab_size, total, dtype=np.uint16)
        return tokens[start:stop]
