"""What the page asks and what it is told, which is computed in a process that ends when the question changes."""

from __future__ import annotations

import pickle
import shlex
import signal
import sys
from contextlib import chdir, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from wlb.documents.lengths import read_lengths, what_was_read
from wlb.errors import UserError
from wlb.report.evidence import usual_step
from wlb.simulate.estimate import Estimate, estimate, question_of
from wlb.simulate.timeline import Timeline
from wlb.token_count import parse_tokens

AUTO = "auto"  # a window or a global batch that is assumed as in ``wlb check``


@dataclass(frozen=True)
class Asked:
    """A job. ``content`` is that of a file dropped on the page, whose name ``lengths`` then is."""

    lengths: str
    model: str
    hardware: str
    gpus: int
    window: str = AUTO
    batch: str = AUTO
    content: bytes | None = None

    @property
    def command(self) -> str:
        """``wlb check`` that says the same."""
        sizes = {"--context-window": self.window, "--batch-tokens": self.batch}
        given = {"--model": self.model, "--hardware": self.hardware, "--gpus": str(self.gpus)} | {
            option: tokens for option, tokens in sizes.items() if tokens != AUTO
        }
        return shlex.join(["wlb", "check", self.lengths, *(word for option in given.items() for word in option)])


@dataclass(frozen=True)
class Answer:
    """The verdict, what was read and noted before it, and a step of the baseline and of the fastest system."""

    read: list[str]
    found: Estimate
    steps: dict[str, Timeline]


def answer(asked: Asked) -> Answer:
    """What ``wlb check`` says of ``asked``. Raises ``UserError`` for what it would refuse."""
    if asked.lengths == "-":
        raise UserError("lengths - is standard input, which the page does not read; name a file")
    window, batch = (None if size == AUTO else parse_tokens(size) for size in (asked.window, asked.batch))
    with redirect_stderr(StringIO()) as notes:  # which a command prints
        lengths = read_lengths(asked.lengths, keep_empty=True)
        question = question_of(
            *(asked.model, asked.hardware, asked.gpus, lengths),
            context_window=window,
            batch_tokens=batch,
            source=asked.lengths,
        )
    found = estimate(question, lengths, source=asked.lengths)
    read = what_was_read(asked.lengths, lengths, question.space.context_window)
    shown = dict.fromkeys((found.verdict.base, found.verdict.fastest))
    steps = {name: usual_step(found.verdict, name, lengths) for name in shown}
    return Answer([read, *notes.getvalue().splitlines()], found, steps)


def main() -> None:
    """Write the ``Answer`` to the ``Asked`` on standard input, or the ``UserError``, to standard output, pickled."""
    for ended in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ended, lambda *_: sys.exit(1))  # the simulation then ends its own processes
    asked: Asked = pickle.load(sys.stdin.buffer)
    try:
        if asked.content is None:
            told: Answer | UserError = answer(asked)
        else:
            with TemporaryDirectory(prefix="wlb-") as folder, chdir(folder):
                Path(asked.lengths).write_bytes(asked.content)
                told = answer(asked)
    except UserError as error:
        told = error
    except OSError as error:
        told = UserError(f"{error.filename or asked.lengths} cannot be used: {error.strerror or error}")
    pickle.dump(told, sys.stdout.buffer)
