"""What the page asks and what it is told, which a process of its own computes, so that it can be ended."""

from __future__ import annotations

import pickle
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from wlb.documents.lengths import read_lengths, what_was_read
from wlb.errors import UserError
from wlb.report.evidence import usual_step
from wlb.report.timeline import Timeline
from wlb.simulate.estimate import Estimate, estimate, question_of
from wlb.token_count import parse_tokens


@dataclass(frozen=True)
class Asked:
    """A question to ``wlb check``, with its ``options``; ``content`` is that of a file dropped on the page."""

    lengths: str
    options: Mapping[str, str]
    content: bytes | None = None

    @property
    def command(self) -> str:
        return shlex.join(["wlb", "check", self.lengths, *chain.from_iterable(self.options.items())])


@dataclass(frozen=True)
class Answer:
    """What was read, the verdict on it, and a usual step of the baseline and of the fastest system."""

    read: list[str]
    found: Estimate
    steps: dict[str, Timeline]


def answer(asked: Asked) -> Answer:
    """What ``wlb check`` says of ``asked``. Raises ``UserError`` for what it would refuse."""
    source, options = asked.lengths, asked.options
    if source == "-":
        raise UserError("lengths - is standard input, which the page does not read; name a file")
    sizes = (options.get(option) for option in ("--context-window", "--batch-tokens"))
    window, batch = (None if size is None else parse_tokens(size) for size in sizes)
    with redirect_stderr(StringIO()) as notes:
        lengths = read_lengths(source, keep_empty=True)
        job = options["--model"], options["--hardware"], int(options["--gpus"])
        question = question_of(*job, lengths, context_window=window, batch_tokens=batch, source=source)
    found = estimate(question, lengths, source=source)
    read = [what_was_read(source, lengths, question.space.context_window), *notes.getvalue().splitlines()]
    shown = dict.fromkeys((found.verdict.base, found.verdict.fastest))
    return Answer(read, found, {name: usual_step(found.verdict, name, lengths) for name in shown})


def computed(asked: Asked, while_waiting: Callable[[], object]) -> Answer:
    """``answer`` from a process of its own, which ends where ``while_waiting``, called again and again, raises."""
    command = [sys.executable, "-P", "-c", "from wlb_studies.page.answer import main; main()"]
    sent: bytes | None = pickle.dumps(asked)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            while process.returncode is None:
                try:
                    told, _ = process.communicate(sent, timeout=0.1)
                except subprocess.TimeoutExpired:
                    sent = None
                    while_waiting()
        finally:
            process.terminate()
    lost = UserError("the simulation was killed, perhaps for memory; ask for fewer GPUs or documents")
    found: Answer | UserError = lost if process.returncode else pickle.loads(told)
    if isinstance(found, UserError):
        raise found
    return found


def main() -> None:
    """Write the ``Answer`` to the ``Asked`` on standard input, or the ``UserError``, to standard output, pickled."""
    for ended in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ended, lambda *_: sys.exit(1))  # so that the simulation ends its own processes
    asked: Asked = pickle.load(sys.stdin.buffer)
    try:
        with TemporaryDirectory(prefix="wlb-") as folder, chdir(folder if asked.content else "."):
            if asked.content:
                Path(asked.lengths).write_bytes(asked.content)
            told: Answer | UserError = answer(asked)
    except UserError as error:
        told = error
    except OSError as error:
        told = UserError(f"{error.filename or asked.lengths} cannot be used: {error.strerror or error}")
    pickle.dump(told, sys.stdout.buffer)
