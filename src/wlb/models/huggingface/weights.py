"""Weights from safetensors files: every rank reads the slices that it holds, and nothing else.

``PretrainedWeights`` opens a directory: one ``model.safetensors``, or several with ``model.safetensors.index.json``.
``check`` compares names, shapes and types with those of the whole model, from the headers alone, before any process
starts; only a head that is said to be the embedding is read and compared with it.
``load`` fills the parameters of a stage; of a parameter that is sharded over ranks, in one dimension or two, just the
local part is read from the file, and converted to the parameter's type. Pickled weights (``.bin``) are not read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wlb.errors import UserError, require
from wlb.models.huggingface.config_json import read_config
from wlb.models.transformer import Transformer, TransformerConfig

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NAMED = 3  # tensors, in an error message
_TYPES = ("F64", "F32", "F16", "BF16")  # others are quantised, and mean nothing without their scales
_ROWS_COMPARED = 4096  # at once
_BUFFERS = ".rotary_emb.inv_freq"  # of early Llama checkpoints; follows from config.json

# Our names of modules and theirs; the matrices are laid out alike.
_OUTSIDE_BLOCKS = {
    "embedding.weight": EMBEDDING,
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": HEAD,
}
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


class PretrainedWeights:
    """The tensors of a Hugging Face directory, by their names there; ``tied`` says its ``config.json``."""

    def __init__(self, directory: Path, files: dict[str, Path], *, tied: bool) -> None:
        self._directory = directory
        self._files = files
        self._tied = tied

    @classmethod
    def open(cls, directory: Path) -> PretrainedWeights:
        """Find every tensor's file.

        Raises ``UserError`` where there are no safetensors or some of them are missing, and for a ``config.json`` that
        ``read_config`` refuses.
        """
        require("safetensors", "train")
        index = directory / INDEX_FILE
        files = _indexed(index) if index.is_file() else _single(directory)
        for path in sorted(set(files.values())):
            if not path.is_file():
                raise UserError(f"{index} names {path.name}, which is not there; download it again")
        return cls(directory, files, tied=read_config(directory).tied_embeddings)

    def check(self, config: TransformerConfig) -> None:
        """Raise ``UserError`` unless the tensors are those of a model with ``config``, in name, shape and type.

        With tied embeddings, a head that is there all the same must be equal to the embedding.
        """
        with torch.device("meta"):
            model = Transformer(config)
        expected = {self._source(name): tuple(p.shape) for name, p in model.named_parameters()}
        passed_over = {HEAD} if config.tied_embeddings else set()
        unexpected = {name for name in self._files if not name.endswith(_BUFFERS)} - expected.keys() - passed_over
        for what, names in (("lacks", expected.keys() - self._files.keys()), ("has unexpected", unexpected)):
            if names:
                raise UserError(f"{self._directory} {what} {_list(names)}; its config.json describes another model")
        with self._tensors() as tensor:
            for name, shape in expected.items():
                found, kind = tuple(tensor(name).get_shape()), tensor(name).get_dtype()
                if found != shape:
                    raise UserError(
                        f"{self._directory} has {name} of shape {found}, its config.json asks for {shape}; one of them "
                        "belongs to another model"
                    )
                if kind not in _TYPES:
                    raise UserError(
                        f"{self._directory} has {name} of type {kind}; save the model as one of {', '.join(_TYPES)}"
                    )
            if config.tied_embeddings and HEAD in self._files and not _equal(tensor(HEAD), tensor(EMBEDDING)):
                raise UserError(
                    f"{self._directory} has a {HEAD} that differs from {EMBEDDING}, but its config.json ties them; set "
                    "model.tied_embeddings = false to train the head that is there, or remove it from the files"
                )

    @torch.no_grad()
    def load(self, *modules: nn.Module) -> None:
        """Fill the parameters of a ``Transformer``, or of stages of it, sharded or not; ``check`` came before."""
        with self._tensors() as tensor:
            for name, parameter in (named for module in modules for named in module.named_parameters()):
                local, part = _local_part(parameter)
                if local.numel():
                    local.copy_(tensor(self._source(name))[part])

    def _source(self, name: str) -> str:
        """Where the parameter ``name`` comes from: a head of its own starts as the embedding that it was tied to."""
        source = hugging_face_name(name)
        return EMBEDDING if source == HEAD and self._tied and HEAD not in self._files else source

    @contextmanager
    def _tensors(self) -> Iterator[Callable[[str], Any]]:
        """Tensors by name, as safetensors' slices; a file is opened when its first tensor is asked for."""
        from safetensors import SafetensorError, safe_open

        try:
            with ExitStack() as stack:
                opened = cache(lambda path: stack.enter_context(safe_open(path, framework="pt")))
                yield lambda name: opened(self._files[name]).get_slice(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"weights in {self._directory} cannot be read ({error}); download them again") from error


def hugging_face_name(name: str) -> str:
    """``layers.7.attention.wq.weight`` as ``model.layers.7.self_attn.q_proj.weight``, and so on."""
    if name in _OUTSIDE_BLOCKS:
        return _OUTSIDE_BLOCKS[name]
    _, layer, inside = name.split(".", 2)
    module, _, kind = inside.rpartition(".")
    return f"model.layers.{layer}.{_INSIDE_BLOCKS[module]}.{kind}"


def _equal(one: Any, other: Any) -> bool:
    """Whether two slices of safetensors hold the same matrix, some rows in memory at a time."""
    if one.get_shape() != other.get_shape():
        return False
    rows = range(0, one.get_shape()[0], _ROWS_COMPARED)
    return all(torch.equal(one[i : i + _ROWS_COMPARED].double(), other[i : i + _ROWS_COMPARED].double()) for i in rows)


def _local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """What this rank holds of a parameter, and where that lies in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    # The protocol by which torch.distributed.checkpoint asks a tensor the same; one chunk, as a rank has one shard.
    (chunk,) = parameter.__create_chunk_list__()
    return parameter.to_local(), tuple(
        slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
    )


def _single(directory: Path) -> dict[str, Path]:
    from safetensors import SafetensorError, safe_open

    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(f"{directory} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; save the model as safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); download it again") from error


def _indexed(index: Path) -> dict[str, Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(tensor): str(file) for tensor, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged ({type(error).__name__}); download it again") from error
    for file in files.values():
        if Path(file).name != file:
            raise UserError(f"{index} names {file!r}, which is not a file beside it; download the model again")
    return {tensor: index.parent / file for tensor, file in files.items()}


def _list(names: Iterable[str]) -> str:
    first = sorted(names)
    more = f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
    return ", ".join(first[:_NAMED]) + more
