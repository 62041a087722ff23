"""Packers turn a stream of documents into ``StepPlan``s; ``balance`` divides a given set of documents.

``make_packer`` and what belongs to it are loaded when they are first used, so that ``import wlb.packing`` needs NumPy
alone: ``wlb.packing.balance`` is for trainers that have little else installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wlb.packing.registry import PACKERS, checked_name, make_packer, packer_options

__all__ = ["PACKERS", "checked_name", "make_packer", "packer_options"]

if not TYPE_CHECKING:  # a type checker sees the imports above

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module("wlb.packing.registry"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
