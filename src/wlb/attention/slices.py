"""Keys, values and gradients that the slices of a document share, where a pipeline runs it in several micro-batches.

Slices run forward in order. In every layer of a stage a slice attends the keys and values that earlier slices keep.
Slices run backward in reverse order. A slice leaves gradients for those keys and values, and the earlier slices add
them to their own, so that the gradients equal those of the whole document.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SliceOf(NamedTuple):
    """A slice of ``document``: where the sliced part begins in it, and the tokens before the slice and in the slice."""

    document: int
    begin: int
    earlier: int
    length: int


class SliceInLayer:
    """A slice in one layer: the keys and values of earlier slices, and the gradients that later slices leave for it."""

    def __init__(self, kept: "list[SliceInLayer]", slice_of: SliceOf) -> None:
        self._kept, self._slice_of = kept, slice_of
        self._x_K2GE = torch.empty(0)  # keys and values
        self._grad_K2GE: Tensor | None = None  # in a wide type

    def before(self, tokens: int) -> list[Tensor]:
        """Keys and values of the last ``tokens`` before the slice, (tokens, 2, G, E), if any.

        Raises ``ValueError`` unless all slices before it are kept.
        """
        kept = self._before()
        if (held := sum(one._slice_of.length for one in kept)) != self._slice_of.earlier:
            raise ValueError(
                f"{self._slice_of} runs forward when {held} tokens before it are kept; run slices in order"
            )
        return [torch.cat([one._x_K2GE for one in kept])[-tokens:]] if tokens else []

    @property
    def is_kept(self) -> bool:
        """Whether its forward has run before, so that this one recomputes it."""
        return self in self._kept

    def keep(self, x_K2GE: Tensor) -> None:
        """Keep the keys and values that later slices attend, in the order of the document."""
        self._kept.append(self)
        self._x_K2GE = x_K2GE

    def leave(self, grad_K2GE: Tensor) -> None:
        """Add the gradients of what ``before`` returned to the gradients of the earlier slices."""
        kept, wide = self._before(), torch.promote_types(grad_K2GE.dtype, torch.float32)
        rows = [len(one._x_K2GE) for one in kept]
        shares = F.pad(grad_K2GE.to(wide), (*[0] * 6, sum(rows) - len(grad_K2GE), 0)).split(rows)
        for one, share_K2GE in zip(kept, shares, strict=True):
            one._grad_K2GE = share_K2GE if one._grad_K2GE is None else one._grad_K2GE + share_K2GE

    def take(self) -> Tensor | None:
        """Release its keys and values, and return the gradients that later slices left for them, if any.

        Raises ``ValueError`` where the backward of a later slice has not run.
        """
        if self._kept[-1] is not self:
            raise ValueError(f"{self._slice_of} runs backward before a later slice; run slices in reverse")
        self._kept.pop()
        grad_K2GE, self._x_K2GE, self._grad_K2GE = self._grad_K2GE, torch.empty(0), None
        return grad_K2GE

    def _before(self) -> "list[SliceInLayer]":
        return [one for one in self._kept if one._slice_of.earlier < self._slice_of.earlier]


class KeptSlices:
    """Keys and values of the slices between their forward and backward, in one pipeline stage and one step."""

    def __init__(self) -> None:
        self.kept: dict[object, list[SliceInLayer]] = defaultdict(list)

    def layers(self, slice_of: SliceOf) -> Iterator[SliceInLayer]:
        """One for every attention call in the forward of the micro-batch that holds the slice, in order."""
        return (SliceInLayer(self.kept[slice_of[:2], layer], slice_of) for layer in count())
