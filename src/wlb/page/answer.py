"""What the page shows of a job, part by part, computed in a process of its own that ends with the question.

First what plain-4d loses, then the verdict of ``wlb check``, pictures of it, and the policies of ``wlb rivals`` one
after another. A part is HTML for the page, with the data that a later process needs to go on from there.
"""

from __future__ import annotations

import gc
import shlex
import signal
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.lengths import read_lengths
from wlb.errors import UserError
from wlb.markup import Markup, join, tag
from wlb.report.evidence import usual_step
from wlb.report.html.charts import length_histogram
from wlb.report.html.markup import table
from wlb.report.html.page import facts, paragraph, section, verdict
from wlb.report.predicted import rivals_shown, step_chart, where_chart
from wlb.simulate.search import SearchSpace, search_space
from wlb.simulate.verdict import BASELINE, Verdict, judge_presets
from wlb.studies.check import (
    CHECKED,
    AskedJob,
    Checked,
    about,
    checked,
    columns_of,
    in_fastest_layout,
    with_phases,
)
from wlb.studies.policies import BASE, POLICIES, Outcome
from wlb.token_count import parse_count, parse_tokens

Part = tuple[str, dict[str, Any]]

_RIVALS = ("rivals", "Published policies")
_RIVALS_ARE = (
    "Published balancing policies beside ours, on the same documents and global batch. Each is in the layout in which "
    "it is fastest, plain-4d too; the verdict above keeps one layout for all."
)
_RIVAL_STEPS = 2  # as in ``wlb rivals``
_SLOW = ("best", "flexsp", "hydraulis", "elastic")  # policies that take seconds to simulate; the others come first
_PLACES = {name: place for place, name in enumerate(POLICIES)}


@dataclass(frozen=True)
class Question:
    """The job that the page asks about; ``context_window`` is None where the documents say it."""

    lengths: str
    model: str
    hardware: str
    context_window: int | None
    gpus: int
    name: str  # what the page calls ``lengths``

    @classmethod
    def of(cls, asked: Mapping[str, Any], name: str) -> Question:
        """What a form has, all of it text. Raises ``UserError`` for what no command would take."""
        texts = {field: asked.get(field) for field in ("lengths", "model", "hardware", "window", "gpus")}
        if wrong := [field for field, value in texts.items() if not isinstance(value, str) or not value.strip()]:
            raise UserError(f"{wrong[0]} is missing; give one")
        lengths, model, hardware, window, written = (str(value).strip() for value in texts.values())
        if lengths == "-":
            raise UserError("lengths - is standard input, which the page does not read; name a file")
        gpus = parse_count(written)
        if not gpus:
            raise UserError(f"gpus {written!r} is no whole number of at least 1")
        return cls(lengths, model, hardware, None if window == "auto" else parse_tokens(window), gpus, name)

    def command(self, name: str, context_window: int | None) -> str:
        """``wlb check`` or ``wlb rivals`` that says the same."""
        given = ["--model", self.model, "--hardware", self.hardware, "--gpus", str(self.gpus)]
        if context_window is not None:
            given += ["--context-window", str(context_window)]
        return shlex.join(["wlb", name, self.name, *given])


def answer(to: Connection, question: Question, known: Mapping[str, dict[str, Any]], rivals: bool) -> None:
    """Send all parts that are not ``known``, then ``done``; or one ``error``, a line."""
    gc.set_threshold(50_000, 20, 50)  # as ``wlb.__main__`` does
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    try:
        for part in _parts(question, known, rivals):
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


def _parts(question: Question, known: Mapping[str, dict[str, Any]], rivals: bool) -> Iterator[Part]:
    if {"verdict", "pictures"} <= known.keys() and not (rivals and known.get("rivals", {}).get("left") != 0):
        return
    with redirect_stderr(StringIO()) as notes:  # which a command prints
        lengths = read_lengths(question.lengths, keep_empty=True)
        found = in_fastest_layout(question.model, question.hardware, question.gpus, question.context_window, lengths)
        found = found._replace(job=with_phases(found.job, question.lengths))
    if not {"verdict", "pictures"} <= known.keys():
        for judged in judge_presets(found.job, lengths, CHECKED):
            if len(judged.systems) == 1:
                yield "loss", {"html": verdict(f"{judged.loses}.")}
        result = checked(found, judged, question.model, question.lengths, question.name)
        yield "verdict", _verdict(result, question, notes.getvalue().splitlines())
        yield "pictures", {"html": _pictures(judged, lengths)}
    if rivals:
        yield from _rivals(question, found, lengths, known.get("rivals", {}))


def _verdict(result: Checked, question: Question, notes: list[str]) -> dict[str, Any]:
    judged, winner = result.verdict, result.verdict.systems[result.verdict.winner]
    figures = {
        f"speed at equal work, {judged.winner} over {judged.base}": f"{judged.speed(judged.winner):.2f}x",
        f"GPU-hours a day given back, of {result.asked.job.layout.world_size:,} GPUs": f"{result.gpu_hours_a_day:,.0f}",
        f"token delay of {judged.winner}, mean, in steps": f"{winner.token_delay:.2f}",
        f"tokens/s of {judged.winner}, all GPUs": f"{winner.tokens_per_second:,.0f}",
    }
    shares = f"Shares are of the time that {judged.base} takes for the same work."
    html = join(
        [
            verdict(str(judged)),
            paragraph(
                tag("span", "simulated", class_="label-simulated"),
                f" from the lengths of {question.name}",
                *(join([tag("br"), line]) for line in (*about(judged, result.asked), *notes)),
                class_="muted",
            ),
            facts(figures),
            section("where", "Where the time goes", where_chart(judged), table(columns_of(judged), shares)),
        ]
    )
    return {
        "html": html,
        "check": result.to_json(),
        "command": question.command("check", question.context_window),
    }


def _pictures(judged: Verdict, lengths: NDArray[np.int64]) -> Markup:
    steps = {name: usual_step(judged, name, lengths) for name in (BASELINE, judged.preset)}
    return join(
        [
            section("pipeline", "One step, before and after", step_chart(steps)),
            section("documents", "Documents", length_histogram(lengths[lengths > 0])),
        ]
    )


def _rivals(
    question: Question, found: AskedJob, lengths: NDArray[np.int64], known: Mapping[str, Any]
) -> Iterator[Part]:
    """All policies so far, anew after each that is simulated; those ``known`` already are not simulated again."""
    job = found.job
    if job.phases is not None:
        why = "The documents have phases of encoders, which the policies of wlb rivals do not know."
        yield "rivals", {"html": section(*_RIVALS, paragraph(why)), "left": 0}
        return
    space = search_space(
        question.model,
        question.gpus,
        job.context_window,
        hardware=question.hardware,
        batch_tokens=job.global_batch * job.context_window,
        steps=_RIVAL_STEPS,
    )
    outcomes = [Outcome(**row) for row in known.get("rows", ())]
    without: dict[str, str] = dict(known.get("without", {}))
    done = {outcome.policy for outcome in outcomes} | {*without}
    left = sorted(POLICIES.keys() - done, key=lambda name: (name in _SLOW, _PLACES[name]))  # the base first
    while left:
        name = left.pop(0)
        try:
            outcomes.append(POLICIES[name].best(name, space, lengths))
        except UserError as error:
            without[name] = str(error)
            if name == BASE:
                left = []
        rows = [asdict(outcome) for outcome in outcomes]
        html = _rivals_section(question, space, outcomes, without, len(left))
        yield "rivals", {"html": html, "rows": rows, "without": without, "left": len(left)}


def _rivals_section(
    question: Question, space: SearchSpace, outcomes: Sequence[Outcome], without: Mapping[str, str], left: int
) -> Markup:
    batch_tokens = space.micro_batches * space.context_window
    command = f"{question.command('rivals', space.context_window)} --batch-tokens {batch_tokens}"
    lines = [
        f"Simulated one after another; {left} to come." if left else "",
        f"The same in a terminal: {command}",
        *(f"{name}: {why}" for name, why in without.items()),
    ]
    said = [paragraph(_RIVALS_ARE), *(paragraph(line, class_="muted") for line in lines if line)]
    if not outcomes:
        return section(*_RIVALS, *said)
    in_order = sorted(outcomes, key=lambda outcome: _PLACES[outcome.policy])
    policies = [outcome.to_json(in_order[0]) for outcome in in_order]
    job = {"model": question.model, "gpus": question.gpus, "hardware": question.hardware, "lengths": question.name}
    shown = rivals_shown(job | {"context_window": space.context_window, "policies": policies})
    return section(*_RIVALS, *said, *shown)
