"""``wlb compare --prefill``: what batching prompts by workload would do to a serving system's prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from wlb.cli import options
from wlb.cli.console import emit_json, print_table, progress_bar
from wlb.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

    from wlb.serving.batching import PrefillPlanner
    from wlb.serving.prefill import PrefillResult
    from wlb.workload.base import Workload

_MOST_RANKS, _MOST_PASSES = 512, 20_000  # what takes some minutes for each method


@dataclass(frozen=True)
class PrefillOptions:
    """The options of ``wlb compare`` that only ``--prefill`` reads."""

    token_budget: int
    chunked: bool
    load: float
    lock_step: bool
    seed: int


def compare_prefill(
    lengths: str,
    prefill: PrefillOptions,
    prices: Callable[[int], tuple[Workload, dict[str, str | int]]],
    *,
    dp: int,
    pp: int,
    methods: str | None,
    json: bool,
) -> None:
    """Print what batching does to the prompts of ``lengths``.

    ``prices`` gives the workload model, and how to describe it, for passes of so many tokens.
    """
    from wlb.documents.lengths import read_lengths
    from wlb.serving.batching import METHODS, PrefillPlanner
    from wlb.serving.prefill import capacity

    prompts = read_lengths(lengths)
    _check_passes(prompts, prefill.token_budget, dp)
    workload, priced_by = prices(prefill.token_budget)
    planners = [
        PrefillPlanner(
            workload,
            prefill.token_budget,
            name,  # type: ignore[arg-type]  # checked by the planner
            prefill.chunked,
            prompts_per_batch=max(1, int(prefill.token_budget / prompts.mean())),
        )
        for name in options.method_names(methods, METHODS)
    ]
    rate = prefill.load * capacity(prompts, planners[0], dp)
    results = _simulated(prompts, planners, prefill, rate, dp, pp)
    settings: dict[str, Any] = {
        "prompts": len(prompts),
        "tokens": int(prompts.sum()),
        "token_budget": prefill.token_budget,
        "prompts_per_batch": planners[0].prompts_per_batch,
        "chunked": prefill.chunked,
        "load": prefill.load,
        "arrivals_per_second": rate if prefill.load else None,
        "lock_step": prefill.lock_step,
        "dp": dp,
        "pp": pp,
        "seed": prefill.seed,
        "workload": priced_by,
    }
    if json:
        emit_json({"methods": [result.to_json() for result in results], **settings})
    else:
        print_table(_table(results, settings))


def _simulated(
    prompts: NDArray[np.int64],
    planners: Sequence[PrefillPlanner],
    prefill: PrefillOptions,
    rate: float,
    dp: int,
    pp: int,
) -> list[PrefillResult]:
    """What each planner does to prompts that arrive at ``rate`` a second, or all at once where it is 0."""
    import numpy as np

    from wlb.serving import prefill as simulation
    from wlb.serving.batching import poisson_arrivals

    arrivals = poisson_arrivals(len(prompts), rate, prefill.seed) if rate else np.zeros(len(prompts))
    results = []
    with progress_bar() as bar:
        for planner in planners:
            advance = partial(bar.advance, bar.add_task(planner.method, total=len(prompts)))
            results.append(
                simulation.compare_prefill(
                    prompts, arrivals, planner, dp=dp, pp=pp, lock_step=prefill.lock_step, on_progress=advance
                )
            )
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


def checked_budget(token_budget: int | None) -> int:
    if token_budget is None:
        raise UserError("--prefill needs --token-budget: the most tokens a rank prefills in one pass")
    return token_budget


def _table(results: list[PrefillResult], settings: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    load = f"load {settings['load']:g} (Poisson)" if settings["load"] else "all at once"
    ranks = f"dp {settings['dp']} {'in lock step' if settings['lock_step'] else 'independent'}, pp {settings['pp']}"
    price = ", ".join(f"{key} {value}" for key, value in settings["workload"].items())
    table = Table(
        title=f"{settings['prompts']:,} prompts, {load}, budget {settings['token_budget']:,} tokens, "
        f"chunked prefill {'on' if settings['chunked'] else 'off'}\n{ranks}; simulated with {price}",
        caption="seconds to the first token; busy: mean over slowest rank of each pass",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("method", no_wrap=True)
    for heading in ("p50", "p95", "p99", "mean", "longest", "tokens/s", "over\nfirst row", "longest\npass", "busy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            r.method,
            *(f"{s:.2f}" for s in (r.p50_seconds, r.p95_seconds, r.p99_seconds, r.mean_seconds, r.longest_seconds)),
            f"{r.tokens_per_second:,.0f}",
            f"{r.tokens_per_second / results[0].tokens_per_second:.2f}x",
            f"{r.longest_pass_seconds:.2f}",
            f"{r.busy:.3f}",
        )
    return table
