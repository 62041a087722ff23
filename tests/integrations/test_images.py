"""Documents with images, packed for unmodified Hugging Face models, against one at a time in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.cases import in_turn
from wlb.errors import UserError
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.document_fields import Document
from wlb.integrations.huggingface import (
    ImageCollator,
    balanced,
    check_batch,
    context_parallel_share,
    register_attention,
)
from wlb.workload.phases import DocumentPhases

transformers: Any = pytest.importorskip("transformers")

IMAGE = 99
DRAWN = np.random.default_rng(0)
TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
}
VISION: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
VISION_OF: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
    "Qwen2_5_VL": {
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 64,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "Qwen3VL": {
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 98, "vision_start_token_id": 97, "vision_end_token_id": 96}


def model(family: str = "Qwen2VL") -> Any:
    torch.manual_seed(0)
    rope = TEXT["rope_parameters"] | ({"mrope_interleaved": True} if family == "Qwen3VL" else {})
    config = getattr(transformers, f"{family}Config")(
        text_config=TEXT | {"rope_parameters": rope}, vision_config=VISION | VISION_OF[family], **TOKENS
    )
    return getattr(transformers, f"{family}ForConditionalGeneration")(config).double()


def document(words: int, *grids: list[int]) -> dict[str, Any]:
    ids = DRAWN.integers(3, 90, words).tolist()
    for _, height, width in grids:
        ids += [97, *[IMAGE] * (height * width // 4), 96, *DRAWN.integers(3, 90, 3).tolist()]
    if not grids:
        return {"input_ids": ids}
    patches = sum(height * width for _, height, width in grids)
    return {"input_ids": ids, "pixel_values": DRAWN.standard_normal((patches, 96)), "image_grid_thw": [*grids]}


DOCUMENTS = [document(5, [1, 4, 6]), document(9), document(3, [1, 8, 4], [1, 2, 2]), document(12, [1, 6, 6])]


def gradients(network: Any, batches: list[dict[str, Any]]) -> torch.Tensor:
    """Of the summed loss; zero where a parameter has none."""
    network.zero_grad()
    for batch in batches:
        network(**batch, num_items_in_batch=1).loss.backward()
    return torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in network.parameters()])


def alone(one: dict[str, Any]) -> dict[str, Any]:
    """As the model takes a document by itself, in its own words."""
    ids = torch.tensor([one["input_ids"]])
    if "pixel_values" not in one:
        return {"input_ids": ids, "labels": ids}
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == IMAGE, -100),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.from_numpy(one["pixel_values"]),
        "image_grid_thw": torch.tensor(one["image_grid_thw"]),
    }


@in_turn("family", VISION_OF)
def test_gradients_of_packed_documents_are_those_of_one_at_a_time(family: str):
    network = model(family)
    singles = gradients(network, [alone(one) for one in DOCUMENTS])
    register_attention(network)
    collate = ImageCollator(network)
    packed = gradients(network, [collate(DOCUMENTS)])
    assert float((packed - singles).norm() / singles.norm()) < 1e-12
    text = gradients(network, [collate([DOCUMENTS[1]])])  # every rank runs the encoder, and learns nothing by it
    assert all(parameter.grad is not None for parameter in network.parameters())
    network.set_attn_implementation("sdpa")
    own = gradients(network, [alone(DOCUMENTS[1])])
    assert float((text - own).norm() / own.norm()) < 1e-12


def test_a_balanced_trainer_trains_every_document_with_images_once(tmp_path: Any):
    class Counting(ImageCollator):
        def __call__(self, documents: Any) -> Any:
            seen.extend(one["number"] for one in documents)
            return super().__call__(documents)

    network, seen = model(), list[int]()
    register_attention(network)
    documents = [{**DOCUMENTS[number % 4], "number": number} for number in range(12)]
    phases = DocumentPhases({"encoder": [1e-3 * ("pixel_values" in one) for one in documents]})
    settings: Any = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "disable_tqdm": True}
    settings |= {"save_strategy": "no", "gradient_accumulation_steps": 2, "dataloader_pin_memory": False}
    trainer = balanced(transformers.Trainer, context_window=64, phases=phases, model="tiny")(
        model=network,
        args=transformers.TrainingArguments(**settings, num_train_epochs=1, remove_unused_columns=False),
        train_dataset=documents,
        data_collator=Counting(network),
    )
    trainer.train()
    assert sorted(seen[-12:]) == [*range(12)]  # before, packing was checked


def with_fields(**changed: Any) -> dict[str, Any]:
    return {name: value for name, value in (DOCUMENTS[0] | changed).items() if value is not None}


REFUSED: list[tuple[Document, str]] = [
    (with_fields(pixel_values=None), "only one of pixel_values and image_grid_thw"),
    (with_fields(pixel_values=None, image_grid_thw=None), "6 placeholders of images and no pixel_values"),
    (with_fields(pixel_values=DOCUMENTS[0]["pixel_values"][:-4]), "has 20 patches in pixel_values, 24 by image_grid"),
    (with_fields(input_ids=[5, *DOCUMENTS[0]["input_ids"], IMAGE]), "28 by its 7 placeholders"),
    (with_fields(pixel_values_videos=[[1.0]]), "has pixel_values_videos, which packed micro-batches would lose"),
]


def test_images_that_would_be_lost_are_refused():
    network = model()
    collate = ImageCollator(network)
    for wrong, message in REFUSED:
        with pytest.raises(UserError, match=message):
            collate([wrong])
    batch = collate(DOCUMENTS)
    with pytest.raises(UserError, match="not shared among context-parallel ranks"):
        context_parallel_share(batch, 2, 0)
    with pytest.raises(UserError, match="check_batch cannot take images"):
        check_batch(network, batch)
    network.config.model_type = "llava"
    with pytest.raises(UserError, match="'llava' are not known to take packed images"):
        ImageCollator(network)


def test_processes_and_states_with_other_phases_are_told_apart():
    lengths = [30, 20, 10, 40] * 4
    settings: Any = {"context_window": 64, "micro_batches": 2, "dp": 1, "model": "tiny"}
    ones = DocumentPhases({"encoder": np.ones(16)})
    sampler = PlannedBatchSampler(lengths, **settings, phases=ones)
    assert sorted(number for batch in sampler for number in batch) == [*range(16)]
    batches = iter(PlannedBatchSampler(lengths, **settings, phases=ones))
    next(batches)
    other = PlannedBatchSampler(lengths, **settings, phases=DocumentPhases({"encoder": 2 * np.ones(16)}))
    with pytest.raises(UserError, match="inside a step with phases = "):
        other.load_state_dict(batches.state_dict())
    with pytest.raises(UserError, match="phases are of 3 documents, and there are 16"):
        list(PlannedBatchSampler(lengths, **settings, phases=DocumentPhases({"encoder": [1, 2, 3]})))
