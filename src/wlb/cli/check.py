"""``wlb check``: what a job loses to imbalance on your documents, and the preset that gives most of it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, progress_bar, show_columns, show_next, stdout
from wlb.cli.groups import given_again, names_of, refuse_unused

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wlb.documents.lengths import ReadLengths
    from wlb.simulate.verdict import Verdict
    from wlb.studies.check import AskedJob

_TEXT = names_of(options.TextOptions)
_STORE = "corpus"  # that documents of text are prepared into


@dataclass(frozen=True, kw_only=True)
class CheckOptions(options.TextOptions, options.JobOptions):
    """The job, and how to count the tokens of documents that are text."""

    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="TOKENIZER", help="LENGTHS is text, as wlb prepare reads it: bytes, a file or a model."),
    ] = None

    def lengths(self, context: typer.Context, source: str) -> ReadLengths:
        """Tokens of every document of ``source``."""
        from wlb.documents.lengths import ReadLengths, read_lengths
        from wlb.documents.prepare import text_lengths
        from wlb.documents.prepare.chat import ChatFormat
        from wlb.documents.prepare.tokenization import load_tokenizer

        if self.tokenizer is None:
            refuse_unused(context, _TEXT, "has no effect without --tokenizer")
            return ReadLengths(source, read_lengths(source, keep_empty=True))
        tokenizer = load_tokenizer(self.tokenizer)
        chat = ChatFormat.of_tokenizer(self.tokenizer, tokenizer.special_tokens) if self.chat else None
        return text_lengths(self.corpus([Path(source)]), tokenizer, chat)


def check(context: typer.Context, lengths: options.Lengths, asked: CheckOptions, json: options.Json = False) -> None:
    """Say what a job loses to imbalance on your documents, and which preset gives it back. Needs no option.

    Simulates plain-4d (fixed-length packing as most trainers do it) and the presets best and elastic on the same
    documents in the same layout.

    Example: wlb check lengths.json --gpus 64 --model llama3-8b

    Example: wlb check corpus.jsonl --tokenizer MODEL_DIRECTORY
    """
    from wlb.studies.check import CHECKED, checked

    tokens = asked.lengths(context, lengths).lengths
    found = asked.job(context, None if asked.tokenizer else lengths, tokens)
    verdict = judged_presets(found, tokens, CHECKED, asked.steps)
    result = checked(found, verdict, asked.model, lengths)
    if json:
        emit_json(result.to_json())
        return
    show_verdict(verdict, found)
    if verdict.winner != verdict.base:
        gpus = f"{found.job.layout.world_size:,} GPUs"
        stdout.print(f"Of {gpus} that is {result.gpu_hours_a_day:,.0f} GPU-hours a day.\n", highlight=False)
        stdout.print(result.config, markup=False, highlight=False, soft_wrap=True)
    if asked.tokenizer is None:
        show_next("report", lengths, *given_again(context, names_of(options.JobOptions)))
    else:
        text = given_again(context, ["tokenizer", *_TEXT])
        show_next("prepare", lengths, *text, "--out", _STORE)


@contextmanager
def progress_of(systems: Iterable[str], steps: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar for each of ``systems``, told the system and its steps just done."""
    with progress_bar() as bar:
        tasks = {name: bar.add_task(name, total=steps) for name in systems}
        yield lambda name, done: bar.advance(tasks[name], done)


def judged_presets(found: AskedJob, lengths: NDArray[np.int64], presets: Iterable[str], steps: int | None) -> Verdict:
    """The verdict on ``presets``, with a progress bar for each."""
    from wlb.simulate.search import usual_steps
    from wlb.simulate.verdict import judge_presets

    steps = steps or usual_steps(found.job.global_batch)
    with progress_of(presets, steps) as told:
        *_, verdict = judge_presets(found.job, lengths, presets, steps, on_progress=told)
    return verdict


def show_verdict(verdict: Verdict, found: AskedJob) -> None:
    """Print the verdict, then what it is made of."""
    from wlb.studies.check import about, columns_of

    for line in (f"{verdict}\n", *about(verdict, found)):
        stdout.print(line, markup=False, highlight=False)
    stdout.print()
    columns = columns_of(verdict)
    note = f"shares are of the time that {verdict.base} takes for the same work"
    show_columns(columns, notes={next(iter(columns)): note})
