"""Weights from safetensors files: every rank reads the slices that it holds.

Pickled weights (``.bin``) are not read.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # DCP's

from wlb.errors import UserError, require
from wlb.models.huggingface.config_json import read_config
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.workload.model_json import read_config_json
from wlb.workload.shapes import ModelShape

INDEX_FILE = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NAMED = 3  # tensors, in an error message
_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # all other types are quantised, and need scales
_ROWS_COMPARED = 4096  # at once
_BUFFERS = ".rotary_emb.inv_freq"  # in early Llama checkpoints; computed from config.json

# Our names of modules and Hugging Face's; both lay matrices out alike. The files have a tensor for each expert.
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
    "feed_forward.router": "mlp.gate",
    "feed_forward.experts.w1": "mlp.experts.*.gate_proj",
    "feed_forward.experts.w2": "mlp.experts.*.down_proj",
    "feed_forward.experts.w3": "mlp.experts.*.up_proj",
}
_MIXTRAL = {
    "feed_forward.router": "block_sparse_moe.gate",
    **{f"feed_forward.experts.{w}": f"block_sparse_moe.experts.*.{w}" for w in ("w1", "w2", "w3")},
}


def hugging_face_names(name: str, family: str, shape: ModelShape) -> list[str]:
    """The tensors of ``family`` whose rows, one after another, are our parameter ``name``: one, or one per expert.

    ``layers.7.attention.wq.weight`` is ``model.layers.7.self_attn.q_proj.weight``, and so on.
    """
    if name in _OUTSIDE_BLOCKS:
        return [_OUTSIDE_BLOCKS[name]]
    _, layer, inside = name.split(".", 2)
    module, kind = inside.rsplit(".", 1) if inside.endswith((".weight", ".bias")) else (inside, "weight")
    names = _INSIDE_BLOCKS | (_MIXTRAL if family == "mixtral" else {})
    found = f"model.layers.{layer}.{names[module]}.{kind}"
    experts = shape.experts.count if "*" in found and shape.experts else 1
    return [found.replace("*", str(expert)) for expert in range(experts)]


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
        self._directory, self._config = directory, read_config(directory)
        self._family: str = read_config_json(directory)["model_type"]
        self._tensors = {name: cast(TensorStorageMetadata, held.state_dict_metadata[name]) for name in names}
        self._files = {place.fqn: info.relative_path for place, info in held.storage_data.items()}

    def check(self, config: TransformerConfig) -> None:
        """Raise ``UserError`` unless names, shapes and types of the tensors are those of a model with ``config``.

        If embeddings are tied and the files hold a head all the same, it must equal the embedding.
        """
        with torch.device("meta"):
            model = Transformer(config)
        expected: dict[str, tuple[int, ...]] = {}
        for name, parameter in model.named_parameters():
            sources = self._sources(name)
            expected |= dict.fromkeys(sources, (len(parameter) // len(sources), *parameter.shape[1:]))
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
                    f"for {shape}, and the type must be one of {types}; save the model again that way"
                )
        if tied_head and self._head_differs():
            raise UserError(
                f"{self._directory} has a {HEAD} that differs from {EMBEDDING}, but its config.json ties them; set "
                "model.tied_embeddings = false to train the head that is there, or remove it from the files"
            )

    @torch.no_grad()
    def load(self, *modules: Transformer) -> None:
        """Fill the parameters of a ``Transformer``, or of stages of it, sharded or not; call ``check`` first."""
        from safetensors import SafetensorError, safe_open

        by_file: dict[str, list[tuple[str, tuple[slice, ...], Tensor]]] = defaultdict(list)
        for module in modules:
            for name, parameter in module.named_parameters():
                for part in _held_parts(parameter, self._sources(name)):
                    by_file[self._files[part[0]]].append(part)
        try:
            for path, parts in by_file.items():
                with safe_open(path, "pt") as file:
                    for source, place, held in parts:
                        held.copy_(file.get_slice(source)[place])
        except (OSError, SafetensorError) as error:
            raise UserError(f"weights in {self._directory} cannot be read; download them again") from error

    def _sources(self, name: str) -> list[str]:
        """The tensors that fill the parameter ``name``; an untied head starts as the embedding that it was tied to."""
        sources = hugging_face_names(name, self._family, self._config.shape)
        copied = sources == [HEAD] and self._config.tied_embeddings and HEAD not in self._tensors
        return [EMBEDDING] if copied else sources

    def _head_differs(self) -> bool:
        from safetensors import safe_open

        if self._tensors[HEAD].size != self._tensors[EMBEDDING].size:
            return True
        with safe_open(self._files[HEAD], "pt") as one, safe_open(self._files[EMBEDDING], "pt") as other:
            head, embedding = one.get_slice(HEAD), other.get_slice(EMBEDDING)
            parts = [slice(i, i + _ROWS_COMPARED) for i in range(0, self._tensors[HEAD].size[0], _ROWS_COMPARED)]
            return any(not torch.equal(head[part].double(), embedding[part].double()) for part in parts)


def _held_parts(parameter: Tensor, sources: list[str]) -> Iterator[tuple[str, tuple[slice, ...], Tensor]]:
    """The parts of ``parameter`` that are on this rank: their tensor among ``sources``, their place in it, and a view.

    Each source has the same number of rows of ``parameter``.
    """
    held, rows, offsets = parameter, parameter.shape[0] // len(sources), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        held = parameter.to_local()
    columns = [slice(left, left + width) for left, width in zip(offsets[1:], held.shape[1:], strict=True)]
    for number, source in enumerate(sources):
        top = number * rows - offsets[0]  # of the source, in ``held``
        begin, end = max(0, top), min(len(held), top + rows)
        if begin < end:
            yield source, (slice(begin - top, end - top), *columns), held[begin:end]
