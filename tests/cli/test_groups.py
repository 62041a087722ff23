"""Options in groups: what Typer is shown, and which group a command gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from wlb.cli.groups import with_groups
from wlb.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Small:
    """What is done without --large."""

    size: Annotated[int, typer.Option(min=1, help="Needed.")]
    colour: Annotated[str, typer.Option(help="Shared.")] = "grey"
    thin: Annotated[bool, typer.Option("--thin/--thick", help="Only here.")] = True


@dataclass(frozen=True, kw_only=True)
class Large:
    """What is done with --large."""

    colour: Annotated[str, typer.Option(help="Shared.")] = "red"
    height: Annotated[int, typer.Option(help="Needed.")]


def run(*arguments: str) -> Any:
    made: list[Any] = []

    def command(
        context: typer.Context,
        name: Annotated[str, typer.Argument()],
        asked: Annotated[Small | Large, typer.Option("--large", help="The other thing.")],
    ) -> None:
        assert context.params["name"] == name
        made.append(asked)

    app = typer.Typer(rich_markup_mode="rich")
    app.command()(with_groups(command))
    result = CliRunner().invoke(app, ["x", *arguments])
    if result.exception is not None:
        raise result.exception
    return made[0] if made else result.stdout


def test_the_flag_says_which_group_is_made_and_each_has_its_own_defaults():
    assert run("--size", "3") == Small(size=3)
    assert run("--size", "3", "--thick", "--colour", "blue") == Small(size=3, thin=False, colour="blue")
    assert run("--large", "--height", "4") == Large(height=4)
    assert run("--large", "--height", "4", "--colour", "grey") == Large(height=4, colour="grey")


def test_an_option_of_the_other_group_is_refused_and_a_missing_one_asked_for():
    """What is there only for one group, test_app.py has of every command."""
    with pytest.raises(UserError, match="missing option --size; only --large does not need it"):
        run()
    with pytest.raises(UserError, match=r"--thin/--thick has no effect with --large \(got --thick\)"):
        run("--large", "--height", "4", "--thick")


def test_help_has_every_option_once_and_says_what_is_needed():
    shown = run("--help")
    for option in ("--size", "--colour", "--thin", "--height"):
        assert shown.count(option) == 1
    assert "Only with --large" in shown
    assert shown.count("[required]") == 3  # the argument, and an option of either group
