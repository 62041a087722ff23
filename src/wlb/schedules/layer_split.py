"""Which blocks of the model each pipeline stage holds."""

from __future__ import annotations

from wlb.errors import UserError
from wlb.workload.shapes import ModelShape
from wlb.workload.weights import mean_block_weights


def split_layers(shape: ModelShape, stages: int) -> list[range]:
    """Deal the blocks to ``stages`` in order, as evenly as the output head allows.

    A stage counts its blocks, of whatever kind; the last one also counts the head, as the share of a block that its
    weights are (so with a large vocabulary the last stage holds fewer blocks). Of experts, those count that a token
    meets. Attention is left out, which makes the head look as heavy as it can be; the embedding is a lookup and counts
    nothing. Blocks that do not divide evenly go to the later stages, whose micro-batches in flight, and with them
    activations, are fewer.

    Raises ``UserError`` if there are fewer blocks than stages.
    """
    if shape.layers < stages:
        raise UserError(
            f"model has {shape.layers} layers, fewer than the {stages} pipeline stages; lower pp or virtual_pp"
        )
    if stages == 1:
        return [range(shape.layers)]
    head = shape.vocab_size * shape.hidden / mean_block_weights(shape, active=True)
    last = round((shape.layers + head) / stages - head)
    last = min(max(last, 1), shape.layers - (stages - 1))
    starts = [(shape.layers - last) * stage // (stages - 1) for stage in range(stages)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], shape.layers], strict=True)]
