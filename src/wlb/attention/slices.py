"""What the slices of a document keep for each other, where a pipeline runs it in several micro-batches.

A slice goes forward after the slices before it and attends their keys and values, which every layer of a stage keeps
for it. Slices go backward in reverse: a slice leaves the gradients of the keys before it here, and their owners add
them when they go backward in turn, so that gradients are those of the whole document.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SliceOf(NamedTuple):
    """Of which ``document`` it is a slice, where what is sliced begins there, and tokens before the slice and in it."""

    document: int
    begin: int
    earlier: int
    length: int


@dataclass
class _Kept:
    slice_of: SliceOf
    x_K2GE: Tensor  # keys and values, in the document's order
    grad_K2GE: Tensor | None = None  # that later slices left, in a wide type


class KeptSlices:
    """Keys and values of the slices that went forward and not yet backward, of one pipeline stage in one step."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], dict[int, _Kept]] = defaultdict(dict)

    def layers(self, slice_of: SliceOf) -> Iterator[SliceInLayer]:
        """One for every call of attention in the forward of a slice's micro-batch, in their order."""
        document, begin, *_ = slice_of
        return (SliceInLayer(self._kept[document, begin, layer], slice_of) for layer in count())


class SliceInLayer:
    """A slice in one layer: what it attends of the slices before it, and what later slices leave for it."""

    def __init__(self, kept: dict[int, _Kept], slice_of: SliceOf) -> None:
        self._kept, self._slice = kept, slice_of

    @property
    def is_kept(self) -> bool:
        """Whether its keys and values are here: it is being recomputed."""
        return self._slice.earlier in self._kept

    def before(self, tokens: int) -> list[Tensor]:
        """Keys and values of the last ``tokens`` before the slice, (tokens, 2, G, E), if any.

        Raises ``ValueError`` unless all slices before it went forward, and none of them backward.
        """
        kept, earlier = self._before(), self._slice.earlier
        if (held := sum(one.slice_of.length for one in kept)) != earlier:
            raise ValueError(
                f"a slice of document {self._slice.document} attends {earlier} tokens before it and {held} are kept; "
                "slices must go forward in order, all before the first goes backward"
            )
        if not tokens:
            return []
        x_K2GE = torch.cat([one.x_K2GE for one in kept])
        return [x_K2GE[len(x_K2GE) - tokens :]]

    def keep(self, x_K2GE: Tensor) -> None:
        """Keep what slices after this one attend of its keys and values."""
        self._kept[self._slice.earlier] = _Kept(self._slice, x_K2GE)

    def leave(self, grad_K2GE: Tensor) -> None:
        """Add the gradient of what ``before`` returned to that of each slice."""
        kept, wide = self._before(), torch.promote_types(grad_K2GE.dtype, torch.float32)
        rows = [len(one.x_K2GE) for one in kept]
        shares = F.pad(grad_K2GE.to(wide), (*[0] * 6, sum(rows) - len(grad_K2GE), 0)).split(rows)
        for one, share_K2GE in zip(kept, shares, strict=True):
            one.grad_K2GE = share_K2GE if one.grad_K2GE is None else one.grad_K2GE + share_K2GE

    def take(self) -> Tensor | None:
        """Free the slice's keys and values; returns the gradients that later slices left for them, in a wide type.

        Raises ``ValueError`` where a later slice has not gone backward.
        """
        kept = self._kept.pop(self._slice.earlier)
        if any(earlier > self._slice.earlier for earlier in self._kept):
            raise ValueError(
                f"a slice of document {self._slice.document} goes backward before a later one; run them in reverse"
            )
        return kept.grad_K2GE

    def _before(self) -> list[_Kept]:
        return [kept for earlier, kept in self._kept.items() if earlier < self._slice.earlier]
