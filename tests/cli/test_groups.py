"""Options in groups: what Typer is shown, and which group a command gets."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.testing import CliRunner

from wlb.cli.groups import with_groups


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What to draw."""

    size: Annotated[int, typer.Option(min=1, help="Needed.")]
    colour: Annotated[str, typer.Option(help="Not needed.")] = "grey"
    thin: Annotated[bool, typer.Option("--thin/--thick", help="Not needed.")] = True


def run(*arguments: str) -> Any:
    made: list[Any] = []

    def command(context: typer.Context, name: Annotated[str, typer.Argument()], asked: Shape) -> None:
        assert context.params["name"] == name
        made.append(asked)

    app = typer.Typer(rich_markup_mode="rich")
    app.command()(with_groups(command))
    result = CliRunner().invoke(app, ["x", *arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return made[0] if made else result.stdout


def test_a_command_gets_the_group_that_its_options_make():
    assert run("--size", "3") == Shape(size=3)
    assert run("--size", "3", "--thick", "--colour", "blue") == Shape(size=3, thin=False, colour="blue")


def test_help_has_every_option_once_and_says_what_is_needed():
    shown = run("--help")
    for option in ("--size", "--colour", "--thin"):
        assert shown.count(option) == 1
    assert shown.count("[required]") == 2  # the argument and an option
