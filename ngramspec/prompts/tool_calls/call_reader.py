"""Finds tool calls in a text as it grows.

Tokens' texts enter in pieces of any size; `TextDelta`, `ToolCallStart` and `ToolCallArguments` leave, in the text's order. Text is held
back only while it may still become a call. What turns out to be no call is passed on as text, unchanged except for blanks beside calls.
The forms of calls are in `call_forms` and `template_form`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import regex

from ngramspec.prompts.tool_calls.call_formats import CallFormat
from ngramspec.prompts.tool_calls.call_forms import FORMS, CallForm
from ngramspec.prompts.tool_calls.call_scanner import KnownTools, Parse, Scanner, StreamDelta, TextDelta, ToolCallStart
from ngramspec.prompts.tool_calls.template_form import make_template_form

CONTEXT = 256  # characters kept before the place where a call is looked for: some forms begin only after certain characters
MAX_WASTED = 1_000_000  # characters read in vain as calls, after which a text is passed on as it is
MIN_CUT = 5  # characters of a form's first word that count as markup, not text, if the text was cut off within it
_CODE_ENDS = regex.compile("```")


class CallReader:
    """Finds the calls in one text."""

    def __init__(self, form: CallFormat, tools: KnownTools, *, held: bool = False, calls_only: bool = False, several: bool = True) -> None:
        """Begin a text. `held`: a grammar holds calls to the template's form, so they are passed on while they are written; other calls
        are passed on when they are whole. `calls_only`: the text is nothing but calls. `several`: pass on more than the first call."""
        own = make_template_form(form, held=held)
        self._forms: tuple[CallForm, ...] = (*([] if own is None else [own]), *FORMS)
        self._begin, self._begin_in_code = (
            _join_begins(self._forms),
            _join_begins([each for each in self._forms if each.marked], _CODE_ENDS),
        )
        self._trusts_json = not form.trigger
        self._scan = Scanner(tools, streams=held)
        self._calls_only, self._several = calls_only, several
        self._from = 0
        """The text from here on is not passed on yet."""
        self._start = 0
        """The position at which a call is tried, or looked for next."""
        self._hidden: list[tuple[int, int]] = []
        """First and last position of each special token, which no text shows."""
        self._tried: list[CallForm] = []
        """Forms that may begin at `_start`; the first is being read."""
        self._parse: Parse | None = None
        self._in_code = False
        """The position is within a fenced block that is no call."""
        self._n_calls = self._n_wasted = 0
        self._has_text = False
        """Some text that is not blank was passed on."""
        self._fresh = True
        """No text was passed on since the beginning or the last call."""
        self._found = False
        """The parser at work has passed something on."""

    @property
    def n_calls(self) -> int:
        return min(self._n_calls, 1) if not self._several else self._n_calls

    @property
    def is_whole(self) -> bool:
        """Whether the text did not end within a call."""
        return not self._scan.broken

    def push(self, text: str) -> list[StreamDelta]:
        """Take the next piece of the text; return what is known now."""
        self._scan.text += text
        return list(self._run()) if text else []

    def push_special(self, token: str) -> list[StreamDelta]:
        """Take a special token, which no text shows; return what is known now."""
        before = len(self._scan.text)
        self._hidden.append((before, before + len(token)))
        return self.push(token)

    def finish(self, *, cut: bool = False) -> list[StreamDelta]:
        """End the text; return what was held back. `cut`: it would have gone on."""
        events: list[StreamDelta] = []
        if cut and self._parse is not None and (self._tried[0].marked or self._scan.sure or self._found):
            if self._scan.streams:
                self._scan.ended = True
                events += [event for event in self._parse if event is not None and not isinstance(event, TextDelta)]
            self._from = self._start = len(self._scan.text)  # the beginning of a call is no text
            self._parse = None
        elif cut and self._parse is None:
            pattern = self._begin_in_code if self._in_code else self._begin
            found = pattern.search(self._scan.text, self._start, partial=True)
            least = 1 if self._fresh and self._n_calls else MIN_CUT
            if found and found.partial and len(found[0].strip()) >= least and not self._is_plain_text(found[0]):
                self._scan.text = self._scan.text[: found.start()]
        self._scan.ended = True
        events += self._run()
        return events

    def _is_plain_text(self, beginning: str) -> bool:
        """Return whether only forms that are not marked begin like this."""
        return not any(form.marked and form.begin.fullmatch(beginning.strip(), partial=True) for form in self._forms)

    def _run(self) -> Iterator[StreamDelta]:
        while (yield from (self._find_begin() if self._parse is None else self._read_form())):
            pass

    # ------------------------------------------------------------------ the two states; both return whether there is more to do

    def _find_begin(self) -> Generator[StreamDelta, None, bool]:
        """Find where the next call may begin, and pass on the text before it."""
        scan = self._scan
        pattern = self._begin_in_code if self._in_code else self._begin
        found = None if self._n_wasted > MAX_WASTED else pattern.search(scan.text, self._start, partial=not scan.ended)
        end = len(scan.text) if found is None else found.start()
        if found is not None and not found.partial:
            yield from self._emit_text(len(scan.text[:end].rstrip()))
            self._start = end
            forms = [form for form in self._forms if form.begin.match(scan.text, end, partial=not scan.ended)]
            self._tried = [form for form in forms if form.marked or not self._in_code]
            self._begin_form()
            if self._parse is None:  # the end of a fenced block
                self._in_code = False
                yield from self._skip_to(found.end())
            return True
        kept = end if scan.ended else len(scan.text[:end].rstrip())
        yield from self._emit_text(kept)
        self._start = max(end, self._start)  # nothing begins within these blanks
        if self._from > 4 * CONTEXT:
            self._drop_text(self._from - CONTEXT)
        return False

    def _read_form(self) -> Generator[StreamDelta, None, bool]:
        """Continue the form that is being read."""
        assert self._parse is not None
        scan = self._scan
        try:
            while (event := next(self._parse)) is not None:
                yield from self._pass_on(event)
            return False
        except StopIteration as stop:
            is_call = bool(stop.value)
        if is_call:
            self._from = self._start = max(scan.at, self._start)
            self._parse = None
            return True
        n_read = scan.furthest - self._start
        self._n_wasted += n_read if n_read > CONTEXT else 0
        form = self._tried.pop(0)
        self._begin_form()
        if self._parse is None:
            self._in_code = self._in_code or form.name == "fence"
            end = self._start + 1 if form.name != "fence" else scan.text.index("```", self._start) + 3
            yield from self._skip_to(end)
        return True

    def _begin_form(self) -> None:
        scan = self._scan
        scan.at, scan.sure, scan.trusts_json, self._found = self._start, False, self._trusts_json and not self._has_text, False
        scan.furthest = self._start
        self._parse = self._read_from_begin(self._tried[0]) if self._tried else None

    def _read_from_begin(self, form: CallForm) -> Parse:
        """Read a form, once it is known that it begins here."""
        if (yield from self._scan.match(form.begin)) is None:
            return False
        self._scan.at = self._start
        return (yield from form.read(self._scan))

    # ------------------------------------------------------------------ what they share

    def _pass_on(self, event: StreamDelta) -> Iterator[StreamDelta]:
        if isinstance(event, TextDelta):
            if not self._fresh:
                yield event
            return
        if isinstance(event, ToolCallStart):
            if not self._found:
                self._from = self._start  # blanks before a call are no text
            self._found = True
            self._n_calls += 1
            self._fresh = True
        if self._several or self._n_calls == 1:
            yield event

    def _skip_to(self, end: int) -> Iterator[StreamDelta]:
        """Pass on the text up to `end`, which is no call."""
        yield from self._emit_text(end)
        self._start = end

    def _emit_text(self, end: int) -> Iterator[StreamDelta]:
        """Pass on the text up to `end`, without special tokens and without blanks beside calls."""
        start, self._from = self._from, max(end, self._from)
        if end <= start:
            return
        pieces, at = [], start
        for first, last in self._hidden:
            if first < end and last > at:
                pieces.append(self._scan.text[at : max(first, at)])
                at = min(last, end)
        text = "".join([*pieces, self._scan.text[at:end]])
        if self._fresh and self._n_calls and (not self._has_text or (self._scan.ended and not text.strip())):
            text = text.lstrip()
        if not text or self._calls_only:
            return
        self._fresh = False
        self._has_text = self._has_text or bool(text.strip())
        yield TextDelta(text)

    def _drop_text(self, n: int) -> None:
        """Drop the first n characters, which have been passed on."""
        self._scan.text = self._scan.text[n:]
        self._from, self._start = self._from - n, self._start - n
        self._hidden = [(first - n, last - n) for first, last in self._hidden if last > n]


def _join_begins(forms: list[CallForm] | tuple[CallForm, ...], *more: regex.Pattern[str]) -> regex.Pattern[str]:
    return regex.compile("|".join(f"(?:{pattern.pattern})" for pattern in (*(form.begin for form in forms), *more)))
