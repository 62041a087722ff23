"""Weights and operations of the presets, against what their authors publish."""

import pytest

from wlb.workload import model_shape
from wlb.workload.flops import attention_flops, linear_flops
from wlb.workload.weights import parameters

# Billions of weights, in all and for one token; how many vocabulary matrices the second leaves out; and how near ours
# come, of which most is the rounding of the publication. Mixtral: arXiv 2401.04088 and its model card. Qwen3: model
# cards. DeepSeek-V3: arXiv 2412.19437, abstract. Kimi K2: arXiv 2507.20534, Table 2. gpt-oss: arXiv 2508.10925,
# Table 1. Gemma 3: arXiv 2503.19786, Table 1, without vision. Mistral: safetensors. GLM-5, Qwen3-Next, Qwen3.5,
# Kimi-Linear, Nemotron 3 and Falcon-H1: model cards, rounded. Where a card rounds to whole billions, so does the error.
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9, 0, 0.002),
    "qwen3-30b-a3b": (30.5, 3.3, 0, 0.02),
    "qwen3-235b-a22b": (235, 22, 0, 0.01),
    "deepseek-v3": (671, 37, 0, 0.02),
    "kimi-k2": (1040, 32.6, 0, 0.02),
    "glm-5": (744, 40, 0, 0.05),
    "qwen3-next-80b-a3b": (80, 3, 2, 0.1),
    "qwen3.5-9b": (9, 9, 0, 0.01),
    "qwen3.5-27b": (27, 27, 0, 0.01),
    "qwen3.5-35b-a3b": (35, 3, 1, 0.02),
    "kimi-linear-48b-a3b": (48, 3, 1, 0.05),
    "nemotron-h-8b": (8.1, 8.1, 0, 0.001),
    "nemotron-3-nano-30b-a3b": (31.6, 3.6, 0, 0.01),
    "nemotron-3-super-120b-a12b": (120.6, 12.7, 0, 0.01),
    "falcon-h1-7b": (7.59, 7.59, 0, 0.002),
    "gpt-oss-20b": (20.91, 3.61, 1, 0.001),
    "gpt-oss-120b": (116.83, 5.13, 1, 0.001),
    "gemma3-12b": (1.012 + 10.759, 1.012 + 10.759, 0, 0.001),
    "gemma3-27b": (1.416 + 25.600, 1.416 + 25.600, 0, 0.001),
    "mistral-7b": (7.2417, 7.2417, 0, 0.0001),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_as_many_weights_as_published(name):
    total, active, left_out, tolerance = PUBLISHED[name]
    shape, tied = model_shape(name), name.startswith("gemma3")
    of_token = parameters(shape, active=True, tied_embeddings=tied) - left_out * shape.vocab_size * shape.hidden
    assert parameters(shape, tied_embeddings=tied) / 1e9 == pytest.approx(total, rel=tolerance)
    assert of_token / 1e9 == pytest.approx(active, rel=tolerance)


# GFLOP for each token of 4,096 trained: "Insights into DeepSeek-V3" (arXiv 2505.09343), Table 2.
@pytest.mark.parametrize(("name", "published"), [("deepseek-v3", 250), ("llama3-405b", 2448)])
def test_a_token_takes_as_many_operations_as_published(name, published):
    # That is three times the forward; ours counts the scores too that flash attention's backward computes again.
    shape, tokens = model_shape(name), 4096
    forward = float(linear_flops(shape, tokens, "forward") + attention_flops(shape, tokens, "forward"))
    assert 3 * forward / tokens / 1e9 == pytest.approx(published, rel=0.02)
