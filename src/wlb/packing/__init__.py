"""Documents in, ``StepPlan``s out: the packers, by name.

A new packer is one new file, with its class of options, and one line in ``PACKERS``.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from wlb.errors import UserError
from wlb.packing.elastic import ElasticPacker
from wlb.packing.fixed import FixedGreedyPacker, FixedSolverPacker
from wlb.packing.makespan import MakespanPacker
from wlb.packing.options import PackerOptions
from wlb.packing.packer import Packer, PackingTask
from wlb.packing.sequential import SequentialPacker
from wlb.packing.tuning import TunedVariableLengthPacker
from wlb.settings import main_problem
from wlb.workload.base import DocumentPrices

PACKERS: dict[str, type[Packer[Any]]] = {
    packer.name: packer
    for packer in (
        SequentialPacker,
        FixedGreedyPacker,
        FixedSolverPacker,
        TunedVariableLengthPacker,
        MakespanPacker,
        ElasticPacker,
    )
}


def make_packer(
    name: str, *, micro_batches: int, context_window: int, workload: DocumentPrices, **options: Any
) -> Packer[Any]:
    """The packer called ``name``, for N = ``micro_batches`` over all data-parallel ranks.

    ``options`` are the packer's own, with the names, defaults and bounds of ``PACKERS[name].options_class``
    (docs/configuration.md); None is the default. Raises ``UserError`` for an unknown name or option, and for a value
    out of bounds.
    """
    task = PackingTask(micro_batches, context_window, workload)
    return PACKERS[checked_name(name)](task, packer_options(name, options))


def packer_options(name: str, options: dict[str, Any]) -> PackerOptions:
    """``options`` of the packer called ``name``, with its defaults. Raises ``UserError`` as ``make_packer`` does."""
    options_class = PACKERS[checked_name(name)].options_class
    try:
        return options_class(**{option: value for option, value in options.items() if value is not None})
    except ValidationError as error:
        problem = main_problem(error)
        option = problem["loc"][0]
        if problem["type"] == "extra_forbidden":
            own = ", ".join(sorted(options_class.model_fields)) or "none"
            raise UserError(f"packing method {name!r} has no option {option!r}; it has {own}") from None
        raise UserError(f"{option} = {problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}") from None


def checked_name(name: str) -> str:
    """``name``, if a packer has it. Raises ``UserError`` otherwise."""
    if name not in PACKERS:
        raise UserError(f"packing method {name!r} is unknown; choose from {', '.join(PACKERS)}")
    return name
