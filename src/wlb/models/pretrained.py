"""Training that starts from a Hugging Face directory, ``model.pretrained``, instead of random weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from wlb.config import ModelConfig
from wlb.documents.store.mixture import TrainedStore
from wlb.models.huggingface.weights import PretrainedWeights
from wlb.planning.model import TransformerConfig


def check_weights(directory: Path, config: TransformerConfig) -> None:
    """Raise ``UserError`` unless ``directory`` holds the weights of ``config``.

    Only the headers of its files are read, and where a tied head is stored all the same, the head and the embedding.
    """
    PretrainedWeights.open(directory).check(config)


def tokenizer_warning(model: ModelConfig, store: TrainedStore) -> str | None:
    """What to tell the user where ``store`` was not prepared with the tokenizer of the pretrained model, or None."""
    file = model.pretrained / "tokenizer.json" if model.pretrained is not None else None
    if store.tokenizer is None or file is None or not file.is_file():
        return None
    if store.tokenizer.get("sha256") == hashlib.sha256(file.read_text(encoding="utf-8").encode()).hexdigest():
        return None
    return (
        f"wlb: warning: {store.prefix} was prepared with the tokenizer {store.tokenizer.get('name')}, not with {file}; "
        "unless both give the same tokens, the pretrained weights are of no use"
    )


def load_weights(directory: Path, stages: Sequence[nn.Module]) -> None:
    """Fill the stages of this rank, each with the slices that it holds."""
    weights = PretrainedWeights.open(directory)
    for stage in stages:
        weights.load(stage)
