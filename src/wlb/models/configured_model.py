"""The model to train, as ``[model]`` describes it."""

from dataclasses import replace

from wlb.job.config import ModelConfig
from wlb.job.configured_shape import configured_shape, has_tied_embeddings, refuse_changes
from wlb.models.huggingface.config_json import read_config
from wlb.models.transformer import TransformerConfig

_FREE = ("rope_theta", "rope_scaling", "norm_eps")
_VARIANTS = ("qkv_bias", "o_bias", "qk_norm", "router")


def configured_model(model: ModelConfig, vocab_size: int | None = None) -> TransformerConfig:
    """The model that ``[model]`` describes, with the shape of ``configured_shape``.

    For a pretrained model, ``[model]`` may change rotary positions and ``norm_eps``, and untie the head. Raises
    ``UserError`` for other changes, for a model that we do not implement, and as ``configured_shape`` does.
    """
    if model.pretrained is None:
        settings = {name: getattr(model, name) for name in (*_FREE, *_VARIANTS)}
        return TransformerConfig(
            configured_shape(model, vocab_size), tied_embeddings=has_tied_embeddings(model), **settings
        )
    config = read_config(model.pretrained)
    configured_shape(model, vocab_size)  # only to check [model] against it
    refuse_changes(model, {name: getattr(config, name) for name in _VARIANTS})
    changes = {name: getattr(model, name) for name in _FREE if name in model.model_fields_set}
    return replace(config, tied_embeddings=has_tied_embeddings(model), **changes)
