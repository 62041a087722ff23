"""torchtitan's Trainer with our micro-batches on CPUs: prints what it trained and how exact losses and gradients are.

torchrun --standalone --nproc-per-node 2 -m tests.integrations.torchtitan_steps STORE --seq-len N --steps N
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.integrations.torchtitan_cpu import IN_ROWS, RecordingTrainer, Trainer, cpu_config
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.integrations.torchtitan import BalancedDataLoader
from wlb.packing.plan import MicroBatch
from wlb.runtime.batch import Batch
from wlb.runtime.reading import make_batch

MICRO_BATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--level", action="store_true", help="level steps")
    parser.add_argument("--ep", type=int, default=1, help="expert parallelism")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    with TemporaryDirectory() as folder:
        sizes = {"seq_len": arguments.seq_len, "steps": arguments.steps, "micro_batches": MICRO_BATCHES // arguments.ep}
        prefix = one_epoch(arguments.store, Path(folder), math.prod(sizes.values()))
        store, sizes = TokenStore.open(prefix), sizes | {"ep": arguments.ep}
        alone = RecordingTrainer(cpu_config(prefix, **sizes))
        recorder = RecordingTrainer(cpu_config(prefix, level=arguments.level, **sizes))
        loader = another_loader(recorder.trainer)
        plans = list(islice(loader.batches.steps.plans(), arguments.steps))
        steps = [[make_batch(MicroBatch((part,), 0.0), store) for part in plan.segments] for plan in plans]
        trained, errors, bias_errors = recorder.trained, [], []
        for segments in steps:
            state, taken = recorder.trainer.dataloader.state_dict(), len(trained)
            loss, gradients, biases = one_document_at_a_time(alone, recorder.trainer, segments)
            recorder.step()
            errors += [gradient_error(recorder.trainer, gradients), abs(recorder.losses[-1] / loss - 1)]
            bias_errors += [float((biases - router_biases(recorder.trainer)).abs().max())]
        loader.load_state_dict(state)
        last_step = [batch["input"].flatten() for batch, _ in islice(loader, len(trained) - taken)]
        planned = [(batch.tokens, batch.position_ids) for segments in steps for batch in segments]
        report = {
            "error": float(np.max(errors)),
            "bias_error": max(gathered(bias_errors)),
            "documents_once": rows_of(gathered(trained)) == rows_of(planned),
            "micro_batches": gathered([len(trained)]),
            "shared": sum(len(part.ranks) > arguments.ep for plan in plans for part in plan.micro_batches),
            "continues": all(map(torch.equal, last_step, [tokens for tokens, _ in trained[taken:]])),
        }
        if dist.get_rank() == 0:
            print(json.dumps(report, indent=2))
    dist.destroy_process_group()


def one_epoch(whole: Path, folder: Path, tokens_per_rank: int) -> str:
    """A store of the first documents of ``whole``, as many as the steps train."""
    source, prefix = TokenStore.open(whole), folder / "documents"
    wanted = int(np.searchsorted(source.lengths.cumsum(), tokens_per_rank * dist.get_world_size())) + 1
    with TokenStoreWriter(prefix, vocab_size=2048) as writer:
        for document in range(min(wanted, len(source))):
            writer.add(source.read(document))
    return str(prefix)


def another_loader(trainer: Trainer) -> BalancedDataLoader:
    """A loader that is built like the trainer's."""
    training = trainer.config.training
    if IN_ROWS:
        sizes = {"seq_len": training.seq_len, "local_batch_size": 1}
    else:
        sizes = {"max_context_length": training.max_context_length, "num_tokens_per_batch": training.max_context_length}
    loader: BalancedDataLoader = trainer.config.dataloader.build(
        dp_world_size=dist.get_world_size(), dp_rank=dist.get_rank(), **sizes
    )
    return loader


def one_document_at_a_time(
    alone: RecordingTrainer, trainer: Trainer, segments: list[Batch]
) -> tuple[float, list[Tensor], Tensor]:
    """Loss and gradients of a step at the weights of ``trainer``, every document on every rank by itself.

    And the biases of routers after it.
    """
    weights, copies = weights_of(trainer), weights_of(alone.trainer)
    for weight, copy in zip(weights, copies, strict=True):
        copy.data.to_local().copy_(weight.data.to_local())
    labels = sum(int((batch.labels >= 0).sum()) for batch in segments)
    rows = None if IN_ROWS else ...  # a dimension more, or none
    loss = 0.0
    for batch in segments:
        loss += alone.forward_backward(
            input_dict={"input": batch.tokens[rows], "positions": batch.position_ids[rows]},
            labels=batch.labels[rows],
            global_valid_tokens=torch.tensor(labels * dist.get_world_size()),  # gradients are summed over ranks
        ).item()
    gradients = [weight.grad.to_local().clone() for weight in copies]
    alone.trainer.optimizers.step()  # which updates biases from the tokens that experts got
    alone.trainer.optimizers.zero_grad()
    return loss * dist.get_world_size(), gradients, router_biases(alone.trainer)


def gradient_error(trainer: Trainer, gradients: list[Tensor]) -> float:
    """Relative, of this rank's share."""
    theirs = torch.cat([weight.grad.to_local().flatten() for weight in weights_of(trainer)])
    ours = torch.cat([gradient.flatten() for gradient in gradients])
    return float((theirs - ours).norm() / ours.norm())


def router_biases(trainer: Trainer) -> Tensor:
    biases = [value for name, value in trainer.model_parts[0].named_buffers() if name.endswith("expert_bias_E")]
    return torch.cat([torch.zeros(1), *(value.to_local() if isinstance(value, DTensor) else value for value in biases)])


def weights_of(trainer: Trainer) -> list[Any]:
    return list(trainer.model_parts[0].parameters())


def rows_of(batches: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[int, int]]:
    """The tokens of micro-batches with their positions, in an order of their own; without padding."""
    return sorted(row for batch in batches for row in zip(*(each.tolist() for each in batch), strict=True) if row[0])


def gathered(mine: list[Any]) -> list[Any]:
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return [item for of_rank in of_ranks for item in of_rank]


if __name__ == "__main__":
    main()
