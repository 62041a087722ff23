"""All options of packers, and the options that each method reads, with their defaults.

They are keyword arguments of ``make_packer`` and keys of [packing], and mean the same in all methods.
"""

import math
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from wlb.errors import UserError, check_known
from wlb.settings import MOST_MICRO_BATCHES, MicroBatchCount, Number, PositiveInt, Section, Tokens

LARGEST_AUTO_FACTOR = 4.0  # bound of L_max if memory sets none, as for a small model on a large device
_POOL_FACTOR = 2.0  # L_max over the mean micro-batch: short documents have more tokens for the same seconds

# L_max in context windows: at most twice the largest global batch, which a single micro-batch may hold.
LengthFactor = Annotated[Number, Field(gt=0, le=2 * MOST_MICRO_BATCHES)]

Grouping = Literal["even", "level", "slices"]

# The options that a method reads, and their defaults.
METHODS: dict[str, dict[str, Any]] = {
    "sequential": {"micro_batch_windows": 1},
    "fixed_greedy": {"max_delay": 16, "window": 1},
    "variable_length": {"max_delay": 16, "max_length_factor": 1.5, "outlier_thresholds": None},
    "balanced": {"max_length_factor": "auto", "rank_micro_batches": "auto", "grouping": "auto"},
}


def _check_rising(thresholds: tuple[int, ...]) -> tuple[int, ...]:
    if any(low >= high for low, high in pairwise(thresholds)):
        raise ValueError("thresholds must rise")
    return thresholds


def _option(name: str, unread: Any, description: str, **bounds: Any) -> Any:
    """The field of an option; its default is that of the method, or ``unread`` if the method does not read it."""
    return Field(
        default_factory=lambda given: METHODS.get(given.get("method", ""), {}).get(name, unread),
        description=description,
        json_schema_extra={"defaults": {method: read[name] for method, read in METHODS.items() if name in read}},
        **bounds,
    )


class PackingOptions(Section):
    """A packing method and its options; options that the method does not read are refused."""

    method: Annotated[str, AfterValidator(partial(check_known, "packing method", known=METHODS))] = Field(
        "balanced", description="Packer", json_schema_extra={"enum": [*METHODS]}
    )
    max_delay: PositiveInt = _option(
        "max_delay", 0, "Steps (times packing.window) after which a waiting document is packed first"
    )
    window: MicroBatchCount = _option("window", 1, "Global batches packed together")
    micro_batch_windows: MicroBatchCount = _option("micro_batch_windows", 1, "Context windows in a micro-batch")
    max_length_factor: LengthFactor | Literal["auto"] = _option(
        "max_length_factor",
        1.0,
        "L_max, the most tokens of a micro-batch, in context windows; auto: what memory allows, up to 4 (balanced: "
        'twice the mean micro-batch). Under 1 only with grouping = "slices"',
    )
    outlier_thresholds: Annotated[tuple[Tokens, ...], AfterValidator(_check_rising)] | None = _option(
        "outlier_thresholds",
        None,
        "Lengths from which documents wait in an outlier queue; default: 3/16 and 9/16 of the context window",
    )
    global_batch: MicroBatchCount | None = Field(None, description="Context windows of a step, over all ranks")
    rank_micro_batches: MicroBatchCount | Literal["auto"] = _option(
        "rank_micro_batches", "auto", "Micro-batches that each pipeline runs in a step; auto: the fastest by simulation"
    )
    grouping: Grouping | Literal["auto"] = _option(
        "grouping",
        "even",
        "even: the same number of micro-batches on every rank; level: each rank runs its own number; slices: long "
        "documents go through a pipeline in slices; auto: the fastest by simulation",
    )

    @field_validator(*dict.fromkeys(option for read in METHODS.values() for option in read), mode="before")
    @classmethod
    def _check_read(cls, value: object, info: ValidationInfo) -> object:
        method = info.data.get("method")  # None if unknown
        if method is not None and info.field_name not in METHODS[method]:
            others = ", ".join(other for other, read in METHODS.items() if info.field_name in read)
            raise ValueError(f"has no effect with method {method!r}, only with {others}; leave it out")
        return value

    @model_validator(mode="after")
    def _check_grouping(self) -> Self:
        if self.max_length_factor != "auto" and self.max_length_factor < 1 and self.grouping != "slices":
            raise ValueError(
                f"max_length_factor = {self.max_length_factor:g} leaves no room for a document of a context window; "
                "give at least 1, or less only with grouping = 'slices', which cuts documents"
            )
        if self.grouping == "level" and self.rank_micro_batches != "auto":
            raise ValueError(
                f"rank_micro_batches = {self.rank_micro_batches} has no meaning with grouping = 'level', where "
                "ranks run different numbers of micro-batches; leave it out"
            )
        return self

    def reads(self, option: str) -> bool:
        """Whether the method reads ``option``."""
        return option in METHODS[self.method]

    def thresholds(self, context_window: int) -> tuple[int, ...]:
        """The given outlier thresholds in tokens, or 3/16 and 9/16 of the window."""
        if self.outlier_thresholds is not None:
            return self.outlier_thresholds
        return tuple(sorted({max(1, context_window * sixteenths // 16) for sixteenths in (3, 9)}))

    @property
    def is_balanced(self) -> bool:
        """Whether steps have the documents of a global batch, in micro-batches of pools."""
        return self.method == "balanced"

    def max_tokens(self, context_window: int, micro_batches: int, global_batch: int) -> int:
        """L_max: the most tokens of a micro-batch, in steps of ``micro_batches`` and ``global_batch`` windows."""
        if self.max_length_factor != "auto":
            return int(self.max_length_factor * context_window) * self.micro_batch_windows
        if not self.is_balanced:
            raise UserError("max_length_factor = 'auto' needs the memory of a job; give a number of context windows")
        return math.ceil(self.largest_auto_factor(micro_batches, global_batch) * context_window)

    def largest_auto_factor(self, micro_batches: int, global_batch: int) -> float:
        """The largest value that "auto" may become in such steps, if memory allows it.

        In pools twice the mean micro-batch, or the mean and room for one document; in level steps twice the whole step.
        """
        if not self.is_balanced:
            return LARGEST_AUTO_FACTOR
        mean = global_batch / micro_batches
        if self.grouping == "level":  # what all ranks hold at once
            return _POOL_FACTOR * micro_batches
        return max(_POOL_FACTOR * mean, mean + 1)

    def identity(self, context_window: int) -> dict[str, Any]:
        """The settings that decide which step trains which document, as JSON; a resumed job must keep them."""
        if self.is_balanced:  # its options only place documents inside their step
            return {}
        own = self.model_dump(mode="json", include={*METHODS[self.method]})
        if "outlier_thresholds" in own:
            own["outlier_thresholds"] = [*self.thresholds(context_window)]
        return own
