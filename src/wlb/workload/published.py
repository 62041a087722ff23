"""Models by name: the presets, and those of a Hugging Face directory."""

from dataclasses import replace
from pathlib import Path

from wlb.errors import UserError, choose_from
from wlb.workload.shapes import Experts, Indexer, LatentAttention, LinearLayer, ModelShape

_DEEPSEEK_LATENT = LatentAttention(q_rank=1536, kv_rank=512, rope_dim=64, value_dim=128)
_GPT_OSS = ModelShape(
    *(2880, 24, 64, 8, 64, 2880, 201_088),
    sliding_window=128,
    full_attention_every=2,
    experts=Experts(32, 4, 2880, biased=True),
)


def _qwen_hybrid(dense: ModelShape, experts: Experts | None = None, value_heads: int = 32) -> ModelShape:
    """Full attention in every fourth block, as in Qwen3-Next."""
    linear, pattern = LinearLayer("gated_delta", value_heads, 16, 128, 128), "MEMEME*E" if experts else "M-M-M-*-"
    return replace(dense, pattern=dense.layers // 4 * pattern, experts=experts, linear=linear, gated_attention=True)


# hidden, layers, heads, kv_heads, head_dim, ffn_hidden, vocab_size
MODEL_SHAPES: dict[str, ModelShape] = {
    # Small enough for a CPU; a 4,096-token window has the attention:linear ratio of a 7B model at 128K.
    "tiny": ModelShape(128, 4, 4, 2, 32, 352, 512),
    # The sizes that WLB-LLM trains. Widths are assumed: 7B and 70B as Llama 2, 550M and 30B as shapes with that many
    # parameters (30B with the layers and heads of OPT-30B, arXiv 2205.01068).
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
    # Mixtures of experts, from the published config.json of each.
    "mixtral-8x7b": ModelShape(4096, 32, 32, 8, 128, 14_336, 32_000, experts=Experts(8, 2, 14_336)),
    "qwen3-30b-a3b": ModelShape(2048, 48, 32, 4, 128, 6144, 151_936, experts=Experts(128, 8, 768)),
    "qwen3-235b-a22b": ModelShape(4096, 94, 64, 4, 128, 12_288, 151_936, experts=Experts(128, 8, 1536)),
    # Experts and latent attention: config.json, DeepSeek-V3 (arXiv 2412.19437, section 4.2), Kimi K2 (arXiv 2507.20534,
    # Table 2). DeepSeek-V3's layer that predicts one more token is not modelled.
    "deepseek-v3": ModelShape(
        *(7168, 61, 128, 128, 192, 18_432, 129_280),
        experts=Experts(256, 8, 2048, shared_hidden=2048, dense_layers=3),
        latent=_DEEPSEEK_LATENT,
    ),
    "kimi-k2": ModelShape(
        *(7168, 61, 64, 64, 192, 18_432, 163_840),
        experts=Experts(384, 8, 2048, shared_hidden=2048, dense_layers=1),
        latent=_DEEPSEEK_LATENT,
    ),
    # From here to Falcon-H1 config.json of each, without layers that predict more tokens: first an indexer.
    "glm-5": ModelShape(
        *(6144, 78, 64, 64, 256, 12_288, 154_880),
        experts=Experts(256, 8, 2048, shared_hidden=2048, dense_layers=3),
        latent=LatentAttention(q_rank=2048, kv_rank=512, rope_dim=64, value_dim=256),
        indexer=Indexer(2048, 32, 128, layers=78),
    ),
    # Hybrids. Qwen3.6 35B-A3B has the shape of Qwen3.5's.
    "qwen3-next-80b-a3b": _qwen_hybrid(
        ModelShape(2048, 48, 16, 2, 256, 5120, 151_936), Experts(512, 10, 512, shared_hidden=512)
    ),
    "qwen3.5-9b": _qwen_hybrid(ModelShape(4096, 32, 16, 4, 256, 12_288, 248_320)),
    "qwen3.5-27b": _qwen_hybrid(ModelShape(5120, 64, 24, 4, 256, 17_408, 248_320), value_heads=48),
    "qwen3.5-35b-a3b": _qwen_hybrid(
        ModelShape(2048, 40, 16, 2, 256, 4608, 248_320), Experts(256, 8, 512, shared_hidden=512)
    ),
    "kimi-linear-48b-a3b": ModelShape(
        *(2304, 27, 32, 32, 192, 9216, 163_840),
        pattern="M-MEME*E" + 5 * "MEMEME*E" + "MEME*E",
        experts=Experts(256, 8, 1024, shared_hidden=1024, dense_layers=1),
        latent=replace(_DEEPSEEK_LATENT, q_rank=0),
        linear=LinearLayer("kda", 32, 32, 128, 128),
    ),
    "nemotron-h-8b": ModelShape(
        *(4096, 28, 32, 8, 128, 21_504, 131_072),
        pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        linear=LinearLayer("mamba2", 128, 8, 128, 64),
        ffn_matrices=2,
    ),
    "nemotron-3-nano-30b-a3b": ModelShape(
        *(2688, 29, 32, 2, 128, 1856, 131_072),
        pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        experts=Experts(128, 6, 1856, shared_hidden=3712),
        linear=LinearLayer("mamba2", 64, 8, 128, 64),
        ffn_matrices=2,
    ),
    "nemotron-3-super-120b-a12b": ModelShape(
        *(4096, 48, 32, 2, 128, 2688, 131_072),
        pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        experts=Experts(512, 22, 2688, shared_hidden=5376, latent=1024),
        linear=LinearLayer("mamba2", 128, 8, 128, 64),
        ffn_matrices=2,
    ),
    "falcon-h1-7b": ModelShape(
        *(3072, 44, 12, 2, 128, 12_288, 130_048), pattern=44 * "H-", linear=LinearLayer("mamba2", 24, 1, 256, 128)
    ),
    # Five blocks with a window to each with full attention (Gemma 3, arXiv 2503.19786, section 2); text part only.
    "gemma3-12b": ModelShape(*(3840, 48, 16, 8, 256, 15_360, 262_208), sliding_window=1024, full_attention_every=6),
    "gemma3-27b": ModelShape(*(5376, 62, 32, 16, 128, 21_504, 262_208), sliding_window=1024, full_attention_every=6),
    # Every other block with a window (gpt-oss model card, arXiv 2508.10925, section 2; sinks not modelled).
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": replace(_GPT_OSS, layers=36, experts=Experts(128, 4, 2880, biased=True)),
    # All blocks with a window (arXiv 2310.06825, Table 1); later versions have full attention.
    "mistral-7b": ModelShape(4096, 32, 32, 8, 128, 14_336, 32_000, sliding_window=4096),
}
# In GLM-5.2 most blocks take the choice of a block before (config.json); DeepSeek-V3.2: arXiv 2512.02556.
MODEL_SHAPES |= {
    "glm-5.2": replace(MODEL_SHAPES["glm-5"], indexer=Indexer(2048, 32, 128, layers=21)),
    "deepseek-v3.2": replace(MODEL_SHAPES["deepseek-v3"], indexer=Indexer(2048, 64, 128, layers=61)),
}


def model_shape(name: str) -> ModelShape:
    """The preset ``name``, or the model of a Hugging Face directory or ``config.json`` at the path ``name``.

    Raises ``UserError``, with a list of presets, if it is neither, and for a model that is not priced.
    """
    if name.lower() in MODEL_SHAPES:
        return MODEL_SHAPES[name.lower()]
    path = Path(name)
    if path.is_dir() or path.is_file():
        from wlb.workload.model_json import read_shape  # presets need NumPy alone

        return read_shape(path)
    raise UserError(
        f"unknown model {name!r}; {choose_from(name, MODEL_SHAPES)}, or name the directory of a Hugging Face model "
        "or its config.json"
    )
