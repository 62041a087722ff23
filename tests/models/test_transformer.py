"""The weights that the plain model begins with.

What it computes of packed documents is what ``transformers`` does (``huggingface/test_equality.py``); stages in a row
are the model in ``tests/training/test_equivalence.py``.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from wlb.errors import UserError
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer, TransformerConfig, check_built
from wlb.workload.shapes import Experts, LatentAttention, ModelShape

SHAPE = ModelShape(hidden=16, layers=3, heads=4, kv_heads=2, head_dim=4, ffn_hidden=24, vocab_size=40)
CONFIG = TransformerConfig(SHAPE)


def _model(layers: range | None = None, seed: int = 0, dtype: torch.dtype = torch.float64) -> Transformer:
    module = Transformer(CONFIG, layers).to(dtype)
    initialise_weights(module, layers=SHAPE.layers, seed=seed)
    return module


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


def test_what_goes_into_the_residual_stream_begins_smaller() -> None:
    experts = Experts(8, 2, 32, shared_hidden=32, dense_layers=1)
    module = Transformer(replace(CONFIG, shape=replace(SHAPE, experts=experts)))
    initialise_weights(module, layers=SHAPE.layers, seed=0)
    for name, weights in module.named_parameters():
        into_stream = ".wo." in name or ".w2" in name
        if not name.endswith("norm.weight"):
            scale = (2 * SHAPE.layers) ** -0.5 if into_stream else 1.0
            assert weights.std().item() == pytest.approx(0.02 * scale, rel=0.3), name


def test_an_odd_head_dim_is_refused() -> None:
    with pytest.raises(UserError, match="head_dim = 5, which is odd"):
        Transformer(TransformerConfig(ModelShape(10, 1, 2, 2, 5, 8, 8)))


def test_what_is_only_priced_is_not_built() -> None:
    check_built(replace(SHAPE, sliding_window=8, full_attention_layers=1))
    priced: list[dict[str, Any]] = [
        {"sliding_window": 8, "full_attention_every": 2},
        {"kv_heads": 4, "latent": LatentAttention(0, 8, 4, 16)},
        {"pattern": "*" * SHAPE.layers},
    ]
    message = r"can be priced and simulated but not trained or profiled; choose a model.*balanced"
    for variant in priced:
        with pytest.raises(UserError, match=message):
            check_built(replace(SHAPE, **variant))
