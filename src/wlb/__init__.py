"""WLB: workload-balanced 4D-parallel training of language models on variable-length documents.

This module exports what a trainer needs to plan its own steps. Each name is loaded on first use, so ``import wlb``
loads nothing else, and no name loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wlb.documents.segments import Segment as Segment
    from wlb.packing.arrange import arrange as arrange
    from wlb.packing.balance import balance as balance
    from wlb.packing.plan import MicroBatch as MicroBatch
    from wlb.packing.plan import StepPlan as StepPlan
    from wlb.packing.registry import make_packer as make_packer
    from wlb.shadow_mode import shadow as shadow
    from wlb.sharding import ShardPlan as ShardPlan
    from wlb.sharding import make_shard_plan as make_shard_plan
    from wlb.workload import make_workload as make_workload

__version__ = "0.1.0"

_MODULES = {
    "MicroBatch": "wlb.packing.plan",
    "Segment": "wlb.documents.segments",
    "ShardPlan": "wlb.sharding",
    "StepPlan": "wlb.packing.plan",
    "arrange": "wlb.packing.arrange",
    "balance": "wlb.packing.balance",
    "make_packer": "wlb.packing.registry",
    "make_shard_plan": "wlb.sharding",
    "make_workload": "wlb.workload",
    "shadow": "wlb.shadow_mode",
}
__all__ = ["__version__", *_MODULES]


if not TYPE_CHECKING:  # a type checker sees the imports above, and refuses names that do not exist

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
