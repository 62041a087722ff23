"""The one exception that the command line turns into a single line and exit status 2."""

from __future__ import annotations

import importlib
from types import ModuleType


class UserError(ValueError):
    """Input that the user can mend; the message names the value, the limit and the remedy, in one line."""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra of ``wlb-llm`` brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{module.partition('.')[0]} is not installed; run: pip install 'wlb-llm[{extra}]'") from error
