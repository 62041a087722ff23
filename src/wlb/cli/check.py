"""``wlb check``: what a job loses to imbalance on your documents, and how much faster each preset trains."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TaskID, TaskProgressColumn, TextColumn

from wlb.cli import options
from wlb.cli.console import emit_json, progress_bar, show_columns, show_next, stdout
from wlb.cli.groups import given_again, names_of, refuse_unused
from wlb.errors import UserError
from wlb.terminal import number_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wlb.simulate.estimate import Estimate
    from wlb.simulate.space import SearchSpace
    from wlb.simulate.verdict import Progress

_TEXT = names_of(options.TextOptions)
_STORE = "corpus"  # that documents of text are prepared into


@dataclass(frozen=True, kw_only=True)
class CheckOptions(options.TextOptions, options.JobOptions):
    """The job, the systems that run it, and how to count the tokens of text."""

    systems: Annotated[str | None, options.list_of_names("Presets; default: plain-4d, per-document-4d, balanced.")] = (
        None
    )
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="TOKENIZER", help="LENGTHS is text, as wlb prepare reads it: bytes, a file or a model."),
    ] = None

    def lengths(self, context: typer.Context, source: str) -> "tuple[str, NDArray[np.int64]]":
        """The name of what was read, and the tokens of every document."""
        if self.tokenizer is None:
            from wlb.documents.lengths import read_lengths

            if unread := given_again(context, _TEXT):
                raise UserError(f"{unread[0]} needs --tokenizer")
            return source, read_lengths(source, column=self.length_column)
        refuse_unused(context, ["length_column"], "has no effect with --tokenizer")
        from wlb.documents.prepare import text_lengths
        from wlb.documents.prepare.chat import ChatFormat
        from wlb.documents.prepare.tokenization import load_tokenizer

        tokenizer = load_tokenizer(self.tokenizer)
        chat = ChatFormat.of_tokenizer(self.tokenizer, tokenizer.special_tokens) if self.chat else None
        return text_lengths(self.corpus([Path(source)]), tokenizer, chat)


def check(context: typer.Context, lengths: options.Lengths, asked: CheckOptions, json: options.Json = False) -> None:
    """Estimate the time a job loses to imbalance on your documents, and how much faster each preset runs it.

    Simulates three systems on the same documents: plain-4d (windows of fixed length, as in most trainers),
    per-document-4d (each document shared between context-parallel ranks) and balanced. Each runs in its own fastest
    layout, with the sizes that you give. All options have defaults.

    Example: wlb check lengths.json --gpus 64 --model llama3-8b

    Example: wlb check corpus.jsonl --tokenizer MODEL_DIRECTORY
    """
    from wlb.documents.lengths import what_was_read
    from wlb.report.answer import about, columns_of, note_on
    from wlb.simulate.estimate import CHECKED

    presets = options.names_in("--systems", asked.systems, CHECKED)
    read, tokens = asked.lengths(context, lengths)
    space = asked.space(context, None if asked.tokenizer else lengths, tokens)
    found = estimated(space, tokens, presets, asked.steps, lengths)
    verdict = found.verdict
    if json:
        emit_json(found.to_json())
        return
    said = what_was_read(read, tokens, space.context_window)
    for line in (f"{said}\n", verdict.headline, *verdict.reasons, "", *about(found), ""):
        stdout.print(line)
    columns = columns_of(verdict)
    show_columns(columns, notes={next(iter(columns)): note_on(verdict)})
    if found.config:
        gpus = number_of(space.gpus, "GPU")
        stdout.print(f"On {gpus} {verdict.winner} saves {found.gpu_hours_a_day:,.0f} GPU-hours a day. Its job:\n")
        stdout.print(found.config, soft_wrap=True)
    if asked.tokenizer is None:
        show_next("report", lengths, *given_again(context, names_of(options.JobOptions)))
    else:
        text = given_again(context, ["tokenizer", *_TEXT])
        show_next("prepare", lengths, *text, "--out", _STORE)


@contextmanager
def progress_of() -> "Iterator[Progress]":
    """A progress bar per system, with its speedup so far; the yielded function takes what is known of each."""
    with progress_bar(TextColumn("{task.fields[speed]}"), TaskProgressColumn()) as bar:
        tasks: dict[str, TaskID] = {}

        def show(known: Mapping[str, tuple[float, float]]) -> None:
            _, base = next(iter(known.values()))
            for name, (done, rate) in known.items():
                speed = f"{rate / base:.2f}x so far" if base and rate else "searching"
                tasks[name] = tasks[name] if name in tasks else bar.add_task(name, total=1.0, speed=speed)
                bar.update(tasks[name], completed=done, speed=speed)

        yield show


def estimated(
    space: "SearchSpace", lengths: "NDArray[np.int64]", presets: Sequence[str], steps: int | None, source: str
) -> "Estimate":
    """``estimate`` of ``presets``, with a progress bar for each."""
    from wlb.simulate.estimate import estimate

    with progress_of() as told:
        return estimate(space, lengths, presets, steps, source=source, on_progress=told)
