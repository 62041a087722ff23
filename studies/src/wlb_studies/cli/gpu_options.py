"""Options of a GPU that runs a model, for commands that search for no layout."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from wlb.cli.groups import refuse_unused
from wlb.cli.options import DEFAULT_MODEL, Hardware, Model, Profile, number, number_of_tokens, settings_as_options

if TYPE_CHECKING:
    from wlb.workload import Costs, ModelShape
    from wlb.workload.profile import WorkloadProfile

_COLUMNS_PER_GPU = 512
_TOKENS_PER_GPU = 65_536

ContextWindow = Annotated[int, number_of_tokens("Tokens attention may span, such as 128K.")]


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """A model, and a GPU that runs it."""

    tp: Annotated[int | None, number("Tensor-parallel size; default: up to 8, with 512 columns left on each GPU.")] = (
        None
    )
    model: Model = DEFAULT_MODEL
    hardware: Hardware = "h100"
    profile: Profile = None

    @settings_as_options()
    def priced(
        self, context: typer.Context, context_window: int, cp: int | None, pp: int = 1, reads: Collection[str] = ()
    ) -> PricedGpu:
        """The prices of one GPU; with ``cp`` None the window decides it.

        Raises ``UserError`` if the model has fewer layers than ``pp`` stages, and for an option that a measured profile
        replaces, unless the command ``reads`` it for something else.
        """
        from wlb.schedules.layout import Layout, split_layers
        from wlb.sharding import check_group_size
        from wlb.workload import make_workload, model_shape
        from wlb.workload.profile import read_profile

        if self.profile is not None:
            replaced = {"model", "hardware", "tp", "cp"} - {*reads}
            refuse_unused(context, replaced, "has no effect with --profile, which says it")
            measured = read_profile(self.profile)
            split_layers(measured.model, Layout(pp=pp))
            said: dict[str, str | int] = {"profile": self.profile.name}
            priced = make_workload(measured.model, self.hardware, measured.tp, profile=measured)
            return PricedGpu(measured.model, measured.tp, measured.cp, priced, said, measured)
        shape = model_shape(self.model)
        split_layers(shape, Layout(pp=pp))
        tp = self.tp or usual_tp(shape, self.hardware)
        cp = usual_cp(context_window) if cp is None else cp
        check_group_size(cp)
        workload = make_workload(shape, self.hardware, tp=tp, cp=cp)
        return PricedGpu(shape, tp, cp, workload, {"model": self.model, "hardware": self.hardware, "tp": tp, "cp": cp})


@dataclass(frozen=True)
class PricedGpu:
    """One of tp x cp GPUs that run a model; ``described`` names the model and hardware that price it."""

    shape: ModelShape
    tp: int
    cp: int
    workload: Costs
    described: dict[str, str | int]
    measured: WorkloadProfile | None = None


def usual_tp(shape: ModelShape, hardware: str) -> int:
    """Up to 8, inside a node, with 512 columns left on each GPU."""
    from wlb.workload import hardware_preset

    most = min(hardware_preset(hardware).node_size, shape.hidden // _COLUMNS_PER_GPU)
    return math.gcd(max((size for size in (2, 4, 8) if size <= most), default=1), shape.kv_heads)


def usual_cp(context_window: int) -> int:
    """A rank for every 65,536 tokens."""
    from wlb.settings import MOST_RANKS

    return min(max(1, context_window // _TOKENS_PER_GPU), MOST_RANKS)
