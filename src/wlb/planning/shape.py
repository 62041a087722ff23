"""The shape of the model that a job's configuration describes; trainer and simulator ask here."""

from __future__ import annotations

from dataclasses import replace

from wlb.config import ModelConfig
from wlb.errors import UserError
from wlb.workload import ModelShape, model_shape


def configured_shape(model: ModelConfig, vocab_size: int | None = None) -> ModelShape:
    """The shape that ``[model]`` describes, by a preset and what it overrides.

    ``vocab_size`` is that of the token store, where it is known; ``model.vocab_size`` may be larger. Without either the
    vocabulary is the preset's. The width of a head is hidden / heads where one of these is given. Raises ``UserError``
    for dimensions that do not fit together, and for the directory of a pretrained model.
    """
    if model.pretrained is not None:
        raise UserError(f"model.pretrained = {model.pretrained} names no preset; read the shape from its config.json")
    names = ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab_size")
    given = {name: value for name in names if (value := getattr(model, name)) is not None}
    if vocab_size is not None:
        asked = given.setdefault("vocab_size", vocab_size)
        if asked < vocab_size:
            raise UserError(f"model.vocab_size = {asked} is below the {vocab_size} of the token store; raise it")
    shape = replace(model_shape(model.name), **given)
    if "head_dim" not in given and ("hidden" in given or "heads" in given):
        if shape.hidden % (2 * shape.heads):
            raise UserError(
                f"model.hidden = {shape.hidden} must be a multiple of 2 x model.heads = {2 * shape.heads}: rotary "
                "positions pair the dimensions of a head"
            )
        shape = replace(shape, head_dim=shape.hidden // shape.heads)
    if shape.head_dim % 2:
        raise UserError(f"model.head_dim = {shape.head_dim} is odd; rotary positions pair the dimensions of a head")
    return shape
