"""``wlb report``: one HTML file on what a job loses to imbalance and how much faster each preset runs it."""

import webbrowser
from itertools import chain, count
from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wlb.cli import options
from wlb.cli.check import estimated
from wlb.cli.console import emit_json, note, show_next, stdout
from wlb.cli.groups import given_again, names_of, refuse_unused

if TYPE_CHECKING:
    from wlb.simulate.estimate import Estimate


def report(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="LENGTHS|STORE|RUN_DIR",
            help="Document lengths, as for wlb check, or metrics.dir of a training job: then measured, not simulated.",
        ),
    ],
    asked: options.JobOptions,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The HTML file to write.")] = Path("report.html"),
    before: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="An earlier job to compare a training job with.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    json: options.Json = False,
) -> None:
    """Write one HTML file that works offline: what imbalance costs, where, and what to set.

    For document lengths it gives the verdict of wlb check, and writes the recommended job, if any, to OUT with
    .job.toml for .html.

    Example: wlb report synthetic:20000:128K:0 --model 7b --dp 4 --pp 4 --cp 2 --tp 8 --open

    Example: wlb report runs/tiny --out measured.html
    """
    from wlb.documents.store.files import names_store
    from wlb.report.measured import measured_report
    from wlb.report.run_directory import STEPS, read_run

    options.check_writable(out)
    said = ""
    # A job may write beside its token stores. Reading complains of a directory without a job.
    is_run = isdir(source) and (Path(source, STEPS).exists() or not names_store(source))
    if before is not None or is_run:
        why = "has no effect on the report of a training run, which is measured"
        refuse_unused(context, names_of(options.JobOptions), why)
        text, summary = measured_report(read_run(Path(source)), None if before is None else read_run(before))
    else:
        config = out.with_suffix(".job.toml")
        options.check_writable(config)
        text, found, said = _predicted(context, source, asked)
        summary = found.to_json() | {"kind": "simulated"}
        if found.config:
            _write_job(config, found.config)
            summary["config_file"] = str(config)
        elif config.exists():
            note(f"{config} is of an earlier report; this one recommends no job")
    content = text.encode(errors="xmlcharrefreplace")  # names of files may have any bytes
    out.write_bytes(content)
    if show:
        webbrowser.open(out.absolute().as_uri())
    if json:
        emit_json({"out": str(out), **summary})
    else:
        stdout.print(said + summary["verdict"])
        stdout.print(f"{out}  ({len(content) / 1e6:.2f} MB)")
        if "config_file" in summary:
            job = summary["config_file"]
            if names_store(source):
                show_next("train", job, "--dry-run", "--hardware", asked.hardware)
            else:
                same = given_again(context, ["length_column", "hardware", "profile", "steps"])
                show_next("simulate", job, "--lengths", source, *same)


def _write_job(path: Path, job: str) -> None:
    """Write ``job``; an earlier file, which may have been edited, is kept beside it."""
    content = job.encode(errors="replace")  # names of files may have any bytes
    if path.exists() and path.read_bytes() != content:
        names = (path.with_suffix(f".earlier{number}.toml") for number in chain([""], count(2)))
        earlier = path.replace(next(name for name in names if not name.exists()))
        note(f"{path} was another job, which is {earlier} now")
    path.write_bytes(content)


def _predicted(context: typer.Context, source: str, asked: options.JobOptions) -> "tuple[str, Estimate, str]":
    """The page, the estimate, and a line on what was read."""
    from wlb.documents.lengths import read_lengths, what_was_read
    from wlb.report.evidence import Evidence
    from wlb.report.predicted import predicted_report
    from wlb.simulate.estimate import CHECKED

    lengths = read_lengths(source, column=asked.length_column)
    space = asked.space(context, source, lengths)
    found = estimated(space, lengths, CHECKED, asked.steps, source)
    read = what_was_read(source, lengths, space.context_window)
    return predicted_report(Evidence(lengths, found), read), found, f"{read}\n\n"
