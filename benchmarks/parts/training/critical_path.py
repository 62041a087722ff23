"""CPU seconds of the critical path of training steps: what a step takes where every rank has a core of its own.

    torchrun --nproc-per-node 2 benchmarks/parts/training/critical_path.py --out DIRECTORY \\
        --job configs/tiny_plain-4d.toml training.steps=8 --job configs/tiny.toml training.steps=8

trains the jobs in turns, a step each, as ``examples/side_by_side.py`` does. Wall time says little about it on a machine
that others use too. So every rank notes its CPU time (of all its threads, so that what gloo copies counts) when it
starts a message and when it has waited for one. ``step_seconds`` plays such notes back: a rank goes on from a wait once
its own CPU seconds are over and those of every rank that it waited for, up to where that one started the message.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import distributed_c10d

from wlb.job.config_file import load_config
from wlb.training.preflight import check_job
from wlb.training.runtime.environment import joined_job
from wlb.training.trainer import Trainer

# Those that a step calls; FSDP's two have another name since torch 2.13.
_COLLECTIVES = (
    *("all_gather", "all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter_tensor", "reduce_scatter_single"),
)


class Note(NamedTuple):
    """A rank started ``message``, or has waited for it where ``needs`` names the ranks that had to start it."""

    message: str
    needs: tuple[int, ...]
    cpu_seconds: float  # of the process since the step began


def step_seconds(ranks: Sequence[Sequence[Note]]) -> float:
    """CPU seconds of the critical path of one step, from the notes of all its ranks.

    Raises ``ValueError`` where a rank waited for a message that nobody started.
    """
    started: dict[tuple[str, int], float] = {}
    ends, at = [0.0] * len(ranks), [0] * len(ranks)
    while any(at[rank] < len(notes) for rank, notes in enumerate(ranks)):
        before = list(at)
        for rank, notes in enumerate(ranks):
            while at[rank] < len(notes):
                note = notes[at[rank]]
                if any((note.message, other) not in started for other in note.needs):
                    break
                ends[rank] += note.cpu_seconds - (notes[at[rank] - 1].cpu_seconds if at[rank] else 0.0)
                if note.needs:
                    ends[rank] = max(ends[rank], *(started[note.message, other] for other in note.needs))
                else:
                    started[note.message, rank] = ends[rank]
                at[rank] += 1
        if at == before:
            raise ValueError("a rank waited for a message that was not started")
    return max(ends)


def typical(repetitions: Sequence[Sequence[Note]]) -> list[Note]:
    """One rank's notes of a step that was trained several times: the median seconds between two notes.

    Raises ``ValueError`` unless every repetition noted the same messages.
    """
    first = repetitions[0]
    if any([note[:2] for note in notes] != [note[:2] for note in first] for notes in repetitions):
        raise ValueError("the repetitions of a step differ in their messages")
    seconds: NDArray[np.float64] = np.array([[note.cpu_seconds for note in notes] for notes in repetitions])
    ends = np.cumsum(np.median(np.diff(seconds, prepend=0.0), axis=0))
    return [note._replace(cpu_seconds=end) for note, end in zip(first, ends.tolist(), strict=True)]


def read_notes(directory: Path, ranks: int) -> dict[tuple[int, int], list[list[Note]]]:
    """The notes of all ranks, of every job (by its place on the command line) and step (counted from 1)."""
    steps: dict[tuple[int, int], list[list[Note]]] = {}
    for rank in range(ranks):
        for line in _file(directory, rank).read_text(encoding="utf-8").splitlines():
            job, step, notes = json.loads(line)
            of_rank = [Note(message, tuple(needs), seconds) for message, needs, seconds in notes]
            steps.setdefault((job, step), []).append(of_rank)
    return steps


def _file(directory: Path, rank: int) -> Path:
    return directory / f"notes-{rank}.jsonl"


class Notebook:
    """What a rank notes of one step after another; as long as it lives, functions of ``torch.distributed`` use it."""

    def __init__(self) -> None:
        self._notes: list[Note] = []
        self._messages: Counter[str] = Counter()
        self._began = 0.0
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                setattr(dist, name, self._noting_collective(getattr(dist, name)))
        for name, end in (("isend", "dst"), ("irecv", "src")):  # in both places, as ``P2POp`` compares them
            noting = self._noting_message(getattr(dist, name), end)
            setattr(dist, name, noting)
            setattr(distributed_c10d, name, noting)

    def begin(self) -> None:
        self._notes, self._messages, self._began = [], Counter(), time.process_time()

    def end(self) -> list[Note]:
        self.note("end")
        return self._notes

    def note(self, message: str, needs: Sequence[int] = ()) -> None:
        self._notes.append(Note(message, tuple(needs), time.process_time() - self._began))

    def _numbered(self, message: str) -> str:
        self._messages[message] += 1
        return f"{message} {self._messages[message]}"

    def _noting_collective(self, call: Callable[..., Any]) -> Callable[..., Any]:
        given = inspect.signature(call)

        @functools.wraps(call)
        def noting(*positional: Any, **keywords: Any) -> Any:
            group = given.bind(*positional, **keywords).arguments.get("group")
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            message = self._numbered(f"{call.__name__} {ranks}")
            self.note(message)
            work = call(*positional, **keywords)
            if isinstance(work, dist.Work):
                return _Awaited(work, lambda: self.note(message, ranks))
            self.note(message, ranks)
            return work

        return noting

    def _noting_message(self, call: Callable[..., Any], end: str) -> Callable[..., Any]:
        given = inspect.signature(call)

        @functools.wraps(call)
        def noting(*positional: Any, **keywords: Any) -> Any:
            words = given.bind(*positional, **keywords).arguments
            here, peer = dist.get_rank(), words.get(end)
            if peer is None:
                group = words.get("group") or dist.group.WORLD
                assert group is not None
                peer = dist.get_global_rank(group, words[f"group_{end}"])
            if end == "src":
                message = self._numbered(f"{peer} to {here}")
                return _Awaited(call(*positional, **keywords), lambda: self.note(message, [peer]))
            self.note(self._numbered(f"{here} to {peer}"))
            return call(*positional, **keywords)

        return noting


class _Awaited(dist.Work):
    """Says when a message has been waited for."""

    def __init__(self, work: dist.Work, on_arrival: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._on_arrival = work, on_arrival

    def wait(self, *positional: Any) -> bool:
        done = self._work.wait(*positional)
        self._on_arrival()
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--job", nargs="+", action="append", required=True, metavar="CONFIG [section.key=value]")
    arguments = parser.parse_args()
    configs = [load_config(Path(config), overrides) for config, *overrides in arguments.job]
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    with joined_job(configs[0]) as device, _file(out, int(os.environ["RANK"])).open("w", encoding="utf-8") as lines:
        trainers = [Trainer(check_job(config, processes), device) for config in configs]
        running = {job: trainer.steps() for job, trainer in enumerate(trainers)}
        notebook = Notebook()
        while running:
            for job, steps in list(running.items()):
                notebook.begin()
                step = next(steps, None)
                if step is None:
                    del running[job]
                else:
                    lines.write(json.dumps([job, step, notebook.end()]) + "\n")


if __name__ == "__main__":
    main()
