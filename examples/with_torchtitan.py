"""torchtitan's Trainer with and without our micro-batches, a step of each in turn, on the same documents.

    wlb prepare --stdlib --train-bpe 1024 --out demo/corpus
    torchrun --standalone --nproc-per-node 2 examples/with_torchtitan.py demo/corpus

Both are torchtitan's Trainer with its debug Llama on CPUs (``torchtitan_cpu.py``); ``balanced`` is all that adoption
takes. Seconds are CPU seconds of each rank, without waiting; "lock-step" is what the dearest rank of each micro-batch
takes over the mean, 1 being perfect.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cpu import IN_ROWS, RecordingTrainer, Trainer, cpu_config
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.training.data.batch import make_batch
from wlb.workload import ModelShape, make_workload

MICRO_BATCHES = 4
SHAPE = ModelShape(hidden=256, layers=6, heads=16, kv_heads=16, head_dim=16, ffn_hidden=768, vocab_size=2048)


def balanced(config: Trainer.Config, store: str) -> Trainer.Config:
    """What a user adds; on a command line ``--override.imports``."""
    settings = {"store": store, "micro_batches": MICRO_BATCHES, "model": "tiny", "hardware": "cpu", "multiple_of": 1}
    config.override.imports = [("wlb.integrations.torchtitan.balance", settings)]
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("store", type=Path)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with TemporaryDirectory() as folder:
        store = one_epoch(arguments.store, Path(folder), arguments.steps * arguments.seq_len * MICRO_BATCHES)
        size = {"seq_len": arguments.seq_len, "micro_batches": MICRO_BATCHES, "steps": arguments.steps}
        original = RecordingTrainer(cpu_config(store, **size))
        ours = RecordingTrainer(balanced(cpu_config(store, **size), store))
        plans = planned(ours.trainer, arguments.steps)
        gradients = one_document_at_a_time(ours, plans[0], TokenStore.open(store))
        for step in range(arguments.steps):
            ours.step()
            if step == 0:
                error = gradient_error(ours.trainer, gradients)
            original.step()
        expected = digest(TokenStore.open(store).read(d, s, n) for plan in plans for d, s, n in in_store(plan, store))
        trained = digest(piece for piece in gathered([tokens for tokens, *_ in pieces(ours)]))
        theirs, mine = measured(original), measured(ours)
        speed = mine["predicted_work_per_critical_second"] / theirs["predicted_work_per_critical_second"]
        report = {
            "documents_once": trained == expected,
            "digest": trained[:16],
            "gradient_error": error,
            "predicted_lock_step": round(lock_step(predicted(plans)), 3),
            "speed_at_equal_work": round(speed, 3),
            "torchtitan": theirs,
            "balanced": mine,
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
    return [plan for plan, _ in zip(loader.steps(), range(steps), strict=False)]


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


def in_store(plan: StepPlan, store: str) -> list[tuple[int, int, int]]:
    documents = len(TokenStore.open(store))
    return [(document % documents, start, length) for document, start, length in plan.segments]


def pieces(recorder: RecordingTrainer) -> list[tuple[list[int], int]]:
    """The documents, or pieces of them, that this rank trained: tokens and length."""
    found = []
    for tokens, positions, _ in recorder.trained:
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(tokens)]
        found += [(tokens[a:b].tolist(), b - a) for a, b in pairwise(starts)]
    return found


def gathered(mine: Any) -> list[Any]:
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return [item for of_rank in of_ranks for item in of_rank]


def digest(trained: Iterable[Any]) -> str:
    """Of a set of documents: the same whoever trained them, and in which order."""
    one_by_one = sorted(hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).hexdigest() for tokens in trained)
    return hashlib.sha256("".join(one_by_one).encode()).hexdigest()


def predicted(plans: list[StepPlan]) -> np.ndarray[Any, Any]:
    return np.array([[m.workload for m in rank] for plan in plans for rank in [*plan.ranks]]).reshape(
        len(plans), dist.get_world_size(), -1
    )


def lock_step(seconds: np.ndarray[Any, Any]) -> float:
    """``seconds`` has shape (steps, ranks, micro-batches): the dearest rank of each micro-batch over the mean."""
    return float(seconds.max(axis=1).sum() / seconds.mean(axis=1).sum())


def measured(recorder: RecordingTrainer) -> dict[str, Any]:
    """Over all steps but the first."""
    steps = len(recorder.wall_seconds)
    cpu = np.array(gathered([recorder.cpu_seconds])).reshape(dist.get_world_size(), steps, -1).swapaxes(0, 1)[1:]
    lengths = gathered([length for tokens, length in pieces(recorder)])
    tokens, wall = sum(lengths), max(gathered([sum(recorder.wall_seconds)]))
    work = float(make_workload(SHAPE, "cpu").document_seconds(lengths).sum())  # attention of cut documents is less
    critical = float(cpu.max(axis=1).sum())
    return {
        "losses": [round(loss, 4) for loss in recorder.losses],
        "lock_step": round(lock_step(cpu), 3),
        "cpu_seconds_per_rank": [round(float(seconds), 2) for seconds in cpu.sum(axis=(0, 2))],
        "tokens": tokens,
        "tokens_per_second": round(tokens / wall),
        "predicted_work_per_critical_second": round(work * (steps - 1) / steps / critical, 4),
    }


if __name__ == "__main__":
    main()
