"""What several commands do alike: declare options, read prompts, files and sizes, open engines and datastores, print names safely.

What the user gave enters; texts, numbers, open engines and stores leave, or `BadInputError`. Knows no command and no option but by the
name that an error tells. Imports nothing that takes time until it is needed.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ngramspec.cli.interrupts import keep_interrupts

if TYPE_CHECKING:
    from rich.console import Console

    from ngramspec.datastore.reader import Datastore
    from ngramspec.engine.llm_engine import Engine


LINE_S = 10.0  # seconds between two lines about the same stage of something that takes long, where there is no terminal


class BadInputError(Exception):
    """What the user gave cannot be worked with. The message says what could."""


class MissingPackagesError(Exception):
    """A command needs packages that this installation was made without. The message says which command brings them."""


def missing_packages(error: Exception) -> MissingPackagesError | None:
    """Return what to tell of a module that was not found because it belongs to an extra; None for any other error."""
    from ngramspec.errors import explain_missing_package

    message = explain_missing_package(error, "this command")
    return MissingPackagesError(message) if message else None


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """Return an option of a command, under a heading of its `--help`."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def to_printable(text: object) -> str:
    """Return a text for a terminal: control characters, lone surrogates and what else is invisible as escapes, such as \\x1b."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))


def format_duration(seconds: float) -> str:
    """Return seconds in words: `45 s`, `12 min`, `3.5 h`."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class ThrottledLines:
    """Passes on the first message of each stage, and one every LINE_S seconds within it. A stage is a message up to a comma or a bracket:
    `packing weights, 31 %` and `capturing passes (8 of 40)` belong to stages that tell how far they are."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._stage = ""
        self._written_s = 0.0

    def __call__(self, message: str) -> None:
        stage, now = re.split(r", | \(", message, maxsplit=1)[0], time.monotonic()
        if stage != self._stage or now - self._written_s >= LINE_S:
            self._stage, self._written_s = stage, now
            self._write(message)


def check_text(value: Any, what: str) -> None:
    """Raises BadInputError where a text or a list of them is no valid Unicode: bytes of the command line that are not UTF-8 become lone
    surrogates. `what` the value is called in errors."""
    for text in value if isinstance(value, list) else [value]:
        try:
            _ = text.encode() if isinstance(text, str) else None
        except UnicodeEncodeError as error:
            wrong = to_printable(text[error.start])
            raise BadInputError(f"{what} is not valid Unicode: character {error.start} is {wrong}; UTF-8 text is accepted") from None


def decode_text(text: str) -> str:
    """Return a text of the command line, decoded as UTF-8 even if the locale has another encoding, as ASCII for LC_ALL=C.

    What is no UTF-8 is left, for `check_text`. Not for paths, which the system takes in the locale's encoding.
    """
    try:
        return text if text.isascii() else os.fsencode(text).decode()
    except UnicodeError:
        return text


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text of PROMPT, of --file, or of standard input. Raises BadInputError."""
    if prompt is not None and file is not None:
        raise BadInputError("give either a PROMPT or --file, not both")
    if file is not None:
        text = read_file(file, "the prompt")
    elif prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        text = read_file(None, "the prompt")
    elif prompt is not None:
        text = decode_text(prompt)
        check_text(text, "the prompt")
    else:
        raise BadInputError("there is no prompt: give a PROMPT, --file FILE, or - and text on standard input")
    if not text:
        raise BadInputError("the prompt is empty: give text as an argument in quotes, by --file FILE, or on standard input")
    return text


def read_file(file: Path | None, what: str) -> str:
    """Return the text of a file, or of standard input. `what` it is called in errors. Raises BadInputError."""
    try:
        return (file.read_bytes() if file is not None else sys.stdin.buffer.read()).decode("utf-8-sig")
    except OSError as error:
        raise BadInputError(f"{what} cannot be read from {file or 'standard input'}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{what} in {file or 'standard input'} is not UTF-8 text: byte {error.start} is invalid") from error


def parse_size(text: str | None, option: str) -> int | None:
    """Return bytes of a size such as 800M, 4G or 123456; None of None. Raises BadInputError, which names the option."""
    if text is None:
        return None
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    scale = {"K": 10, "M": 20, "G": 30, "T": 40}.get(number[-1:], 0)
    try:
        size = int(float(number[:-1] if scale else number) * (1 << scale))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise BadInputError(f"{option} must be a size such as 500K, 800M or 4G, got {text!r}")
    return size


def format_size(n_bytes: int) -> str:
    """Return a number of bytes as `parse_size` reads it, in the largest unit that it is a whole number of."""
    for power, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if n_bytes >> power << power == n_bytes > 0:
            return f"{n_bytes >> power}{unit}"
    return str(n_bytes)


def open_store(folder: Path | str) -> Datastore:
    """Open the datastore of a --datastore, before a model is loaded, so that a wrong one is reported at once. Raises BadInputError."""
    from ngramspec.datastore.errors import DatastoreError, DatastoreNotFoundError
    from ngramspec.datastore.reader import Datastore

    try:
        store = Datastore.open(folder)
    except DatastoreError as error:
        hint = "; `ngramspec build-datastore` makes one" if isinstance(error, DatastoreNotFoundError) else ""
        raise BadInputError(f"--datastore: {error}{hint}") from error
    store.release()
    return store


def check_model(model: str) -> None:
    """Look a model's name up, before anything is imported that takes time. Raises ModelNotFoundError."""
    from ngramspec.models.names import check_name

    check_name(model)


def open_engine(model: str, *, drafters: Sequence[str] = (), alone: bool = False, **settings: Any) -> Engine:
    """Open an `Engine` whose `drafters` are given by their names (`papers.registry`). `alone`: draft with the only one alone.

    Raises BadInputError for what is out of bounds, and what `Engine` raises.
    """
    from ngramspec.datastore.garbage import pause_collector

    check_model(model)
    with pause_collector():
        with keep_interrupts():
            _import_numba()
            from ngramspec.engine.llm_engine import Engine
            from ngramspec.papers.registry import make_drafter

        try:
            made = [make_drafter(name) for name in drafters]
            return Engine(model, **settings, **({"alone": made[0]} if alone else {"drafters": made}))
        except ValueError as error:
            raise BadInputError(str(error)) from error


def _import_numba() -> None:
    """Import numba without what takes a tenth of a start: scipy, in which it would look for a BLAS, and yaml, if there is no file to read.

    No compiled function of this package multiplies matrices with a BLAS.
    """
    absent = ["scipy.linalg"] if Path(".numba_config.yaml").exists() else ["scipy.linalg", "yaml"]
    missing = dict.fromkeys(name for name in absent if name not in sys.modules)
    sys.modules.update(missing)  # type: ignore[arg-type]  # None is what Python takes for a module that cannot be found
    try:
        importlib.import_module("numba.np.arraymath")
    finally:
        for name in missing:
            del sys.modules[name]


def make_console(*, stderr: bool = False, **more: Any) -> Console:
    """Return a console that does not colour numbers, and takes 200 columns if there is no terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else 200, **more)
