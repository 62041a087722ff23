"""The ``wlb`` command: one Typer application, one small module per command.

``main`` is the single place where a mistake of the user becomes one line on stderr and exit status 2.
Commands import what they need when they run, so that ``wlb --help`` answers at once.
"""

import difflib
import errno
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from wlb import __version__
from wlb.cli.groups import with_groups
from wlb.errors import UserError
from wlb.terminal import tell


def _plain(parameters: list[Any]) -> list[Any]:
    """Make the help of all ``parameters`` alike: no placeholders of flags, no types of arguments, no ranges."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = _nothing
        parameter._get_number_range_help_str = _nothing
    return parameters


def _nothing(**_: object) -> None:
    return None


class _PlainCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


class _PlainGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


_INTERRUPTED = 130  # what Typer returns after Ctrl-C
# Errors of the operating system about a path that a user named, or a full disk. All others are bugs.
_PATH_ERRORS = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG),
    *(errno.ELOOP, errno.EROFS, errno.EINVAL, errno.ENOSPC, errno.EDQUOT, errno.EIO),
}

# The base of every mistake on the command line; Typer carries its own copy of click from 0.29 on.
_CommandLineError = cast(
    type[typer.BadParameter], next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
)


# The commands in each panel of the help: functions in ``wlb.cli``, named like their module.
_COMMANDS = {
    "Data": ("prepare",),
    "Planning": ("check", "simulate", "profile", "report"),
    "Training": ("train", "export", "doctor"),
}


def application(name: str, help: str, version: str, package: str, commands: Mapping[str, Sequence[str]]) -> typer.Typer:
    """The Typer application ``name``; every command is the function ``package.COMMAND.COMMAND``."""
    app = typer.Typer(
        name=name,
        cls=_PlainGroup,
        help=help,
        invoke_without_command=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )

    def show_version(asked: bool) -> None:
        if asked:
            print(version)
            raise typer.Exit

    @app.callback()
    def root(
        context: typer.Context,
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Print the version and exit."
        ),
    ) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    for panel, names in commands.items():
        for command_name in names:
            command = getattr(import_module(f"{package}.{command_name}"), command_name)
            paragraphs = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.__doc__))  # the terminal wraps them
            app.command(command_name, cls=_PlainCommand, help=paragraphs, rich_help_panel=panel)(with_groups(command))
    return app


def _described(error: typer.BadParameter) -> str:
    """The message of ``error`` with an example or the refused value, which Typer omits."""
    from pydantic import ValidationError

    message, cause = error.format_message(), error.__cause__
    if type(error).__name__ == "NoSuchOption" and error.ctx is not None:
        return _unknown_option(error)
    if type(error).__name__ == "MissingParameter" and error.ctx is not None:
        example = re.search("Example: (.*)", error.ctx.command.help or "")
        return message.rstrip(".") + (f"; for example: {example[1]}" if example else "")
    if message.startswith("No such command") and message.endswith(".") and error.ctx is not None:
        return f"{message.rstrip('.')}; {error.ctx.command_path} --help lists all"
    if not isinstance(cause, ValidationError):
        return message
    from wlb.settings import in_plain_words

    given, message = cause.errors()[0]["input"], in_plain_words(message)
    return message if repr(given) in message else f"{message} (got {given})"


def _unknown_option(error: Any) -> str:
    """The message for an unknown option: which one was probably meant, or where all are listed."""
    command = error.ctx.command_path
    known = [name for parameter in error.ctx.command.params for name in parameter.opts if name.startswith("--")]
    close = difflib.get_close_matches(error.option_name, known, n=1)
    advice = f"did you mean {close[0]}?" if close else f"{command} --help lists all"
    return f"No such option: {error.option_name}; {advice}"


def run(app: typer.Typer) -> NoReturn:
    """Run ``app`` on the command line; exits 0 on success, 2 with one line on stderr for a user's mistake.

    Raises ``KeyboardInterrupt`` on Ctrl-C. ``wlb.__main__`` handles it, because it may come before this import ends.
    """

    def refuse(message: str) -> NoReturn:
        tell(f"{app.info.name}: error: {' '.join(message.splitlines())}")  # names of files may have line ends
        sys.exit(2)

    try:
        status = app(standalone_mode=False)
    except (UserError, _CommandLineError) as error:
        refuse(str(error) if isinstance(error, UserError) else _described(error))
    except OSError as error:
        if error.errno not in _PATH_ERRORS:
            raise
        where = f"{error.filename} cannot be used: " if error.filename else ""
        refuse(f"{where}{error.strerror}; give another path")
    except typer.Abort:
        status = _INTERRUPTED
    if status == _INTERRUPTED:
        raise KeyboardInterrupt
    sys.exit(status if isinstance(status, int) else 0)


app = application(
    "wlb",
    "Workload-balanced 4D-parallel training on documents of very different lengths.",
    f"wlb-llm {__version__}",
    "wlb.cli",
    _COMMANDS,
)


def main() -> NoReturn:
    """Run ``wlb``, as ``run`` does."""
    run(app)
