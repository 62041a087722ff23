"""``torch.compile`` for the blocks of a ``Transformer``, once for micro-batches of every length.

Micro-batches differ in length from step to step, so the token count is a symbol in the compiled code from the start:
a block is compiled for its first micro-batch and never again, except that PyTorch may take a length of 1 and one that
equals a width of the model apart, once. Attention stays outside: its runs, shards and exchanges follow from the plan
of each micro-batch, and its kernels are compiled already. So a block becomes a few graphs before and after attention,
and all blocks of a stage share them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from wlb.models.transformer import Block, Transformer


def compile_blocks(module: Transformer, backend: str = "inductor") -> None:
    """Have every block of ``module`` compiled when it first runs; call it before ``apply_activation_checkpointing``.

    ``backend`` is one of ``torch.compile``. Parameters keep their names.
    """
    for block in module.layers.values():
        assert isinstance(block, Block)
        block.forward = _compiled(block.forward, backend)  # type: ignore[method-assign]


def _compiled(forward: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    compiled = torch.compile(forward, backend=backend, dynamic=True)

    @wraps(forward)
    def run(x_TD: Tensor, rotation: Any, attend: Callable[..., Tensor]) -> Tensor:
        if type(x_TD) is not Tensor:
            # Still on its way from a tensor-parallel collective. Compiled code (torch 2.13) would run on it and give it
            # a wrong gradient; a copy has arrived.
            x_TD = x_TD.clone()
        out: Tensor = compiled(x_TD, rotation, torch.compiler.disable(attend))
        return out

    return run
