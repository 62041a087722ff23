"""The lines and the table that commands print below a verdict."""

from collections.abc import Mapping

from wlb.job.memory.fit import fits
from wlb.simulate.estimate import Estimate
from wlb.simulate.verdict import BASELINE, PARTS, PER_DOCUMENT, VARIANTS, Verdict
from wlb.terminal import number_of

_STACKS = {
    BASELINE: "micro-batches are windows of one length, which documents are cut to fill; cp ranks share each as one "
    "sequence (torch, torchtitan)",
    PER_DOCUMENT: "the same packing, but cp ranks share each document (Megatron-Core, Transformer Engine)",
}


def about(found: Estimate) -> list[str]:
    """The lines below a verdict: which job was simulated, for how many steps, and what was assumed."""
    space, verdict = found.space, found.verdict
    passes = max(system.epochs for system in verdict.systems.values())
    each = "each system in its own fastest layout" + (f" with {listed(space.fixed)}" if space.fixed else "")
    if space.layout:
        each = "every system in the given layout"
    variants = [name for name in VARIANTS if name in verdict.systems]
    if variants:
        each += f", except {' and '.join(variants)}"
    too_large = [name for name, system in verdict.systems.items() if not fits(system.job)]
    return [
        f"simulated: {listed(space.priced_by)}, {number_of(space.gpus, 'GPU')}, {space.batch_tokens:,} tokens per "
        f"step ({number_of(space.global_batch, 'window')} of {space.context_window:,}); {each}; "
        f"{number_of(verdict.steps, 'step')} per shuffle after {number_of(verdict.warm_up, 'warm-up step')}",
        *(["defaults used: " + ", ".join(space.assumed)] if space.assumed else []),
        *(f"{name}: {stack}" for name, stack in _STACKS.items() if name in verdict.systems),
        *_assumed(verdict),
        *(f"{name} is left out: {why}" for name, why in found.left_out.items()),
        *([f"over the memory of these GPUs, which the figures ignore: {', '.join(too_large)}"] if too_large else []),
        *_host_bound(verdict),
        *([too_few(passes)] if passes > 1 else []),
    ]


def too_few(passes: int) -> str:
    """The line for a corpus that does not fill the steps."""
    often = "twice" if passes == 2 else f"up to {passes} times"
    return f"Small corpus: documents reused {often}; treat the result as rough."


def _assumed(verdict: Verdict) -> list[str]:
    """The lines for linear layers and indexers, and for layouts with expert parallelism: what is assumed."""
    jobs = [system.job for system in verdict.systems.values()]
    shape = jobs[0].shape
    part = "linear layers" if shape.linear else "indexer" if shape.indexer else ""
    rough = [f"{part}: priced by counting, and hardly measured; treat the result as rough"] if part else []
    jobs = [job for job in jobs if job.layout.ep > 1]
    if not jobs:
        return rough
    software = jobs[0].software
    return [
        *rough,
        f"experts: the busiest GPU of a group has {software.expert_imbalance:g} times the tokens of the mean one "
        f"(assumed), and {software.exposed_exchange:.0%} of the exchange of tokens is not overlapped",
    ]


def _host_bound(verdict: Verdict) -> list[str]:
    """The line for layouts in which a host takes longer to launch the kernels of a block than a GPU to run them."""
    bound = []
    for name, system in verdict.systems.items():
        launching = sum(float(system.job.costs.host_seconds(1, phase)) for phase in ("forward", "backward"))
        if (block := launching / system.job.shape.layers) > system.block_seconds:
            bound.append(
                f"{name} {1e3 * system.block_seconds:.1f} ms, and a host {1e3 * block:.1f} ms to launch its kernels"
            )
    return [f"host-bound: a block takes a GPU ({'; '.join(bound)}), which is simulated roughly"] if bound else []


def columns_of(verdict: Verdict) -> dict[str, list[str]]:
    """The table of a verdict by column: where the time of each system goes, its speedup, delay and layout."""
    systems = verdict.systems
    parts = {name: verdict.parts(name) for name in systems}
    rows = {part: [_percent(parts[name][part]) for name in systems] for part in PARTS}
    rows["total"] = [_percent(sum(parts[name].values())) for name in systems]
    rows["speedup, tokens/s"] = [f"{verdict.speed(name):.2f}x" for name in systems]
    spreads = {name: verdict.spread(name) for name in systems}
    rows[f"range in {verdict.draws} shuffles"] = [f"{low:.2f} to {high:.2f}" for low, high in spreads.values()]
    rows["speed at equal work"] = [f"{verdict.speed_at_equal_work(name):.2f}x" for name in systems]
    delays = [verdict.systems[name].token_delay for name in systems]
    if max(delays) >= 0.005:
        rows["mean token delay, steps"] = [f"{delay:.2f}" for delay in delays]
    layouts = [system.job.layout for system in systems.values()]
    rows["tp, cp, pp, dp"] = [f"{one.tp}, {one.cp}, {one.pp}, {one.dp}" for one in layouts]
    if any(one.ep > 1 for one in layouts):
        rows["ep"] = [f"{one.ep}" for one in layouts]
    if any(one.virtual_pp > 1 for one in layouts):
        rows["stages per pipeline rank"] = [f"{one.virtual_pp}" for one in layouts]
    windows = [system.job.packing.micro_batch_windows for system in systems.values()]
    if max(windows) > 1:
        rows["windows of a micro-batch"] = [f"{one}" for one in windows]
    if any(one.deals_head for one in layouts):
        rows["output head"] = ["dealt" if one.deals_head else "last stage" for one in layouts]
    if any(one.pp == 1 for one in layouts):
        rows["weights"] = ["kept" if one.keeps_weights else "gathered" for one in layouts]
    rows["activation checkpointing"] = [system.job.activation_checkpointing for system in systems.values()]
    columns = zip(systems, zip(*rows.values(), strict=True), strict=True)
    return {f"share of {verdict.base} time": [*rows]} | {name: [*cells] for name, cells in columns}


def note_on(verdict: Verdict) -> str:
    """The note below the table of a verdict."""
    return f"speedup: tokens/s over those of {verdict.base}; shares: of its time for as many tokens"


def _percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:.1%}"  # never -0.0%


def listed(settings: Mapping[str, object]) -> str:
    """``settings`` in one line: "model 7b, hardware h100"."""
    return ", ".join(f"{key} {value}" for key, value in settings.items())
