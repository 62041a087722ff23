"""Options of packers: a frozen class for each, which ``make_packer``, the configuration, ``wlb compare`` and docs read.

A packer's options are keyword arguments of ``make_packer`` and keys of the section [packing]. An option of several
packers means the same in all of them and has one type; its default may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from wlb.errors import UserError
from wlb.settings import MOST_MICRO_BATCHES, NonNegativeInt, Number, Section
from wlb.token_count import parse_count

LARGEST_AUTO_FACTOR = 4.0  # of L_max: a bound where memory sets none, as for a small model on a large device

# L_max in context windows: at most twice the largest global batch, which one micro-batch of elastic pools may hold.
LengthFactor = Annotated[Number, Field(ge=1, le=2 * MOST_MICRO_BATCHES)]

Grouping = Literal["even", "alike", "level"]


@dataclass(frozen=True)
class Pools:
    """Pools of ``size`` of a pipeline stage's dp x cp ranks, each of which runs ``micro_batches`` a step.

    With grouping "level" every rank of a pool runs micro-batches of its own, whose number differs from step to step:
    ``micro_batches`` is "auto" there, and one pool holds all ranks of a stage.
    ``global_batch`` counts the context windows that a step trains, whatever the pools; documents of a micro-batch are
    chosen by ``grouping`` (``wlb.packing.elastic``), and with ``delays`` they may wait for another step. What is "auto"
    is yet to be decided (``wlb.simulate.decide``).
    """

    size: int | Literal["auto"]
    micro_batches: int | Literal["auto"]
    grouping: Grouping | Literal["auto"]
    global_batch: int
    delays: bool = False


class PackerOptions(Section):
    """Base of all options; a packer without any has this class."""

    @classmethod
    def from_argument(cls, argument: str, context_window: int) -> dict[str, object]:
        """The options that ARGUMENT of ``NAME:ARGUMENT`` stands for in ``wlb compare``.

        Raises ``UserError`` where it stands for none.
        """
        raise UserError(f"the method takes no argument, {argument!r} was given")

    def most_tokens(self, context_window: int, micro_batches: int) -> int:
        """L_max: the most tokens of a micro-batch, where a step has so many."""
        return context_window

    def pools(self, size: int | Literal["auto"], micro_batches: int) -> Pools | None:
        """The pools that it packs for, of ``size`` ranks; None where context-parallel groups run its micro-batches.

        ``micro_batches`` are those of a step, which pools divide anew.
        """
        return None

    @property
    def global_batches(self) -> int:
        """Global batches that are planned together."""
        return 1

    def identity(self, context_window: int) -> dict[str, Any]:
        """What decides which document is trained in which step, as JSON; a job keeps to it when it continues."""
        return self.model_dump(mode="json")

    def check_window(self, context_window: int) -> None:
        """Raise ``ValueError`` for an option that has no effect on documents of up to ``context_window`` tokens."""


class DelayOptions(PackerOptions):
    """Of packers in which a document may wait."""

    least_max_delay: ClassVar[int] = 1  # 0 where no document needs to wait

    max_delay: NonNegativeInt = Field(
        16,
        description="Steps (or packing.window of them) after which a waiting document goes first; 0 only with makespan "
        "and elastic",
    )

    @field_validator("max_delay")
    @classmethod
    def _long_enough(cls, max_delay: int) -> int:
        if max_delay < cls.least_max_delay:
            raise ValueError(f"must be at least {cls.least_max_delay} here; makespan takes 0 and lets no document wait")
        return max_delay


class LengthFactorOptions(DelayOptions):
    """Of packers whose micro-batches may be longer than the context window."""

    max_length_factor: LengthFactor | Literal["auto"] = Field(
        1.5,
        description="L_max, the most tokens of a micro-batch, in context windows; auto is what memory allows, up to 4 "
        "(with elastic, twice the mean micro-batch)",
    )

    def largest_auto_factor(self, micro_batches: int) -> float:
        """The most that "auto" is decided to be, where memory allows it and a step has so many micro-batches."""
        return LARGEST_AUTO_FACTOR

    def most_tokens(self, context_window: int, micro_batches: int) -> int:
        if self.max_length_factor == "auto":
            raise UserError("max_length_factor = 'auto' is decided by a job's memory; give a number of context windows")
        return int(self.max_length_factor * context_window)


def whole_number(argument: str, *, least: int) -> int:
    """``argument`` as a number. Raises ``UserError`` where it is none of at least ``least``."""
    number = parse_count(argument)
    if number is None or number < least:
        raise UserError(f"{argument!r} is not a whole number of at least {least}")
    return number
