"""torchtitan's Trainer with our micro-batches on CPUs: prints what it trained and how exact its first gradients are.

torchrun --standalone --nproc-per-node 2 -m tests.integrations.torchtitan_steps STORE --seq-len N --steps N
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.integrations.torchtitan_cpu import IN_ROWS, RecordingTrainer, Trainer, cpu_config
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime.batch import make_batch

MICRO_BATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with TemporaryDirectory() as folder:
        prefix = one_epoch(arguments.store, Path(folder), arguments.steps * arguments.seq_len * MICRO_BATCHES)
        store = TokenStore.open(prefix)
        recorder = RecordingTrainer(
            cpu_config(prefix, seq_len=arguments.seq_len, micro_batches=MICRO_BATCHES, steps=arguments.steps)
        )
        plans = planned(recorder.trainer, arguments.steps)
        gradients = one_document_at_a_time(recorder, plans[0], store)
        recorder.step()
        error = gradient_error(recorder.trainer, gradients)
        for _ in range(arguments.steps - 1):
            recorder.step()
        expected = digest(store.read(d % len(store), s, n) for plan in plans for d, s, n in plan.segments)
        report = {
            "documents_once": digest(gathered(pieces(recorder))) == expected,
            "gradient_error": error,
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


def planned(trainer: Trainer, steps: int) -> list[StepPlan]:
    """What the balanced loader plans, from another one that is built the same."""
    training = trainer.config.training
    if IN_ROWS:
        sizes = {"seq_len": training.seq_len, "local_batch_size": 1}
    else:
        sizes = {"max_context_length": training.max_context_length, "num_tokens_per_batch": training.max_context_length}
    loader = trainer.config.dataloader.build(dp_world_size=dist.get_world_size(), dp_rank=dist.get_rank(), **sizes)
    return list(islice(loader.steps(), steps))


def one_document_at_a_time(recorder: RecordingTrainer, plan: StepPlan, store: TokenStore) -> list[Tensor]:
    """Gradients of a step from each of its documents alone, on every rank; they are summed over ranks, so divided."""
    batches = [make_batch(MicroBatch((segment,), 0.0), store) for segment in plan.segments]
    labels = sum(int((batch.labels >= 0).sum()) for batch in batches)
    rows = None if IN_ROWS else ...  # a dimension more, or none
    for batch in batches:
        recorder.forward_backward(
            input_dict={"input": batch.tokens[rows], "positions": batch.positions[rows]},
            labels=batch.labels[rows],
            global_valid_tokens=torch.tensor(labels * dist.get_world_size()),
        )
    gradients = [weight.grad.to_local().clone() for weight in recorder.trainer.model_parts[0].parameters()]
    recorder.trainer.optimizers.zero_grad()
    return gradients


def gradient_error(trainer: Trainer, gradients: list[Tensor]) -> float:
    """Relative, of this rank's share; torchtitan has clipped its gradients to a norm of ``max_norm``."""
    theirs = torch.cat([weight.grad.to_local().flatten() for weight in trainer.model_parts[0].parameters()])
    ours = torch.cat([gradient.flatten() for gradient in gradients])
    theirs, ours = theirs / theirs.norm(), ours / ours.norm()
    return float((theirs - ours).norm())


def pieces(recorder: RecordingTrainer) -> list[list[int]]:
    """The documents, or pieces of them, that this rank trained."""
    found = []
    for tokens, positions in recorder.trained:
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(tokens)]
        found += [tokens[a:b].tolist() for a, b in pairwise(starts)]
    return found


def gathered(mine: Any) -> list[Any]:
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return [item for of_rank in of_ranks for item in of_rank]


def digest(trained: Iterable[Any]) -> str:
    """Of a set of documents: the same whoever trained them, and in which order."""
    one_by_one = sorted(hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).hexdigest() for tokens in trained)
    return hashlib.sha256("".join(one_by_one).encode()).hexdigest()


if __name__ == "__main__":
    main()
