"""Prefill policies by name, for the same prompts on the same GPUs.

A new policy is one new file and one line in ``POLICIES``.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from wlb.errors import UserError, choose_from
from wlb_studies.serving.batching import METHODS, Method, PrefillPlanner
from wlb_studies.serving.dynamollm import dynamollm, presets
from wlb_studies.serving.job import PrefillJob
from wlb_studies.serving.loongserve import loongserve
from wlb_studies.serving.prefill import GpuGroup, PrefillRun, simulate_prefill

OnProgress = Callable[[int], None]


class PrefillPolicy(NamedTuple):
    """``run`` prefills a job; ``check`` raises ``UserError`` if it cannot. ``reads`` names the job's fields it uses."""

    run: Callable[[PrefillJob, OnProgress], PrefillRun]
    reads: frozenset[str] = frozenset()
    check: Callable[[PrefillJob], object] = lambda job: None


def batched(method: Method, job: PrefillJob, on_progress: OnProgress = lambda prompts: None) -> PrefillRun:
    """Prefill on ranks with the job's layout; ``PrefillPlanner`` plans passes by ``method``."""
    planner = PrefillPlanner(job.workload, job.token_budget, method, job.chunked, job.prompts_per_batch)
    return simulate_prefill(job, planner, GpuGroup(job.tp, job.cp, count=job.dp), on_progress)


POLICIES: dict[str, PrefillPolicy] = {
    **{method: PrefillPolicy(partial(batched, method), frozenset({"chunked", "lock_step"})) for method in METHODS},
    "loongserve": PrefillPolicy(loongserve, check=lambda job: job.instance(job.tp)),
    "dynamollm": PrefillPolicy(dynamollm, frozenset({"chunked"}), check=presets),
}


def policy(name: str) -> PrefillPolicy:
    """The policy called ``name``. Raises ``UserError`` that lists all policies."""
    if name not in POLICIES:
        raise UserError(f"prefill method {name!r} is unknown; {choose_from(name, POLICIES)}")
    return POLICIES[name]
