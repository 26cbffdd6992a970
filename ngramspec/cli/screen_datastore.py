"""What datastores look like in a terminal: a build's progress and summary, what a store holds, what a look-up found.

Summaries and progress go to standard error, answers to questions to standard output.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ngramspec.cli import common
from ngramspec.cli.common import make_console, to_printable
from ngramspec.datastore import progress as datastore_progress
from ngramspec.datastore.errors import DatastoreLockedError
from ngramspec.datastore.progress import ProgressCallback, Summary

_NAMED = 10  # unreadable files that a summary names


@contextlib.contextmanager
def show_progress(quiet: bool) -> Iterator[ProgressCallback]:
    """Return a function to hand to a build: a bar in a terminal, elsewhere a line per stage and one every LINE_S seconds."""
    screen = Console(stderr=True)
    if quiet:
        yield datastore_progress.ignore_progress
    elif screen.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}", markup=False))
        with Progress(*columns, console=screen, transient=True, refresh_per_second=8) as bars:
            task = bars.add_task("looking", total=None, text="")
            yield _limit_rate(
                lambda p: bars.update(
                    task, description=p.stage, total=p.n_bytes if p.stage == "reading" else None, completed=p.bytes, text=_format_rates(p)
                ),
                0.1,
            )
    else:
        yield _limit_rate(lambda p: print(f"ngramspec: {_format_line(p)}", file=sys.stderr) if p.stage != "done" else None, common.LINE_S)


def _limit_rate(draw: ProgressCallback, seconds: float) -> ProgressCallback:
    """Draw at a new stage, and no more often than every few seconds within one."""
    last: tuple[str, float] = ("", 0.0)

    def tell(p: datastore_progress.Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if p.stage != last[0] or now - last[1] >= seconds:
            last = (p.stage, now)
            draw(p)

    return tell


def _format_line(p: datastore_progress.Progress) -> str:
    """Return a line of progress for a stream that is no terminal."""
    if p.stage == "looking":
        return "looking for files"
    if p.stage == "reading" and not p.files:
        return f"reading {p.n_files:,} files, {p.n_bytes / 1e6:,.1f} MB"
    return f"{p.stage}, {_format_rates(p)}"


def _format_rates(p: datastore_progress.Progress) -> str:
    if p.stage == "looking":
        return ""
    parts = [f"{p.files:,} of {p.n_files:,} files", f"{p.tokens / 1e6:.1f} M tokens"]
    if p.stage == "reading":
        parts[1:] = [f"{p.bytes / 1e6:,.1f} of {p.n_bytes / 1e6:,.1f} MB"]
        parts.append(f"{p.mb_s:.1f} MB/s")
        if p.seconds_left is not None and p.seconds_left >= 1:
            parts.append(f"about {common.format_duration(p.seconds_left)} left")
    return ", ".join(parts)


def print_summary(summary: Summary) -> None:
    """Print counts, what was left out and why, and where the time went, on standard error."""
    table = _make_grid()
    seconds = summary.seconds.get("total", 0.0)
    changes = [f"{summary.added} added", f"{summary.removed} removed", f"{summary.unchanged} unchanged"]
    if summary.merged:
        changes.append(f"{summary.merged} segments merged")
    table.add_row("documents", f"{summary.files:,}", ", ".join(changes))
    table.add_row("tokens", f"{summary.tokens:,}", f"in {summary.segments} segment{'s' if summary.segments != 1 else ''}")
    rate = f", {summary.mb / seconds:.1f} MB/s" if summary.mb and seconds else ""
    table.add_row(
        "store", f"{summary.bytes / 1e6:,.1f} MB", f"generation {summary.generation}" + ("" if summary.committed else ", as it was")
    )
    stages = ", ".join(f"{stage} {value:.1f}" for stage, value in summary.seconds.items() if stage != "total" and value >= 0.05)
    table.add_row("seconds", f"{seconds:.1f}", f"{stages}{rate}")
    table.add_row("left out", f"{summary.skipped.total():,}", Text(_format_counts(summary.skipped)))
    if summary.secrets:
        table.add_row(
            "secrets", f"{summary.secrets.total():,}", Text(f"files left out whole, by what is in them: {_format_counts(summary.secrets)}")
        )
    screen = _make_console(stderr=True)
    screen.print(table)
    for path, why in summary.named[:_NAMED]:
        screen.print(Text(to_printable(f"could not be read: {path}: {why}")))
    if len(summary.named) > _NAMED:
        screen.print(f"and {len(summary.named) - _NAMED} more")


def print_info(found: dict[str, Any]) -> None:
    """Print what `Datastore.info` returns."""
    table = _make_grid(("left", "left"))
    tokenizer = found["tokenizer"]
    table.add_row("store", Text(to_printable(f"{found['path']}, generation {found['generation']}, written by {found['writer']}")))
    name = to_printable(f"{tokenizer['name']}, {tokenizer['fingerprint'][:12]}, vocabulary {found['vocab_size']:,}")
    table.add_row("tokenizer", Text(name))
    table.add_row("documents", f"{found['documents']:,}, and {found['dead_documents']:,} dead, in {found['segments']} segments")
    table.add_row("tokens", f"{found['tokens']:,}")
    table.add_row("size", f"{found['bytes'] / 1e6:,.1f} MB, {found['bytes_per_token']:.2f} bytes per token")
    table.add_row("made from", Text("\n".join(to_printable(source.get("path", source)) for source in found["sources"])))
    chosen = {name: value for name, value in found["options"].items() if value}
    table.add_row("options", Text(to_printable(", ".join(f"{name} {_format_value(value)}" for name, value in chosen.items()))))
    _make_console().print(table)


def print_match(document: dict[str, Any]) -> None:
    """Print what a look-up found, as `datastore lookup --json` has it."""
    screen = _make_console()
    match = document["match"]
    if not match["tokens"]:
        screen.print("no end of this text occurs")
        return
    times = f"{document['count']:,}{'' if document['complete'] else ' or more'}"
    screen.print(Text(f"{match['tokens']} tokens, {times} times: {match['text'][-100:]!r}"))
    table = _make_grid(("right", "left"))
    for item in document["continuations"]:
        table.add_row(f"{item['count']:,}", Text(repr(item["text"])))
    screen.print(table)
    for place in document["locations"]:
        screen.print(Text(to_printable(f"{place['path']}:{place['line']}")))


def print_watched(sources: Sequence[Any]) -> None:
    print(f"ngramspec: watching {to_printable(', '.join(source.label for source in sources))}; Ctrl-C ends it", file=sys.stderr, flush=True)


def print_outcome(outcome: Summary | Exception) -> None:
    """Print one line for each update of a watched store on standard error."""
    clock = time.strftime("%H:%M:%S")
    if isinstance(outcome, DatastoreLockedError):
        text = to_printable(outcome.waiting)
    elif isinstance(outcome, Exception):
        text = f"failed, will be tried again: {to_printable(outcome)}"
    else:
        merged = f", {outcome.merged} segments merged" if outcome.merged else ""
        text = (
            f"{outcome.added} documents added, {outcome.removed} removed{merged}: "
            f"generation {outcome.generation} after {outcome.seconds.get('total', 0.0):.2f} s"
        )
    print(f"{clock} {text}", file=sys.stderr, flush=True)


def _format_counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counter.most_common())


def _make_grid(justify: Sequence[Any] = ("left", "right", "left")) -> Table:
    table = Table.grid(padding=(0, 2))
    for side in justify:
        table.add_column(justify=side)
    return table


def _make_console(stderr: bool = False) -> Console:
    return make_console(stderr=stderr, soft_wrap=not (sys.stderr if stderr else sys.stdout).isatty())


def _format_value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "yes" if value is True else str(value)
