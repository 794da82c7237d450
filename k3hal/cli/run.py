"""Runs the command line and turns every outcome into an exit code: the one place where exceptions end."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
import typer.main

from k3hal import __version__
from k3hal.cli.output import ERROR_SCHEMA, print_json, stdout, stdout_reserved
from k3hal.cli.quick import read_plainly
from k3hal.env import check_environment, debug_enabled
from k3hal.errors import K3HALError, UsageError

EXIT_CRASH = 3
EXIT_USAGE = 4
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
BUG_REPORT = "the project's issue tracker"

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Set by the shell while it completes a command line; typer's protocol.
_COMPLETION_VARIABLE = "_K3HAL_COMPLETE"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `k3hal` with `argv` (default: the process's) and return its exit code; never raises for a user's mistake."""
    from k3hal.cli.app import app

    _write_utf8()
    args = list(sys.argv[1:] if argv is None else argv)
    command = typer.main.get_command(app)
    read_plainly(command)
    if os.environ.get(_COMPLETION_VARIABLE):
        return command.main(args, prog_name="k3hal", complete_var=_COMPLETION_VARIABLE)
    as_json = _wants_json(args)
    # Without an error stream there is nowhere else for anything to go.
    divert = as_json and sys.stderr is not None
    with stdout_reserved(for_good=argv is None) if divert else contextlib.nullcontext():
        return _run(command, args, as_json=as_json)


def _run(command: Any, args: list[str], *, as_json: bool) -> int:
    try:
        check_environment(os.environ)
        code = _invoke(command, args)
        stdout().flush()
    except K3HALError as error:
        return _refuse(error, as_json=as_json)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _NO_ROOM:
            return _crash(error, as_json=as_json)
        _discard_output()
        return _refuse(UsageError(f"cannot write: {error.strerror}"), as_json=False)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the last resort: a bug is reported, never shown raw
        return _crash(error, as_json=as_json)
    return code


def _discard_output() -> None:
    """What is still buffered can go nowhere: without this the interpreter complains about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout().fileno())


def _write_utf8() -> None:
    """Let standard output take any text whatever the locale says, and the error stream even names that are no text."""
    if sys.stdout is None:  # started with it closed; no other file may take its number
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace" if stream is sys.stderr else stream.errors)


def _invoke(command: Any, args: list[str]) -> int:
    """Parse and run. A wrong command line raises `UsageError`."""
    try:
        with command.make_context("k3hal", args) as ctx:
            result = command.invoke(ctx)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        if error.format_message().startswith("Usage: "):  # a group without a verb answers with its help
            typer.echo(error.format_message(), err=True)
            return EXIT_USAGE
        context = getattr(error, "ctx", None)
        help_line = f"see `{context.command_path} --help`" if context else "see `k3hal --help`"
        raise UsageError(error.format_message().rstrip("."), hint=help_line) from error
    return result if isinstance(result, int) else 0


def _wants_json(args: Sequence[str]) -> bool:
    """Whether `--json` stands among the flags, without one that asks for text; not parsed, since the command line
    itself may be what is wrong."""
    flags = args[: args.index("--")] if "--" in args else args
    return "--json" in flags and not {"--help", "--version"} & set(flags)


def _refuse(error: K3HALError, *, as_json: bool) -> int:
    if debug_enabled(os.environ):
        traceback.print_exception(error)
    _print_error(error.message, error.hint)
    if as_json:
        _print_error_json(error.code, error.message, error.hint)
    return error.exit_code


def _crash(error: BaseException, *, as_json: bool) -> int:
    message = f"this is a bug in k3hal {__version__}: {type(error).__name__}: {_first_line(error)}"
    hint = f"please report it in {BUG_REPORT}"
    if debug_enabled(os.environ):
        traceback.print_exception(error)
    else:
        hint += " with the traceback that K3HAL_DEBUG=1 shows"
    _print_error(message, hint)
    if as_json:
        _print_error_json("internal", message, hint)
    return EXIT_CRASH


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "no message")


def _print_error(message: str, hint: str) -> None:
    typer.echo(f"k3hal: error: {message}" + (f" ({hint})" if hint else ""), err=True)


def _print_error_json(code: str, message: str, hint: str) -> None:
    try:
        print_json(ERROR_SCHEMA, {"errors": [{"code": code, "message": message, "hint": hint}]})
        stdout().flush()
    except OSError:  # the line on the error stream and the exit code say it all
        _discard_output()
