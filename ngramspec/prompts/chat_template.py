"""Turn what a request says into the token ids of its prompt; text in messages and tools never becomes a control token.

Texts, messages and tools enter, lists of ids leave. Control tokens are all that the tokenizer's vocabulary was extended with, special or
not; in a chat they come from the template alone, and in a text to be continued from the text itself, if it is to be parsed. Knows the
engine's tokenizer; nothing of HTTP or of sampling.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from inspect import signature
from typing import Any, NamedTuple, Protocol

from jinja2.defaults import DEFAULT_NAMESPACE

from ngramspec.datastore.tokens import find_control_tokens
from ngramspec.errors import InvalidInputError, TokenizerError, UnsupportedModelError
from ngramspec.prompts.named_templates import NAMED_TEMPLATES
from ngramspec.prompts.template_process import TemplateLimitError, get_template_processes
from ngramspec.prompts.thoughts import HARMONY, ThoughtMarks, ThoughtReader, detect_marks
from ngramspec.prompts.tool_calls.call_formats import HERMES, NAMED_ID, CallFormat
from ngramspec.prompts.tool_calls.call_probe import detect_call_format
from ngramspec.prompts.tool_calls.stream_parser import StreamParser
from ngramspec.prompts.tool_calls.tool_prompt import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    Turn,
    separate_calls,
    write_calls_as_text,
    write_tools_as_text,
)
from ngramspec.prompts.tool_calls.toolbox import Toolbox
from ngramspec.tokenizer.encode import replace_lone_surrogates

# The tools as OpenAI's chats declare them.
Tools = Sequence[dict[str, Any]]
Hide = Callable[[str, str], str]


class Style(NamedTuple):
    """How a template is asked for a prompt."""

    answer_follows: bool = True
    """The prompt ends with the beginning of the assistant's answer."""
    goes_on: bool = False
    """It ends within the last message."""
    variables: Mapping[str, Any] = {}
    """What the template can read beside messages and tools."""


ANSWER = Style()
# The day, as llama.cpp tells templates. Without it those of Llama 3 show the day of their making.
DATES = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}
MAX_DEPTH = 64  # of nested groups in a pattern for control tokens: Python's compiler takes some hundred; the longest tokens have 40 letters
MAX_CONTROL = 1024  # characters of a control token, all of whose beginnings and endings are kept
MAX_BLANKS = 4  # tokens of blanks between the mark of thoughts and the end of a prompt


class TextEncoder(Protocol):
    """The part of an engine that encodes texts."""

    tokenizer: Any

    def encode_text(self, text: str, *, parse_special: bool = False) -> list[int]: ...


class Prompts:
    """The prompts of one engine. Threads may share it; encoding a long text takes a while."""

    def __init__(self, encoder: TextEncoder) -> None:
        """Look at the tokenizer's control tokens. Raises TokenizerError for one that is too long."""
        self._encoder, self._tokenizer = encoder, encoder.tokenizer
        self._bos: list[int] = [] if self._tokenizer is None else before_text(self._tokenizer)
        controls = {} if self._tokenizer is None else find_control_tokens(self._tokenizer.backend_tokenizer)
        self._control_ids = frozenset(controls)
        self._control = _any_of([token.content for token in controls.values()])
        self._special = _any_of([token.content for token in controls.values() if token.special])
        texts = [token.content for token in controls.values()]
        self._longest = max(map(len, texts), default=0)
        if self._longest > MAX_CONTROL:
            raise TokenizerError(f"the tokenizer has a control token of {self._longest} characters; accepted: up to {MAX_CONTROL}")
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        self._endings = {text[n:] for text in texts for n in range(1, len(text))}
        self._controls = {token.content: number for number, token in controls.items()}
        self._specials = {token.content: number for number, token in controls.items() if token.special}
        self.marks = {number: token for token, number in self._specials.items()}
        """The tokens that no text shows, some of which tell of a call."""

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def to_continue(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the ids of a text to be continued, after the token that the tokenizer begins texts with, if any. Raises TokenizerError."""
        return self._bos + self._encoder.encode_text(text, parse_special=parse_special)

    @cached_property
    def calls(self) -> CallFormat:
        """How the model writes calls of tools: as its template has it, or in a form that the prompt tells it."""
        return self._learned or HERMES

    @cached_property
    def thought_marks(self) -> ThoughtMarks | None:
        """What stands around the model's thoughts; None if its template knows none."""
        return detect_marks(str(self._tokenizer.chat_template or ""))

    def make_thought_reader(self, turns: Sequence[Turn], style: Style, ids: Sequence[int]) -> ThoughtReader | None:
        """Return what tells thoughts from the answer to this prompt; None if the answer has none. `ids`: the prompt's, or its last ones."""
        marks = self.thought_marks
        if marks is None:
            return None
        if style.goes_on:
            last = turns[-1].content
            is_open = last.rfind(marks.begin) > last.rfind(marks.end)
            return ThoughtReader(marks, is_open=is_open) if is_open or marks.recurs else None
        end = str(self._tokenizer.decode(list(ids[-len(marks.begin) - MAX_BLANKS :]), skip_special_tokens=False))
        return ThoughtReader(marks, is_open=end.rstrip().endswith(marks.begin))

    def make_stream_parser(self, box: Toolbox, thoughts: ThoughtReader | None, *, held: bool) -> StreamParser:
        """Return what reads an answer. `held`: a grammar holds all of it to calls, or to a form."""
        if not box.tools and not (thoughts is not None and self.thought_marks is HARMONY):  # whose answer stands in marks, too
            return StreamParser(None, self.marks, thoughts)
        if thoughts is not None:
            thoughts.end_before_calls((begin for begin in self.calls.begins if begin[:1] in "<["), self._specials)
        from ngramspec.prompts.tool_calls.call_reader import CallReader  # its patterns take 30 ms

        reader = CallReader(self.calls, box.known, held=held, calls_only=box.required, several=box.several)
        return StreamParser(reader, self.marks, thoughts)

    @cached_property
    def added(self) -> dict[str, int]:
        """The tokens beside text of which a text with calls may consist."""
        return {text: number for text, number in self._controls.items() if text not in self._specials or text in self.calls.special}

    def chat(
        self, turns: Sequence[Turn], tools: Tools = (), style: Style = ANSWER, check: Callable[[str], None] | None = None
    ) -> list[int]:
        """Return the ids of messages in the model's template, up to where its answer begins. Raises InvalidInputError if it refuses them.

        Control tokens in a message are text: each is hidden from the template and the tokenizer behind a random mark, and encoded apart.
        So is what the template could join with its own or another message's text to a control token, if it does. What the assistant is
        said to have written keeps the tokens that are not special (such as those around a chain of thought): they are in the text that
        the server gave out, and templates look for them there. Of tools and calls, names, descriptions and values are messages' text, and
        so are variables of the template. `check` sees the text before it is encoded, and may raise.
        """
        self._check(turns, style)
        turns, tools = self._adapt_to_template(turns, tools)
        foreign = False

        def note_control_tokens(text: str, role: str) -> str:
            nonlocal foreign
            foreign = foreign or bool(self._get_forbidden_pattern(role).search(text))
            return text

        def put(text: str, role: str) -> str:
            return text if role == TOOL and _WORD.fullmatch(text) else marks.put(text)

        rendered = self._render(turns, tools, style, note_control_tokens)
        if check is not None:
            check(rendered)
        marks = _Marks()
        hidden = self._make_template_input(turns, tools, style, lambda text, role: self._hide(text, role, marks))
        pieces = marks.split(self._render_input(hidden)) if marks.texts else [(rendered, False)]
        allowed = [token for text, is_user in pieces if not is_user for token in self._control.findall(text)]
        if not foreign and self._control.findall(rendered) == allowed:
            ids = self._encode(rendered)  # nothing was hidden, or ends of messages to which nothing was joined
        else:
            ids = self._join(pieces)
        if sum(token in self._control_ids for token in ids) > len(allowed):  # the tokenizer's normalizer makes one of other text
            marks = _Marks()
            ids = self._join(marks.split(self._render(turns, tools, style, put)))
        return self._beginning + ids

    def render_text(self, turns: Sequence[Turn], tools: Tools = (), style: Style = ANSWER) -> str:
        """Return the text that `chat` encodes. Raises InvalidInputError."""
        self._check(turns, style)
        return self._render(*self._adapt_to_template(turns, tools), style)

    def _check(self, turns: Sequence[Turn], style: Style) -> None:
        """Raises InvalidInputError."""
        if style.goes_on and (turns[-1].role != ASSISTANT or turns[-1].calls):
            why = "continue_final_message: the last message must be a text of the assistant"
            raise InvalidInputError(why, param="continue_final_message")
        self.check_variables(style.variables)

    def check_variables(self, names: Iterable[str]) -> None:
        """Raises InvalidInputError for a name that no variable of a template can have here."""
        for name in names:
            if name in self._own_names or not name.isidentifier():
                why = "the server's own" if name.isidentifier() else "no name of a variable"
                param = "chat_template_kwargs"
                raise InvalidInputError(f"{param}: {name[:40]!r} is {why}", param=param)

    @cached_property
    def _own_names(self) -> frozenset[str]:
        """What templates are told, and how they are applied."""
        applied = signature(self._tokenizer.apply_chat_template).parameters
        return frozenset({*applied, *self._tokenizer.special_tokens_map, *DEFAULT_NAMESPACE, *_TOLD})

    def _adapt_to_template(self, turns: Sequence[Turn], tools: Tools) -> tuple[Sequence[Turn], Tools]:
        """Return the same as the template can show it: without tools if it knows none."""
        if not (tools or any(turn.calls or turn.role == TOOL for turn in turns)):
            return turns, tools
        if (form := self._learned) is None:
            return write_tools_as_text(turns, tools, takes_system=self._takes_system), ()
        if form.in_text:
            first, last = (self._replace_tokens(text, put=True) for text in (form.first, form.last))
            return write_calls_as_text(turns, replace(form, first=first, last=last)), tools
        return (separate_calls(turns) if form.between is None else turns), tools

    @cached_property
    def _stand_ins(self) -> dict[str, str]:
        """What stands for the special tokens of calls that are written into the assistant's text, in which such tokens are text."""
        return {token: _make_nonce() for token in self.calls.special} if self.calls.in_text else {}

    def _replace_tokens(self, text: str, *, put: bool) -> str:
        """Return the text with stand-ins for tokens (`put`), or with the tokens in their place again."""
        for token, stand_in in self._stand_ins.items():
            text = text.replace(token, stand_in) if put else text.replace(stand_in, token)
        return text

    @cached_property
    def _learned(self) -> CallFormat | None:
        return detect_call_format(self._apply_template, list(self._specials))

    @cached_property
    def _takes_system(self) -> bool:
        try:
            return "probe" in self._apply_template([{"role": SYSTEM, "content": "probe"}, {"role": USER, "content": "a"}], [], True)
        except ValueError:
            return False

    def _hide(self, text: str, role: str, marks: _Marks) -> str:
        """Return the text with marks in the place of what is, or could become, a control token."""
        body = text.strip()  # templates strip too
        start = len(text) - len(text.lstrip())
        before, after = text[:start], text[start + len(body) :]
        reach = range(min(self._longest, len(body)), 0, -1)
        end = next((n for n in reach if body[-n:] in self._beginnings), 0)
        body, tail = body[: len(body) - end], body[len(body) - end :]
        start = next((n for n in reach if body[:n] in self._endings), 0)
        head, body = body[:start], body[start:]
        middle = self._get_forbidden_pattern(role).sub(lambda found: marks.put(found[0]), body)
        return before + marks.put(head) + middle + marks.put(tail) + after

    def _get_forbidden_pattern(self, role: str) -> re.Pattern[str]:
        return self._special if role == ASSISTANT else self._control

    def _render(self, turns: Sequence[Turn], tools: Tools, style: Style, hide: Hide = lambda text, role: text) -> str:
        return self._render_input(self._make_template_input(turns, tools, style, hide))

    def _make_template_input(self, turns: Sequence[Turn], tools: Tools, style: Style, hide: Hide) -> _TemplateInput:
        """Return what the template is handed, with `hide(text, role)` in the place of each text."""
        variables = {name: _hide_values(value, hide) for name, value in style.variables.items()}
        ids = self._make_ids(turns, hide)
        messages = [self._make_message(turn, hide, ids) for turn in turns]
        return _TemplateInput(messages, [_hide_values(tool, hide) for tool in tools], style, variables)

    def _render_input(self, told: _TemplateInput) -> str:
        """Return the rendered text, with tokens in the place of their stand-ins. Raises InvalidInputError."""
        try:
            goes_on, follows = told.style.goes_on, told.style.answer_follows
            text = self._render_continuation(told) if goes_on else self._apply_template(*told[:2], follows, **told.variables)
            return self._replace_tokens(text, put=False)
        except TemplateLimitError as e:
            raise InvalidInputError(f"these messages are too much: {e}", param="messages", code="template_limit") from None
        except ValueError as e:
            raise InvalidInputError(f"the model's chat template refuses these messages: {str(e)[:200]}", param="messages") from None

    def _render_continuation(self, told: _TemplateInput) -> str:
        """Return the prompt up to the end of the last message, without the blanks there if the template strips them, as transformers has
        it. Raises ValueError."""
        (*before, last), end = told.messages, _make_nonce()
        rendered = self._apply_template([*before, last | {"content": f"{last['content']}{end} "}], told.tools, False, **told.variables)
        text, found, behind = rendered.rpartition(end)
        if not found:
            raise ValueError("it does not show the last message, which is to be continued")
        return text if behind.startswith(" ") or not last["content"].strip() else text.rstrip()

    def _make_ids(self, turns: Sequence[Turn], hide: Hide) -> dict[str, str]:
        """Return the ids of calls as the template is told them, if they have to name the tools."""
        calls = [call for turn in turns for call in turn.calls] if self.calls.ids_name_tools else []
        return {call.id: NAMED_ID.format(name=hide(call.name, TOOL), index=i) for i, call in enumerate(calls)}

    def _make_message(self, turn: Turn, hide: Hide, ids: Mapping[str, str]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role, "content": hide(turn.content, turn.role)}
        if turn.thoughts:
            message["reasoning_content"] = hide(turn.thoughts, TOOL)
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": ids.get(call.id) or _shorten_id(call.id),
                    "type": "function",
                    "function": {"name": hide(call.name, TOOL), "arguments": arguments},
                }
                for call in turn.calls
                for arguments in [self._hide_arguments(call.arguments, hide)]
            ]
        if turn.role == TOOL:
            message |= {"tool_call_id": ids.get(turn.call_id or "") or _shorten_id(turn.call_id or ""), "name": hide(turn.name or "", TOOL)}
        return message

    def _hide_arguments(self, given: str, hide: Hide) -> Any:
        given = given or "{}"  # as some clients have a call without arguments
        try:
            parsed = json.loads(replace_lone_surrogates(given.encode()))
        except (ValueError, RecursionError):
            parsed = given
        if self.calls.arguments_as_text or not isinstance(parsed, dict):
            return hide(given, TOOL)
        return _hide_values(parsed, hide)

    def _apply_template(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], answer_follows: bool, **variables: Any) -> str:
        """Return what the tokenizer's `apply_chat_template` says, within limits. Raises ValueError."""
        told = {"messages": [{name: value for name, value in message.items() if value is not None} for message in messages]}
        told |= {"tools": tools or None, "documents": None, "add_generation_prompt": answer_follows}  # type: ignore[dict-item]
        template = self._tokenizer.get_chat_template(None, tools or None)
        today = datetime.date.today()
        defaults = {name: today.strftime(form) for name, form in DATES.items()}
        defaults["functions"] = json.dumps(tools, ensure_ascii=False, indent=4) if tools else ""  # Firefunction's, which has no `tools`
        return get_template_processes().render(template, {**self._tokenizer.special_tokens_map, **defaults, **variables, **told})

    def check_template(self) -> None:
        """Raises UnsupportedModelError for a template that takes more time or memory than it may for a conversation of a few words."""
        if not self.has_chat_template:
            return
        turns = [{"role": role, "content": "probe"} for role in (USER, ASSISTANT, USER)]
        try:
            for messages in (turns[:1], turns):
                with contextlib.suppress(ValueError):
                    self._apply_template(messages, [], True)
            _ = self._learned
        except TemplateLimitError as error:
            raise UnsupportedModelError(f"the model's chat template cannot be used: {error}") from None

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text, in which control tokens are control tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def _beginning(self) -> list[int]:
        """What stands before the template's text: with one of llama.cpp's names, what the tokenizer begins texts with."""
        return self._bos if self._tokenizer.chat_template in NAMED_TEMPLATES.values() else []

    def _join(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        spelled = cache(self._encoder.encode_text)  # the same few texts, maybe very often
        return [token for text, is_user in pieces for token in (spelled(text) if is_user else self._encode(text))]


class _TemplateInput(NamedTuple):
    """What a template is handed."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    style: Style
    variables: dict[str, Any]


class _Marks:
    """Stand-ins for texts while a template is rendered. Private-use characters that nobody can guess: no case, no blanks, no escapes."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._nonce = _make_nonce()

    def put(self, text: str) -> str:
        """Return a stand-in for the text; nothing for nothing."""
        if not text:
            return ""
        self.texts.append(text)
        return f"{self._nonce}{len(self.texts) - 1};"

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Return (text, whether it stood after a mark), in order."""
        cut = re.split(f"{self._nonce}([0-9]+);", rendered)
        pieces = [(self.texts[int(piece)], True) if i % 2 else (piece, False) for i, piece in enumerate(cut)]
        return [(text, is_user) for text, is_user in pieces if text]


def _make_nonce() -> str:
    return "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(16))


# What templates read that no signature names.
_TOLD = ("messages", "raise_exception", "strftime_now", "self", "caller", "loop")
_WORD = re.compile(r"[A-Za-z0-9_]*")


def _hide_values(value: Any, hide: Hide) -> Any:
    """Return a value of JSON with every text in it hidden."""
    if isinstance(value, str):
        return hide(value, TOOL)
    if isinstance(value, Mapping):
        return {hide(key, TOOL): _hide_values(each, hide) for key, each in value.items()}
    return [_hide_values(each, hide) for each in value] if isinstance(value, list) else value


def _shorten_id(number: str) -> str:
    """Return the id of a call as Mistral's templates ask for it: nine letters and digits, here the digest of any other."""
    return number if re.fullmatch("[a-zA-Z0-9]{9}", number) else hashlib.sha256(number.encode()).hexdigest()[:9]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds these texts, at each place the longest, as tokenizers do; without texts it finds nothing.

    The pattern is the tree of their first letters, so that a search does not slow down with their number.
    """

    def write_pattern(ends: list[str], depth: int) -> str:
        """Return a pattern for any of these ends of texts, given longest first."""
        if len(ends) == 1 or depth == MAX_DEPTH:
            return f"(?:{'|'.join(map(re.escape, ends))})"
        further: dict[str, list[str]] = {}
        for end in ends:
            further.setdefault(end[:1], []).append(end[1:])
        branches = [re.escape(letter) + write_pattern(rest, depth + 1) for letter, rest in further.items() if letter]
        return f"(?:{'|'.join(branches)}){'?' if '' in further else ''}"

    ends = sorted({*texts}, key=lambda text: (-len(text), text))
    return re.compile(write_pattern(ends, 0) if ends else r"(?!)")


def before_text(tokenizer: Any) -> list[int]:
    """Return the ids that the tokenizer puts before a text."""
    with_special, without = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
    for at in range(len(with_special) - len(without) + 1):
        if with_special[at : at + len(without)] == without:
            return with_special[:at]
    return []
