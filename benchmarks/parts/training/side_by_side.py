"""Train several jobs in turns, a step each, in the same processes: a comparison free of what else the machine does.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.parts.training.side_by_side --out DIRECTORY \\
        --job configs/tiny_plain-4d.toml training.steps=8 --job configs/tiny.toml training.steps=8

Every ``--job`` is a configuration and the settings to override in it; all jobs have as many processes, and each writes
its own ``steps.jsonl``. Wall time says little on a machine that others use. So every rank notes its CPU time (of all
its threads, so that what gloo copies counts) when it starts a message, when it has waited for one, and where a
micro-batch begins and ends. ``played`` plays such notes back: a rank goes on from a wait once its own CPU seconds are
over and those of every rank that it waited for, up to where that one started the message. ``step_seconds``, the
critical path, is what a step takes where every rank has a core of its own. A job that is given twice does the same work
twice, and ``typical`` takes the smaller of both seconds between any two notes.

Ranks that compute at the same time slow each other, most of all on two hyperthreads of one core, and a rank whose peer
waits is faster. Ranks of a job that is given by ``--one-at-a-time`` in place of ``--job`` take turns to compute.
"""

import argparse
import fcntl
import functools
import inspect
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.parts.measurement import lower_median
from wlb.errors import UserError
from wlb.job.config_file import load_config
from wlb.runtime.clock import ComputeClock
from wlb.training.environment import joined_job
from wlb.training.preflight import check_job
from wlb.training.trainer import Trainer

# Those that a step calls; FSDP's two have another name since torch 2.13.
_COLLECTIVES = (
    *("all_gather", "all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter_tensor", "reduce_scatter_single"),
)
BEGIN, END = "micro-batch begins", "micro-batch ends"


def launch(processes: int, out: Path, jobs: Sequence[str]) -> None:
    """Run this program on so many processes of one thread; what trainers say goes to ``training.log`` in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *torchrun, "-m", "benchmarks.parts.training.side_by_side", "--out", str(out), *jobs]
    log = out / "training.log"
    with log.open("w", encoding="utf-8") as errors:
        done = subprocess.run(command, stderr=errors, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        raise SystemExit(f"training failed; the end of {log}:\n{log.read_text(encoding='utf-8')[-3000:]}")


def files_of(directory: Path) -> list[str]:
    """Settings of a job that is only measured: where its files go, and none that are not read."""
    return [
        f"checkpoint.dir={directory / 'checkpoints'}",
        f"checkpoint.every={10**6}",
        f"metrics.dir={directory}",
        "metrics.tensorboard=false",
    ]


class Note(NamedTuple):
    """A rank started ``message``, or has waited for it where ``needs`` names the ranks that had to start it.

    Messages named ``BEGIN`` and ``END`` are marks of a micro-batch, for which nobody waits.
    """

    message: str
    needs: tuple[int, ...]
    cpu_seconds: float  # of the process since the step began


def played(ranks: Sequence[Sequence[Note]]) -> list[list[float]]:
    """When each rank comes to each of its notes, in seconds since the step began, were every core a rank's own.

    Raises ``ValueError`` where a rank waited for a message that nobody started.
    """
    started: dict[tuple[str, int], float] = {}
    times: list[list[float]] = [[] for _ in ranks]
    while any(len(done) < len(notes) for done, notes in zip(times, ranks, strict=True)):
        before = [len(done) for done in times]
        for rank, (done, notes) in enumerate(zip(times, ranks, strict=True)):
            while len(done) < len(notes):
                note = notes[len(done)]
                if any((note.message, other) not in started for other in note.needs):
                    break
                computed = note.cpu_seconds - (notes[len(done) - 1].cpu_seconds if done else 0.0)
                now = (done[-1] if done else 0.0) + computed
                now = max(now, *(started[note.message, other] for other in note.needs)) if note.needs else now
                if not note.needs:
                    started[note.message, rank] = now
                done.append(now)
        if [len(done) for done in times] == before:
            raise ValueError("a rank waited for a message that was not started")
    return times


def step_seconds(ranks: Sequence[Sequence[Note]]) -> float:
    """CPU seconds of the critical path of one step, from the notes of all its ranks; raises as ``played`` does."""
    return max(times[-1] if times else 0.0 for times in played(ranks))


def typical(repetitions: Sequence[Sequence[Note]]) -> list[Note]:
    """One rank's notes of a step that was trained several times: the ``lower_median`` of seconds between two notes.

    Raises ``ValueError`` unless every repetition noted the same messages.
    """
    first = repetitions[0]
    if any([note[:2] for note in notes] != [note[:2] for note in first] for notes in repetitions):
        raise ValueError("the repetitions of a step differ in their messages")
    seconds = np.array([[note.cpu_seconds for note in notes] for notes in repetitions])
    ends = np.cumsum(lower_median(np.diff(seconds, prepend=0.0)))
    return [note._replace(cpu_seconds=end) for note, end in zip(first, ends.tolist(), strict=True)]


def micro_batch_seconds(notes: Sequence[Note]) -> list[float]:
    """CPU seconds of each micro-batch, forward and backward."""
    seconds: dict[str, float] = {}
    for message, _, cpu_seconds in notes:
        mark, _, number = message.rpartition(" ")
        if mark in (BEGIN, END):
            seconds[number] = seconds.get(number, 0.0) + (cpu_seconds if mark == END else -cpu_seconds)
    return [*seconds.values()]


def read_notes(directory: Path, ranks: int) -> dict[tuple[int, int], list[list[Note]]]:
    """The notes of all ranks, of every job (by its place on the command line) and step (counted from 1)."""
    steps: dict[tuple[int, int], list[list[Note]]] = {}
    for rank in range(ranks):
        for line in (directory / f"notes-{rank}.jsonl").read_text(encoding="utf-8").splitlines():
            job, step, notes = json.loads(line)
            of_rank = [Note(message, tuple(needs), seconds) for message, needs, seconds in notes]
            steps.setdefault((job, step), []).append(of_rank)
    return steps


class Notebook:
    """What a rank notes of one step after another; as long as it lives, functions of ``torch.distributed`` use it.

    Every rank has opened ``turn``, the same file. In steps that begin ``one_at_a_time`` who computes holds its lock.
    """

    def __init__(self, turn: IO[Any] | None = None) -> None:
        self._notes: list[Note] = []
        self._messages: Counter[str] = Counter()
        self._began = 0.0
        self._turn = turn
        self._one_at_a_time = self._computing = False
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                setattr(dist, name, self._noting_collective(getattr(dist, name)))
        for name, end in (("isend", "dst"), ("irecv", "src")):  # in both places, as ``P2POp`` compares them
            noting = self._noting_message(getattr(dist, name), end)
            setattr(dist, name, noting)
            setattr(distributed_c10d, name, noting)

    def mark(self, clock: ComputeClock) -> None:
        """Note also where the micro-batches begin and end that ``clock`` measures."""
        measuring = clock.measuring

        @contextmanager
        def marking(phase: str, micro_batch: int) -> Iterator[None]:
            self._computing = True
            self._lock(True)
            self.note(f"{BEGIN} {micro_batch}")
            with measuring(phase, micro_batch):
                yield
            self.note(f"{END} {micro_batch}")
            self._computing = False
            self._lock(False)

        clock.measuring = marking  # type: ignore[method-assign]

    def begin(self, *, one_at_a_time: bool = False) -> None:
        self._one_at_a_time = one_at_a_time
        self._notes, self._messages, self._began = [], Counter(), time.process_time()

    def end(self) -> list[Note]:
        self.note("end")
        return self._notes

    def note(self, message: str, needs: Sequence[int] = ()) -> None:
        self._notes.append(Note(message, tuple(needs), time.process_time() - self._began))

    def _lock(self, held: bool) -> None:
        if self._one_at_a_time and self._turn is not None:
            fcntl.flock(self._turn, fcntl.LOCK_EX if held else fcntl.LOCK_UN)

    def _unlocked(self, wait: Callable[[], Any]) -> Any:
        """What ``wait`` returns; another rank may compute meanwhile."""
        if self._computing:
            self._lock(False)
        done = wait()
        if self._computing:
            self._lock(True)
        return done

    def _waited(self, wait: Callable[[], Any], message: str, needs: Sequence[int]) -> Any:
        done = self._unlocked(wait)
        self.note(message, needs)
        return done

    def _numbered(self, message: str) -> str:
        self._messages[message] += 1
        return f"{message} {self._messages[message]}"

    def _noting_collective(self, call: Callable[..., Any]) -> Callable[..., Any]:
        given = inspect.signature(call)

        @functools.wraps(call)
        def noting(*positional: Any, **keywords: Any) -> Any:
            words = given.bind(*positional, **keywords).arguments
            ranks = dist.get_process_group_ranks(words.get("group") or dist.group.WORLD)
            message = self._numbered(f"{call.__name__} {ranks}")
            self.note(message)
            if not words.get("async_op"):
                return self._waited(lambda: call(*positional, **keywords), message, ranks)
            return _Awaited(call(*positional, **keywords), lambda wait: self._waited(wait, message, ranks))

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
                return _Awaited(call(*positional, **keywords), lambda wait: self._waited(wait, message, [peer]))
            self.note(self._numbered(f"{here} to {peer}"))
            return _Awaited(call(*positional, **keywords), self._unlocked)

        return noting


class _Awaited(dist.Work):
    """Waits for a message as ``waited`` does."""

    def __init__(self, work: dist.Work, waited: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._work, self._waited = work, waited

    def wait(self, *positional: Any) -> bool:
        return bool(self._waited(lambda: self._work.wait(*positional)))

    def is_completed(self) -> bool:
        return self._work.is_completed()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the ranks' notes")
    job: dict[str, Any] = {"nargs": "+", "action": "append", "default": [], "metavar": "CONFIG [section.key=value]"}
    parser.add_argument("--one-at-a-time", **job, help="a job whose ranks compute in turn; these jobs come first")
    parser.add_argument("--job", **job, help="a job whose ranks compute at the same time")
    arguments = parser.parse_args()
    out: Path = arguments.out
    try:
        configs = [load_config(Path(name), settings) for name, *settings in arguments.one_at_a_time + arguments.job]
    except UserError as error:
        parser.error(str(error))
    if not configs:
        parser.error("name a --job")
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    with joined_job(configs[0]) as device, ExitStack() as files:
        lines = files.enter_context((out / f"notes-{dist.get_rank()}.jsonl").open("w", encoding="utf-8"))
        notebook = Notebook(files.enter_context((out / "turn").open("w")))
        trainers = [Trainer(check_job(config, processes), device) for config in configs]
        for trainer in trainers:
            notebook.mark(trainer.runner.clock)
        running = {number: trainer.steps() for number, trainer in enumerate(trainers)}
        last = max(config.training.steps or 0 for config in configs)
        for round_ in count(1):
            for number, steps in list(running.items()):
                notebook.begin(one_at_a_time=number < len(arguments.one_at_a_time))
                step = next(steps, None)
                if step is None:
                    del running[number]
                else:
                    lines.write(json.dumps([number, step, notebook.end()]) + "\n")
            if not running:
                break
            if dist.get_rank() == 0:
                print(f"\r  step {round_} of {last}", end="\n" if round_ == last else "", flush=True)


if __name__ == "__main__":
    main()
