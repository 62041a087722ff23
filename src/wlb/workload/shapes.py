"""Shapes of the language models that the workload model prices and the trainer builds."""

from __future__ import annotations

from dataclasses import dataclass

from wlb.errors import UserError

_MOST_LAYERS = 10_000  # ten times the deepest transformer that was trained (DeepNet, arXiv 2203.00555)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and a SwiGLU feed-forward layer.

    ``layers`` counts all blocks of the model, ``head_dim`` is the width of one attention head. Raises
    ``UserError`` for a size below 1, for more than 10,000 layers, and for query heads that do not share the key/value
    heads evenly.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UserError(f"model shape has {name} = {value}; it must be at least 1")
        if self.layers > _MOST_LAYERS:
            raise UserError(f"model shape has layers = {self.layers}; it must be at most {_MOST_LAYERS}")
        if self.heads % self.kv_heads:
            raise UserError(
                f"model shape has heads = {self.heads}, not a multiple of kv_heads = {self.kv_heads}; "
                "every key/value head serves the same number of query heads"
            )


# hidden, layers, heads, kv_heads, head_dim, ffn_hidden, vocab_size
MODEL_SHAPES: dict[str, ModelShape] = {
    # Small enough for a CPU; a 4,096-token window has the attention:linear ratio of a 7B model at 128K.
    "tiny": ModelShape(128, 4, 4, 2, 32, 352, 512),
    # The sizes that WLB-LLM trains, whose widths are assumed: those of Llama 2 7B and 70B, and for 550M and 30B
    # shapes of that many parameters (30B with the layers and heads of OPT-30B, arXiv 2205.01068).
    "550m": ModelShape(1536, 16, 12, 12, 128, 4096, 32_000),
    "7b": ModelShape(4096, 32, 32, 32, 128, 11_008, 32_000),
    "30b": ModelShape(7168, 48, 56, 56, 128, 19_200, 32_000),
    "70b": ModelShape(8192, 80, 64, 8, 128, 28_672, 32_000),
    # Llama 3 (arXiv 2407.21783, Table 3).
    "llama3-8b": ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256),
    "llama3-70b": ModelShape(8192, 80, 64, 8, 128, 28_672, 128_256),
    "llama3-405b": ModelShape(16_384, 126, 128, 8, 128, 53_248, 128_256),
    # The published config.json of each model (biases and q/k norms are not modelled).
    "qwen2.5-7b": ModelShape(3584, 28, 28, 4, 128, 18_944, 152_064),
    "qwen2.5-72b": ModelShape(8192, 80, 64, 8, 128, 29_568, 152_064),
    "qwen3-8b": ModelShape(4096, 36, 32, 8, 128, 12_288, 151_936),
    "qwen3-32b": ModelShape(5120, 64, 64, 8, 128, 25_600, 151_936),
}


def model_shape(name: str) -> ModelShape:
    """Return the preset ``name``; raises ``UserError`` that lists the presets."""
    try:
        return MODEL_SHAPES[name]
    except KeyError:
        raise UserError(f"unknown model {name!r}; choose one of {', '.join(MODEL_SHAPES)}") from None


def check_divisible(shape: ModelShape, tp: int) -> None:
    """Raise ``UserError`` unless ``tp`` ranks can share the model's heads, feed-forward columns and vocabulary."""
    for name in ("heads", "kv_heads", "ffn_hidden", "vocab_size"):
        size = getattr(shape, name)
        if size % tp:
            more = f" or a vocab_size of {size + tp - size % tp}" if name == "vocab_size" else ""
            raise UserError(
                f"model {name} = {size} cannot be split over tp = {tp} ranks; choose a divisor of {size}{more}"
            )
