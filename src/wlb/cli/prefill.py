"""``wlb prefill``: what each policy would make of a serving system's prefill; ``wlb compare --prefill`` is the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, print_table, progress_bar, stderr, stdout
from wlb.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

    from wlb.serving.job import PrefillJob
    from wlb.serving.result import GroupResult, PrefillResult

_MOST_RANKS, _MOST_PASSES = 512, 20_000  # what takes some minutes for each method


def prefill(
    context: typer.Context,
    lengths: options.Lengths,
    token_budget: Annotated[
        int, typer.Option(metavar="TOKENS", parser=options.tokens, help="Tokens of a rank in one pass.")
    ],
    dp: options.Dp = 1,
    pp: options.Pp = 1,
    tp: options.Tp = None,
    cp: Annotated[int, typer.Option(min=1, metavar="N", help="Context-parallel size.")] = 1,
    model: options.Model = options.DEFAULT_MODEL,
    hardware: options.Hardware = "h100",
    profile: options.Profile = None,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Methods; default: all that can be priced.")
    ] = None,
    chunked: Annotated[bool, typer.Option("--chunked/--whole", help="Cut prompts into chunks, or not.")] = True,
    load: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="X", help="Rate of arrivals, as a share of what ranks can sustain; 0: all at once."
        ),
    ] = 0.0,
    lock_step: Annotated[
        bool, typer.Option("--lock-step/--independent", help="Ranks start passes together, or each at its own pace.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the arrivals.")] = 0,
    json: options.Json = False,
) -> None:
    """Compare policies of a serving system's prefill on a list of prompt lengths.

    Simulates time to first token, throughput, GPU-seconds and energy of every method on the same number of GPUs
    (dp x pp x tp x cp). count, tokens, workload and workload:shortest choose what a rank batches; loongserve has
    elastic sequence parallelism over instances of tp GPUs; dynamollm has pools by prompt length, each with a degree and
    a clock.

    Example: wlb prefill synthetic:2000:128K:0 --token-budget 8K --dp 8 --model llama3-8b --tp 1 --load 0.4
    """
    from wlb.documents.lengths import read_lengths

    if not load:
        options.refuse_unused(context, ["seed"], "has no effect without --load, as all prompts are there at once")
    prompts = read_lengths(lengths)
    _check_passes(prompts, token_budget, dp)
    workload, priced_by = options.workload_from(context, model, hardware, tp, cp, token_budget, profile, pp=pp)
    layout = {"dp": dp, "pp": pp, **_priced(priced_by, profile)}
    job, rate = _job(
        prompts,
        load,
        seed,
        workload=workload,
        token_budget=token_budget,
        **layout,
        chunked=chunked,
        lock_step=lock_step,
    )
    names = _methods(context, methods, job)
    results = _simulated(names, job)
    settings: dict[str, Any] = {
        "prompts": len(prompts),
        "tokens": int(prompts.sum()),
        "token_budget": token_budget,
        "prompts_per_batch": job.prompts_per_batch,
        "chunked": chunked,
        "load": load,
        "arrivals_per_second": rate if load else None,
        "lock_step": lock_step,
        "gpus": job.gpus,
        "dp": dp,
        "pp": pp,
        "seed": seed,
        "workload": priced_by,
    }
    if json:
        emit_json({"methods": [result.to_json() for result in results], **settings})
        return
    print_table(_table(results, settings), _table(results, settings, narrow=True))
    for line in _chosen_groups(results):
        stdout.print(line, highlight=False)


def _priced(priced_by: dict[str, str | int], profile: Path | None) -> dict[str, Any]:
    """What a ``PrefillJob`` knows of the GPUs: their groups and, where they are presets, model, hardware and watts."""
    from wlb.workload import hardware_preset, model_shape
    from wlb.workload.power import POWER
    from wlb.workload.profile import read_profile

    if profile is not None:
        measured = read_profile(profile)
        return {"tp": measured.tp, "cp": measured.cp}
    hardware = str(priced_by["hardware"])
    return {
        "tp": priced_by["tp"],
        "cp": priced_by["cp"],
        "model": model_shape(str(priced_by["model"])),
        "hardware": hardware_preset(hardware),
        "power": POWER.get(hardware),
    }


def _job(prompts: NDArray[np.int64], load: float, seed: int, **given: Any) -> tuple[PrefillJob, float]:
    """The job, and how many prompts arrive in a second; 0 where all are there at once."""
    import numpy as np

    from wlb.serving.batching import PrefillPlanner, poisson_arrivals
    from wlb.serving.job import PrefillJob
    from wlb.serving.prefill import capacity

    planner = PrefillPlanner(given["workload"], given["token_budget"])
    rate = load * capacity(prompts, planner, given["dp"] * given["pp"])
    arrivals = poisson_arrivals(len(prompts), rate, seed) if load else np.zeros(len(prompts))
    return PrefillJob(prompts, arrivals, **given), rate


def _methods(context: typer.Context, methods: str | None, job: PrefillJob) -> list[str]:
    """The methods to simulate. Raises ``UserError`` for one that the job cannot price, and for an option none reads."""
    from wlb.serving.policies import POLICIES, policy

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
    unread = [option for option in ("chunked", "lock_step") if option not in read]
    options.refuse_unused(context, unread, f"has no effect on {', '.join(names)}")
    return names


def _simulated(names: Sequence[str], job: PrefillJob) -> list[PrefillResult]:
    from wlb.serving.policies import POLICIES
    from wlb.serving.result import prefill_result

    results = []
    with progress_bar() as bar:
        for name in names:
            advance = partial(bar.advance, bar.add_task(name, total=len(job.lengths)))
            results.append(prefill_result(name, POLICIES[name].run(job, advance), job))
    return results


def _check_passes(prompts: NDArray[np.int64], token_budget: int, dp: int) -> None:
    """Raise ``UserError`` for what would take hours."""
    if dp > _MOST_RANKS:
        raise UserError(f"--dp {dp} is over the {_MOST_RANKS} data-parallel ranks of a simulated prefill; lower it")
    passes = int(prompts.sum()) // (token_budget * dp)
    if passes > _MOST_PASSES:
        raise UserError(
            f"--token-budget {token_budget} with --dp {dp} takes {passes} passes for {prompts.sum()} tokens, over the "
            f"{_MOST_PASSES} that are simulated; raise it, or give fewer prompts"
        )


_WIDE_ONLY = ("mean", "longest", "longest\npass", "busy", "GPU-s")  # a narrow terminal goes without


def _table(results: list[PrefillResult], settings: dict[str, Any], *, narrow: bool = False) -> Table:
    from rich import box
    from rich.table import Table

    load = f"load {settings['load']:g} (Poisson)" if settings["load"] else "all at once"
    ranks = f"dp {settings['dp']} {'in lock step' if settings['lock_step'] else 'independent'}, pp {settings['pp']}"
    price = ", ".join(f"{key} {value}" for key, value in settings["workload"].items())
    columns = {heading: cells for heading, cells in _columns(results).items() if not (narrow and heading in _WIDE_ONLY)}
    table = Table(
        title=f"{settings['prompts']:,} prompts, {load}, budget {settings['token_budget']:,} tokens, "
        f"chunked prefill {'on' if settings['chunked'] else 'off'}\n{settings['gpus']} GPUs: {ranks}\n"
        f"simulated with {price}",
        caption="p50 to longest: seconds to the first token"
        + ("; kJ: of all GPUs until the last first token" if "kJ" in columns else "")
        + ("" if narrow else "\nbusy: mean over slowest rank of each pass; GPU-s: GPU-seconds that passes hold"),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("method", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in zip([r.method for r in results], *columns.values(), strict=True):
        table.add_row(*row)
    return table


def _columns(results: list[PrefillResult]) -> dict[str, list[str]]:
    columns = {
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
    return columns


def _chosen_groups(results: list[PrefillResult]) -> list[str]:
    """A line for each policy that chose groups of several kinds: those with at least 1% of the tokens."""
    lines = []
    for r in results:
        tokens = sum(group.tokens for group in r.groups)
        groups = [f"{_group(group)} {group.tokens / tokens:.0%}" for group in r.groups if group.tokens >= 0.01 * tokens]
        if len(r.groups) > 1:
            lines.append(f"{r.method}, share of the tokens: {', '.join(groups)}")
    return lines


def _group(group: GroupResult) -> str:
    size = f"{group.count} x tp {group.tp}" + (f" cp {group.cp}" if group.cp > 1 else "")
    return f"{size}{f' at clock {group.clock:g}' if group.clock < 1 else ''} ({group.prompts})"
