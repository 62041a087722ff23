"""Documents in, ``StepPlan``s out: the packers, by name.

A new packer is one new file and one line in ``PACKERS``.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from wlb.config import PackingConfig
from wlb.errors import UserError
from wlb.packing.base import Packer
from wlb.packing.fixed_greedy import FixedGreedyPacker
from wlb.packing.fixed_solver import FixedSolverPacker
from wlb.packing.makespan import MakespanPacker
from wlb.packing.sequential import SequentialPacker
from wlb.packing.variable_length import VariableLengthPacker
from wlb.workload.base import DocumentPrices

PACKERS: dict[str, type[Packer]] = {
    packer.name: packer
    for packer in (SequentialPacker, FixedGreedyPacker, FixedSolverPacker, VariableLengthPacker, MakespanPacker)
}


def make_packer(
    name: str, *, micro_batches: int, context_window: int, workload: DocumentPrices, **options: Any
) -> Packer:
    """The packer called ``name``, for N = ``micro_batches`` over all data-parallel ranks.

    ``options`` are the packer's own: ``window`` and ``max_delay`` (fixed_greedy, fixed_solver), ``node_limit`` and
    ``time_limit`` (fixed_solver), ``max_length_factor``, ``outlier_thresholds``, ``early_release`` and ``max_delay``
    (variable_length), ``max_length_factor``, ``max_delay``, ``delay_price``, ``lookahead`` and ``token_spread``
    (makespan).
    Raises ``UserError`` for an unknown name or option.
    """
    if name not in PACKERS:
        raise UserError(f"packing method {name!r} is unknown; choose from {', '.join(PACKERS)}")
    sizes = {"micro_batches": micro_batches, "context_window": context_window}
    accepted = signature(PACKERS[name]).parameters
    if unknown := [option for option in options if option not in accepted]:
        own = sorted(set(accepted) - {*sizes, "workload"})
        raise UserError(f"packing method {name!r} has no option {unknown[0]!r}; it has {', '.join(own) or 'none'}")
    return PACKERS[name](**sizes, workload=workload, **options)


def packer_from_config(config: PackingConfig, context_window: int, workload: DocumentPrices) -> Packer:
    """The packer that a job's ``[packing]`` section describes, in which ``max_length_factor`` is no longer "auto"."""
    options: dict[str, Any] = {}
    if config.method != "sequential" and config.max_delay is not None:
        options["max_delay"] = config.max_delay
    if config.method in ("fixed_greedy", "fixed_solver"):
        options["window"] = config.window
    if config.method == "fixed_solver":
        options["node_limit"] = config.solver_nodes
    if config.has_length_factor:
        options["max_length_factor"] = config.max_length_factor
    if config.method == "variable_length":
        options["outlier_thresholds"] = config.outlier_thresholds
        options["early_release"] = config.early_release
    if config.method == "makespan":
        options |= {name: getattr(config, name) for name in ("delay_price", "lookahead", "token_spread")}
    return make_packer(
        config.method,
        micro_batches=config.micro_batches,
        context_window=context_window,
        workload=workload,
        **options,
    )
