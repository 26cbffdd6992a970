"""The `ngramspec` command: the commands it has, its version, its exit codes.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted. An error is one message on standard error; standard output carries text, JSON
and nothing else. Knows its commands by name only: a command's module is imported when the command is asked for.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import os
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from ngramspec import __version__
from ngramspec.child_process import has_current_folder
from ngramspec.cli.common import BadInputError, MissingPackagesError, missing_packages, to_printable
from ngramspec.cli.interrupts import INTERRUPTED, keep_interrupts

# Name → module of this package and what it has there: a function, or a Typer application of commands
_COMMANDS = {
    "beam": "beam_search:run_beam_search",
    "build-datastore": "datastore:build_datastore",
    "plan": "plan:plan",
    "serve": "serve:serve",
    "complete": "complete:complete",
    "warm-up": "warm_up:warm_up",
    "datastore": "datastore:app",
}


# What was probably meant by a word too many, by command
_EXTRA_ARGUMENTS = {
    "serve": "name the model with --model, or -hf org/name:Q4_K_M",
    "complete": "put the prompt in quotes, so that it is one argument",
    "beam": "put the prompt in quotes, so that it is one argument",
}


class _PlainValues:
    """Takes values of options that are plainly what they are to be: typer asks pydantic about all, whose import takes a tenth of a start.

    An earlier typer does not, and its parameters have no `type_descriptor`.
    """

    def get_params(self, context: Any) -> list[Any]:
        params: list[Any] = super().get_params(context)  # type: ignore[misc]  # of typer's class that comes next
        for param in params:
            if hasattr(param, "type_descriptor") and not param.required and "process_value" not in vars(param):
                param.process_value = functools.partial(_take_value, param, param.process_value)
        return params


def _take_value(param: Any, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    kind = None if param.type_descriptor.is_ranged else param.type_descriptor.annotation
    taken, is_plain = value, value is None or (type(value) is kind and kind is not str)
    if isinstance(value, str) and kind in (str, int, float):
        with contextlib.suppress(ValueError):  # no number, or not Unicode
            taken = kind(value)
            is_plain = str(taken).encode() == value.encode()
    if not is_plain:
        return process(context, value)
    return param.callback(context, param, taken) if param.callback else taken


class _Commands(UserDict[str, Any]):
    """Commands by name, each made when it is looked up first."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(found := self.data[name], str):
            module, _, attribute = found.partition(":")
            from ngramspec.datastore.garbage import pause_collector

            with pause_collector(), keep_interrupts():
                found = getattr(importlib.import_module(f"ngramspec.cli.{module}"), attribute)
            if not isinstance(found, typer.Typer):
                function, found = found, typer.Typer(add_completion=False)
                found.command(name, cls=_Command)(function)
            self.data[name] = found = typer.main.get_command(found)
        return found


class _Command(_PlainValues, TyperCommand):
    pass


class _Group(_PlainValues, TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands(_COMMANDS)


app = typer.Typer(
    name="ngramspec",
    cls=_Group,
    help="Run a language model faster with the same output, token for token: it verifies drafts from text that already exists.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run_command() -> NoReturn:
    """Run the command and end the process as soon as it is done: freeing an engine object by object takes Python seconds on a busy machine,
    and the system no time."""
    _open_missing_streams()
    code = 1

    def end_process() -> None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (AttributeError, ValueError):  # there are none
            pass
        except OSError:
            os._exit(code or 1)
        os._exit(code)

    atexit.register(end_process)  # before all others, so it is the last that runs
    try:
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
        raise


def _open_missing_streams() -> None:
    """Open the null device in place of the standard streams that were closed at the start, as with `>&-`.

    Otherwise Python has no object for them, and the next file to be opened, a model or a cache, gets the number to which libraries write
    errors.
    """
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115  # for the whole process; gets the lowest free number
            setattr(sys, name, stream)


class _PrefixFormatter(logging.Formatter):
    """Begins warnings of this package with its name, as all other messages of the command begin."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"ngramspec: {text}" if record.name.partition(".")[0] == "ngramspec" else text


def main() -> NoReturn:
    """Run the command and exit with its exit code."""
    if logging.lastResort is not None:  # writes warnings unless a command sets handlers
        logging.lastResort.setFormatter(_PrefixFormatter())
    with contextlib.suppress(AttributeError):  # a captured stream
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as raised:
        error = missing_packages(raised) or raised
        if (code := exit_code(error)) is None:
            raise
        if message := _format_message(error):  # without arguments typer shows the help and has nothing to add
            print(f"ngramspec: {message}", file=sys.stderr)
    sys.exit(code or 0)


def exit_code(error: Exception) -> int | None:
    """Return 1 or 2 for an error that is to be told, None for a defect, which shows its traceback."""
    if isinstance(error, MissingPackagesError):
        return 1
    if isinstance(error, BadInputError) or hasattr(error, "format_message"):  # typer's own: unknown option, missing value
        return 2
    from ngramspec import errors
    from ngramspec.datastore import errors as datastore_errors

    damaged = (datastore_errors.DatastoreLockedError, datastore_errors.DatastoreFullError, datastore_errors.DatastoreCorruptError)
    if isinstance(error, (MemoryError, errors.EngineClosedError, *damaged)):
        return 1
    if isinstance(error, (errors.NgramspecError, datastore_errors.DatastoreError)):
        return 2
    return 1 if isinstance(error, OSError) else None


def _format_message(error: Exception) -> str:
    from ngramspec.errors import ModelNotFoundError, NgramspecError

    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if isinstance(error, MemoryError) and not isinstance(error, NgramspecError):  # numpy's, of an array; Python's own says nothing
        message = f"memory ran out: {message or 'Python could not allocate more'}"
    context: Any = getattr(error, "ctx", None)
    if message.startswith("No such command") and message.endswith("."):  # else typer has named the nearest one
        message = f"{message[:-1]}; accepted: {', '.join(context.command.commands)}"
    elif flag := getattr(error, "option_name", None) if message.startswith("No such option") else None:
        message = _explain_option(flag) or message
    elif message.startswith("Got unexpected extra argument") and (hint := _EXTRA_ARGUMENTS.get(context.command.name)):
        message = f"{message}; {hint}"
    # What to do about a model may be a command, on a line of its own. All else is one line, whatever a file is called.
    lines = message.split("\n") if isinstance(error, ModelNotFoundError) else [message]
    return "\n".join(map(to_printable, lines))


def _explain_option(flag: str) -> str | None:
    """Return the error of an option that llama.cpp or vLLM have; None for any other."""
    from ngramspec.foreign_names import explain_flag

    given = next((word for word in sys.argv[1:] if word.startswith(flag)), flag)  # -ngl, of which the parser names -n alone
    ours = explain_flag(given.partition("=")[0])
    return ours and f"No such option: {given}; use {ours}"


def _print_version(asked: bool) -> None:
    if asked:
        print(f"ngramspec {__version__}")
        raise typer.Exit


@app.callback()
def _check_current_folder(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    if not has_current_folder():
        raise BadInputError("the current folder has been deleted; change to another one and run the command again")
