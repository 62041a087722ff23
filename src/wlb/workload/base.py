"""What packing, sharding and simulation ask of a workload model."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Phase = Literal["forward", "backward", "both"]
Seconds = NDArray[np.float64]
EXCHANGES = 2  # of keys and values, and of their gradients, that ``kv_gather_seconds`` prices together


class DocumentPrices(Protocol):
    """What packing asks: prices that add up over the documents of a micro-batch."""

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        """Forward and backward of each document, over 0; shape of ``lengths`` (tokens)."""


class Workload(DocumentPrices, Protocol):
    """Predicted seconds that one GPU of a (tp, cp) group spends on a micro-batch, over all layers.

    W_a is what attention costs, the sum over documents of a function of each document's length; W_l is
    everything else (GEMM, element-wise, collectives), a function of the micro-batch's token count
    (WLB-LLM, section 4.1). Times for one of ``pp`` pipeline stages are these divided by ``pp``.
    """

    def attention_seconds(self, lengths: ArrayLike, phase: Phase = "both") -> Seconds:
        """W_a of each whole document (or segment) alone; shape of ``lengths`` (tokens)."""

    def piece_seconds(self, starts: ArrayLike, stops: ArrayLike, phase: Phase = "both") -> Seconds:
        """Attention of pieces of documents alone: queries ``starts`` to ``stops``, keys 0 to ``stops`` (tokens)."""

    def drain_seconds(self, stops: ArrayLike, phase: Phase = "both") -> Seconds:
        """Attention of a micro-batch on one GPU, beside its pieces, of which the longest reaches to key ``stops``.

        While the last tiles of a forward finish, most of the GPU idles. It does not shrink with tp or cp. Over all
        layers; shape of ``stops`` (tokens); 0 where it was not measured apart.
        """

    def linear_seconds(self, tokens: ArrayLike, phase: Phase = "both") -> Seconds:
        """W_l of micro-batches of ``tokens`` tokens; shape of ``tokens``."""

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        """The additive price of each document: W_a plus its share of W_l, forward and backward."""

    def kv_gather_seconds(self, tokens: ArrayLike, cp_size: int, nodes: int | None = None) -> Seconds:
        """What a rank of a group of ``cp_size`` pays to receive (or send) K and V of ``tokens`` tokens.

        Over all layers: in the forward, and in the backward their gradients the other way. The group lies on ``nodes``
        nodes, by default on as few as hold it. Shape of ``tokens``; 0 where links were not measured.
        """

    def kv_copy_seconds(
        self,
        sent: ArrayLike,
        received: ArrayLike,
        merged: ArrayLike,
        phase: Phase = "both",
        alone: ArrayLike = False,
    ) -> Seconds:
        """Beside that: what a rank spends in memory on bringing together and taking apart what it exchanges.

        It sends and receives the keys of so many tokens, and ``merged`` queries attend what it receives, counted once
        for every part in which that arrives. Of a segment that is ``alone`` in its micro-batch, less has to be copied.
        Over all layers; 0 where it was not measured.
        """
