"""``wlb simulate``: what a job's steps take on its GPUs, where the time goes, and which layout is fastest."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, print_table, progress_bar, stdout
from wlb.cli.simulation_tables import report_search, simulation_json, simulation_table
from wlb.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wlb.documents.mixture import DocumentLengths
    from wlb.simulate import SimulatedJob, SimulationResult
    from wlb.simulate.search import SearchResult

_SEARCH_ONLY = ("gpus", "model", "context_window", "batch_tokens")
_JOB_ONLY = ("job", "systems", "profile", "schedule", "settings", "trace")
_STEPS, _SEARCH_STEPS = 50, 8
_CONFIGURED = "as configured"
_DOCUMENTS = 100_000  # synthetic ones, where a named job is given no lengths


def simulate(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(
            help="Configuration file of a job, or a named one: 550m-64k ... 70b-128k, 405b-128k. \\[required without "
            "--search]",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="LENGTHS",
            help="Document lengths, as for wlb compare; default: the job's store, or synthetic.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            max=options.MOST_STEPS,
            metavar="N",
            help="Steps to simulate; default 50, or 8 of each finalist of --search.",
        ),
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(
            "--systems",
            metavar="A,B,...",
            help="Presets: plain-4d, fixed-4d, wlb-llm, best, elastic; default: all, or a configuration and plain-4d.",
        ),
    ] = None,
    hardware: options.Hardware = "h100",
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="Workload profile measured by wlb profile: compute as measured, links of --hardware.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Pipeline schedule: 1f1b, interleaved_1f1b, gpipe, interleaved_zero_bubble, zbv_zero_bubble.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting; may be given several times."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write the last step of the last system as a Perfetto trace."),
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Look for the fastest layout and packing.")] = False,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=1, metavar="N", rich_help_panel=options.SEARCH_ONLY, help="GPUs of the job. \\[required]"
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(metavar="NAME", rich_help_panel=options.SEARCH_ONLY, help="Model, as for wlb compare."),
    ] = options.DEFAULT_MODEL,
    context_window: Annotated[
        int,
        typer.Option(
            "--context-window",
            metavar="TOKENS",
            parser=options.tokens,
            rich_help_panel=options.SEARCH_ONLY,
            help="Tokens attention may span, such as 128K.",
        ),
    ] = 131_072,
    batch_tokens: Annotated[
        int,
        typer.Option(
            "--batch-tokens",
            metavar="TOKENS",
            parser=options.tokens,
            rich_help_panel=options.SEARCH_ONLY,
            help="Global batch, such as 16M.",
        ),
    ] = 2**24,
    json: options.Json = False,
) -> None:
    """Simulate steps of a job on any number of GPUs, and say where their time goes.

    Plans and shards are those that the trainer would run; seconds are predicted from the hardware preset or a profile.

    Example: wlb simulate 7b-128k

    Example: wlb simulate configs/7b_128k.toml --lengths lengths.json --trace step.json

    Example: wlb simulate --search --gpus 64 --model 7b --lengths lengths.json
    """
    if search:
        options.refuse_unused(context, _JOB_ONLY, "has no effect with --search, which makes its own jobs")
        if gpus is None:
            raise UserError("--search needs --gpus: how many there are")
        found = _search(gpus, model, context_window, batch_tokens, hardware, lengths, steps or _SEARCH_STEPS)
        report_search(found, json)
        return
    options.refuse_unused(context, _SEARCH_ONLY, "has no effect without --search")
    if job is None:
        raise UserError("name a configuration file or a job such as 7b-128k, or use --search")
    if trace is not None:
        options.check_writable(trace)
    steps = steps or _STEPS
    jobs, own_lengths = _jobs(job, systems, settings or [], hardware, _changes(profile, schedule))
    source = " + ".join(own_lengths) if lengths is None else lengths
    documents = _lengths(lengths) if lengths is not None else _own_lengths(own_lengths)
    results = _simulate_all(jobs, documents, steps)
    jobs = {system: result.job for system, result in results.items()}
    _warn_of_memory(jobs)
    shown = {"job": job, "lengths": source, "hardware": hardware, "profile": profile and profile.name}
    if trace is not None:
        _write_trace(trace, next(reversed(jobs.values())), documents, steps)
    if json:
        emit_json(shown | {"systems": simulation_json(results)})
        return
    print_table(*(simulation_table(Path(job).name, results, shown, narrow=narrow) for narrow in (False, True)))
    if trace is not None:
        stdout.print(f"trace: {trace} (open it at ui.perfetto.dev)")


def _changes(profile: Path | None, schedule: str | None) -> dict[str, Any]:
    """What options replace of every job's prices and layout."""
    from wlb.workload.profile import read_profile

    changes: dict[str, Any] = {} if profile is None else {"profile": read_profile(profile)}
    if schedule is not None:
        changes["schedule"] = schedule
    if schedule == "zbv_zero_bubble":
        changes["virtual_pp"] = 2
    return changes


def _jobs(
    name: str, systems: str | None, settings: Sequence[str], hardware: str, changes: dict[str, Any]
) -> tuple[dict[str, SimulatedJob], list[str]]:
    """The jobs to simulate, by the system that each shows, and where the lengths of their documents come from.

    That is one source, or each store of a mixture.
    """
    from wlb.documents.store.reader import stored_vocab_size
    from wlb.job.config import PRESETS
    from wlb.job.config_file import load_config
    from wlb.simulate import SimulatedJob
    from wlb.simulate.job import NAMED_JOBS, named_job

    if name in NAMED_JOBS:
        if settings:
            raise UserError("--set overrides a configuration file; a named job has none")
        chosen = options.names_in("--systems", systems, PRESETS)
        jobs = {preset: named_job(name, preset, hardware=hardware) for preset in chosen}
        sources = [f"synthetic:{_DOCUMENTS}:{NAMED_JOBS[name].context_window}:0"]
    elif Path(name).suffix == ".toml":
        path, chosen = Path(name), options.names_in("--systems", systems, ["plain-4d"])
        config = load_config(path, settings)
        configs = {_CONFIGURED: config} | {
            preset: load_config(path, [*settings, f"preset={preset}", *_without_pools(preset)]) for preset in chosen
        }
        vocab_size = max(stored_vocab_size(prefix) or 0 for prefix in config.data.stores) or None
        jobs = {
            system: SimulatedJob.from_config(configured, hardware, vocab_size=vocab_size)
            for system, configured in configs.items()
        }
        sources = [str(prefix) for prefix in config.data.stores]
    else:
        raise UserError(f"{name!r} is neither a .toml file nor a named job; named jobs are {', '.join(NAMED_JOBS)}")
    of_layout = {name: changes.pop(name) for name in ("schedule", "virtual_pp") if name in changes}
    return {system: job.with_layout(**of_layout).priced(**changes) for system, job in jobs.items()}, sources


def _without_pools(preset: str) -> list[str]:
    """Overrides with which a configuration of pools is one of ``preset``."""
    return [] if preset == "elastic" else ["parallel.pool=auto"]


def _warn_of_memory(jobs: dict[str, SimulatedJob]) -> None:
    """Say in one line which jobs the trainer would refuse, and why; they are simulated all the same."""
    from wlb.job.memory.fit import fits, predicted_memory, too_large

    refused = [system for system, job in jobs.items() if not fits(job)]
    if refused:
        worst = max(refused, key=lambda system: predicted_memory(jobs[system]).total)
        problem = too_large(jobs[worst])
        others = [system for system in refused if system != worst]
        also = f"; {', '.join(others)} {'do' if len(others) > 1 else 'does'} not fit either" if others else ""
        print(f"wlb: warning: {worst}: {problem}{also}", file=sys.stderr)


def _lengths(source: str) -> NDArray[np.int64]:
    from wlb.documents.lengths import read_lengths

    return read_lengths(source, keep_empty=True)


def _own_lengths(sources: list[str]) -> DocumentLengths:
    return _lengths(sources[0]) if len(sources) == 1 else [_lengths(source) for source in sources]


def _simulate_all(jobs: dict[str, SimulatedJob], lengths: DocumentLengths, steps: int) -> dict[str, SimulationResult]:
    from wlb.simulate import simulate as run

    results = {}
    with progress_bar() as bar:
        for name, job in jobs.items():
            advance = partial(bar.advance, bar.add_task(name, total=steps))
            results[name] = run(job, lengths, steps, on_progress=advance)
    return results


def _write_trace(path: Path, job: SimulatedJob, lengths: DocumentLengths, steps: int) -> None:
    from itertools import islice

    from wlb.job.planner import StepPlanner
    from wlb.simulate.timeline import timeline
    from wlb.simulate.trace import write_trace

    plan = next(islice(StepPlanner(job, lengths).plans(), steps - 1, None))
    write_trace(path, timeline(plan, job))


def _search(
    gpus: int, model: str, context_window: int, batch_tokens: int, hardware: str, lengths: str | None, steps: int
) -> SearchResult:
    from wlb.simulate.search import search, search_space

    space = search_space(model, gpus, context_window, hardware=hardware, batch_tokens=batch_tokens, steps=steps)
    documents = _lengths(f"synthetic:{_DOCUMENTS}:{context_window}:0" if lengths is None else lengths)
    with progress_bar() as bar:
        task = bar.add_task("layouts", total=None)
        return search(space, documents, on_progress=lambda done, of: bar.update(task, completed=done, total=of))
