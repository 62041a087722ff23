"""``wlb check``: what a job loses to imbalance on your documents, and the preset that gives most of it back."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, note, progress_bar, show_columns, stdout
from wlb.terminal import number_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wlb.cli.options import AskedJob
    from wlb.simulate import SimulatedJob
    from wlb.simulate.verdict import Verdict

_CHECKED = ("plain-4d", "best", "elastic")
_MOST_TEXTS = 20_000  # that are tokenised


@dataclass(frozen=True, kw_only=True)
class CheckOptions(options.JobOptions):
    """The job, and how to count the tokens of documents that are text."""

    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="TOKENIZER", help="LENGTHS is text, as wlb prepare reads it: bytes, a file or a model."),
    ] = None
    text_field: Annotated[str, typer.Option(metavar="FIELD", help="Field or column of the text.")] = "text"

    def lengths(self, source: str) -> NDArray[np.int64]:
        """Tokens of every document of ``source``."""
        from wlb.documents.lengths import read_lengths
        from wlb.documents.prepare import text_lengths
        from wlb.documents.prepare.sources import FileCorpus
        from wlb.documents.prepare.tokenization import load_tokenizer

        if self.tokenizer is None:
            return read_lengths(source, keep_empty=True)
        corpus = FileCorpus([Path(source)], self.text_field)
        lengths: NDArray[np.int64]
        lengths, are_all = text_lengths(corpus, load_tokenizer(self.tokenizer), _MOST_TEXTS)
        if not are_all:
            note(f"lengths are those of the first {number_of(len(lengths), 'document')} of {source}")
        return lengths


def check(context: typer.Context, lengths: options.Lengths, asked: CheckOptions, json: options.Json = False) -> None:
    """Say what a job loses to imbalance on your documents, and which preset gives it back. Needs no option.

    Simulates plain-4d (fixed-length packing as most trainers do it) and the presets best and elastic on the same
    documents in the same layout.

    Example: wlb check lengths.json --gpus 64 --model llama3-8b

    Example: wlb check corpus.jsonl --tokenizer MODEL_DIRECTORY
    """
    from wlb.documents.store.sources import names_store
    from wlb.report.predicted import recommended_config
    from wlb.simulate.verdict import presets_of

    tokens = asked.lengths(lengths)
    found = asked.job(context, None if asked.tokenizer else lengths, tokens)
    verdict = judged(presets_of(found.job, tokens, _CHECKED), tokens, asked.steps)
    store = lengths if names_store(lengths) else None
    gpus = found.job.layout.world_size
    hours = 24 * gpus * verdict.given_back
    config = recommended_config(verdict.configured(), asked.model, lengths, store, preset=verdict.preset)
    if json:
        emit_json(verdict.to_json() | {"gpu_hours_a_day": hours, "assumed": found.assumed, "config": config})
        return
    show_verdict(verdict, found)
    if verdict.winner != verdict.base:
        stdout.print(f"Of {gpus:,} GPUs that is {hours:,.0f} GPU-hours a day.\n", highlight=False)
        stdout.print(config, markup=False, highlight=False)
    if lengths != "-" and not asked.tokenizer:  # which a second command cannot read, or not as lengths
        stdout.print(f"next: wlb report {shlex.quote(lengths)}, with the same options", markup=False, highlight=False)


def judged(jobs: Mapping[str, SimulatedJob], lengths: NDArray[np.int64], steps: int | None) -> Verdict:
    """The verdict on ``jobs``, with a progress bar for each."""
    from wlb.simulate.search import usual_steps
    from wlb.simulate.verdict import judge

    steps = steps or usual_steps(next(iter(jobs.values())).global_batch)
    with progress_bar() as bar:
        tasks = {name: bar.add_task(name, total=steps) for name in jobs}
        return judge(jobs, lengths, steps, on_progress=lambda name, done: bar.advance(tasks[name], done))


def show_verdict(verdict: Verdict, found: AskedJob) -> None:
    """Print the verdict, then what it is made of."""
    from wlb.simulate.search import layout_of
    from wlb.simulate.verdict import PARTS

    systems, base = verdict.systems, verdict.systems[verdict.base]
    parts = {name: verdict.parts(name) for name in systems}
    rows = {part: [f"{parts[name][part]:.1%}" for name in systems] for part in PARTS}
    rows["together"] = [f"{sum(parts[name].values()):.1%}" for name in systems]
    rows["speed at equal work"] = [f"{verdict.speed(name):.2f}x" for name in systems]
    rows["token delay, steps"] = [f"{system.token_delay:.2f}" for system in systems.values()]
    job = found.job
    passes = max(system.epochs for system in systems.values())
    said = [
        f"{verdict}\n",
        f"{options.described(found.priced_by)}: {layout_of(job)}; "
        f"{number_of(job.packing.micro_batches, 'micro-batch')} of {job.context_window:,} tokens a step",
        f"assumed: {found.assumed}" if found.assumed else "",
        f"simulated: {number_of(base.steps, 'step')}, after {verdict.warm_up} that warm up"
        + (f"; the documents fill fewer and are repeated, {passes} passes over them began" if passes > 1 else ""),
    ]
    for line in filter(None, said):
        stdout.print(line, markup=False, highlight=False)
    stdout.print()
    first = f"of a step of {verdict.base}"
    show_columns(
        {first: [*rows]} | dict(zip(systems, zip(*rows.values(), strict=True), strict=True)),
        notes={first: f"shares are of the time that {verdict.base} takes for the same work"},
    )
