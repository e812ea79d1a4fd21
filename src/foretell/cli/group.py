"""How the command line fails: one line on standard error and an exit code, or the traceback with ``--debug``."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from foretell.errors import ForetellError
from foretell.units import printable

__all__ = ["ForetellGroup", "hoisted", "one_line"]

# typer exports BadParameter only; its bases are what it raises for any wrong use, whichever click it carries.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


def hoisted(arguments: Iterable[str]) -> list[str]:
    """`arguments` with foretell's own options moved before the command, so that they may also follow it.

    >>> hoisted(["predict", "w", "--debug", "--on", "t4", "--devices", "mine"])
    ['--debug', '--devices', 'mine', 'predict', 'w', '--on', 't4']
    """
    front: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            rest += [argument, *remaining]
        elif argument == "--debug" or argument.startswith("--devices="):
            front.append(argument)
        elif argument == "--devices":
            front += [argument, *([value] if (value := next(remaining, None)) is not None else [])]
        else:
            rest.append(argument)
    return front + rest


def one_line(error: BaseException) -> str:
    """What an error says, on one line: our own say what, where and the repair; others get their type.

    What a terminal would take for a command, in a file's name or a text from a file, becomes a question mark.
    """
    return printable(_said(error))


def _said(error: BaseException) -> str:
    if isinstance(error, ForetellError):
        return " ".join(f"error: {error}".split())
    if isinstance(error, _UsageError):
        message = " ".join(error.format_message().split()).rstrip(".")
        context = error.ctx
        where = context.command_path if context is not None else "foretell"
        return f"error: {message}; see {where} --help"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = error.filename or "output"
        return f"error: {where}: cannot be written, the disk is full; make room, or write elsewhere"
    said = " ".join(str(error).split())
    kind = type(error).__name__
    return f"error: {kind}: {said or 'no message'}; run again with --debug for the traceback"


def _without_type(parameters: Any) -> Any:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class ForetellGroup(TyperGroup):
    """The group of commands; catches what they raise."""

    def get_params(self, ctx: Any) -> Any:
        """The group's own parameters."""
        return _without_type(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command, its flags without the type that help would show for them."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _without_type(command.get_params(ctx))
        return command

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> None:
        """Run the command that `args` name and exit the interpreter with its code."""
        arguments = hoisted(sys.argv[1:] if args is None else args)
        debug = "--debug" in arguments[: arguments.index("--")] if "--" in arguments else "--debug" in arguments
        if not debug:
            _hush()
        extra["standalone_mode"] = False
        try:
            code = super().main(args=arguments, prog_name=prog_name or "foretell", **extra)
        except typer.Abort:
            sys.exit(130)
        except Exception as error:  # the outermost frame: whatever comes here would be a traceback otherwise
            if debug and not isinstance(error, _UsageError):
                import traceback

                traceback.print_exc()
            elif str(error) or not isinstance(error, _UsageError):  # without arguments the help says enough
                print(one_line(error), file=sys.stderr)
            sys.exit(_code(error))
        sys.exit(code if isinstance(code, int) else 0)


def _code(error: Exception) -> int:
    if isinstance(error, ForetellError):
        return error.exit_code
    return 2 if isinstance(error, _UsageError) else 1


def _hush() -> None:
    """Keep the chatter of libraries off the terminal; what matters to a figure is in its notes."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
