"""What the page shows of a job, part by part, computed in a process of its own that ends with the question.

First what was read, then the verdict of ``wlb check`` and pictures of it. A part is HTML for the page.
"""

from __future__ import annotations

import gc
import shlex
import signal
import traceback
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.lengths import read_lengths, what_was_read
from wlb.errors import UserError
from wlb.markup import Markup, join, tag
from wlb.report.answer import about, columns_of
from wlb.report.evidence import usual_step
from wlb.report.html.charts import length_histogram
from wlb.report.html.markup import table
from wlb.report.html.page import facts, paragraph, section, verdict
from wlb.report.predicted import step_chart, where_chart
from wlb.simulate.estimate import Estimate, estimate, question_of
from wlb.simulate.verdict import BASELINE, Verdict
from wlb.token_count import parse_count, parse_tokens

Part = tuple[str, dict[str, Any]]

_FIELDS = ("lengths", "model", "hardware", "window", "batch", "gpus")


@dataclass(frozen=True)
class PageQuestion:
    """The job that the page asks about; window and global batch are None where they are assumed as in ``wlb check``."""

    lengths: str
    model: str
    hardware: str
    context_window: int | None
    batch_tokens: int | None
    gpus: int
    name: str  # what the page calls ``lengths``

    @classmethod
    def of(cls, asked: Mapping[str, Any], name: str) -> PageQuestion:
        """What a form has, all of it text. Raises ``UserError`` for what no command would take."""
        texts = {field: asked.get(field) for field in _FIELDS}
        if wrong := [field for field, value in texts.items() if not isinstance(value, str) or not value.strip()]:
            raise UserError(f"{wrong[0]} is missing; give one")
        lengths, model, hardware, window, batch, written = (str(value).strip() for value in texts.values())
        if lengths == "-":
            raise UserError("lengths - is standard input, which the page does not read; name a file")
        gpus = parse_count(written)
        if not gpus:
            raise UserError(f"gpus {written!r} is no whole number of at least 1")
        window_tokens, batch_tokens = (None if text == "auto" else parse_tokens(text) for text in (window, batch))
        return cls(lengths, model, hardware, window_tokens, batch_tokens, gpus, name)

    def command(self) -> str:
        """``wlb check`` that says the same."""
        given = ["--model", self.model, "--hardware", self.hardware, "--gpus", str(self.gpus)]
        if self.context_window is not None:
            given += ["--context-window", str(self.context_window)]
        if self.batch_tokens is not None:
            given += ["--batch-tokens", str(self.batch_tokens)]
        return shlex.join(["wlb", "check", self.name, *given])


def answer(to: Connection, question: PageQuestion, known: Mapping[str, dict[str, Any]]) -> None:
    """Send all parts that are not ``known``, then ``done``; or one ``error``, a line."""
    gc.set_threshold(50_000, 20, 50)  # as ``wlb.__main__`` does
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    try:
        for part in _parts(question, known):
            to.send(part)
        to.send(("done", {}))
    except UserError as error:
        to.send(("error", {"text": " ".join(str(error).splitlines())}))
    except BrokenPipeError:
        return
    except OSError as error:
        to.send(("error", {"text": f"{error.filename or question.name} cannot be used: {error.strerror or error}"}))
    except Exception as error:
        traceback.print_exc()
        to.send(("error", {"text": f"the simulation failed: {error!r}; the terminal of wlb serve has more"}))


def _parts(question: PageQuestion, known: Mapping[str, dict[str, Any]]) -> Iterator[Part]:
    if {"verdict", "pictures"} <= known.keys():
        return
    with redirect_stderr(StringIO()) as notes:  # which a command prints
        lengths = read_lengths(question.lengths, keep_empty=True)
        job = question_of(
            question.model,
            question.hardware,
            question.gpus,
            lengths,
            context_window=question.context_window,
            batch_tokens=question.batch_tokens,
            source=question.lengths,
        )
    read = what_was_read(question.name, lengths, job.space.context_window)
    yield "read", {"html": paragraph(read, class_="muted")}
    found = estimate(job, lengths, source=question.name)
    yield "verdict", _verdict(found, question, [read, *notes.getvalue().splitlines()])
    yield "pictures", {"html": _pictures(found.verdict, lengths)}


def _verdict(found: Estimate, question: PageQuestion, notes: list[str]) -> dict[str, Any]:
    judged = found.verdict
    name = judged.fastest
    low, high = judged.spread(name)
    figures = {
        f"speed at equal work, {name} over {judged.base} ({low:.2f} to {high:.2f})": f"{judged.speed(name):.2f}x",
        f"token delay of {name}, mean, in steps": f"{judged.token_delay(name):.2f}",
        f"tokens/s of {name}, all GPUs": f"{judged.systems[name].tokens_per_second:,.0f}",
    }
    if found.config:
        figures[f"GPU-hours a day saved, of {found.question.space.gpus:,} GPUs"] = f"{found.gpu_hours_a_day:,.0f}"
    shares = f"Shares are of the time that {judged.base} takes for the same work."
    html = join(
        [
            verdict(str(judged)),
            paragraph(
                tag("span", "simulated", class_="label-simulated"),
                f" from the lengths of {question.name}",
                *(join([tag("br"), line]) for line in (*notes, *about(found))),
                class_="muted",
            ),
            facts(figures),
            section("where", "Where the time goes", where_chart(judged), table(columns_of(judged), shares)),
        ]
    )
    return {"html": html, "check": found.to_json(), "command": question.command()}


def _pictures(judged: Verdict, lengths: NDArray[np.int64]) -> Markup:
    steps = {name: usual_step(judged, name, lengths) for name in dict.fromkeys((BASELINE, judged.fastest))}
    return join(
        [
            section("pipeline", "One step, before and after", step_chart(steps)),
            section("documents", "Documents", length_histogram(lengths[lengths > 0])),
        ]
    )
