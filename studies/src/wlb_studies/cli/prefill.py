"""``wlb-studies prefill``: compare prefill policies of a serving system on your prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, show_columns, stderr, stdout
from wlb.cli.groups import refuse_unused
from wlb.errors import UserError
from wlb.report.answer import listed
from wlb_studies.cli.gpu_options import GpuOptions, PricedGpu
from wlb_studies.cli.terminal import with_progress, with_room

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wlb_studies.serving.job import PrefillJob
    from wlb_studies.serving.result import GroupResult, PrefillResult

_MOST_RANKS, _MOST_PASSES, _MOST_CHUNKS = 512, 20_000, 1_000_000  # takes some minutes per method


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(GpuOptions):
    """The GPUs that serve prompts, and their mode."""

    token_budget: Annotated[int, options.number_of_tokens("Tokens of a rank in one pass.")]
    dp: Annotated[int, options.number("Data-parallel size.")] = 1
    pp: Annotated[int, options.number("Pipeline-parallel size.")] = 1
    cp: Annotated[int, options.number("Context-parallel size.")] = 1
    methods: Annotated[str | None, options.list_of_names("Methods; default: all that can be priced.")] = None
    chunked: Annotated[bool, typer.Option("--chunked/--whole", help="Cut prompts into chunks, or not.")] = True
    load: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="X", help="Arrival rate, as a share of the rate that ranks can sustain; 0: all at once."
        ),
    ] = 0.0
    lock_step: Annotated[
        bool, typer.Option("--lock-step/--independent", help="Ranks start passes together, or each at its own pace.")
    ] = True
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the arrivals.")] = 0


def prefill(
    context: typer.Context, lengths: options.Lengths, asked: PrefillOptions, json: options.Json = False
) -> None:
    """Compare policies of a serving system's prefill on a list of prompt lengths.

    Simulates time to first token, throughput, GPU-seconds and energy of every method on the same number of GPUs
    (dp x pp x tp x cp). count, tokens, workload and workload:shortest choose the batch of a rank; loongserve uses
    elastic sequence parallelism over instances of tp GPUs; dynamollm uses pools by prompt length, each with its own tp
    degree and clock.

    Example: wlb-studies prefill synthetic:2000:128K:0 --token-budget 8K --dp 8 --model llama3-8b --tp 1 --load 0.4
    """
    from wlb.documents.lengths import read_lengths
    from wlb_studies.serving.policies import POLICIES
    from wlb_studies.serving.result import prefill_result

    if not asked.load:
        refuse_unused(context, ["seed"], "has no effect without --load, as all prompts are there at once")
    prompts = read_lengths(lengths)
    prompts = prompts[prompts > 0]
    _check_passes(prompts, asked)
    gpu = asked.priced(context, asked.token_budget, asked.cp, asked.pp)
    job, rate = _job(prompts, asked, gpu)
    methods = [(name, POLICIES[name]) for name in _methods(context, asked.methods, job)]
    results = [
        prefill_result(name, policy.run(job, advance), job)
        for name, policy, advance in with_progress(methods, len(prompts))
    ]
    if json:
        names = ("token_budget", "chunked", "load", "lock_step", "dp", "pp", "seed")
        settings = {name: getattr(asked, name) for name in names} | {
            "prompts": len(prompts),
            "tokens": int(prompts.sum()),
            "prompts_per_batch": job.prompts_per_batch,
            "arrivals_per_second": rate if asked.load else None,
            "gpus": job.gpus,
            "workload": gpu.described,
        }
        emit_json({"methods": [result.to_json() for result in results], **settings})
        return
    _show(results, asked, job, gpu.described)


def _check_passes(prompts: NDArray[np.int64], asked: PrefillOptions) -> None:
    """Raise ``UserError`` for a simulation that would take hours."""
    dp, budget, tokens = asked.dp, asked.token_budget, int(prompts.sum())
    if dp > _MOST_RANKS:
        raise UserError(f"--dp {dp} is over the {_MOST_RANKS} data-parallel ranks of a simulated prefill; lower it")
    together = dp if asked.lock_step else 1
    for what, number, most in (
        ("passes", tokens // (budget * together), _MOST_PASSES),
        ("chunks", len(prompts) + tokens // budget, _MOST_CHUNKS),
    ):
        if number > most:
            raise UserError(
                f"{len(prompts)} prompts of {tokens} tokens take {number} {what} of --token-budget {budget} with --dp "
                f"{dp}, over the {most} that are simulated; raise the budget, or give fewer prompts"
            )


def _job(prompts: NDArray[np.int64], asked: PrefillOptions, gpu: PricedGpu) -> tuple[PrefillJob, float]:
    """The job and the prompts that arrive per second; 0 if all arrive at once."""
    import numpy as np

    from wlb.workload import hardware_preset
    from wlb_studies.serving.batching import PrefillPlanner, poisson_arrivals
    from wlb_studies.serving.job import PrefillJob
    from wlb_studies.serving.power import POWER
    from wlb_studies.serving.prefill import capacity

    rate = asked.load * capacity(prompts, PrefillPlanner(gpu.workload, asked.token_budget), asked.dp * asked.pp)
    arrivals = poisson_arrivals(len(prompts), rate, asked.seed) if asked.load else np.zeros(len(prompts))
    presets: dict[str, Any] = {}  # none of a measured GPU
    if gpu.measured is None:
        hardware = hardware_preset(asked.hardware)
        presets = {"model": gpu.shape, "hardware": hardware, "power": POWER.get(asked.hardware)}
    given = {name: getattr(asked, name) for name in ("token_budget", "dp", "pp", "chunked", "lock_step")}
    return PrefillJob(prompts, arrivals, gpu.workload, tp=gpu.tp, cp=gpu.cp, **given, **presets), rate


def _methods(context: typer.Context, methods: str | None, job: PrefillJob) -> list[str]:
    """The methods to simulate. Raises ``UserError`` for a method without prices or an option that none reads."""
    from wlb_studies.serving.policies import POLICIES, policy

    names = []
    for name in options.names_in("--methods", methods, POLICIES):
        try:
            policy(name).check(job)
        except UserError as error:
            if methods is not None:
                raise
            stderr.print(f"{name} is left out: {error}", highlight=False, soft_wrap=True)
        else:
            names.append(name)
    read = frozenset().union(*(POLICIES[name].reads for name in names))
    refuse_unused(context, {"chunked", "lock_step"} - read, f"has no effect on {', '.join(names)}")
    return names


def _show(
    results: Sequence[PrefillResult], asked: PrefillOptions, job: PrefillJob, priced_by: dict[str, str | int]
) -> None:
    load = f"load {asked.load:g} (Poisson)" if asked.load else "all at once"
    ranks = f"dp {job.dp} {'in lock step' if job.lock_step else 'independent'}, pp {job.pp}"
    columns = {
        "method": [r.method for r in results],
        "p50": [f"{r.p50_seconds:.2f}" for r in results],
        "p95": [f"{r.p95_seconds:.2f}" for r in results],
        "p99": [f"{r.p99_seconds:.2f}" for r in results],
        "mean": [f"{r.mean_seconds:.2f}" for r in results],
        "longest": [f"{r.longest_seconds:.2f}" for r in results],
        "tokens/s": [f"{r.tokens_per_second:,.0f}" for r in results],
        "over\nfirst row": [f"{r.tokens_per_second / results[0].tokens_per_second:.2f}x" for r in results],
        "longest\npass": [f"{r.longest_pass_seconds:.2f}" for r in results],
        "busy": [f"{r.busy:.3f}" for r in results],
        "GPU-s": [f"{r.gpu_seconds:,.0f}" for r in results],
    }
    if all(r.energy_joules is not None for r in results):
        columns["kJ"] = [f"{(r.energy_joules or 0) / 1000:,.1f}" for r in results]
    show_columns(
        with_room(columns, ("mean", "longest", "longest\npass", "busy", "GPU-s")),
        title=f"{len(job.lengths):,} prompts, {load}, budget {job.token_budget:,} tokens, "
        f"chunked prefill {'on' if job.chunked else 'off'}\n{job.gpus} GPUs: {ranks}\n"
        f"simulated with {listed(priced_by)}",
        notes={
            "method": "p50 to longest: seconds to the first token",
            "kJ": "kJ: energy of all GPUs until the last first token",
            "busy": "busy: mean over slowest rank of each pass; GPU-s: GPU-seconds that passes occupy",
        },
    )
    for r in results:
        if len(r.groups) > 1:
            stdout.print(f"{r.method}, share of the tokens: {', '.join(_main_groups(r))}")


def _main_groups(result: PrefillResult) -> list[str]:
    """The groups with at least 1% of the tokens, for a policy that chose several kinds."""
    tokens = sum(group.tokens for group in result.groups)
    return [f"{_group(g)} {g.tokens / tokens:.0%}" for g in result.groups if g.tokens >= 0.01 * tokens]


def _group(group: GroupResult) -> str:
    size = f"{group.count} x tp {group.tp}" + (f" cp {group.cp}" if group.cp > 1 else "")
    return f"{size}{f' at clock {group.clock:g}' if group.clock < 1 else ''} ({group.prompts})"
