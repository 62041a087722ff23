"""A Llama-style decoder that runs on packed micro-batches and knows nothing of parallelism.

A micro-batch is one run of T tokens; there is no batch dimension and no padding. The embedding turns token ids into
vectors, the blocks process them (RMSNorm, grouped-query attention with rotary positions, RMSNorm, SwiGLU or a mixture
of experts), and the head turns them into scores over the vocabulary (RMSNorm, projection). Tokens interact only in the
function ``attend`` that comes with the micro-batch: it knows the segments, and which rank holds which tokens.

A ``Transformer`` may hold only some of the blocks. Then it is one stage of a pipeline, which takes or returns the
residual stream where the model is cut, and still names its parameters as the full model does
(``layers.7.attention.wq.weight``). With tied embeddings there is one matrix, ``embedding.weight``; stages that need it,
for the embedding or for a head, all hold it under that name.

Shapes: T tokens · D hidden · H query heads · G key/value heads · E head_dim · F ffn_hidden · V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wlb.errors import UserError
from wlb.job.config import RopeScalingConfig
from wlb.models.experts import MixtureOfExperts, Routing
from wlb.workload import ModelShape

# Takes query (T, H, E), key and value (T, G, E), returns (T, H, E); causal, inside segments. Layers with a sliding
# window pass the keyword ``window``, the number of tokens that each one attends to, including itself.
Attend = Callable[..., Tensor]
Rotation = tuple[Tensor, Tensor]  # cosine and sine of the rotary angles of tokens, (T, 1, E), equal for both halves


@dataclass(frozen=True)
class TransformerConfig:
    """What a ``Transformer`` needs beyond its shape; see ``wlb.job.config.ModelConfig`` for the meaning.

    Raises ``UserError`` for rotary frequencies that make no sense.
    """

    shape: ModelShape
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    rope_scaling: RopeScalingConfig | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    o_bias: bool = False
    router: Literal["softmax", "sigmoid"] = "softmax"

    def __post_init__(self) -> None:
        if not 1 < self.rope_theta < math.inf:
            raise UserError(
                f"model rope_theta = {self.rope_theta} is not a base of rotary frequencies; give a number over 1, "
                "such as 10000"
            )
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn":
            _yarn_ramp(self.rope_scaling, self.rope_theta, self.shape.head_dim // 2)


def check_built(shape: ModelShape) -> None:
    """Raise ``UserError`` for a variant that can be priced but that ``Transformer`` does not implement.

    Sliding windows are implemented for models whose blocks with full attention come first. Models in which they
    alternate (Gemma, gpt-oss) differ in more than that.
    """
    for name, variant in (
        ("full_attention_every", "full attention in every few blocks"),
        ("latent", "multi-head latent attention"),
        ("pattern", "linear layers or blocks without a feed-forward layer"),
    ):
        if getattr(shape, name) is not None:
            raise UserError(
                f"the model has {variant} ({name}), which can be priced and simulated but not trained or profiled; "
                "choose a model with full or windowed attention, such as llama3-8b or qwen3-30b-a3b, or train it in "
                "Hugging Face's Trainer (wlb.integrations.huggingface.balanced)"
            )


class Transformer(nn.Module):
    """The blocks ``layers`` of a decoder, with the embedding if the first is among them and the head if the last is.

    If the head is dealt, no forward ends with its ``scores``. ``dealt_heads`` is then the number of modules that have
    one, or 0 if this has none.
    """

    def __init__(
        self, config: TransformerConfig, layers: range | None = None, *, dealt_heads: int | None = None
    ) -> None:
        super().__init__()
        shape = config.shape
        check_built(shape)
        layers = range(shape.layers) if layers is None else layers
        self.config = config
        self.is_first, self.is_last = layers.start == 0, layers.stop == shape.layers
        self.ends_with_head, self.dealt_heads = self.is_last and dealt_heads is None, dealt_heads
        holds_head = self.ends_with_head or bool(dealt_heads)
        holds_embedding = self.is_first or (holds_head and config.tied_embeddings)
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden) if holds_embedding else None
        self.layers = nn.ModuleDict({str(layer): Block(config, layer) for layer in layers})
        self.head = Head(config) if holds_head else None

    def forward(self, x: Tensor, positions_T: Tensor, attend: Attend, routing: Routing | None = None) -> Tensor:
        """Run the blocks on one micro-batch.

        Args:
            x: Token ids (T,) if this is the first stage, else the residual stream (T, D).
            positions_T: Position of each token in its segment.
            attend: Attention over the segments of the micro-batch.
            routing: For routers; without it they have no losses and count no tokens.

        Returns:
            Scores (T, V) if this stage ends with the head, else the residual stream (T, D).
        """
        x_TD: Tensor = self.embedding(x) if self.is_first and self.embedding is not None else x
        rotation = rotary_angles(positions_T, self.config, x_TD.dtype)
        for block in self.layers.values():
            x_TD = block(x_TD, rotation, attend, routing)
        return self.scores(x_TD) if self.ends_with_head else x_TD

    def scores(self, x_TD: Tensor) -> Tensor:
        """The scores (T, V) that the head of this module gives the stream (T, D) after the last block."""
        assert self.head is not None, "this module holds no head"
        scores_TV: Tensor = self.head(x_TD, *self.tied_VD)
        return scores_TV

    @property
    def tied_VD(self) -> tuple[Tensor, ...]:
        """The matrix of a tied embedding, if this module holds one."""
        return (self.embedding.weight,) if self.config.tied_embeddings and self.embedding is not None else ()


class Block(nn.Module):
    """Pre-norm transformer block ``layer``, counted from 0."""

    feed_forward: "FeedForward | MixtureOfExperts"

    def __init__(self, config: TransformerConfig, layer: int = 0) -> None:
        super().__init__()
        shape, kind = config.shape, config.shape.block_kind(layer)
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=config.norm_eps)
        self.attention, self.window = Attention(config), shape.sliding_window if kind.attention == "sliding" else None
        self.feed_forward_norm = nn.RMSNorm(shape.hidden, eps=config.norm_eps)
        if shape.experts is None or not kind.routed:
            self.feed_forward = FeedForward(shape.hidden, shape.ffn_hidden)
        else:
            shared = FeedForward(shape.hidden, columns) if (columns := shape.experts.shared_hidden) else None
            self.feed_forward = MixtureOfExperts(shape.hidden, shape.experts, config.router, layer, shared)

    def forward(self, x_TD: Tensor, rotation: Rotation, attend: Attend, routing: Routing | None = None) -> Tensor:
        # The graphs of torch.compile break at ``attend``. Called in ``attention``, it would also part that module's
        # products from the tensor-parallel collective before them, and these could not overlap.
        window = {} if self.window is None else {"window": self.window}
        x_TD = x_TD + self.attention.wo(
            attend(*self.attention(self.attention_norm(x_TD), rotation), **window).flatten(-2)
        )
        routed = (routing,) if isinstance(self.feed_forward, MixtureOfExperts) else ()
        out_TD: Tensor = x_TD + self.feed_forward(self.feed_forward_norm(x_TD), *routed)
        return out_TD


class Attention(nn.Module):
    """The projections of grouped-query attention with rotary positions; its block calls ``attend`` and ``wo``."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        shape, bias = config.shape, config.qkv_bias
        self.head_dim = shape.head_dim
        self.wq = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=bias)
        self.wk = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=bias)
        self.wv = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(shape.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.wo = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=config.o_bias)

    def forward(self, x_TD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of this rank's heads, ready for attention; with ``qk_norm`` from normalised q and k."""
        # -1 rather than the head counts: a tensor-parallel rank holds only some of the heads.
        q_THE = self.q_norm(self.wq(x_TD).unflatten(-1, (-1, self.head_dim)))
        k_TGE = self.k_norm(self.wk(x_TD).unflatten(-1, (-1, self.head_dim)))
        v_TGE = self.wv(x_TD).unflatten(-1, (-1, self.head_dim))
        return rotate(q_THE, rotation), rotate(k_TGE, rotation), v_TGE


class FeedForward(nn.Module):
    """SwiGLU: (silu(x W1) * x W3) W2."""

    def __init__(self, hidden: int, columns: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, columns, bias=False)
        self.w2 = nn.Linear(columns, hidden, bias=False)
        self.w3 = nn.Linear(hidden, columns, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.w2(F.silu(self.w1(x_TD)) * self.w3(x_TD))
        return out_TD


class Head(nn.Module):
    """The final norm and the projection to scores over the vocabulary, with its own matrix or the embedding's."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        shape = config.shape
        self.norm = nn.RMSNorm(shape.hidden, eps=config.norm_eps)
        self.output = TiedOutput() if config.tied_embeddings else nn.Linear(shape.hidden, shape.vocab_size, bias=False)

    def forward(self, x_TD: Tensor, *tied_VD: Tensor) -> Tensor:
        scores_TV: Tensor = self.output(self.norm(x_TD), *tied_VD)
        return scores_TV


class TiedOutput(nn.Module):
    """Projection with the embedding's matrix, which is passed in so that one module owns the parameter."""

    def forward(self, x_TD: Tensor, embedding_VD: Tensor) -> Tensor:
        return F.linear(x_TD, embedding_VD)


def rotary_angles(positions_T: Tensor, config: TransformerConfig, dtype: torch.dtype) -> Rotation:
    """Rotary position angles (RoFormer, arXiv 2104.09864, section 3.2.2), pairing dimension e with e + E/2.

    Computed in float64 for every ``dtype``, because at position 100,000 a float32 angle is off by about 0.004. YaRN
    also scales cosine and sine, and so the attention scores.
    """
    head_dim, theta, scaling = config.shape.head_dim, config.rope_theta, config.rope_scaling
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_T.device) / head_dim
    frequencies = theta**-exponents
    length = 1.0
    if scaling is not None:
        divided = frequencies / scaling.factor
        if scaling.rope_type == "linear":
            frequencies = divided
        elif scaling.rope_type == "llama3":
            turns = frequencies * scaling.original_max_position_embeddings / (2 * math.pi)
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            frequencies = torch.lerp(divided, frequencies, kept.clamp(0.0, 1.0))
        else:  # YaRN (arXiv 2309.00071, section 3.2): keep fast frequencies, divide slow ones, and ramp in between
            first, last = _yarn_ramp(scaling, theta, len(frequencies))
            pairs = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
            slow = ((pairs - first) / (last - first or 1e-3)).clamp(0.0, 1.0)
            frequencies = torch.lerp(frequencies, divided, slow)
            length = scaling.attention_factor or 0.1 * math.log(max(1.0, scaling.factor)) + 1.0  # section 3.4
    angles_TE = (positions_T[:, None] * frequencies).repeat(1, 2)
    cos_TE, sin_TE = angles_TE.cos() * length, angles_TE.sin() * length
    return cos_TE.to(dtype)[:, None], sin_TE.to(dtype)[:, None]


def rotate(x_THE: Tensor, rotation: Rotation) -> Tensor:
    """Rotate every head's pairs of dimensions by the token's angles."""
    (cos_T1E, sin_T1E), (first, second) = rotation, x_THE.chunk(2, dim=-1)
    return x_THE * cos_T1E + torch.cat((-second, first), dim=-1) * sin_T1E


def _yarn_ramp(scaling: RopeScalingConfig, theta: float, pairs: int) -> tuple[float, float]:
    """Where YaRN's ramp over ``pairs`` pairs of dimensions begins and ends, for frequencies of base ``theta``.

    With ``truncate`` both ends are whole pairs. Raises ``UserError`` if the ramp would end before it begins, and so
    divide frequencies that must be kept.
    """
    context = scaling.original_max_position_embeddings
    # The pairs, as fractions, that rotate beta_fast and beta_slow times over the original context.
    first, last = (
        pairs * math.log(context / (times * 2 * math.pi)) / math.log(theta)
        for times in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if last < first:
        raise UserError(
            f"yarn with beta_fast = {scaling.beta_fast:g}, beta_slow = {scaling.beta_slow:g} and an original context "
            f"of {context} tokens has no ramp over the frequencies of rope_theta = {theta:g}; correct them"
        )
    return first, last
