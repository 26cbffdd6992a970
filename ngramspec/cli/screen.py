"""What a completion looks like in a terminal: progress, the text as it grows, and its statistics.

Text goes to standard output, everything else to standard error. Where standard output is no terminal, the text
leaves byte for byte; in a terminal, control characters of the model's are shown, not obeyed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ngramspec.cli import common
from ngramspec.cli.common import to_printable
from ngramspec.outputs import Completion, Delta
from ngramspec.sampling_params import SamplingParams
from ngramspec.tokenizer.detokenizer import TextStream

COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
_VISIBLE = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)


@contextlib.contextmanager
def show_progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Return a function that shows what is going on: one line that changes, or a few lines where there is no terminal."""
    console = Console(stderr=True)
    if quiet:
        yield lambda message: None
    elif console.is_terminal:
        with console.status("starting") as status:
            yield lambda message: status.update(Text(to_printable(message)))
    else:  # a line and its end in one write: several threads report
        yield common.ThrottledLines(lambda message: print(f"ngramspec: {to_printable(message)}\n", end="", file=sys.stderr))


def find_verbatim_runs(sources: Sequence[str | None]) -> list[tuple[str, int]]:
    """Return runs of tokens that one file of a datastore proposed, as (path:first-last line, tokens), longest first.

    Other tokens in a run, such as the model's own at the end of each pass, neither end nor count in it while the file stays the same and
    at most one stands alone.
    """
    runs: list[list[Any]] = []  # path, first line, last line, tokens, place of the last one
    for i, source in enumerate(sources):
        if source is None or not source.startswith("datastore:"):
            continue
        path, _, line = source.removeprefix("datastore:").rpartition(":")
        if not path:
            continue
        if runs and runs[-1][0] == path and i - runs[-1][4] <= 2 and 0 <= int(line) - runs[-1][2] <= 2:
            runs[-1][2:] = int(line), runs[-1][3] + 1, i
        else:
            runs.append([path, int(line), int(line), 1, i])
    runs.sort(key=lambda run: -run[3])
    return [(f"{path}:{first}" + (f"-{last}" if last > first else ""), n) for path, first, last, n, _ in runs]


class CompletionView:
    """Shows the deltas of one request as they come; several choices one after the other, at the end."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], params: SamplingParams, *, drafts: bool, silent: bool) -> None:
        self._out = Console(highlight=False, soft_wrap=True)
        self._err = common.make_console(stderr=True)
        self._drafts = drafts
        self._silent = silent
        self._colours: dict[str, str] = {}
        self._pieces: list[list[tuple[str, str | None]]] = [[] for _ in range(params.n)]
        self._n_tokens = [0] * params.n  # that deltas have brought
        self._n_chars = [0] * params.n
        stops, hidden = (params.stop, params.min_tokens), len(params.healed)
        self._streams = [TextStream(tokenizer, prompt_ids, *stops, n_hidden=hidden) for _ in range(params.n)] if drafts else []

    def add(self, delta: Delta) -> None:
        self._n_tokens[delta.index] += len(delta.token_ids)
        self._n_chars[delta.index] += len(delta.text)
        for piece, source in self._attribute(delta) if self._drafts else [(delta.text, None)]:
            if len(self._pieces) == 1:
                self._show(piece, source)
            else:
                self._pieces[delta.index].append((piece, source))

    def finish(self, done: Completion) -> None:
        """End the text: what no delta brought, what was held back, choices that waited, the last line."""
        for choice in done.choices:
            seen, shown = self._n_tokens[choice.index], self._n_chars[choice.index]
            self.add(Delta(choice.index, choice.text[shown:], choice.token_ids[seen:], choice.draft_sources[seen:]))
        for index, stream in enumerate(self._streams):
            self._pieces[index].append((stream.finish(), None))
        n = len(self._pieces)
        for index, pieces in enumerate(self._pieces):
            if n > 1 and not self._silent:
                self._out.print(Text(f"── {index + 1} of {n}", style="dim"))
            for piece, source in pieces:
                self._show(piece, source)
            if (n > 1 or self._out.is_terminal) and not self._silent:
                self._out.print()

    def print_statistics(self, done: Completion) -> None:
        """Print the statistics of the request on standard error."""
        stats = done.stats
        table = Table.grid(padding=(0, 2))
        rate = f"{stats.tokens / done.duration_s:.1f} tok/s" if done.duration_s else ""
        reasons = ", ".join(dict.fromkeys(str(choice.finish_reason) for choice in done.choices))
        table.add_row(
            "tokens", f"{stats.tokens}", f"{rate} in {done.duration_s:.2f} s, first after {done.ttft_s:.2f} s; ended by {reasons}"
        )
        table.add_row("passes", f"{stats.passes}", f"{stats.tokens_per_pass:.2f} tokens per pass")
        if stats.drafted:
            table.add_row("drafted", f"{stats.drafted}", f"{stats.accepted} accepted, {stats.acceptance_rate:.0%}")
        for source, drafted in sorted(stats.drafted_by_source.items(), key=lambda item: -item[1]):
            accepted = stats.accepted_by_source.get(source, 0)
            share = accepted / drafted if drafted else 0.0
            name = Text(to_printable(f"  {source}"), style=self._get_colour(source) if self._drafts else "")
            table.add_row(name, f"{drafted}", f"{accepted} accepted, {share:.0%}; expected {stats.expected_by_source.get(source, 0.0):.0f}")
        table.add_row("seed", "", f"{done.seed}; exactness {done.exactness}, precision {done.precision}")  # a wide column would be too much
        for choice in done.choices if self._drafts else []:
            for where, n in find_verbatim_runs(choice.draft_sources)[:8]:
                table.add_row(Text(f"  {n} tokens", style=self._get_colour("datastore")), "", Text(to_printable(where)))
        self._err.print(table)
        if not self._silent:
            for choice in done.choices:
                self._print_logprobs(choice.logprobs)

    def _attribute(self, delta: Delta) -> Iterator[tuple[str, str | None]]:
        """Yield the delta's text token by token, each piece with the source of the token that completed it."""
        stream = self._streams[delta.index]
        for token, source in zip(delta.token_ids, delta.draft_sources, strict=True):
            if stream.stopped_by is not None:
                return
            yield stream.push(token), source

    def _show(self, piece: str, source: str | None) -> None:
        if not piece or self._silent:
            return
        if not self._out.is_terminal:
            sys.stdout.write(piece)
            sys.stdout.flush()
            return
        self._out.print(Text(piece.translate(_VISIBLE), style=self._get_colour(source) if source else "", tab_size=4), end="")

    def _get_colour(self, source: str) -> str:
        return self._colours.setdefault(source.split(":")[0], COLOURS[len(self._colours) % len(COLOURS)])

    def _print_logprobs(self, logprobs: Any) -> None:
        if not logprobs:
            return
        table = Table("token", "logprob", "most likely", box=None)
        for entry in logprobs:
            likely = "  ".join(f"{token} {value:.3f}" for token, value in entry.top)
            table.add_row(f"{entry.token_id}", f"{entry.logprob:.4f}", likely)
        self._err.print(table)
