"""Published balancing policies beside ours, in one simulator: same documents, model, GPUs and links.

A policy is one small file that plans a step, and one line in ``POLICIES``. Plans are data (``plan``); ``pricing`` sums
them up with the simulator's own workload, links, FSDP and pipelines, and ``compare`` finds each policy's best layout.
Each file names its source and its assumptions; docs/rivals.md compares the policies.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError, choose_from
from wlb.simulate.filling import check_filling
from wlb.simulate.search import without_collection
from wlb.simulate.space import SearchSpace
from wlb.simulate.verdict import usual_steps
from wlb_studies.policies import (
    bytescale,
    chunkflow,
    distca,
    fcp,
    flexible_cp,
    flexsp,
    infinipipe,
    libra,
    magi,
    megatron,
    odc,
    rebalance,
    seq1f1b,
    slimpack,
    slimpipe,
    verl,
    wlb_llm,
)
from wlb_studies.policies.hbp import HbpPolicy
from wlb_studies.policies.hotspa import HotSpaPolicy
from wlb_studies.policies.hydraulis import HydraulisPolicy
from wlb_studies.policies.ours import PresetPolicy
from wlb_studies.policies.policy import Outcome, Policy, RankPolicy
from wlb_studies.policies.sliced import SlicedPolicy

BASE = "plain-4d"  # the one to compare with
_MANY = 6  # fewest policies for which separate processes pay
POLICIES: dict[str, Policy] = {
    BASE: PresetPolicy(),
    "per-document-4d": PresetPolicy(),
    "fixed-4d": PresetPolicy(),
    "wlb-llm": PresetPolicy(),
    "plain-4d-dealt-head": PresetPolicy("plain-4d", head="dealt"),
    "wlb-llm-dealt-head": PresetPolicy("wlb-llm", head="dealt"),
    "wlb-no-delay": RankPolicy(wlb_llm.without_delay),
    "megatron-balanced": RankPolicy(megatron.dp_balanced),
    "megatron-dynamic": RankPolicy(megatron.dynamic, pipelines=False),
    "megatron-packing": RankPolicy(megatron.packing_aware),
    "hotspa": HotSpaPolicy(),
    "hydraulis": HydraulisPolicy(),
    "flexsp": RankPolicy(flexsp.heterogeneous_groups, pipelines=False, layouts=1, solver_nodes=flexsp.NODES),
    "bytescale": RankPolicy(bytescale.hybrid_data_parallel, pipelines=False),
    "bytescale-pipeline": RankPolicy(bytescale.hybrid_data_parallel),
    "flexible-cp": RankPolicy(flexible_cp.any_degree),
    "odc": RankPolicy(
        odc.minibatch_balanced, pipelines=False, handlings=("gathered",)
    ),  # weights are fetched every time
    "hbp": HbpPolicy(),
    "distca": RankPolicy(partial(distca.attention_servers, idle_stages_serve=True), interleaves=False),
    "distca-busy": RankPolicy(partial(distca.attention_servers, idle_stages_serve=False), interleaves=False),
    "libra": RankPolicy(libra.pools),
    "fcp": RankPolicy(fcp.blocks),
    "magi": RankPolicy(magi.dispatched),
    "verl": RankPolicy(verl.karmarkar_karp_twice),
    "slime": RankPolicy(verl.packed_then_dealt),
    "batch-rebalance": RankPolicy(rebalance.padded, pipelines=False),
    "seq1f1b": SlicedPolicy(seq1f1b.even_slices, seq1f1b.SETTINGS),
    "slimpipe": SlicedPolicy(slimpipe.uniform_slices, slimpipe.SETTINGS, spreads_head=True),
    "slimpipe-one-head": SlicedPolicy(partial(slimpipe.uniform_slices, spreads_head=False), slimpipe.SETTINGS),
    "chunkflow": SlicedPolicy(chunkflow.equal_chunks, chunkflow.SETTINGS, interleaves=False),
    "infinipipe": SlicedPolicy(infinipipe.equal_seconds, infinipipe.SETTINGS, interleaves=False),
    "slimpack": SlicedPolicy(slimpack.asymmetric_units, slimpack.SETTINGS),
    "balanced": PresetPolicy(),
}


def chosen(names: str | None) -> list[str]:
    """The policies in a comma-separated list, the base first; all policies for None. Raises ``UserError``."""
    if names is None:
        return [*POLICIES]
    listed = [name.strip() for name in names.split(",")]
    for name in listed:
        if name not in POLICIES:
            raise UserError(f"policy {name!r} is unknown; {choose_from(name, POLICIES)}")
    return [*dict.fromkeys([BASE, *listed])]


@without_collection()
def compare(
    names: Sequence[str],
    space: SearchSpace,
    lengths: NDArray[np.int64],
    steps: int | None = None,
    *,
    on_progress: Callable[[int], None] = lambda done: None,
    apart: Executor | None = None,
) -> tuple[list[Outcome], dict[str, str]]:
    """Run every policy in its best layout on the same documents; also return why a policy has no layout.

    Each draw has ``steps`` steps, by default ``usual_steps``. ``on_progress`` gets the number of finished policies;
    ``apart`` may run them. Raises ``UserError`` if the base has no layout or the documents do not fill one step.
    """
    steps = steps or usual_steps(space.global_batch)
    check_filling(lengths, space.batch_tokens, space.context_window, steps=steps)
    found: dict[str, Outcome | UserError] = {}
    for name, one in _found(names, partial(_attempt, space=space, lengths=lengths, steps=steps), apart):
        if name == BASE and isinstance(one, UserError):
            raise one
        found[name] = one
        on_progress(len(found))
    in_order = [(name, found[name]) for name in names]
    outcomes = [one for _, one in in_order if isinstance(one, Outcome)]
    return outcomes, {name: str(one) for name, one in in_order if isinstance(one, UserError)}


def _found(
    names: Sequence[str], attempt: Callable[[str], Outcome | UserError], apart: Executor | None
) -> Iterator[tuple[str, Outcome | UserError]]:
    if apart is None:
        yield from ((name, attempt(name)) for name in names)
        return
    # Ours come last and take longest, so they start first.
    running = {apart.submit(attempt, name): name for name in reversed(names)}
    try:
        for future in as_completed(running):
            yield running[future], future.result()
    finally:
        for future in running:
            future.cancel()


def _attempt(name: str, space: SearchSpace, lengths: NDArray[np.int64], steps: int) -> Outcome | UserError:
    try:
        if space.shape.experts is not None and not isinstance(POLICIES[name], PresetPolicy):
            raise UserError("it was published for dense models, not for experts whose ranks meet in every layer")
        return POLICIES[name].best(name, space, lengths, steps)
    except UserError as error:
        return error


def workers(policies: int) -> AbstractContextManager[Executor | None]:
    """Processes for ``compare``, one per core; None if starting them takes longer than they save."""
    cores = os.cpu_count() or 1
    if cores == 1 or policies < _MANY:
        return nullcontext()
    return ProcessPoolExecutor(min(cores, policies), mp_context=multiprocessing.get_context("spawn"))


def epochs(space: SearchSpace, lengths: NDArray[np.int64], steps: int) -> int:
    """How many passes over the documents ``steps`` steps of a draw start; with 2 or more, documents repeat."""
    return -(-(usual_steps(space.global_batch) + steps) * space.batch_tokens // int(lengths.sum()))


__all__ = ["BASE", "POLICIES", "Outcome", "Policy", "chosen", "compare", "epochs", "workers"]
