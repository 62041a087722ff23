"""``wlb-studies rivals``: compare published balancing policies with ours on your documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from wlb.cli import options
from wlb.cli.console import counted, emit_json, note, show_columns, show_next
from wlb.cli.groups import given_again
from wlb.terminal import number_of
from wlb_studies.cli.gpu_options import ContextWindow
from wlb_studies.plots import Plot, check_picture

if TYPE_CHECKING:
    from wlb_studies.policies.policy import Outcome


@dataclass(frozen=True, kw_only=True)
class SpaceOptions:
    """The job whose fastest layout is searched for."""

    gpus: Annotated[int, options.number("GPUs of the job.")]
    model: options.Model = options.DEFAULT_MODEL
    context_window: ContextWindow = 131_072
    hardware: options.Hardware = "h100"
    batch_tokens: options.BatchTokens = None


def rivals(
    context: typer.Context,
    lengths: options.Lengths,
    given: SpaceOptions,
    policies: Annotated[str | None, options.list_of_names("Policies; default: all (docs/rivals.md).")] = None,
    steps: Annotated[
        int | None,
        options.number_of_steps(
            "Steps of each draw, after warm-up; default: 256 windows, at least 4 and at most 16 steps."
        ),
    ] = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """Compare balancing policies on the same documents, model, GPUs and global batch, each in its best layout.

    Everything is simulated with the same prices for all policies; only planning seconds are measured, on this machine.
    A speedup is tokens per second over plain-4d, which is always included, of several draws of the documents, as in
    wlb check. --plot draws it.

    Example: wlb-studies rivals synthetic:20000:128K:0 --gpus 64 --context-window 128K --policies distca,balanced
    """
    from wlb.documents.lengths import read_lengths
    from wlb.report.answer import too_few
    from wlb.simulate.search import DRAWS
    from wlb.simulate.space import search_space
    from wlb_studies.policies import chosen, compare, epochs, workers
    from wlb_studies.policies.grid import draw_speeds

    check_picture(plot)
    names = chosen(policies)
    documents = read_lengths(lengths)
    space = search_space(
        given.model,
        given.gpus,
        given.context_window,
        documents,
        hardware=given.hardware,
        batch_tokens=given.batch_tokens,
        source=lengths,
    )
    with counted("policies") as progress, workers(len(names)) as apart:
        outcomes, without = compare(
            names, space, documents, steps, on_progress=lambda done: progress(done, len(names)), apart=apart
        )
    steps = outcomes[0].steps
    passes = epochs(space, documents, steps)
    title = (
        f"{given.gpus:,} GPUs, {given.model}, {space.global_batch} windows of {space.context_window:,} tokens a step"
    )
    if plot is not None:
        draw_speeds(plot, outcomes, title)
    if json:
        settings = {name: getattr(given, name) for name in ("gpus", "model", "hardware")}
        emit_json(
            settings
            | {
                "context_window": space.context_window,
                "batch_tokens": space.batch_tokens,
                "lengths": lengths,
                "draws": DRAWS,
                "epochs": passes,
                "policies": [outcome.to_json(outcomes[0]) for outcome in outcomes],
                "without_layout": without,
            }
        )
        return
    _show(outcomes, f"{title}\nsimulated; planning measured here", f"{DRAWS} draws of {number_of(steps, 'step')}")
    if space.assumed:
        note(f"defaults used: {', '.join(space.assumed)}")
    for remark in _beside(outcomes):
        note(remark)
    if passes > 1:
        note(too_few(passes))
    for name, why in without.items():
        note(f"{name}: {why}")
    show_next("check", lengths, *given_again(context, ["gpus", "model", "context_window", "hardware", "batch_tokens"]))


def _beside(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What speedups leave out: attention that the base drops, and documents that wait."""
    base, *others = outcomes
    dropped = 1 - base.attention_kept
    if dropped >= 0.005 and any(one.attention_kept == 1 for one in others):
        yield f"policies that train whole documents also the {dropped:.0%} of attention that {base.policy} drops"
    if delaying := [one.policy for one in others if one.token_delay]:
        names = " and ".join(delaying)
        yield f"documents wait under {names}, so a few steps have too many or too few long ones: compare at equal work"


def _show(outcomes: Sequence[Outcome], title: str, draws: str) -> None:
    """Each policy's result in 80 columns, then its layout and how many layouts were tried."""
    base = outcomes[0]
    policies = {"policy": [o.policy for o in outcomes]}
    spreads = [outcome.spread(base) for outcome in outcomes]
    columns = {
        "speedup": [f"{o.speedup(base):.2f}x" for o in outcomes],
        "least-most\nof draws": [f"{low:.2f}-{high:.2f}" for low, high in spreads],
        "token\ndelay": [f"{o.token_delay:.2f}" for o in outcomes],
        "tokens/\nstep CV": [f"{o.tokens_cv:.3f}" for o in outcomes],
        "exchange\nGB/GPU": [f"{o.exchanged_bytes / 1e9:.1f}" for o in outcomes],
        "peak\nGiB": [f"{o.memory_bytes / 2**30:.0f}" for o in outcomes],
        "planning\nCPU s": [f"{o.planning_seconds:.2f}" for o in outcomes],
    }
    notes = {
        "speedup": f"speedup: tokens per second over {base.policy}, of {draws}",
        "exchange\nGB/GPU": "exchange: received by a GPU in a step, for attention and switching strategies",
    }
    show_columns(policies | columns, title=title, notes=notes)
    layouts = {
        "at equal\nwork": [f"{o.speed_at_equal_work(base):.2f}x" for o in outcomes],
        "tried": [f"{o.tried}" for o in outcomes],
        "its best layout": [o.layout for o in outcomes],
    }
    show_columns(policies | layouts, words=("policy", "its best layout"))
