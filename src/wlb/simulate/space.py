"""What a search of layouts is given: how many GPUs of which kind, and what they train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from wlb.errors import UserError
from wlb.schedules.layout import Layout
from wlb.settings import MOST_MICRO_BATCHES
from wlb.workload import Costs, Hardware, ModelShape, hardware_preset, make_workload, model_shape
from wlb.workload.base import Checkpointing

BATCH_TOKENS = 2**22  # of a step, where nobody says
PINNED = {"tp", "cp", "pp", "dp"}  # sizes that leave one layout


@dataclass(frozen=True)
class SearchSpace:
    """How many GPUs of which kind, and what they train.

    ``global_batch`` counts context windows. Only layouts with the ``fixed`` sizes (fields of
    ``Layout``) are tried, and only the given activation ``checkpointing``. Packers that fill windows put
    ``micro_batch_windows`` of them into a micro-batch.
    """

    gpus: int
    shape: ModelShape
    hardware: Hardware
    context_window: int
    global_batch: int
    fixed: tuple[tuple[str, int | str], ...] = ()
    checkpointing: Checkpointing | None = None
    micro_batch_windows: int = 1

    @property
    def layout(self) -> Layout | None:
        """The only layout, if all of its sizes are fixed."""
        fixed: dict[str, Any] = dict(self.fixed)
        return Layout(**fixed) if fixed.keys() >= PINNED else None

    @property
    def batch_tokens(self) -> int:
        return self.global_batch * self.context_window

    @property
    def given(self) -> frozenset[str]:
        """What describes a job that runs already: a whole layout, or settings that nobody would search for."""
        settings = {"checkpointing": self.checkpointing, "micro_batch_windows": self.micro_batch_windows > 1}
        layout = {"layout"} if self.layout else {"weights"} & {*dict(self.fixed)}
        return frozenset({name for name, value in settings.items() if value} | layout)

    def fixed_to(self, layout: Layout, checkpointing: Checkpointing | None = None) -> SearchSpace:
        """The same with ``layout`` only, but for its pools and its blocks of stages."""
        sizes = {name: size for name, size in vars(layout).items() if name not in ("stage_blocks", "pool")}
        return replace(self, fixed=tuple(sizes.items()), checkpointing=checkpointing)

    @property
    def work_prices(self) -> Costs:
        """The prices of work for comparing systems: W_a + W_l of a document on a single GPU."""
        return make_workload(self.shape, self.hardware)


def search_space(
    model: str | ModelShape,
    gpus: int,
    context_window: int,
    *,
    hardware: str | Hardware = "h100",
    batch_tokens: int = BATCH_TOKENS,
    fixed: Mapping[str, int | str] | None = None,
    checkpointing: Checkpointing | None = None,
    micro_batch_windows: int = 1,
) -> SearchSpace:
    """A search space by names; the global batch is as many whole windows as ``batch_tokens`` holds."""
    if gpus < 1:
        raise UserError(f"gpus = {gpus} is below 1; raise it")
    global_batch = batch_tokens // context_window
    if global_batch < 1:
        raise UserError(
            f"--batch-tokens {batch_tokens} is smaller than one context window of {context_window} tokens; raise it"
        )
    if global_batch > MOST_MICRO_BATCHES:
        raise UserError(
            f"a global batch of {batch_tokens} tokens holds {global_batch} windows of {context_window}, over "
            f"{MOST_MICRO_BATCHES}; lower it"
        )
    return SearchSpace(
        gpus,
        model_shape(model) if isinstance(model, str) else model,
        hardware_preset(hardware) if isinstance(hardware, str) else hardware,
        context_window,
        global_batch,
        tuple((fixed or {}).items()),
        checkpointing,
        micro_batch_windows,
    )
