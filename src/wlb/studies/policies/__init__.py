"""Rivals in one simulator: published balancing policies beside ours, on the same documents, model, GPUs and links.

A policy is one small file that plans a step, and one line in ``POLICIES``. Plans are data (``plan``), priced in one
place (``pricing``) by the simulator's own workload, links, FSDP and pipelines; ``compare`` finds each policy's best
layout. docs/rivals.md has every policy's source and what was assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from wlb.documents.filling import check_filling
from wlb.errors import UserError
from wlb.simulate.search import SearchSpace
from wlb.studies.policies import bytescale, distca, fcp, flexsp, hotspa, hydraulis, libra, magi, megatron, verl, wlb_llm
from wlb.studies.policies.elastic import ElasticPolicy
from wlb.studies.policies.ours import LONGER, SystemPolicy
from wlb.studies.policies.policy import Outcome, Policy, RankPolicy
from wlb.studies.policies.pricing import price_groups, price_moved
from wlb.workload import make_workload
from wlb.workload.base import DocumentPrices


@dataclass(frozen=True)
class OwnSearch:
    """A policy whose layouts are more than ranks of a stage: ``search`` finds its best."""

    source: str
    assumed: str
    search: Callable[[str, SearchSpace, NDArray[np.int64], DocumentPrices], Outcome]

    def best(self, name: str, space: SearchSpace, lengths: NDArray[np.int64], work_prices: DocumentPrices) -> Outcome:
        return self.search(name, space, lengths, work_prices)


_MEGATRON = "NVIDIA/Megatron-LM"
_RING = "keys and values travel as ours do, overlapped"

BASE = "plain-4d"
POLICIES: dict[str, Policy] = {
    BASE: SystemPolicy("plain-4d", "WLB-LLM, arXiv 2503.17924, section 2.1"),
    "fixed-4d": SystemPolicy("fixed-4d", "WLB-LLM, section 2.3"),
    "wlb-llm": SystemPolicy("wlb-llm", "WLB-LLM, sections 4 and 5", delays=True),
    "wlb-no-delay": RankPolicy(
        "WLB-LLM as DistCA's paper runs it, arXiv 2510.18121", _RING, wlb_llm.without_delay, price_groups
    ),
    "megatron-balanced": RankPolicy(f"{_MEGATRON}, dp_balanced", _RING, megatron.dp_balanced, price_groups),
    "megatron-dynamic": RankPolicy(
        f"{_MEGATRON}, hybrid_cp_schedule.py",
        f"weights gathered once a step; {_RING}",
        megatron.dynamic,
        price_groups,
        pipelines=False,
        keeps_weights=True,
    ),
    "megatron-packing": RankPolicy(
        f"{_MEGATRON}, next_hdp_group_packing_aware",
        _RING,
        megatron.packing_aware,
        price_groups,
        keeps_weights=True,
    ),
    "hotspa": OwnSearch("HotSPa, SOSP '24", "three buckets; switching is not overlapped", hotspa.best),
    "hydraulis": OwnSearch(
        "Hydraulis, arXiv 2412.07894", "two strategies at once; the packing program bounded by nodes", hydraulis.best
    ),
    "flexsp": RankPolicy(
        "FlexSP, arXiv 2412.01523",
        "the program solved for all groups of a size together, at a bisected bound",
        flexsp.heterogeneous_groups,
        price_groups,
        pipelines=False,
        layouts=1,
    ),
    "bytescale": RankPolicy(
        "ByteScale, arXiv 2502.21231",
        f"weights gathered once a step; {_RING}; nothing offloaded",
        bytescale.hybrid_data_parallel,
        price_groups,
        pipelines=False,
        keeps_weights=True,
    ),
    "bytescale-pipeline": RankPolicy(
        "ByteScale, arXiv 2502.21231", _RING, bytescale.hybrid_data_parallel, price_groups, keeps_weights=True
    ),
    "distca": RankPolicy(
        "DistCA, arXiv 2510.18121",
        "idle pipeline stages serve; activations of 1F1B",
        partial(distca.attention_servers, idle_stages_serve=True),
        distca.price_attention_servers,
        interleaves=False,
    ),
    "distca-busy": RankPolicy(
        "DistCA, arXiv 2510.18121",
        "idle pipeline stages do not serve; activations of 1F1B",
        partial(distca.attention_servers, idle_stages_serve=False),
        distca.price_attention_servers,
        interleaves=False,
    ),
    "libra": RankPolicy(
        "Libra, arXiv 2607.23250",
        "soft cap 2%; tokens even in a pool; four chunks of heads",
        libra.pools,
        partial(price_moved, hidden_by="heads"),
    ),
    "fcp": RankPolicy(
        "FCP, arXiv 2605.08524",
        "reshuffling shows; keys and values travel in four parts",
        fcp.blocks,
        partial(price_moved, hidden_by="attention"),
    ),
    "magi": RankPolicy(
        "SandAI-org/MagiAttention, dispatch_solver.py",
        "fixed groups, micro-batches even in attention; keys and values travel in four parts",
        magi.dispatched,
        partial(price_moved, hidden_by="attention"),
    ),
    "verl": RankPolicy("verl, utils/seqlen_balancing.py", _RING, verl.karmarkar_karp_twice, price_groups),
    "slime": RankPolicy("THUDM/slime, utils/dp_schedule.py", _RING, verl.packed_then_dealt, price_groups),
    "best": SystemPolicy("best", "this project, docs/planner.md", delays=True),
    "elastic": ElasticPolicy("this project, docs/elastic.md"),
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

    Work is priced by a single GPU's W_a + W_l, for all alike. ``on_progress`` gets the policy that comes next. Raises
    ``UserError`` where the base has no layout, and where the documents do not fill one step.
    """
    check_filling(lengths, space.micro_batches * space.context_window, space.context_window, steps=space.steps)
    work_prices = make_workload(space.shape, space.hardware)
    outcomes: list[Outcome] = []
    without: dict[str, str] = {}
    for name in names:
        on_progress(name)
        try:
            outcomes.append(POLICIES[name].best(name, space, lengths, work_prices))
        except UserError as error:
            if name == BASE:
                raise
            without[name] = str(error)
    return outcomes, without


def epochs(names: Sequence[str], space: SearchSpace, lengths: NDArray[np.int64]) -> int:
    """Passes over the documents that the steps of ``names`` begin; from 2 on documents are repeated."""
    longer = max(LONGER if getattr(POLICIES[name], "delays", False) else 1 for name in names)
    return -(-longer * space.steps * space.micro_batches * space.context_window // int(lengths.sum()))


__all__ = ["BASE", "POLICIES", "Outcome", "Policy", "chosen", "compare", "epochs"]
