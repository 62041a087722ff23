"""Documents in, ``StepPlan``s out: the packers, by name."""

from typing import Any

from pydantic import ValidationError

from wlb.errors import UserError, check_known, choose_from
from wlb.packing.balanced import BalancedPacker
from wlb.packing.carrying import FixedGreedyPacker
from wlb.packing.options import METHODS, PackingOptions
from wlb.packing.packer import Packer
from wlb.packing.sequential import SequentialPacker
from wlb.packing.variable_length import VariableLengthPacker
from wlb.settings import main_problem
from wlb.workload.base import DocumentPrices

_ALL = SequentialPacker, FixedGreedyPacker, VariableLengthPacker, BalancedPacker
PACKERS: dict[str, type[Packer]] = {packer.name: packer for packer in _ALL}


def make_packer(
    name: str, *, micro_batches: int, context_window: int, workload: DocumentPrices, **options: Any
) -> Packer:
    """The packer called ``name``, for N = ``micro_batches`` over all data-parallel ranks.

    ``options`` are the [packing] options that it reads, with their defaults and bounds (docs/configuration.md); None is
    the default. Raises ``UserError`` for an unknown name or option, and for a value out of bounds.
    """
    check_known("packing method", name, METHODS)
    if "method" in options:
        raise UserError(f"method = {options['method']!r} is given beside the name {name!r}; leave it out")
    given = {option: value for option, value in options.items() if value is not None}
    try:
        checked = PackingOptions.model_validate({**given, "method": name})
    except ValidationError as error:
        problem = main_problem(error)
        option = ".".join(problem.where)
        if problem.kind == "extra_forbidden":
            remedy = choose_from(option, METHODS[name]) if METHODS[name] else "it has none; leave it out"
            raise UserError(f"packing method {name!r} has no option {option} = {problem.value!r}; {remedy}") from None
        what = f"{option} = {problem.value!r}" if option else f"packing method {name!r}"
        raise UserError(f"{what}: {problem.what}") from None
    return PACKERS[name](micro_batches, context_window, workload, checked)
