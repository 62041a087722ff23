"""How many weights a model has, in total and per token.

Matrices are counted; norms, biases and scalars of heads or experts are not, less than 0.1% of any model here.
``tests/workload/test_weights.py`` compares with published counts and with models that ``transformers`` builds.
"""

from wlb.workload.shapes import BlockKind, ModelShape


def parameters(shape: ModelShape, *, active: bool = False, tied_embeddings: bool = False) -> int:
    """Weights of the whole model; with ``active`` only the experts that a token is routed to."""
    ends = (1 if tied_embeddings else 2) * shape.vocab_size * shape.hidden
    return sum(count * block_weights(shape, kind, active=active) for kind, count in shape.blocks.items()) + ends


def mean_block_weights(shape: ModelShape, *, active: bool = False) -> float:
    """Mean weights of a block, over blocks of all kinds."""
    return (parameters(shape, active=active) - 2 * shape.vocab_size * shape.hidden) / shape.layers


def block_weights(shape: ModelShape, kind: BlockKind, *, active: bool = False) -> int:
    """Weights of a block of this kind."""
    mixing = kind.attends * _attention_weights(shape) + (_linear_weights(shape) if kind.linear else 0)
    return mixing + _feed_forward_weights(shape, kind, active=active)


def expert_weights(shape: ModelShape, *, active: bool = False) -> int:
    """Weights of all routed experts of all blocks, or of those that a token is sent to; 0 without any."""
    experts = shape.experts
    if experts is None:
        return 0
    width = (experts.active if active else experts.count) * experts.ffn_hidden
    return routed_layers(shape) * shape.ffn_matrices * shape.expert_input * width


def routed_layers(shape: ModelShape) -> int:
    """Blocks whose feed-forward layer is experts behind a router."""
    return sum(count for kind, count in shape.blocks.items() if kind.routed)


def feed_forward_width(shape: ModelShape, kind: BlockKind) -> int:
    """Columns of SwiGLU that one token passes through."""
    experts = shape.experts
    if experts is None or not kind.routed:
        return shape.ffn_hidden * kind.feeds_forward
    return experts.active * experts.ffn_hidden + experts.shared_hidden


def _attention_weights(shape: ModelShape) -> int:
    """Projections to queries, keys and values and back; with latents, down to a latent and up from it.

    Blocks share the weights of indexers evenly here.
    """
    query, hidden, latent, indexer = shape.heads * shape.head_dim, shape.hidden, shape.latent, shape.indexer
    if latent is None:
        gates = shape.heads * shape.gated_attention
        return hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads + gates)
    to_query = latent.q_rank * (hidden + query) if latent.q_rank else hidden * query
    to_latent = hidden * (latent.kv_rank + latent.rope_dim)
    indexing = 0
    if indexer is not None:
        from_query = (latent.q_rank or hidden) * indexer.heads * indexer.head_dim
        of_one = from_query + hidden * (indexer.head_dim + indexer.heads)
        indexing = of_one * indexer.layers // shape.layers
    return to_query + to_latent + latent_expansion(shape) + shape.heads * latent.value_dim * hidden + indexing


def _linear_weights(shape: ModelShape) -> int:
    """Projections to queries, keys, values, gates and decays, and back; the gates and decays of KDA have a low rank.

    Short convolutions are not counted.
    """
    linear, hidden = shape.linear, shape.hidden
    assert linear is not None
    keys, values, heads, rank = linear.keys, linear.values, linear.heads, linear.value_dim
    others = {
        "mamba2": hidden * (values + heads),
        "gated_delta": hidden * (values + 2 * heads),
        "kda": hidden * (heads + 2 * rank) + rank * (keys + values),
    }
    return 2 * hidden * (keys + values) + others[linear.kind]


def latent_expansion(shape: ModelShape) -> int:
    """Weights of the projection from a latent to keys and values of all heads; 0 without one."""
    latent = shape.latent
    if latent is None:
        return 0
    return latent.kv_rank * shape.heads * (shape.head_dim - latent.rope_dim + latent.value_dim)


def _feed_forward_weights(shape: ModelShape, kind: BlockKind, *, active: bool) -> int:
    experts, hidden = shape.experts, shape.hidden
    if experts is None or not kind.routed:
        return shape.ffn_matrices * hidden * shape.ffn_hidden * kind.feeds_forward
    routed = shape.expert_input * (experts.active if active else experts.count) * experts.ffn_hidden
    ends = hidden * experts.count + 2 * hidden * (experts.latent or 0)  # the router, and to and from a latent
    return shape.ffn_matrices * (routed + hidden * experts.shared_hidden) + ends
