"""A vision-language model, packed by lengths alone and by what its encoder and its language model take.

torchrun --standalone --nproc-per-node 2 examples/with_images.py

A tiny Qwen2-VL of random weights trains documents whose text and images (seeded noise) differ in size independently.
Both ways train every document once. Seconds are CPU time of each phase, measured on every rank; in lock step, as under
FSDP, every micro-batch takes the slower rank's encoder and then the slower rank's language model.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.checks import check_packing
from wlb.integrations.huggingface import ImageCollator, register_attention
from wlb.integrations.packed import packed_loss
from wlb.training.observe.compute_clock import thread_seconds
from wlb.workload import ModelShape, make_workload
from wlb.workload.phases import DocumentPhases

MERGE, PATCH, VALUES = (
    2,
    4,
    3 * 2 * 4**2,
)  # patches of a side of a token, pixels of a side of a patch, values of a patch
VOCABULARY, IMAGE = 300, 299
TEXT = ModelShape(hidden=128, layers=2, heads=4, kv_heads=4, head_dim=32, ffn_hidden=256, vocab_size=VOCABULARY)
VISION = ModelShape(hidden=96, layers=3, heads=4, kv_heads=4, head_dim=24, ffn_hidden=192, vocab_size=1)


def documents_with_images(count: int, longest: int) -> list[dict[str, Any]]:
    """Text with none to three images of up to 32 x 32 patches, at most ``longest`` tokens."""
    drawn = np.random.default_rng(0)
    documents: list[dict[str, Any]] = []
    while len(documents) < count:
        ids, grids = drawn.integers(3, 290, int(drawn.lognormal(4.5, 1.0)) + 2).tolist(), []
        for _ in range(drawn.choice(4, p=[0.4, 0.3, 0.2, 0.1])):
            height, width = (MERGE * drawn.integers(2, 17, 2)).tolist()
            grids.append([1, height, width])
            ids += [297, *[IMAGE] * (height * width // MERGE**2), 296]
        if len(ids) > longest:
            continue
        document: dict[str, Any] = {"input_ids": ids, "number": len(documents)}
        if grids:
            pixels = drawn.standard_normal((sum(h * w for _, h, w in grids), VALUES), np.float32)
            document |= {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": grids}
        documents.append(document)
    return documents


def tiny_model() -> Any:
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": TEXT.hidden,
        "intermediate_size": TEXT.ffn_hidden,
        "num_hidden_layers": TEXT.layers,
        "num_attention_heads": TEXT.heads,
        "num_key_value_heads": TEXT.kv_heads,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "depth": VISION.layers,
        "embed_dim": VISION.hidden,
        "num_heads": VISION.heads,
        "mlp_ratio": VISION.ffn_hidden // VISION.hidden,
        "hidden_size": TEXT.hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
    }
    tokens: Any = {
        "image_token_id": IMAGE,
        "video_token_id": 298,
        "vision_start_token_id": 297,
        "vision_end_token_id": 296,
    }
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **tokens))
    register_attention(model)
    return model


def encoder_phase(documents: list[dict[str, Any]]) -> DocumentPhases:
    """Predicted seconds of every document's images: patches attend all others of their image, not half of them."""
    prices = make_workload(VISION, "cpu")
    seconds = [
        float((prices.document_seconds(patches) + prices.attention_seconds(patches)).sum())
        for patches in (np.prod(document.get("image_grid_thw", [[0, 0, 0]]), axis=1) for document in documents)
    ]
    return DocumentPhases({"encoder": seconds})


class PhaseClock:
    """CPU seconds of encoder and language model in every micro-batch, forward and backward; shape (2,) each."""

    def __init__(self, model: Any) -> None:
        self.seconds: list[list[float]] = []
        self._now = thread_seconds()
        self._encoder = self._mark = 0.0
        model.model.visual.register_forward_pre_hook(self._enter)
        model.model.visual.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._mark = sum(self._now())

    def _leave(self, module: Any, inputs: Any, output: Any) -> None:
        self._encoder = sum(self._now()) - self._mark
        output.pooler_output.register_hook(self._enter)  # here the backward of the language model is done

    def run(self, step: Any) -> None:
        began = sum(self._now())
        step()
        ended = sum(self._now())
        encoder = self._encoder + ended - self._mark
        self.seconds.append([encoder, ended - began - encoder])


def check(model: Any, collate: ImageCollator, documents: list[dict[str, Any]]) -> float:
    """The gradient of documents packed against that of one at a time."""

    def loss(some: list[dict[str, Any]]) -> torch.Tensor:
        total: torch.Tensor = model(**collate(some), num_items_in_batch=1).loss
        return total

    return check_packing(model, partial(loss, documents), [partial(loss, [one]) for one in documents]).gradient_error


def train(documents: list[dict[str, Any]], phases: DocumentPhases | None, arguments: Any) -> dict[str, Any]:
    """One epoch; what this rank trained and took."""
    model = tiny_model()
    collate = ImageCollator(model)
    error, clock = check(model, collate, documents[:8]), PhaseClock(model)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-3)
    sampler = PlannedBatchSampler(
        [len(document["input_ids"]) for document in documents],
        context_window=arguments.context_window,
        micro_batches=arguments.micro_batches,
        rank=dist.get_rank(),
        workload=make_workload(TEXT, "cpu"),
        phases=phases,
    )
    dataset: Any = documents
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_sampler=sampler, collate_fn=lambda some: ([one["number"] for one in some], collate(some))
    )
    batches, trained = iter(loader), []
    for count in sampler.micro_batches_of_steps():
        step = [next(batches) for _ in range(count)]
        loss_tokens = torch.tensor(sum(int((batch["labels"] >= 0).sum()) for _, batch in step))
        dist.all_reduce(loss_tokens)
        for numbers, batch in step:
            trained += numbers
            clock.run(partial(_backward, parallel, batch, loss_tokens))
        optimizer.step()
        optimizer.zero_grad()
    return {"trained": trained, "seconds": clock.seconds, "error": error}


def _backward(model: Any, batch: dict[str, Any], loss_tokens: torch.Tensor) -> None:
    labels = torch.nn.functional.pad(batch.pop("labels")[0, 1:], (0, 1), value=-100)
    logits = model(**batch).logits[0]
    packed_loss(logits, labels, loss_tokens, averaged_over=dist.get_world_size()).backward()


def column(turns: list[list[dict[str, Any]]], documents: int) -> dict[str, str]:
    """``turns`` of ranks, the first a warm-up, as a column of the table."""
    trained = sorted(number for rank in turns[0] for number in rank["trained"])
    once = " once" if trained == [*range(documents)] else ""
    seconds = np.median([[rank["seconds"] for rank in turn] for turn in turns[1:]], axis=0)  # ranks, micro-batches, 2
    slowest, mean = seconds.max(axis=0).sum(axis=0), seconds.mean(axis=0).sum(axis=0)  # of the phases
    encoder, model = slowest / mean
    return {
        "documents": hashlib.sha256(repr(trained).encode()).hexdigest()[:8] + once,
        "gradient, one at a time": f"{turns[0][0]['error']:.0e}",
        "imbalance, encoder": f"{encoder:.3f}",
        "imbalance, language model": f"{model:.3f}",
        "imbalance, lock step": f"{slowest.sum() / mean.sum():.3f}",
        "CPU s of a rank, by phase": " ".join(f"{phase:.2f}" for phase in mean),
        "CPU s, lock step": f"{slowest.sum():.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--context-window", type=int, default=2048)
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step on each rank")
    parser.add_argument("--turns", type=int, default=2, help="of both ways, after a warm-up")
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("this needs two processes: torchrun --standalone --nproc-per-node 2 examples/...")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    documents = documents_with_images(arguments.documents, arguments.context_window)
    ways = {"lengths alone": None, "phases": encoder_phase(documents)}
    turns: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in ways}
    for _ in range(arguments.turns + 1):
        for name, phases in ways.items():
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, train(documents, phases, arguments))
            turns[name].append(gathered)
    if dist.get_rank() == 0:
        columns = [column(turns[name], len(documents)) for name in ways]
        print(
            f"{'':28}" + "".join(f"{name:>16}" for name in ways) + f"   measured on {len(turns['phases'][0])} processes"
        )
        for row in columns[0]:
            print(f"{row:28}" + "".join(f"{one[row]:>16}" for one in columns))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive the group, as in examples/comparison.py


if __name__ == "__main__":
    main()
