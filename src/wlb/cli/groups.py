"""Groups of options: dataclasses whose fields are options, which a command takes as one parameter.

A command with two modes takes ``Annotated[A | B, typer.Option("--flag", help=...)]``: a ``B`` with the flag, else an
``A``. A field of both is one option, with the default of the group in use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from inspect import Parameter
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from wlb.errors import UserError

T = TypeVar("T")


def with_groups(command: Callable[..., T]) -> Callable[..., T]:
    """``command`` in the form that Typer reads, with an option for each field of its groups.

    Options that only the other group has are refused, and required options of the group in use must be given.
    """
    own, hints = inspect.signature(command).parameters, get_type_hints(command, include_extras=True)
    shown = {"context": Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)}
    groups: dict[str, _OptionGroup] = {}
    for name, parameter in own.items():
        kind, *flag = get_args(hints[name]) or (hints[name],)
        if kinds := [one for one in get_args(kind) or (kind,) if is_dataclass(one)]:
            groups[name] = _OptionGroup(kinds, *flag)
            shown |= groups[name].options()
        else:
            shown[name] = parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])

    def run(context: typer.Context, **given: Any) -> T:
        given["context"] = context
        given |= {name: group.made(context, given) for name, group in groups.items()}
        return command(**{name: given[name] for name in own})

    run.__signature__ = inspect.Signature([*shown.values()])  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True)
class _OptionGroup:
    """A parameter that is one of ``kinds``: the only one, or the second if ``flag`` is given."""

    kinds: list[Any]
    flag: Any = None  # made by typer.Option; inside Annotated its default is its name

    def options(self) -> dict[str, Parameter]:
        if self.flag is None:
            return _options(*self.kinds)
        first, second = map(_options, self.kinds)
        flag = Parameter("flag", Parameter.KEYWORD_ONLY, annotation=Annotated[bool, self.flag], default=False)
        panel = f"Only with {self.flag.default}"
        only = {name: _optional(option, panel) for name, option in second.items() if name not in first}
        return {name: _optional(option) for name, option in first.items()} | {"flag": flag} | only

    def made(self, context: typer.Context, given: dict[str, Any]) -> Any:
        """The group in use. Raises ``UserError`` for missing options, and for options of the other group."""
        if self.flag is None:
            (kind,) = self.kinds
            return kind(**{name: given[name] for name in names_of(kind)})
        asked, flag = given["flag"], self.flag.default
        kind, other = self.kinds[::-1] if asked else self.kinds
        others = {*names_of(other)} - {*names_of(kind)}
        if not asked and (unread := given_again(context, others)):
            raise UserError(f"{unread[0]} needs {flag}")
        refuse_unused(context, others, f"has no effect with {flag}")
        values = {name: given[name] for name in names_of(kind) if was_given(context, name)}
        for parameter in context.command.params:
            if parameter.name in _required(kind) - {*values}:
                option = _spelled(parameter)
                if not asked:
                    raise UserError(f"missing option {option}; only {flag} does not need it")
                told = str(getattr(parameter, "help", "")).removesuffix(" \\[required]").rstrip(".")
                raise UserError(f"{flag} needs {option}: {told}")
        return kind(**values)


def names_of(group: type) -> list[str]:
    """The names of the options of a group."""
    return [field.name for field in fields(group)]


def refuse_unused(context: typer.Context, names: Collection[str], why: str) -> None:
    """Refuse options (by parameter ``names``) that were given but have no effect; ``why`` completes the message."""
    for parameter in context.command.params:
        if parameter.name in names and was_given(context, parameter.name):
            value = context.params[parameter.name]
            if isinstance(value, bool):
                value = (parameter.opts if value else parameter.secondary_opts)[0]
            given = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            raise UserError(f"{_spelled(parameter)} {why} (got {given}); leave it out")


def was_given(context: typer.Context, name: str) -> bool:
    """Whether the option of this parameter name was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def given_again(context: typer.Context, names: Collection[str]) -> list[str]:
    """The options of ``names`` that were given, as words for another command with the same options."""
    words: list[str] = []
    for parameter in context.command.params:
        if parameter.name in names and was_given(context, parameter.name):
            value = context.params[parameter.name]
            if isinstance(value, bool):
                words.append((parameter.opts if value else parameter.secondary_opts)[0])
                continue
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], str(one)]
    return words


def _spelled(parameter: Any) -> str:
    return "/".join((*parameter.opts, *parameter.secondary_opts))


def _options(group: Any) -> dict[str, Parameter]:
    """The options of ``group`` by name; required ones come first."""
    hints, own = get_type_hints(group, include_extras=True), inspect.signature(group).parameters
    names = sorted(own, key=lambda name: own[name].default is not Parameter.empty)
    return {name: own[name].replace(annotation=hints[name]) for name in names}


def _required(group: Any) -> set[str]:
    return {name for name, option in _options(group).items() if option.default is Parameter.empty}


def _optional(option: Parameter, panel: str | None = None) -> Parameter:
    """``option``, shown as required if it is, although Typer treats it as optional."""
    kind, info = get_args(option.annotation)
    info = copy(info)
    info.rich_help_panel = panel
    if option.default is not Parameter.empty:
        return option.replace(annotation=Annotated[kind, info])
    info.help += " \\[required]"
    return option.replace(annotation=Annotated[kind | None, info], default=None)
