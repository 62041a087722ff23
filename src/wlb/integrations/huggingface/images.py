"""Packed micro-batches with images, for models that take the patches of all images in one row, as Qwen2-VL does.

A document has ``input_ids`` with a placeholder for every merged patch, and what its processor made of its images:
``pixel_values`` (patches, values of a patch) and ``image_grid_thw`` (images, 3). In a micro-batch the patches of all
documents follow one another, and positions are those that the model gives each document alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wlb.errors import UserError
from wlb.integrations.document_fields import IMAGE_FIELDS, Document
from wlb.integrations.packed import FlatteningCollator
from wlb.training.data.batch import IGNORE_LABEL

_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


class ImageCollator(FlatteningCollator):
    """Lays documents with images, and others, one after another, as ``model`` takes them.

    Beside what ``FlatteningCollator`` makes there are ``pixel_values`` (patches, values) and ``image_grid_thw``
    (images, 3) of all documents in their order; ``position_ids`` have shape (4, 1, tokens): places in the document, and
    the model's three positions. Placeholders are not learnt. So that every rank runs the encoder in every micro-batch,
    one without images gets a document of one blank image, of which nothing is learnt.

    Raises ``UserError`` for a model that is not known to take images so, and for documents whose patches, grid and
    placeholders disagree.
    """

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        if config.model_type not in _MODELS:
            raise UserError(
                f"models of type {config.model_type!r} are not known to take packed images; those of type "
                f"{', '.join(_MODELS)} are"
            )
        network: Any = model
        vision = config.vision_config
        self._rope_index = network.model.get_rope_index
        self._placeholder, self._merge = config.image_token_id, vision.spatial_merge_size
        self._values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def token_count(self, document: Document, name: str) -> int:
        """Tokens of ``document``, placeholders of its images among them."""
        return super().token_count(_without_images(document), name)

    def __call__(self, documents: Sequence[Document]) -> dict[str, Any]:
        if not any(self._has_images(document) for document in documents):
            documents = [*documents, self._blank()]
        batch = super().__call__([_without_images(document) for document in documents])
        ids, labels = batch["input_ids"], batch["labels"]
        bounds = batch["cu_seq_lens_q"].tolist()
        pixels, grids, positions = [], [], []
        document: Any
        for index, document in enumerate(documents):
            own = ids[:, bounds[index] : bounds[index + 1]]
            grid = self._grid(document, own, f"document {index} of the batch")
            if grid is not None:
                pixels.append(torch.as_tensor(document["pixel_values"]))
                grids.append(grid)
            positions.append(self._rope_index(own, (own == self._placeholder).int(), image_grid_thw=grid)[0])
        return {
            **batch,
            "labels": labels.masked_fill(ids == self._placeholder, IGNORE_LABEL),
            "position_ids": torch.cat([batch["position_ids"][None], torch.cat(positions, dim=-1)]),
            "pixel_values": torch.cat(pixels),
            "image_grid_thw": torch.cat(grids),
        }

    def _grid(self, document: Any, ids: Tensor, name: str) -> Tensor | None:
        """``image_grid_thw`` of a document, None where it has no images."""
        placeholders = int((ids == self._placeholder).sum())
        if not self._has_images(document):
            if placeholders:
                raise UserError(f"{name} has {placeholders} placeholders of images and no pixel_values; give both")
            return None
        if document.get("pixel_values") is None or document.get("image_grid_thw") is None:
            raise UserError(f"{name} has only one of pixel_values and image_grid_thw; give both")
        grid = torch.as_tensor(document["image_grid_thw"]).reshape(-1, 3)
        patches, expected = len(document["pixel_values"]), int(grid.prod(dim=1).sum())
        if patches != expected or placeholders * self._merge**2 != patches:
            raise UserError(
                f"{name} has {patches} patches in pixel_values, {expected} by image_grid_thw and "
                f"{placeholders * self._merge**2} by its {placeholders} placeholders; they must agree"
            )
        return grid

    @staticmethod
    def _has_images(document: Document) -> bool:
        fields = ("pixel_values", "image_grid_thw")
        return isinstance(document, Mapping) and any(document.get(field) is not None for field in fields)

    def _blank(self) -> dict[str, Any]:
        return {
            "input_ids": [self._placeholder],
            "pixel_values": torch.zeros(self._merge**2, self._values),
            "image_grid_thw": [[1, self._merge, self._merge]],
        }


def _without_images(document: Document) -> Document:
    if not isinstance(document, Mapping):
        return document
    return {field: value for field, value in document.items() if field not in IMAGE_FIELDS}
