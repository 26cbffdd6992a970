"""The prompts of the engine's own methods: a gap between two texts, or a chat, becomes token ids.

Texts and messages enter with sampling parameters; ids leave, with parameters that end or hold the text as the model was trained. Knows the
engine's tokenizer and its limits; runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ngramspec.engine.request import Files
from ngramspec.errors import InvalidInputError, PromptTooLongError, UnsupportedModelError
from ngramspec.grammar.constraint import Grammar
from ngramspec.outputs import Completion, Delta
from ngramspec.prompts.chat_reply import ChatDelta, ChatReply, read_delta, read_reply
from ngramspec.prompts.chat_template import Prompts, Style
from ngramspec.prompts.fim import MAX_UNFINISHED, MIDDLE_LINES, Fim, FimOptions
from ngramspec.prompts.messages import read_messages, read_tools
from ngramspec.prompts.tool_calls.stream_parser import StreamParser
from ngramspec.sampling_params import SamplingParams
from ngramspec.tokenizer.encode import Encoding, check_unicode


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A chat for the engine."""

    ids: list[int]
    params: SamplingParams
    parser: StreamParser
    """Reads the answer."""

    def read_reply(self, done: Completion) -> ChatReply:
        return read_reply(self.parser, done)

    def read_delta(self, delta: Delta) -> ChatDelta | None:
        """Return what a delta brings; None if it has nothing to show."""
        return read_delta(self.parser, delta)


class PromptMaker:
    """Makes the prompts of one engine. For any thread; encoding a long text takes a while."""

    def __init__(self, encoding: Encoding, max_model_len: int, compile_grammar: Callable[[Grammar], object]) -> None:
        self._encoding, self._max_model_len, self._compile_grammar = encoding, max_model_len, compile_grammar

    @cached_property
    def fim(self) -> Fim | None:
        """The model's fill-in-the-middle format; None if it has none."""
        return Fim.detect(self._encoding.tokenizer, FimOptions("auto", middle_lines=MIDDLE_LINES, heals=True))

    @cached_property
    def prompts(self) -> Prompts:
        """The model's chat template."""
        return Prompts(self._encoding)

    def make_infill(
        self, prefix: str, suffix: str, params: SamplingParams, extra: Files = (), path: str | None = None, repo: str | None = None
    ) -> tuple[list[int], SamplingParams]:
        """Return the prompt for the text between `prefix` and `suffix`, and parameters that end it where the middle ends.

        Raises InvalidInputError, UnsupportedModelError.
        """
        if self.fim is None:
            raise UnsupportedModelError("this model has no fill-in-the-middle tokens; a code model such as Qwen2.5-Coder has")
        files = _read_files(extra)
        names = {name: value for name, value in (("path", path), ("repo", repo)) if value is not None}
        for name, text in {"prefix": prefix, "suffix": suffix, **names}.items():
            check_unicode(text, name)
        is_healed = params.grammar is None and params.allowed_token_ids is None
        limit = self._max_model_len - min(params.max_tokens + MAX_UNFINISHED, self._max_model_len // 2)
        try:
            ids = self.fim.make_prompt(prefix, suffix, files, limit=limit, is_healed=is_healed, **names)
        except ValueError as error:
            raise PromptTooLongError(str(error)) from None
        params = replace(params, healed=self.fim.find_unfinished(prefix) if is_healed else "")
        if params.ignore_eos:
            return ids, params
        return ids, replace(params, stop_token_ids=(*params.stop_token_ids, *self.fim.stop_ids))

    def make_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        *,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **sampling: Any,
    ) -> ChatInput:
        """Return the prompt of a chat, up to where the assistant's answer begins. `sampling`: fields of `SamplingParams`.

        Without `params` and `max_tokens`, the answer may fill the context. Raises InvalidInputError, PromptTooLongError,
        UnsupportedModelError.
        """
        prompts = self.prompts
        if not prompts.has_chat_template:
            raise UnsupportedModelError("this model has no chat template; `complete` continues texts")
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise InvalidInputError(f"chat_template_kwargs must be a dict, got {chat_template_kwargs!r:.80}", param="chat_template_kwargs")
        box = read_tools(tools, tool_choice, parallel_tool_calls)
        style = Style(not continue_final_message, continue_final_message, dict(chat_template_kwargs or {}))
        turns = read_messages(messages)
        ids = prompts.chat(turns, box.prompt_tools, style)
        room = self._max_model_len - len(ids)
        if room < 1:
            most = self._max_model_len - 1
            raise PromptTooLongError(f"the chat has {len(ids)} tokens; with max_model_len {most + 1}, at most {most} fit")
        params = replace(params, **sampling) if params is not None else SamplingParams(**{"max_tokens": room} | sampling)
        if params.n != 1:
            raise InvalidInputError(f"n must be 1 in a chat, got {params.n}: a chat has one answer; ask again for another", param="n")
        is_formed = params.grammar is not None or (bool(box.tools) and box.required)  # which leaves no room for thoughts
        separated = params.skip_special_tokens and not is_formed
        thoughts = prompts.make_thought_reader(turns, style, ids) if separated else None
        if not box.tools:
            return ChatInput(ids, params, prompts.make_stream_parser(box, thoughts, held=False))
        if not params.skip_special_tokens:
            raise InvalidInputError("skip_special_tokens must be True beside tools, whose calls are told apart from text by special tokens")
        grammar = box.make_grammar(prompts.calls, prompts.added, params.grammar)
        if grammar is not None:
            box.check_grammar(self._compile_grammar, grammar)
        held = grammar is not None and (box.required or params.grammar is not None)
        return ChatInput(ids, replace(params, grammar=grammar), prompts.make_stream_parser(box, thoughts, held=held))


def _read_files(extra: Files) -> list[tuple[str, str]]:
    """Return further files as pairs of path and text. Raises InvalidInputError for what is no list of pairs or no text."""
    if isinstance(extra, str) or not isinstance(extra, (Sequence, Mapping)):
        raise InvalidInputError(f"extra must be pairs of path and text, got {extra!r:.80}", param="extra")
    files = list(extra.items() if isinstance(extra, Mapping) else extra)
    for i, each in enumerate(files):
        if not isinstance(each, (tuple, list)) or len(each) != 2:
            raise InvalidInputError(f"extra must be pairs of path and text, got {each!r:.80}", param="extra")
        for text in each:
            check_unicode(text, f"extra[{i}]")
    return [(path, text) for path, text in files]
