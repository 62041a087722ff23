"""Weights from safetensors files, read by torch's own reader: every rank reads the slices that it holds.

Pickled weights (``.bin``) are not read.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from wlb.errors import UserError, require
from wlb.models.huggingface.config_json import read_config
from wlb.models.transformer import Transformer, TransformerConfig

INDEX_FILE = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NAMED = 3  # tensors, in an error message
_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # all other types are quantised, and need scales
_ROWS_COMPARED = 4096  # at once
_BUFFERS = ".rotary_emb.inv_freq"  # in early Llama checkpoints; computed from config.json

# Our names of modules and Hugging Face's; both lay matrices out alike.
_OUTSIDE_BLOCKS = {"embedding.weight": EMBEDDING, "head.norm.weight": "model.norm.weight", "head.output.weight": HEAD}
_INSIDE_BLOCKS = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def hugging_face_name(name: str) -> str:
    """``layers.7.attention.wq.weight`` as ``model.layers.7.self_attn.q_proj.weight``, and so on."""
    if name in _OUTSIDE_BLOCKS:
        return _OUTSIDE_BLOCKS[name]
    _, layer, inside = name.split(".", 2)
    module, _, kind = inside.rpartition(".")
    return f"model.layers.{layer}.{_INSIDE_BLOCKS[module]}.{kind}"


@contextmanager
def alone() -> Iterator[None]:
    """Silence the warning of ``torch.distributed.checkpoint`` that this process is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        yield


class PretrainedWeights:
    """The tensors of a Hugging Face ``directory``; opening it reads the headers of all files.

    Raises ``UserError`` if there are no safetensors, if a file is damaged, and for a ``config.json`` that
    ``read_config`` refuses.
    """

    def __init__(self, directory: Path) -> None:
        unreadable, index = require("safetensors", "train").SafetensorError, directory / INDEX_FILE
        try:
            held = HuggingFaceStorageReader(str(directory)).read_metadata()
            names = held.state_dict_metadata.keys()
            if index.is_file():  # there may also be files of another format
                names &= json.loads(index.read_bytes())["weight_map"].keys()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, unreadable) as error:
            raise UserError(f"weights in {directory} cannot be read ({error}); download them again") from error
        if not names:
            raise UserError(f"{directory} holds no weights; save the model as safetensors")
        self._directory, self._tied = directory, read_config(directory).tied_embeddings
        self._tensors = {name: cast(TensorStorageMetadata, held.state_dict_metadata[name]) for name in names}
        self._files = {place.fqn: info.relative_path for place, info in held.storage_data.items()}

    def check(self, config: TransformerConfig) -> None:
        """Raise ``UserError`` unless names, shapes and types of the tensors are those of a model with ``config``.

        If embeddings are tied and the files hold a head all the same, it must equal the embedding.
        """
        with torch.device("meta"):
            model = Transformer(config)
        expected = {self._source(name): parameter.shape for name, parameter in model.named_parameters()}
        tied_head = {HEAD} & self._tensors.keys() if config.tied_embeddings else set()
        unexpected = {name for name in self._tensors if not name.endswith(_BUFFERS)} - expected.keys() - tied_head
        for what, names in (("lacks", expected.keys() - self._tensors.keys()), ("has unexpected", unexpected)):
            if names:
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                raise UserError(
                    f"{self._directory} {what} {', '.join(sorted(names)[:_NAMED])}{more}; its config.json describes "
                    "another model, or files are missing"
                )
        for name, shape in expected.items():
            found, kind = self._tensors[name].size, self._tensors[name].properties.dtype
            if found != shape or kind not in _TYPES:
                types = ", ".join(map(str, _TYPES))
                raise UserError(
                    f"{self._directory} has {name} of type {kind} and shape {tuple(found)}, but its config.json asks "
                    f"for {tuple(shape)}, and the type must be one of {types}; save the model again that way"
                )
        if tied_head and self._head_differs():
            raise UserError(
                f"{self._directory} has a {HEAD} that differs from {EMBEDDING}, but its config.json ties them; set "
                "model.tied_embeddings = false to train the head that is there, or remove it from the files"
            )

    def load(self, *modules: nn.Module) -> None:
        """Fill the parameters of a ``Transformer``, or of stages of it, sharded or not; call ``check`` first."""
        reader = HuggingFaceStorageReader(str(self._directory))
        for module in modules:
            parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
            head = {name: parameters.pop(name) for name in {"head.output.weight"} & parameters.keys()}
            for part in filter(None, (parameters, head)):
                try:
                    with alone():
                        dcp.load({self._source(name): part[name] for name in part}, storage_reader=reader, no_dist=True)
                except CheckpointException as error:
                    raise UserError(f"weights in {self._directory} cannot be read; download them again") from error

    def _source(self, name: str) -> str:
        """The tensor that fills the parameter ``name``; an untied head starts as the embedding that it was tied to."""
        source = hugging_face_name(name)
        return EMBEDDING if source == HEAD and self._tied and HEAD not in self._tensors else source

    def _head_differs(self) -> bool:
        from safetensors import safe_open

        if self._tensors[HEAD].size != self._tensors[EMBEDDING].size:
            return True
        with safe_open(self._files[HEAD], "pt") as one, safe_open(self._files[EMBEDDING], "pt") as other:
            head, embedding = one.get_slice(HEAD), other.get_slice(EMBEDDING)
            parts = [slice(i, i + _ROWS_COMPARED) for i in range(0, self._tensors[HEAD].size[0], _ROWS_COMPARED)]
            return any(not torch.equal(head[part].double(), embedding[part].double()) for part in parts)
