"""The plain model on one process: packing, cutting into stages and seeding change nothing they should not."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from wlb.attention import segment_attention
from wlb.errors import UserError
from wlb.job.rope_scaling import RopeScalingConfig
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Attend, Transformer, TransformerConfig, check_built, rotary_angles, rotate
from wlb.workload.shapes import Experts, LatentAttention, ModelShape

SHAPE = ModelShape(hidden=16, layers=3, heads=4, kv_heads=2, head_dim=4, ffn_hidden=24, vocab_size=40)
CONFIG = TransformerConfig(SHAPE)
VARIANTS = {
    "llama": CONFIG,
    "qwen2": replace(CONFIG, qkv_bias=True),
    "qwen3": replace(CONFIG, shape=replace(SHAPE, head_dim=10), qk_norm=True),
    "tied": replace(CONFIG, tied_embeddings=True),
}


def _model(
    layers: range | None = None, seed: int = 0, dtype: torch.dtype = torch.float64, variant: str = "llama"
) -> Transformer:
    module = Transformer(VARIANTS[variant], layers).to(dtype)
    initialise_weights(module, layers=SHAPE.layers, seed=seed)
    return module


def _positions(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def _within(*lengths: int) -> Attend:
    return partial(segment_attention, segment_lengths=lengths)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_score_as_they_do_alone(variant: str) -> None:
    model, lengths = _model(variant=variant), (5, 1, 11, 3)
    tokens = torch.randint(SHAPE.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    packed = model(tokens, _positions(lengths), _within(*lengths))
    alone = [model(piece, torch.arange(len(piece)), _within(len(piece))) for piece in tokens.split(lengths)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cuts", [(0, 3), (0, 1, 3), (0, 1, 2, 3)])
def test_stages_in_a_row_are_the_full_model(cuts: tuple[int, ...], variant: str) -> None:
    lengths = (4, 6)
    tokens = torch.arange(10)
    x = tokens
    names: list[str] = []
    for start, stop in pairwise(cuts):
        stage = _model(range(start, stop), variant=variant)
        names += [name for name, _ in stage.named_parameters()]
        x = stage(x, _positions(lengths), _within(*lengths))
    full = _model(variant=variant)
    assert torch.equal(x, full(tokens, _positions(lengths), _within(*lengths)))
    if variant == "tied" and len(cuts) > 2:
        names.remove("embedding.weight")  # the last stage holds it as well
    assert sorted(names) == sorted(name for name, _ in full.named_parameters())


def test_scores_depend_on_distances_not_on_where_a_segment_starts() -> None:
    model, tokens = _model(), torch.arange(12)
    here, further_on = (model(tokens, torch.arange(12) + offset, _within(12)) for offset in (0, 1000))
    torch.testing.assert_close(here, further_on, rtol=1e-9, atol=1e-9)


def test_rotation_turns_pairs_by_position_times_frequency() -> None:
    rotation = rotary_angles(torch.tensor([0, 3]), head_dim=4, theta=100.0, dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0, 0.0, 0.0]], dtype=torch.float64).expand(2, 1, 4)
    turned = rotate(x, rotation)[:, 0]
    first, second = 3.0, 3.0 / 10.0  # position times theta^0 and theta^(-1/2)
    expected = [math.cos(first), 2 * math.cos(second), math.sin(first), 2 * math.sin(second)]
    torch.testing.assert_close(turned, torch.tensor([[1.0, 2.0, 0.0, 0.0], expected], dtype=torch.float64))


def test_scaled_rotation_slows_what_turns_slowly_and_keeps_what_turns_often() -> None:
    scaling = RopeScalingConfig(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1000
    )

    def frequencies(scaled: RopeScalingConfig | None) -> Tensor:
        rotation = rotary_angles(torch.tensor([1]), 12, 10_000.0, torch.float64, scaling=scaled)
        return rotation.sin_T1E[0, 0, :6].arcsin()

    plain, scaled = frequencies(None), frequencies(scaling)
    turns = plain * 1000 / (2 * math.pi)  # 159, 34, 7.4, 1.6, 0.34, 0.07
    torch.testing.assert_close(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.sum() == 1
    assert plain[between] / 8 < scaled[between] < plain[between]


def test_initial_weights_follow_from_seed_and_name() -> None:
    full, again, other = (dict(_model(seed=seed).named_parameters()) for seed in (0, 0, 1))
    last_stage = dict(_model(range(2, 3)).named_parameters())
    for name, weights in full.items():
        assert torch.equal(weights, again[name])
        assert name not in last_stage or torch.equal(weights, last_stage[name])
        assert name.endswith("norm.weight") or not torch.equal(weights, other[name])
    drawn = [weights.flatten()[0].item() for name, weights in full.items() if not name.endswith("norm.weight")]
    assert len(set(drawn)) == len(drawn)


def test_initial_weights_are_the_same_in_every_type() -> None:
    for exact, rounded in zip(_model().parameters(), _model(dtype=torch.float32).parameters(), strict=True):
        assert torch.equal(exact.float(), rounded)


def test_an_odd_head_dim_is_refused() -> None:
    with pytest.raises(UserError, match="head_dim = 5, which is odd"):
        Transformer(TransformerConfig(ModelShape(10, 1, 2, 2, 5, 8, 8)))


PRICED = [
    {"sliding_window": 8, "full_attention_every": 2},
    {"experts": Experts(4, 2, 16)},
    {"kv_heads": 4, "latent": LatentAttention(0, 8, 4, 16)},
]


@pytest.mark.parametrize("variant", PRICED)
def test_what_is_only_priced_is_not_built(variant: dict[str, Any]) -> None:
    check_built(replace(SHAPE, sliding_window=8, full_attention_layers=1))
    with pytest.raises(
        UserError, match=r"can be priced and simulated but not trained or profiled; choose a dense model.*balanced"
    ):
        check_built(replace(SHAPE, **variant))
