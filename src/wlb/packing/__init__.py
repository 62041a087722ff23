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
from wlb.packing.pooling import PoolingPacker
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
    options = settings_in_use(config)
    if config.method == "fixed_solver":
        options["node_limit"] = config.solver_nodes
    return make_packer(
        config.method,
        micro_batches=config.micro_batches,
        context_window=context_window,
        workload=workload,
        **options,
    )


def settings_in_use(config: PackingConfig) -> dict[str, Any]:
    """The settings that decide which document ``config.method`` trains when: what it has no use for is left out."""
    names: list[str] = []
    if config.has_length_factor:
        names.append("max_length_factor")
    if config.method == "variable_length":
        names += ["outlier_thresholds", "early_release"]
    if config.method == "makespan":
        names += ["delay_price", "lookahead", "token_spread"]
    if config.method in ("fixed_greedy", "fixed_solver"):
        names.append("window")
    settings = {name: getattr(config, name) for name in names}
    packer = PACKERS[config.method]
    if issubclass(packer, PoolingPacker):
        settings["max_delay"] = packer.default_max_delay if config.max_delay is None else config.max_delay
    return settings
