"""``wlb simulate``: what a job's steps take on its GPUs, where the time goes, and which layout is fastest."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.check import progress_of
from wlb.cli.console import counted, emit_json, show_columns, show_next, stdout
from wlb.errors import UserError
from wlb.schedules.operations import TRAINED_SCHEDULES
from wlb.terminal import number_of, tell

if TYPE_CHECKING:
    from wlb.documents.length_counts import DocumentLengths
    from wlb.documents.store.sources import StoreSource
    from wlb.simulate import SimulatedJob, SimulationResult
    from wlb.simulate.search import SearchResult
    from wlb.simulate.verdict import Verdict

_SEARCH_STEPS = 8
_CONFIGURED = "as configured"
_DOCUMENTS = 100_000  # synthetic ones, where no lengths are given
_FINALISTS_SHOWN = 12
_WORTH_TELLING = 0.002  # of a step


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Which job is simulated, under which systems."""

    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="Configuration file of a job, or a named one: 550m-64k ... 70b-128k, 405b-128k. \\[required without "
            "--search]",
            show_default=False,
        ),
    ] = None
    systems: Annotated[
        str | None,
        options.list_of_names(
            "Presets: plain-4d, fixed-4d, wlb-llm, best, elastic; default: all, or a configuration and plain-4d."
        ),
    ] = None
    hardware: options.Hardware = "h100"
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Workload profile measured by wlb profile: compute as measured, links of --hardware.",
        ),
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Pipeline schedule: 1f1b, interleaved_1f1b, gpipe, interleaved_zero_bubble, zbv_zero_bubble.",
        ),
    ] = None
    settings: options.Settings = None
    encoder: options.Encoders = None
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the last step of every system as a Perfetto trace.")
    ] = None
    open_trace: Annotated[
        bool, typer.Option("--open-trace", help="Open it at ui.perfetto.dev; without --trace from a temporary file.")
    ] = False

    def jobs(self, lengths: str | None) -> tuple[dict[str, SimulatedJob], Any, list[StoreSource]]:
        """The jobs to simulate, by the system that each shows; the lengths of their documents, and where they are from.

        These are one source, ``lengths`` where it is given, or each store of a mixture.
        """
        from wlb.simulate.job import NAMED_JOBS
        from wlb.simulate.run import check_documents
        from wlb.simulate.verdict import well_checkpointed
        from wlb.studies.check import with_phases
        from wlb.workload.profile import read_profile

        if self.job is None:
            raise UserError("name a configuration file or a job, or use --search; for example: wlb simulate 7b-128k")
        if self.job in NAMED_JOBS:
            jobs, sources = self._named(self.job)
        elif Path(self.job).suffix == ".toml":
            jobs, sources = self._configured(Path(self.job))
        else:
            raise UserError(
                f"{self.job!r} is neither a .toml file nor a named job; named jobs are {', '.join(NAMED_JOBS)}"
            )
        layout: dict[str, Any] = {} if self.schedule is None else {"schedule": self.schedule}
        if self.schedule == "zbv_zero_bubble":
            layout["virtual_pp"] = 2
        prices = {} if self.profile is None else {"profile": read_profile(self.profile)}
        sources = sources if lengths is None else [lengths]
        documents = _lengths(sources)
        jobs = {system: job.with_layout(**layout).priced(**prices) for system, job in jobs.items()}
        if lengths is not None:
            jobs = {system: with_phases(job, lengths, self.encoder) for system, job in jobs.items()}
        if self.systems is None:  # pools know no phases
            jobs = {system: job for system, job in jobs.items() if not (job.phases and job.pools)}
        if self.job in NAMED_JOBS:
            check_documents(next(iter(jobs.values())), documents)
            jobs = {preset: well_checkpointed(job, documents) for preset, job in jobs.items()}
        return jobs, documents, sources

    def follows(self, job: SimulatedJob, sources: list[StoreSource]) -> list[object]:
        """The command to go on with: a dry run of a configuration whose stores exist, or a report on a named job."""
        from wlb.documents.store.sources import names_store
        from wlb.simulate.job import NAMED_JOBS

        assert self.job is not None
        if self.job in NAMED_JOBS:
            gpu = {"model": NAMED_JOBS[self.job].model, "tp": job.layout.tp, "cp": job.layout.cp}
            priced = gpu if self.profile is None else {"profile": self.profile}
            encoders = [word for one in self.encoder or () for word in ("--encoder", one)]
            return ["report", *sources, *_as_options(job, priced | {"hardware": self.hardware}), *encoders]
        if not all(map(names_store, job.data.stores)):
            return []
        settings = [word for one in self.settings or () for word in ("--set", one)]
        return ["train", self.job, *settings, "--dry-run", *options.machine_of(self.hardware)]

    def _named(self, name: str) -> tuple[dict[str, SimulatedJob], list[StoreSource]]:
        from wlb.job.config import PRESETS
        from wlb.simulate.job import NAMED_JOBS, named_job

        if self.settings:
            raise UserError("--set overrides a configuration file; a named job has none")
        presets = options.names_in("--systems", self.systems, PRESETS)
        jobs = {preset: named_job(name, preset, hardware=self.hardware) for preset in presets}
        return jobs, [_synthetic(NAMED_JOBS[name].context_window)]

    def _configured(self, path: Path) -> tuple[dict[str, SimulatedJob], list[StoreSource]]:
        from wlb.documents.store.reader import stored_vocab_size
        from wlb.job.config_file import load_config
        from wlb.simulate import SimulatedJob

        settings = self.settings or []
        configs = {_CONFIGURED: load_config(path, settings)}
        for preset in options.names_in("--systems", self.systems, ["plain-4d"]):
            without_pools = [] if preset == "elastic" else ["parallel.pool=auto"]
            configs[preset] = load_config(path, [*settings, f"preset={preset}", *without_pools])
        stores = configs[_CONFIGURED].data.stores
        vocab_size = max(stored_vocab_size(prefix) or 0 for prefix in stores) or None
        jobs = {
            system: SimulatedJob.from_config(config, self.hardware, vocab_size=vocab_size)
            for system, config in configs.items()
        }
        return jobs, [*stores]


def simulate(
    asked: Annotated[
        SimulateOptions | options.SpaceOptions,
        typer.Option("--search", help="Look for the fastest layout and packing."),
    ],
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTHS", help="Document lengths, as for wlb compare; default: the job's store, or synthetic."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        options.number_of_steps(
            "Steps to simulate, after some that warm up; default: of 512 windows, or 8 with --search."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Simulate steps of a job on any number of GPUs, and say where their time goes.

    Plans and shards are those that the trainer would run; seconds are predicted from the hardware preset or a profile.

    Example: wlb simulate 7b-128k

    Example: wlb simulate configs/7b_128k.toml --lengths lengths.json --trace step.json

    Example: wlb simulate --search --gpus 64 --model 7b --lengths lengths.json
    """
    if isinstance(asked, options.SpaceOptions):
        _search(asked, lengths or _synthetic(asked.context_window), steps or _SEARCH_STEPS, json)
        return
    from wlb.documents.store.sources import source_name
    from wlb.simulate.search import usual_steps
    from wlb.simulate.verdict import judge

    if asked.trace is not None:
        options.check_writable(asked.trace)
    jobs, documents, sources = asked.jobs(lengths)
    steps = steps or usual_steps(next(iter(jobs.values())).global_batch)
    with progress_of(jobs, steps) as told:
        verdict = judge(jobs, documents, steps, on_progress=told)
    results = verdict.systems
    jobs = {system: result.job for system, result in results.items()}
    _warn_of_memory(jobs)
    trace = asked.trace
    if trace is None and asked.open_trace:
        trace = Path(tempfile.mkdtemp(prefix="wlb-"), "trace.json")
    if trace is not None:
        _write_trace(trace, jobs, documents, verdict.warm_up + verdict.steps)
    profile = asked.profile and asked.profile.name
    shown = {
        "job": asked.job,
        "lengths": " + ".join(map(source_name, sources)),
        "hardware": asked.hardware,
        "profile": profile,
    }
    if json:
        emit_json(shown | verdict.to_json())
    else:
        _show_simulation(verdict, shown)
        if trace is not None:
            where = "" if asked.open_trace else " (open it at ui.perfetto.dev)"
            stdout.print(f"trace: {trace}{where}", markup=False, highlight=False, soft_wrap=True)
    if asked.open_trace and trace is not None:
        from wlb.cli.perfetto import open_trace

        open_trace(trace)
    if not json:
        show_next(*asked.follows(verdict.systems[verdict.base].job, sources))


def _search(asked: options.SpaceOptions, lengths: str, steps: int, json: bool) -> None:
    from wlb.simulate.search import search

    space = asked.space(steps)
    with counted("layouts") as progress:
        found = search(space, _lengths([lengths]), on_progress=progress)
    if json:
        emit_json(_search_json(found))
    else:
        _show_search(found)
        priced = {"model": asked.model, "tp": found.winner.job.layout.tp, "cp": found.winner.job.layout.cp}
        show_next("report", lengths, *_as_options(found.winner.job, priced | {"hardware": asked.hardware}))


def _as_options(job: SimulatedJob, priced: dict[str, Any]) -> list[object]:
    """What ``wlb report`` is told for ``job``: its sizes, and by what it is ``priced``."""
    layout = job.layout
    chosen: dict[str, Any] = {"context_window": job.context_window, "micro_batches": job.packing.micro_batches}
    chosen |= priced | {"dp": layout.dp, "pp": layout.pp}
    if layout.schedule in TRAINED_SCHEDULES and layout.virtual_pp > 1:
        chosen |= {"virtual_pp": layout.virtual_pp, "schedule": layout.schedule}
    return [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", value)]


def _synthetic(context_window: int) -> str:
    return f"synthetic:{_DOCUMENTS}:{context_window}:0"


def _lengths(sources: Sequence[StoreSource]) -> Any:
    from wlb.documents.lengths import read_lengths

    read = [read_lengths(source, keep_empty=True) for source in sources]
    return read[0] if len(read) == 1 else read


def _warn_of_memory(jobs: dict[str, SimulatedJob]) -> None:
    """Say in one line which jobs the trainer would refuse, and why; they are simulated all the same."""
    from wlb.job.memory.fit import fits, predicted_memory, too_large

    refused = [system for system, job in jobs.items() if not fits(job)]
    if refused:
        worst = max(refused, key=lambda system: predicted_memory(jobs[system]).total)
        problem = too_large(jobs[worst])
        others = [system for system in refused if system != worst]
        also = f"; {', '.join(others)} {'do' if len(others) > 1 else 'does'} not fit either" if others else ""
        tell(f"wlb: warning: {worst}: {problem}{also}")


def _write_trace(path: Path, jobs: dict[str, SimulatedJob], lengths: DocumentLengths, steps: int) -> None:
    """The last step of every system."""
    from itertools import islice

    from wlb.job.planner import StepPlanner
    from wlb.simulate.timeline import timeline
    from wlb.simulate.trace import write_trace

    lines = {}
    for system, job in jobs.items():
        plan = next(islice(StepPlanner(job, lengths).plans(), steps - 1, None))
        lines[system] = timeline(plan, job)
    write_trace(path, lines)


def _show_simulation(verdict: Verdict, shown: dict[str, Any]) -> None:
    """The verdict, and where the time of each system's steps goes, in seconds."""
    from wlb.simulate import CAUSES
    from wlb.simulate.step import IMBALANCES

    stdout.print(f"{verdict}\n", markup=False, highlight=False)
    results = verdict.systems
    phases = [name for name in next(iter(results.values())).imbalance if name not in IMBALANCES]
    systems, first = list(results.values()), results[verdict.base]
    causes = [cause for cause in CAUSES if any(abs(r.where[cause]) > 5e-4 for r in systems)]  # not shown as 0.000
    rows = {
        "speed at equal work": [f"{verdict.speed(name):.3f}x" for name in results],
        "tokens/s": [f"{r.tokens_per_second:,.0f}" for r in systems],
        **{cause: [f"{round(r.where[cause], 3) + 0.0:.3f}" for r in systems] for cause in causes},
        "step": [f"{r.mean_step_seconds:.3f}" for r in systems],
        "imbalance: GPUs": [f"{r.imbalance['gpus']:.3f}" for r in systems],
        "imbalance: micro-batches": [f"{r.imbalance['micro_batches']:.3f}" for r in systems],
        "imbalance: cp ranks": [f"{r.imbalance['cp']:.3f}" for r in systems],
        "imbalance: dp ranks": [f"{r.imbalance['dp']:.3f}" for r in systems],
        **{f"imbalance: {name}": [f"{r.imbalance[name]:.3f}" for r in systems] for name in phases},
        "token delay, steps": [f"{r.token_delay:.3f}" for r in systems],
        "tokens per step, CV": [f"{r.tokens_cv:.3f}" for r in systems],
        "attention kept": [f"{r.attention_kept:.0%}" for r in systems],
    }
    jobs = {name: result.job for name, result in results.items()}
    micro_batches = number_of(first.job.packing.micro_batches, "micro-batch")
    priced = f"profile {shown['profile']}, links of {shown['hardware']}" if shown["profile"] else shown["hardware"]
    columns = dict(zip(results, map(list, zip(*rows.values(), strict=True)), strict=True))
    same = [name for name in results if name != _CONFIGURED and jobs[name] == jobs.get(_CONFIGURED)]
    if same:
        del columns[_CONFIGURED]
    columns = {f"{name},\n{_CONFIGURED}" if name in same else name: column for name, column in columns.items()}
    show_columns(
        {"": [*rows]} | columns,
        title=f"{Path(shown['job']).name} on {number_of(first.job.layout.world_size, 'GPU')}\nsimulated ({priced})",
        notes={
            "": f"{number_of(first.steps, 'step')} of {micro_batches}, lengths {shown['lengths']}\n"
            f"{_repeated(systems)}"
            f"speed at equal work: predicted seconds of work done in a second, over {verdict.base}\n"
            "tokens/s counts attention that is cut away, and documents still delayed, as gains\n"
            "from compute to step: seconds · imbalance: slowest over mean"
        },
    )


def _repeated(results: Iterable[SimulationResult]) -> str:
    """A line where the documents did not fill the steps."""
    epochs = max(result.epochs for result in results)
    return f"the documents fill fewer steps and are repeated: {epochs} passes over them began\n" if epochs > 1 else ""


def _search_json(found: SearchResult) -> dict[str, Any]:
    from wlb.simulate.search import explanation

    def described(result: SimulationResult) -> dict[str, Any]:
        job = result.job
        return result.to_json() | {
            "speed_at_equal_work": result.speed_at_equal_work(found.plain),
            "parallel": vars(job.layout),
            "activation_checkpointing": job.activation_checkpointing,
            "packing": job.packing.in_use(),
            "sharding": job.sharding.model_dump(),
        }

    return {
        "layouts": found.layouts,
        "too_large": found.too_large,
        "ranking": [described(result) for result in found.ranking],
        "plain": described(found.plain),
        "saved": {name: dict(explanation(found.winner, other)) for name, other in _others(found)},
    }


def _others(found: SearchResult) -> list[tuple[str, SimulationResult]]:
    """What the winner is explained beside."""
    return [*(("the runner-up", other) for other in found.ranking[1:2]), ("plain-4d in its layout", found.plain)]


def _show_search(found: SearchResult) -> None:
    """Print the ranking, plain-4d below it, and why its first is first."""
    from wlb.simulate.search import explanation, layout_of, packing_of

    job, rows = found.winner.job, [*found.ranking[:_FINALISTS_SHOWN], found.plain]
    columns: dict[str, list[str]] = {
        "layout": [layout_of(r.job) for r in rows],
        "check-\npointing": [r.job.activation_checkpointing for r in rows],
        "packing and sharding": [packing_of(r.job) for r in rows],
        "speed at\nequal work": [f"{r.speed_at_equal_work(found.plain):.3f}x" for r in rows],
        "tokens/s": [f"{r.tokens_per_second:,.0f}" for r in rows],
        "step s": [f"{r.mean_step_seconds:.3g}" for r in rows],
        "attention\nkept": [f"{r.attention_kept:.0%}" for r in rows],
    }
    base = f"{_repeated(rows)}speed at equal work: over plain-4d in the fastest layout, the last row"
    show_columns(
        columns,
        title=f"{job.layout.world_size:,} GPUs, {job.packing.micro_batches} windows of {job.context_window:,} tokens "
        f"a step\nsimulated ({found.layouts} layouts fit the memory, {found.too_large} do not)",
        notes={"speed at\nequal work": base},
        words=("layout", "check-\npointing", "packing and sharding"),
        wide_only=("check-\npointing", "step s", "attention\nkept"),
    )
    for name, other in _others(found):
        gain, saved = found.winner.speed_at_equal_work(other), explanation(found.winner, other)
        worth_telling = _WORTH_TELLING * found.winner.mean_step_seconds
        told = ", ".join(f"{cause} {seconds:+.2g}" for cause, seconds in saved if abs(seconds) >= worth_telling)
        stdout.print(
            f"{gain:.3f}x {name} at equal work ({layout_of(other.job)}, {packing_of(other.job)}); "
            f"seconds saved a step: {told or 'none'}",
            highlight=False,
        )
