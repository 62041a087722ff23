"""Weights from safetensors files, by torch's reader of them: every rank reads the slices that it holds.

Pickled weights (``.bin``) are not read.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from wlb.errors import UserError, require
from wlb.models.huggingface.config_json import read_config
from wlb.models.transformer import Transformer, TransformerConfig

INDEX_FILE = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NAMED = 3  # tensors, in an error message
_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # others are quantised, and need their scales
_ROWS_COMPARED = 4096  # at once
_BUFFERS = ".rotary_emb.inv_freq"  # of early Llama checkpoints; follows from config.json

# Our names of modules and theirs; the matrices are laid out alike.
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


def read_tensors(tensors: Mapping[str, Tensor], reader: dcp.StorageReader) -> None:
    """Fill ``tensors`` by their names in the storage, in this process alone. Raises ``CheckpointException``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # disabled: no other process takes part
        dcp.load({name: tensor.detach() for name, tensor in tensors.items()}, storage_reader=reader, no_dist=True)


class PretrainedWeights:
    """The tensors of a Hugging Face directory."""

    def __init__(self, directory: Path, tensors: dict[str, TensorStorageMetadata], files: dict[str, str]) -> None:
        self._directory, self._tensors, self._files = directory, tensors, files
        self._tied = read_config(directory).tied_embeddings

    @classmethod
    def open(cls, directory: Path) -> PretrainedWeights:
        """Read the headers of all files.

        Raises ``UserError`` where there are no safetensors or one is damaged, and for a ``config.json`` that
        ``read_config`` refuses.
        """
        unreadable, index = require("safetensors", "train").SafetensorError, directory / INDEX_FILE
        try:
            held = HuggingFaceStorageReader(str(directory)).read_metadata()
            names = held.state_dict_metadata.keys()
            if index.is_file():  # beside which there may be files of another format
                names &= json.loads(index.read_bytes())["weight_map"].keys()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, unreadable) as error:
            raise UserError(f"weights in {directory} cannot be read ({error}); download them again") from error
        if not names:
            raise UserError(f"{directory} holds no weights; save the model as safetensors")
        entries = cast(dict[str, TensorStorageMetadata], held.state_dict_metadata)
        files = {place.fqn: info.relative_path for place, info in held.storage_data.items()}
        return cls(directory, {name: entries[name] for name in names}, files)

    def check(self, config: TransformerConfig) -> None:
        """Raise ``UserError`` unless the tensors are those of a model with ``config``, in name, shape and type.

        With tied embeddings, a head that is there all the same must be equal to the embedding.
        """
        with torch.device("meta"):
            model = Transformer(config)
        expected = {self._source(name): parameter.shape for name, parameter in model.named_parameters()}
        tied_head = {HEAD} & self._tensors.keys() if config.tied_embeddings else set()
        unexpected = {name for name in self._tensors if not name.endswith(_BUFFERS)} - expected.keys() - tied_head
        for what, names in (("lacks", expected.keys() - self._tensors.keys()), ("has unexpected", unexpected)):
            if names:
                raise UserError(
                    f"{self._directory} {what} {_list(names)}; its config.json describes another model, or files are missing"
                )
        for name, shape in expected.items():
            found, kind = self._tensors[name].size, self._tensors[name].properties.dtype
            if found != shape:
                raise UserError(
                    f"{self._directory} has {name} of shape {tuple(found)}, its config.json asks for {tuple(shape)}; "
                    "one of them belongs to another model"
                )
            if kind not in _TYPES:
                raise UserError(
                    f"{self._directory} has {name} of type {kind}; save the model as one of {', '.join(map(str, _TYPES))}"
                )
        if tied_head and self._head_differs():
            raise UserError(
                f"{self._directory} has a {HEAD} that differs from {EMBEDDING}, but its config.json ties them; set "
                "model.tied_embeddings = false to train the head that is there, or remove it from the files"
            )

    @torch.no_grad()
    def load(self, *modules: nn.Module) -> None:
        """Fill the parameters of a ``Transformer``, or of stages of it, sharded or not; ``check`` came before."""
        parameters = [named for module in modules for named in module.named_parameters()]
        while parameters:  # twice where the head comes from the embedding, too
            batch = {self._source(name): parameter for name, parameter in reversed(parameters)}
            parameters = [named for named in parameters if batch[self._source(named[0])] is not named[1]]
            try:
                read_tensors(batch, HuggingFaceStorageReader(str(self._directory)))
            except CheckpointException as error:
                raise UserError(f"weights in {self._directory} cannot be read; download them again") from error

    def _source(self, name: str) -> str:
        """Where the parameter ``name`` comes from: a head of its own starts as the embedding that it was tied to."""
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


def _list(names: Iterable[str]) -> str:
    first = sorted(names)
    more = f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
    return ", ".join(first[:_NAMED]) + more
