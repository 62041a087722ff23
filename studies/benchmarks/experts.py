"""A small mixture of experts, trained on text: how uneven experts are in a round, and what rounds gain.

    .venv/bin/python -m studies.benchmarks.experts [--steps N] [--repetitions N] [--out FILE]

First a mixture trains ``--steps`` steps on the source code of Python's standard library, with each kind of router. Then
it routes rounds of about a window of tokens: one long document, or many short ones. "Uneven" are the tokens of the
busiest GPU over those of the mean one, of ``ep`` GPUs that divide the experts, in the mean layer; the simulator assumes
1.1 (``Software.expert_imbalance``).

Then plain-4d and level rounds train the same mixture in turns, on two and four real processes with ep = 2. "Speed" is
trained tokens per CPU second of the critical path, over plain-4d (``benchmarks/parts/training/side_by_side.py``).
plain-4d cuts documents at windows, so its tokens attend less; "equal work" counts predicted work in place of tokens.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.parts.measurement import command, facts, make_parser, show, spread, write
from benchmarks.parts.training.side_by_side import Note, files_of, launch, read_notes, step_seconds, typical
from benchmarks.parts.training.turns import CONFIG, prepare
from wlb.documents.segments import Segment
from wlb.documents.store.reader import TokenStore
from wlb.job.config_file import load_config
from wlb.job.configured_shape import configured_shape
from wlb.models.experts import Routing
from wlb.models.transformer import Transformer
from wlb.packing.plan import MicroBatch
from wlb.runtime.batch import RankSlice
from wlb.runtime.reading import make_batch
from wlb.training.environment import joined_job
from wlb.training.preflight import check_job
from wlb.training.trainer import Trainer
from wlb.workload import make_workload

MIXTURE = ("model.experts=32", "model.experts_per_token=4", "model.expert_hidden=128", "model.layers=4")
ROUTERS = {
    "softmax, balance loss 0.001": ["training.balance_loss=0.001"],
    "softmax, balance loss 0.01": ["training.balance_loss=0.01"],
    "sigmoid, bias": ["model.router=sigmoid", "training.balance_loss=0"],
}
SIZES, ROUNDS = (4, 8, 32), 64
SYSTEMS = {"plain-4d": ["preset=plain-4d"], "level rounds": ["preset=balanced", "packing.grouping=level"]}


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, print tables and write them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="trained before routing is measured")
    parser.add_argument("--window", type=int, default=4096, help="tokens of a round")
    parser.add_argument("--repetitions", type=int, default=3, help="of the comparison")
    parser.add_argument("--compared", type=int, default=6, help="counted steps of a repetition")
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-experts"), help="working files")
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    store = prepare(options.directory)
    uneven = [row for router, settings in ROUTERS.items() for row in _unevenness(router, settings, options, store)]
    columns = {"router": "{router}", "round": "{round}", "ep": "{ep}", "uneven": "{median:.2f}", "most": "{most:.2f}"}
    show(f"after {options.steps} steps, {ROUNDS} rounds of {options.window} tokens", uneven, columns)
    speeds = [row for processes in (2, 4) for row in _speeds(processes, options, store)]
    columns = {
        "processes": "{processes}",
        "": "{system}",
        "speed": "{speed:.2f}x",
        "least to most": "{least:.2f} to {most:.2f}",
        "equal work": "{equal_work:.2f}x",
    }
    show("tokens per CPU second of the critical path, ep = 2", speeds, columns)
    write(facts("torch") | {"steps": options.steps, "uneven": uneven, "speeds": speeds}, options.out)


def _unevenness(router: str, changes: Sequence[str], options: Any, store: Path) -> Iterator[dict[str, Any]]:
    """Rows of the table, from a mixture that this process trains with ``changes`` for its ``router``."""
    window = options.window
    settings = [
        *(*MIXTURE, *changes, f"data.store={store}", f"data.context_window={window}"),
        *("packing.global_batch=2", f"training.steps={options.steps}", "parallel.pp=1"),
        *files_of(options.directory / router),
    ]
    config = load_config(CONFIG, settings)
    with joined_job(config) as device:
        trainer = Trainer(check_job(config, 1), device)
        trainer.run()
        (model,) = trainer.model.stages
        tokens = trainer.model.checked.store
        for name, rounds in _rounds(tokens.lengths, window).items():
            counts = [_routed(model, one, tokens) for one in rounds]
            for ep in SIZES:
                of_gpus = torch.stack(counts).double().unflatten(2, (ep, -1)).sum(-1)  # (rounds, layers, ep)
                uneven = (of_gpus.amax(-1) / of_gpus.mean(-1)).mean(-1).tolist()
                yield {"router": router, "round": name, "ep": ep, "median": median(uneven), "most": max(uneven)}


def _rounds(lengths: np.ndarray, window: int) -> dict[str, list[MicroBatch]]:
    """Rounds of the first ``window`` tokens of long documents, and of short documents with about as many."""
    rng = np.random.default_rng(0)
    long = rng.permutation(np.flatnonzero(lengths >= window))[:ROUNDS]
    short = rng.permutation(np.flatnonzero((lengths > 0) & (lengths < window // 4)))
    ends = np.searchsorted(lengths[short].cumsum(), np.arange(1, ROUNDS + 1) * window)
    many = [part for part in np.split(short, ends)[:ROUNDS] if len(part)]
    whole = [MicroBatch(tuple(Segment(int(one), 0, int(lengths[one])) for one in part), 0.0) for part in many]
    return {"one document": [MicroBatch((Segment(int(one), 0, window),), 0.0) for one in long], "many": whole}


@torch.no_grad()
def _routed(model: Transformer, one: MicroBatch, store: TokenStore) -> torch.Tensor:
    """Tokens of each expert in each layer, (layers, experts)."""
    batch = RankSlice().of(make_batch(one, store))
    assert batch.attention is not None
    routing = Routing(len(batch.tokens))
    model(batch.tokens, batch.position_ids, batch.attention, routing)
    return torch.stack([*routing.counts.values()])


def _speeds(processes: int, options: Any, store: Path) -> Iterator[dict[str, Any]]:
    """Rows of the table: all systems train a step in turn."""
    folder = options.directory / f"{processes}"
    shape = configured_shape(load_config(CONFIG, [*MIXTURE]).model, 512)
    notes: list[dict[tuple[int, int], list[list[Note]]]] = []
    for repetition in range(options.repetitions):
        words: list[str] = []
        for name, settings in SYSTEMS.items():
            shutil.rmtree(folder / name, ignore_errors=True)
            words += ["--job", str(CONFIG), *settings, *MIXTURE, *files_of(folder / name), f"data.store={store}"]
            words += ["metrics.document_ids=segments", f"parallel.dp={processes}", "parallel.ep=2", "parallel.pp=1"]
            words += [f"packing.global_batch={4 * processes}", f"training.steps={options.compared + 1}"]
        launch(processes, folder / f"notes-{repetition}", words)
        notes.append(read_notes(folder / f"notes-{repetition}", processes))
    rates: list[list[float]] = []  # tokens per CPU second: of all repetitions together, and of each
    work: list[float] = []  # of a token
    for number, name in enumerate(SYSTEMS):
        rows = [json.loads(line) for line in (folder / name / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
        steps, tokens = range(2, options.compared + 2), sum(row["tokens"] for row in rows[1:])
        lengths = [length for row in rows[1:] for *_, length in row["segments"]]
        work.append(float(make_workload(shape, "cpu").document_seconds(lengths).sum()) / tokens)
        together = [[typical(one) for one in zip(*(of[number, step] for of in notes), strict=True)] for step in steps]
        seconds = [sum(map(step_seconds, together))]
        seconds += [sum(step_seconds(of[number, step]) for step in steps) for of in notes]
        rates.append([tokens / one for one in seconds])
    for name, of_system, of_token in zip(SYSTEMS, rates, work, strict=True):
        speeds = [mine / base for mine, base in zip(of_system, rates[0], strict=True)]
        row = {"processes": processes, "system": name, "speed": speeds[0], "equal_work": speeds[0] * of_token / work[0]}
        yield row | {"tokens_per_cpu_second": of_system[0]} | spread(speeds)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    sys.exit(main())
