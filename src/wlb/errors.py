"""The one exception that the command line turns into a single line and exit status 2, and what often raises it."""

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class UserError(ValueError):
    """Invalid user input; the message names the value, the limit and the remedy, in one line."""


def choose_from(name: object, known: Iterable[str]) -> str:
    """The remedy for a ``name`` that is not ``known``: the most similar known name, and all of them."""
    names = list(known)
    close = difflib.get_close_matches(str(name).lower(), names, n=1)
    return (f"did you mean {close[0]}? " if close else "") + f"choose from {', '.join(names)}"


def check_known(what: str, name: str, known: Iterable[str]) -> str:
    """Return ``name`` if it is one of the ``known`` names of ``what``. Raises ``UserError`` otherwise."""
    if name not in (names := list(known)):
        raise UserError(f"{what} {name!r} is unknown; {choose_from(name, names)}")
    return name


def require(module: str, extra: str, package: str = "wlb-llm") -> ModuleType:
    """Import an optional dependency, or raise ``UserError`` with the extra of ``package`` that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = module.partition(".")[0]
        raise UserError(f"{missing} is not installed; run: pip install '{package}[{extra}]'") from error
