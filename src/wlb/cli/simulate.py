"""``wlb simulate``: how long the steps of a job take, and where the time goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.check import estimated, progress_of
from wlb.cli.console import emit_json, show_columns, show_next, stdout
from wlb.errors import UserError
from wlb.terminal import number_of, tell

if TYPE_CHECKING:
    from wlb.documents.store.files import StoreSource
    from wlb.job.job import Job
    from wlb.simulate.verdict import Lengths, Verdict
    from wlb.workload.profile import WorkloadProfile

_DOCUMENTS = 100_000  # synthetic ones, where no lengths are given
_IMBALANCES = {"gpus": "GPUs", "micro_batches": "micro-batches", "cp": "cp ranks", "dp": "dp ranks"}

_Systems = Annotated[
    str | None, options.list_of_names("Presets, see wlb check; default: all, or a configuration and plain-4d.")
]


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The job to simulate, and the systems to compare."""

    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB", help="Configuration file of a job, or a named one: 550m-64k ... 70b-128k, 405b-128k."
        ),
    ]
    systems: _Systems = None
    length_column: options.LengthColumn = None
    hardware: options.Hardware = "h100"
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Workload profile measured by wlb profile: compute as measured, links of --hardware."
        ),
    ] = None
    settings: options.Settings = None
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the last step of every system as a Perfetto trace.")
    ] = None
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTHS", help="Document lengths, as for wlb check; default: the job's store, or synthetic."
        ),
    ] = None
    steps: options.Steps = None

    def judged(self) -> tuple[Verdict, Lengths, list[StoreSource]]:
        """The verdict on the job, the lengths of its documents, and their sources.

        There is one source, ``lengths`` if given, or one per store of a mixture.
        """
        from wlb.job.config import PRESETS
        from wlb.simulate.job import NAMED_JOBS
        from wlb.workload.profile import read_profile

        profile = None if self.profile is None else read_profile(self.profile)
        if self.job in NAMED_JOBS:
            return self._named(options.names_in("--systems", self.systems, PRESETS), profile)
        if Path(self.job).suffix == ".toml":
            return self._configured(Path(self.job), profile)
        raise UserError(f"{self.job!r} is neither a .toml file nor a named job; named jobs are {', '.join(NAMED_JOBS)}")

    def follows(self, job: Job, sources: list[StoreSource]) -> list[object]:
        """The next command: a dry run of a configuration whose stores exist, or a report on a named job."""
        from wlb.documents.store.files import names_store
        from wlb.simulate.job import NAMED_JOBS

        if self.job in NAMED_JOBS:
            named = NAMED_JOBS[self.job]
            priced = {"model": named.model} if self.profile is None else {"profile": self.profile}
            asked = priced | {"hardware": self.hardware, "gpus": named.gpus, "context_window": named.context_window}
            asked |= {"batch_tokens": job.global_batch * named.context_window}
            words = (word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", value))
            return ["report", *sources, *words]
        if not all(map(names_store, job.data.stores)):
            return []
        settings = [word for one in self.settings or () for word in ("--set", one)]
        return ["train", self.job, *settings, "--dry-run", "--hardware", self.hardware]

    def _named(self, presets: list[str], profile: WorkloadProfile | None) -> tuple[Verdict, Lengths, list[StoreSource]]:
        """Every system in its own fastest layout on the GPUs of the named job."""
        from wlb.documents.lengths import read_lengths
        from wlb.simulate.job import NAMED_JOBS
        from wlb.simulate.space import search_space

        if self.settings:
            raise UserError("--set overrides a configuration file; a named job has none")
        named = NAMED_JOBS[self.job]
        source = f"synthetic:{_DOCUMENTS}:{named.context_window}:0" if self.lengths is None else self.lengths
        documents = read_lengths(source, column=self.length_column)
        space = search_space(
            named.model,
            named.gpus,
            named.context_window,
            documents,
            hardware=self.hardware,
            batch_tokens=named.global_batch * named.context_window,
            profile=profile,
            source=self.lengths,
        )
        found = estimated(space, documents, presets, self.steps, source)
        for name, why in found.left_out.items():
            tell(f"wlb: warning: {name} is left out: {why}")
        return found.verdict, documents, [source]

    def _configured(self, path: Path, profile: WorkloadProfile | None) -> tuple[Verdict, Lengths, list[StoreSource]]:
        from wlb.documents.lengths import read_lengths
        from wlb.documents.store.reader import stored_vocab_size
        from wlb.job.config_file import load_config
        from wlb.job.job import Job
        from wlb.simulate.estimate import judge_config

        config = load_config(path, self.settings or [])
        sources: list[StoreSource] = [*config.data.stores] if self.lengths is None else [self.lengths]
        vocab_size = max(stored_vocab_size(prefix) or 0 for prefix in config.data.stores) or None
        job = Job.from_config(config, self.hardware, vocab_size=vocab_size)
        job = job if profile is None else replace(job, profile=profile)
        presets = options.names_in("--systems", self.systems, ["plain-4d"])
        documents = [read_lengths(source, column=self.length_column) for source in sources]
        with progress_of() as told:
            return judge_config(config, job, documents, presets, self.steps, on_progress=told), documents, sources


def simulate(asked: SimulateOptions, json: options.Json = False) -> None:
    """Simulate steps of a job on any number of GPUs, and say where their time goes.

    Uses the plans and shards that the trainer would run, and predicts seconds from the hardware preset or a profile.
    wlb check finds the fastest layouts.

    Example: wlb simulate 7b-128k

    Example: wlb simulate configs/7b_128k.toml --lengths lengths.json --trace step.json
    """
    from wlb.documents.lengths import what_was_read
    from wlb.documents.store.files import source_name
    from wlb.simulate.filling import joined_lengths

    if asked.trace is not None:
        options.check_writable(asked.trace)
    verdict, documents, sources = asked.judged()
    results = verdict.systems
    jobs = {system: result.job for system, result in results.items()}
    _warn_of_memory(jobs)
    if asked.trace is not None:
        _write_trace(asked.trace, jobs, documents, verdict.warm_up + verdict.steps)
    shown: dict[str, Any] = {
        "job": asked.job,
        "lengths": " + ".join(map(source_name, sources)),
        "hardware": asked.hardware,
    }
    shown["profile"] = asked.profile and asked.profile.name
    if json:
        emit_json(shown | verdict.to_json())
    else:
        window = verdict.systems[verdict.base].job.context_window
        said = what_was_read(shown["lengths"], joined_lengths(documents), window)
        stdout.print(f"{said}\n")
        _show_simulation(verdict, shown)
        if asked.trace is not None:
            stdout.print(f"trace: {asked.trace} (open it at ui.perfetto.dev)", soft_wrap=True)
        show_next(*asked.follows(verdict.systems[verdict.base].job, sources))


def _warn_of_memory(jobs: dict[str, Job]) -> None:
    """Warn in one line of jobs that the trainer would refuse for memory; they are simulated nevertheless."""
    from wlb.job.memory.fit import fits, predicted_memory, too_large

    refused = [system for system, job in jobs.items() if not fits(job)]
    if refused:
        worst = max(refused, key=lambda system: predicted_memory(jobs[system]).total)
        problem = too_large(jobs[worst])
        others = [system for system in refused if system != worst]
        also = f"; {', '.join(others)} {'do' if len(others) > 1 else 'does'} not fit either" if others else ""
        tell(f"wlb: warning: {worst}: {problem}{also}")


def _write_trace(path: Path, jobs: dict[str, Job], lengths: Lengths, steps: int) -> None:
    """Write the last step of every system."""
    from itertools import islice

    from wlb.job.planner import StepPlanner
    from wlb.report.timeline import timeline
    from wlb.report.trace import write_trace

    lines = {}
    for system, job in jobs.items():
        plan = next(islice(StepPlanner(job, lengths).plans(), steps - 1, None))
        lines[system] = timeline(plan, job)
    write_trace(path, lines)


def _show_simulation(verdict: Verdict, shown: dict[str, Any]) -> None:
    """Print the verdict, and where the time of each system goes, in seconds."""
    from wlb.report.answer import too_few
    from wlb.simulate import CAUSES
    from wlb.simulate.estimate import CONFIGURED

    stdout.print(f"{verdict}\n")
    results = verdict.systems
    systems, first = list(results.values()), results[verdict.base]
    causes = [cause for cause in CAUSES if any(abs(r.where[cause]) > 5e-4 for r in systems)]  # not shown as 0.000
    rows = {
        "speedup": [f"{verdict.speed(name):.3f}x" for name in results],
        "speed at equal work": [f"{verdict.speed_at_equal_work(name):.3f}x" for name in results],
        "tokens/s": [f"{r.tokens_per_second:,.0f}" for r in systems],
        **{cause: [f"{round(r.where[cause], 3) + 0.0:.3f}" for r in systems] for cause in causes},
        "step": [f"{r.mean_step_seconds:.3f}" for r in systems],
        **{f"imbalance: {what}": [f"{r.imbalance[key]:.3f}" for r in systems] for key, what in _IMBALANCES.items()},
        "mean token delay, steps": [f"{r.token_delay:.3f}" for r in systems],
        "tokens per step, CV": [f"{r.tokens_cv:.3f}" for r in systems],
        "attention kept": [f"{r.attention_kept:.0%}" for r in systems],
    }
    windows = number_of(first.job.global_batch, "window")
    priced = f"profile {shown['profile']}, links of {shown['hardware']}" if shown["profile"] else shown["hardware"]
    columns = dict(zip(results, map(list, zip(*rows.values(), strict=True)), strict=True))
    epochs = max(result.epochs for result in systems)
    repeated = f"{too_few(epochs)}\n" if epochs > 1 else ""
    jobs = {name: result.job for name, result in results.items()}
    same = [name for name in results if name != CONFIGURED and jobs[name] == jobs.get(CONFIGURED)]
    if same:
        del columns[CONFIGURED]
    columns = {f"{name},\n{CONFIGURED}" if name in same else name: column for name, column in columns.items()}
    show_columns(
        {"": [*rows]} | columns,
        title=f"{Path(shown['job']).name} on {number_of(first.job.layout.world_size, 'GPU')}\nsimulated ({priced})",
        notes={
            "": f"{number_of(first.steps, 'step')} of {windows}, lengths {shown['lengths']}\n"
            f"{repeated}"
            f"speedup: tokens/s over those of {verdict.base}; equal work: seconds of work (W_a + W_l) per second\n"
            "compute to step: seconds · imbalance: slowest / mean · attention kept: not lost where documents are cut"
        },
    )
