"""Groups of options: dataclasses whose fields are options, which a command takes as one parameter."""

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, is_dataclass
from inspect import Parameter
from typing import Any, TypeVar, get_type_hints

import typer

from wlb.errors import UserError

T = TypeVar("T")


def with_groups(command: Callable[..., T]) -> Callable[..., T]:
    """``command`` in the form that Typer reads, with an option for each field of its groups."""
    own, hints = inspect.signature(command).parameters, get_type_hints(command, include_extras=True)
    shown = {"context": Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)}
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    for name, parameter in own.items():
        if name in groups:
            shown |= _options(groups[name])
        else:
            shown[name] = parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])

    def run(context: typer.Context, **given: Any) -> T:
        given["context"] = context
        for name, kind in groups.items():
            given[name] = kind(**{option: given[option] for option in names_of(kind)})
        return command(**{name: given[name] for name in own})

    run.__signature__ = inspect.Signature([*shown.values()])  # type: ignore[attr-defined]
    return run


def names_of(group: type) -> list[str]:
    """The names of the options of a group."""
    return [field.name for field in fields(group)]


def refuse_unused(context: typer.Context, names: Collection[str], why: str) -> None:
    """Refuse options (by parameter ``names``) that were given but have no effect; ``why`` completes the message."""
    for parameter, values in _given(context, names):
        spelled = "/".join((*parameter.opts, *parameter.secondary_opts))
        raise UserError(f"{spelled} {why} (got {', '.join(values)}); leave it out")


def was_given(context: typer.Context, name: str) -> bool:
    """Whether the option of this parameter name was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def given_again(context: typer.Context, names: Collection[str]) -> list[str]:
    """The options of ``names`` that were given, as words for another command with the same options."""
    words: list[str] = []
    for parameter, values in _given(context, names):
        words += values if parameter.is_flag else [word for value in values for word in (parameter.opts[0], value)]
    return words


def _given(context: typer.Context, names: Collection[str]) -> Iterator[tuple[Any, list[str]]]:
    """The parameters of ``names`` that were given, with their values; the value of a flag is the flag itself."""
    for parameter in context.command.params:
        if parameter.name in names and was_given(context, parameter.name):
            value = context.params[parameter.name]
            if isinstance(value, bool):
                value = (parameter.opts if value else parameter.secondary_opts)[0]
            yield parameter, [str(one) for one in (value if isinstance(value, list | tuple) else [value])]


def _options(group: Any) -> dict[str, Parameter]:
    """The options of ``group`` by name; required ones come first."""
    hints, own = get_type_hints(group, include_extras=True), inspect.signature(group).parameters
    names = sorted(own, key=lambda name: own[name].default is not Parameter.empty)
    return {name: own[name].replace(annotation=hints[name]) for name in names}
