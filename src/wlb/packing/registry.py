"""Documents in, ``StepPlan``s out: the packers, by name.

A new packer is one new file, with its class of options, and one line in ``PACKERS``.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from wlb.errors import UserError, choose_from
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
        option = ".".join(problem.where)
        if problem.kind == "extra_forbidden":
            remedy = _instead_of(option, name)
            raise UserError(f"packing method {name!r} has no option {option} = {problem.value!r}; {remedy}") from None
        what = f"{option} = {problem.value!r}" if option else f"packing method {name!r}"
        raise UserError(f"{what}: {problem.what}") from None


def _instead_of(option: str, name: str) -> str:
    """What to write instead of an ``option`` that the packer called ``name`` does not have."""
    own = sorted(PACKERS[name].options_class.model_fields)
    if close := get_close_matches(option, own, n=1):
        return f"did you mean {close[0]}?"
    others = [other for other, packer in PACKERS.items() if option in packer.options_class.model_fields]
    elsewhere = f" (it is an option of {', '.join(others)})" if others else ""
    return f"leave it out{elsewhere}" + (f" or choose from {', '.join(own)}" if own else "; the method has no options")


def checked_name(name: str) -> str:
    """``name``, if a packer has it. Raises ``UserError`` otherwise."""
    if name not in PACKERS:
        raise UserError(f"packing method {name!r} is unknown; {choose_from(name, PACKERS)}")
    return name
