"""What the adoption examples share: documents, a model, turns, and the table.

Every example trains the same documents with the same model and seed in two ways or more: as its stack does it, and
balanced. They take turns, so that all see the same machine, and what is compared are CPU seconds in lock step: of every
step those of the slowest rank. A document is a definition in Python's standard library, one token a
byte, cut off where it is longer than the window. Micro-batches are packed without padding and attend with the
same attention, so that they differ in nothing but which documents are together.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from wlb.attention import segment_attention
from wlb.documents.prepare.sources import stdlib_documents, stdlib_files, stdlib_root
from wlb.integrations.huggingface import balanced, check_batch, register_attention
from wlb.integrations.packed import FlatteningCollator
from wlb.training.observe.compute_clock import thread_seconds
from wlb.workload import Costs, ModelShape, make_workload

Train = Callable[[str, "Run", Sequence[Any], argparse.Namespace], None]
WAYS = ("original", "balanced")
VOCABULARY = 256  # bytes
SHAPE = ModelShape(
    hidden=128, layers=2, heads=4, kv_heads=4, head_dim=32, ffn_hidden=256, vocab_size=VOCABULARY
)  # attention costs about as much here as in a 7B model at long context


def run_example(
    description: str | None, train: Train, *, ways: Sequence[str] = WAYS, shared: bool = False, masked: bool = False
) -> None:
    """Run one example: ``train(way, run, documents, arguments)`` in turns on the processes of torchrun.

    Of ``ways`` the first is the stack's own. ``shared`` is whether all processes share every micro-batch; ``masked``
    documents begin with a prompt, a quarter of their tokens, that is not learnt.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--documents", type=_at_least_1, default=128, help="documents, a multiple of 16")
    parser.add_argument("--context-window", type=_at_least_1, default=4096)
    parser.add_argument("--micro-batches", type=_at_least_1, default=2, help="of a step on each rank")
    parser.add_argument("--turns", type=_at_least_1, default=2, help="of each way of training, after one to warm up")
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("this needs two processes: torchrun --standalone --nproc-per-node 2 examples/...")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    documents = stdlib_texts(arguments.documents, arguments.context_window)
    for document in documents if masked else ():
        prompt = document["length"] // 4
        document["labels"] = [-100] * prompt + document["input_ids"][prompt:]
    compare(arguments, ways, train, documents, dist.get_world_size() if shared else 1)
    # The process ends here: torch's DDP keeps gloo's threads past destroy_process_group, and an interpreter that ends
    # while they run aborts now and then (one in fifty on a busy machine, torch 2.13).
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def stdlib_texts(count: int, longest: int) -> list[dict[str, Any]]:
    """``count`` documents of at most ``longest`` tokens, numbered: definitions, from every seventh file."""
    documents: list[dict[str, Any]] = []
    for path in list(stdlib_files(stdlib_root()))[::7]:
        for text in stdlib_documents(path):
            tokens = list(text.encode()[:longest])
            if len(tokens) > 1:
                documents.append({"input_ids": tokens, "length": len(tokens), "number": len(documents)})
            if len(documents) == count:
                return documents
    return documents


def prices() -> Costs:
    """Predicted seconds of a document in the examples' model on a CPU."""
    return make_workload(SHAPE, "cpu")


class TinyTransformer(nn.Module):
    """Two blocks, for the examples that need no Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        width = SHAPE.hidden
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(64, width)  # of a token's place in its document, modulo 64
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(width),
                        nn.Linear(width, SHAPE.ffn_hidden),
                        nn.GELU(),
                        nn.Linear(SHAPE.ffn_hidden, width),
                    ),
                }
            )
            for _ in range(SHAPE.layers)
        )

    def forward(self, tokens: Tensor, position_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Scores (tokens, vocabulary) of packed tokens (tokens,) in documents of ``lengths``."""
        hidden = self.embedding(tokens) + self.positions(position_ids % 64)
        block: Any
        for block in self.blocks:
            q, k, v = block["qkv"](block["norm"](hidden)).unflatten(1, (3, SHAPE.heads, -1)).unbind(1)
            hidden = hidden + block["out"](segment_attention(q, k, v, lengths).flatten(1))
            hidden = hidden + block["mlp"](hidden)
        scores: Tensor = hidden @ self.embedding.weight.T
        return scores


def llama(run: Run, documents: Sequence[Any]) -> Any:
    """An unmodified Hugging Face Llama of the same size with packed attention, and its gradient held to one at a time.

    Both ways of training attend with it: packed documents need no mask of tokens x tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.ffn_hidden,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        max_position_embeddings=1 << 17,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    register_attention(model)
    run.gradient_error = check_batch(model, FlatteningCollator()(documents[:8])).gradient_error
    return model


def trainer_settings(documents: Sequence[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """``TrainingArguments`` of both ways of training; nothing is saved."""
    return {
        "output_dir": tempfile.gettempdir(),
        "per_device_train_batch_size": usual_batch(documents, arguments),  # the balanced Trainer has no use for it
        "gradient_accumulation_steps": arguments.micro_batches,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }


def trainer_class(base: type[Any], way: str, run: Run, arguments: argparse.Namespace) -> type[Any]:
    """A Hugging Face Trainer whose micro-batches are timed; a planned one where ``way`` is "balanced"."""

    class Timed(base):
        def training_step(self, *positional: Any, **keywords: Any) -> Any:
            with run.computing():
                return super().training_step(*positional, **keywords)

    # ``llama`` has checked packing already.
    planned = {"context_window": arguments.context_window, "check": False}
    return balanced(Timed, **planned) if way == "balanced" else Timed


@dataclass
class Run(FlatteningCollator):
    """One run on this rank, and the collator that writes down what it trains.

    ``batches`` are the documents of each micro-batch and ``computed`` the seconds that its own thread ran.
    """

    micro_batches: int
    batches: list[list[int]] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    gradient_error: float = float("nan")
    predicted: list[float] = field(default_factory=list)  # of each micro-batch, where ranks share them

    def __post_init__(self) -> None:
        self._now = thread_seconds()

    def __call__(self, documents: Sequence[Any]) -> dict[str, Any]:
        self.batches.append([document["number"] for document in documents])
        return super().__call__(documents)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count a micro-batch's forward and backward; waiting for another rank, or for a core, is not in it."""
        began = self._now()[0]
        yield
        self.computed.append(self._now()[0] - began)


def usual_batch(documents: Sequence[Any], arguments: argparse.Namespace) -> int:
    """Documents of a micro-batch as the original makes it: as many as fill the window on average."""
    tokens: int = sum(document["length"] for document in documents)
    window: int = arguments.context_window
    return max(1, round(window * len(documents) / tokens))


def compare(
    arguments: argparse.Namespace, ways: Sequence[str], train: Train, documents: Sequence[Any], cp: int
) -> None:
    """Train in turns and print a column for each way; the first turn warms up."""
    runs: dict[str, list[list[Run]]] = {way: [] for way in ways}
    for _ in range(arguments.turns + 1):
        for way, turns in runs.items():
            run = Run(arguments.micro_batches)
            dist.barrier()
            train(way, run, documents, arguments)
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (run.batches, run.computed, run.gradient_error, run.predicted))
            turns.append([Run(arguments.micro_batches, *of_rank) for of_rank in gathered])
    if dist.get_rank() == 0:
        lengths = np.array([document["length"] for document in documents])
        _print({way: turns[1:] for way, turns in runs.items()}, lengths, cp)


def _print(runs: dict[str, list[list[Run]]], lengths: Any, cp: int) -> None:
    prices_of = prices().document_seconds(lengths)
    columns = {way: _column(turns, lengths, prices_of, cp) for way, turns in runs.items()}
    first, *others = runs
    print(f"{'':28}" + "".join(f"{way:>18}" for way in runs) + f"   {len(runs[first][0])} processes, one thread each")
    for name in columns[first]:
        print(f"{name:28}" + "".join(f"{column[name]:>18}" for column in columns.values()))
    seconds = {way: np.array([_lock_step(turn, cp) for turn in turns]) for way, turns in runs.items()}
    work = {
        way: sum(prices_of[i] for run in turns[0][::cp] for batch in run.batches for i in batch)
        for way, turns in runs.items()
    }
    for way in others:
        speeds = seconds[first] / seconds[way] * work[way] / work[first]
        same = ", same documents" if columns[way]["documents"] == columns[first]["documents"] else ""
        print(
            f"speed at equal work, {way}: {np.median(speeds):.2f}x "
            f"({speeds.min():.2f} to {speeds.max():.2f} over {len(speeds)} turns{same})"
        )


def _column(turns: list[list[Run]], lengths: Any, seconds: Any, cp: int) -> dict[str, str]:
    ranks = turns[0]
    trained = Counter(document for run in ranks[::cp] for batch in run.batches for document in batch)
    digest = hashlib.sha256(repr(sorted(trained.items())).encode()).hexdigest()[:8]
    once = set(trained.values()) == {1} and len(trained) == len(lengths)
    predicted = [run.predicted or [float(seconds[batch].sum()) for batch in run.batches] for run in ranks]
    computed = np.median([[sum(run.computed) for run in turn] for turn in turns], axis=0)
    measured = [_imbalance(_steps([run.computed for run in turn], ranks[0], cp)) for turn in turns]
    return {
        "documents": digest + (" once" if once else ""),
        "gradient, one at a time": f"{ranks[0].gradient_error:.0e}",
        "imbalance, predicted": f"{_imbalance(_steps(predicted, ranks[0], cp)):.3f}",
        "imbalance, measured": f"{np.median(measured):.3f}",
        "CPU seconds of each rank": " ".join(f"{value:.1f}" for value in computed),
        "in lock step": f"{np.median([_lock_step(turn, cp) for turn in turns]):.1f}",
    }


def _steps(ranks: Sequence[Sequence[float]], run: Run, cp: int) -> Any:
    """Seconds of every rank (rows) between two points at which all wait: of a step, or of a micro-batch they share."""
    table = np.array([values[: min(map(len, ranks))] for values in ranks])
    return table if cp > 1 else np.add.reduceat(table, range(0, table.shape[1], run.micro_batches), axis=1)


def _imbalance(steps: Any) -> float:
    """The slowest rank's seconds over the mean rank's."""
    return float(steps.max(axis=0).sum() / steps.mean(axis=0).sum())


def _lock_step(ranks: Sequence[Run], cp: int) -> float:
    """Seconds of the slowest rank, of every step."""
    return float(_steps([run.computed for run in ranks], ranks[0], cp).max(axis=0).sum())
