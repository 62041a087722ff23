"""Rivals in one simulator: published balancing policies beside ours, on the same documents, model, GPUs and links.

A policy is one small file that plans a step, and one line in ``POLICIES``. Plans are data (``plan``), priced in one
place (``pricing``) by the simulator's own workload, links, FSDP and pipelines; ``compare`` finds each policy's best
layout. docs/rivals.md has every policy's source and what was assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from wlb.documents.filling import check_filling
from wlb.errors import UserError
from wlb.simulate.search import SearchSpace
from wlb.studies.policies import bytescale, distca, fcp, flexible_cp, flexsp, libra, magi, megatron, odc, verl, wlb_llm
from wlb.studies.policies.hbp import HbpPolicy
from wlb.studies.policies.hotspa import HotSpaPolicy
from wlb.studies.policies.hydraulis import HydraulisPolicy
from wlb.studies.policies.ours import LONGER, ElasticPolicy, SystemPolicy
from wlb.studies.policies.policy import Outcome, Policy, RankPolicy

BASE = "plain-4d"
POLICIES: dict[str, Policy] = {
    BASE: SystemPolicy("plain-4d"),
    "fixed-4d": SystemPolicy("fixed-4d"),
    "wlb-llm": SystemPolicy("wlb-llm", delays=True),
    "wlb-no-delay": RankPolicy(wlb_llm.without_delay),
    "megatron-balanced": RankPolicy(megatron.dp_balanced),
    "megatron-dynamic": RankPolicy(megatron.dynamic, pipelines=False, keeps_weights=True),
    "megatron-packing": RankPolicy(megatron.packing_aware, keeps_weights=True),
    "hotspa": HotSpaPolicy(),
    "hydraulis": HydraulisPolicy(),
    "flexsp": RankPolicy(flexsp.heterogeneous_groups, pipelines=False, layouts=1),
    "bytescale": RankPolicy(bytescale.hybrid_data_parallel, pipelines=False, keeps_weights=True),
    "bytescale-pipeline": RankPolicy(bytescale.hybrid_data_parallel, keeps_weights=True),
    "flexible-cp": RankPolicy(flexible_cp.any_degree, keeps_weights=True),
    "odc": RankPolicy(odc.minibatch_balanced, pipelines=False),
    "hbp": HbpPolicy(),
    "distca": RankPolicy(partial(distca.attention_servers, idle_stages_serve=True), interleaves=False),
    "distca-busy": RankPolicy(partial(distca.attention_servers, idle_stages_serve=False), interleaves=False),
    "libra": RankPolicy(libra.pools),
    "fcp": RankPolicy(fcp.blocks),
    "magi": RankPolicy(magi.dispatched),
    "verl": RankPolicy(verl.karmarkar_karp_twice),
    "slime": RankPolicy(verl.packed_then_dealt),
    "best": SystemPolicy("best", delays=True),
    "elastic": ElasticPolicy(),
}


def chosen(names: str | None) -> list[str]:
    """The policies of a comma-separated list, the base first; all where there is none. Raises ``UserError``."""
    if names is None:
        return [*POLICIES]
    listed = [name.strip() for name in names.split(",")]
    for name in listed:
        if name not in POLICIES:
            raise UserError(f"policy {name!r} is unknown; choose from {', '.join(POLICIES)}")
    return [*dict.fromkeys([BASE, *listed])]


def compare(
    names: Sequence[str],
    space: SearchSpace,
    lengths: NDArray[np.int64],
    *,
    on_progress: Callable[[str], None] = lambda name: None,
) -> tuple[list[Outcome], dict[str, str]]:
    """Every policy in its best layout, on the same documents and global batch, and why others have none.

    ``on_progress`` gets the policy that comes next. Raises ``UserError`` where the base has no layout, and where the
    documents do not fill one step.
    """
    check_filling(lengths, space.micro_batches * space.context_window, space.context_window, steps=space.steps)
    outcomes: list[Outcome] = []
    without: dict[str, str] = {}
    for name in names:
        on_progress(name)
        try:
            outcomes.append(POLICIES[name].best(name, space, lengths))
        except UserError as error:
            if name == BASE:
                raise
            without[name] = str(error)
    return outcomes, without


def epochs(names: Sequence[str], space: SearchSpace, lengths: NDArray[np.int64]) -> int:
    """Passes over the documents that the steps of ``names`` begin; from 2 on documents are repeated."""
    longer = LONGER if any(POLICIES[name].delays for name in names) else 1
    return -(-longer * space.steps * space.micro_batches * space.context_window // int(lengths.sum()))


__all__ = ["BASE", "POLICIES", "Outcome", "Policy", "chosen", "compare", "epochs"]
