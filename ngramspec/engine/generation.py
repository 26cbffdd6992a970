"""What is asked of an engine: to continue a text, to fill a gap in one, to answer a chat; each at once, piece by piece, or for asyncio.

Prompts and messages enter and become requests; completions, replies and their pieces leave. Knows of the engine how it submits a request.
"""

from __future__ import annotations

import contextlib
import queue
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, Unpack, overload

import numpy as np

from ngramspec.engine.request import (
    ChatFields,
    ChatOptions,
    Deliver,
    Hints,
    InfillFiles,
    InfillOptions,
    PromptOptions,
    Request,
    merge_params,
    split_options,
    take_options,
)
from ngramspec.grammar.constraint import Constraint, Grammar
from ngramspec.grammar.llguidance import Grammars
from ngramspec.outputs import Completion, Delta
from ngramspec.sampling_params import SamplingParams
from ngramspec.tokenizer.encode import Encoding, Prompt

if TYPE_CHECKING:  # what asyncio and chats need takes time, which completions do not have
    from ngramspec.engine.prompting import ChatInput, PromptMaker
    from ngramspec.prompts.chat_reply import ChatDelta, ChatReply


class Stream(Iterator[Delta]):
    """The pieces of one request. Closing it, dropping it or leaving its `with` block cancels what is not written yet.

    Several threads may take pieces: each piece goes to one of them, and all of them end with the last one.
    """

    def __init__(self, request: Request, pieces: queue.SimpleQueue[Delta | Exception | None]) -> None:
        """Make an iterator over what the request puts into `pieces`. This class adds None after the last one."""
        self._request, self._pieces, self._over = request, pieces, False

    def __next__(self) -> Delta:
        """Return the next piece. Raises the request's error, CallbackError, EngineClosedError."""
        if self._over:
            raise StopIteration
        self._request.check_caller()
        try:
            piece = self._pieces.get()
        except BaseException:  # an interrupt
            self.close()
            raise
        if piece is None or isinstance(piece, Exception) or piece.completion is not None:
            self._over = True
            self._pieces.put(None)  # another thread may wait for a piece
        if piece is None:
            raise StopIteration
        if isinstance(piece, Exception):
            raise piece
        return piece

    def close(self) -> None:
        """Cancel what is not written yet. A second call changes nothing."""
        if not self._over:
            self._over = True
            self._request.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Stream, {'over' if self._over else 'under way'}>"


class ChatStream(Iterator["ChatDelta"]):
    """The pieces of a chat's answer. Closing it, dropping it or leaving its `with` block cancels what is not written yet."""

    def __init__(self, stream: Stream, chat: ChatInput) -> None:
        self._stream, self._chat = stream, chat

    def __next__(self) -> ChatDelta:
        """Return the next piece that has something to show. Raises the request's error."""
        while True:
            delta = self._chat.read_delta(next(self._stream))
            if delta is not None:
                return delta

    def close(self) -> None:
        """Cancel what is not written yet. A second call changes nothing."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def read_last(pieces: AsyncGenerator[Delta]) -> Completion:
    """Return the completion that the last piece carries. Cancelling the task cancels the request."""
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            if piece.completion is not None:
                return piece.completion
    raise AssertionError("a stream ends with its completion")


async def _run_in_thread(function: Callable[..., T], *args: Any, **options: Any) -> T:
    import asyncio

    return await asyncio.to_thread(function, *args, **options)


Messages: TypeAlias = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class GenerationMethods(ABC):
    """The methods of `Engine` that generate text. They know no thread and no step: all of them `submit` requests."""

    max_model_len: int
    _encoding: Encoding
    _grammars: Grammars

    @abstractmethod
    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, deliver: Deliver | None = None, final_only: bool = False,
        **options: Unpack[PromptOptions],
    ) -> Request:  # fmt: skip
        """Start a request and return it at once."""

    @abstractmethod
    def compile_grammar(self, grammar: Grammar, *, tenant: str | None = "") -> Constraint:
        """Return the grammar's state at the beginning of a text."""

    # ------------------------------------------------------------------ prompts

    @overload
    def complete(self, prompt: str | list[int], params: SamplingParams | None = None, **options: Unpack[PromptOptions]) -> Completion: ...
    @overload
    def complete(
        self, prompt: list[str] | list[list[int]], params: SamplingParams | None = None, **options: Unpack[PromptOptions]
    ) -> list[Completion]: ...
    def complete(
        self, prompt: Any, params: SamplingParams | None = None, **options: Unpack[PromptOptions]
    ) -> Completion | list[Completion]:
        """Complete a prompt (text or token ids), or a list of them together.

        `options`: fields of `SamplingParams` (`max_tokens=64, temperature=0.8, stop=["\\n"]`), which replace those of `params`; and hints,
        which change how soon a token comes and never which: `prediction`, `speculation`, `datastores`, `tenant`, `prefix_cache`.
        `help(ngramspec.SamplingParams)` says what each field means, `help(ngramspec.Hints)` what each hint does.

        Raises InvalidInputError, PromptTooLongError, EngineClosedError, CallbackError.
        """
        several = _is_several(prompt)
        requests: list[Request] = []
        try:
            for each in prompt if several else [prompt]:
                requests.append(self.submit(each, params, **options))
            results = [request.result() for request in requests]
        except BaseException:
            for request in requests:
                request.cancel()
            raise
        return results if several else results[0]

    @overload
    async def acomplete(
        self, prompt: str | list[int], params: SamplingParams | None = None, **options: Unpack[PromptOptions]
    ) -> Completion: ...
    @overload
    async def acomplete(
        self, prompt: list[str] | list[list[int]], params: SamplingParams | None = None, **options: Unpack[PromptOptions]
    ) -> list[Completion]: ...
    async def acomplete(
        self, prompt: Any, params: SamplingParams | None = None, **options: Unpack[PromptOptions]
    ) -> Completion | list[Completion]:
        """Complete as `complete` does, for asyncio."""
        if _is_several(prompt):
            import asyncio

            tasks = [asyncio.create_task(read_last(self.astream(each, params, **options))) for each in prompt]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
        return await read_last(self.astream(prompt, params, **options))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[PromptOptions]) -> Stream:
        """Yield pieces of text as they are written; the last one carries the completion. `options` as in `complete`.

        Closing or dropping the iterator cancels the request.
        """
        pieces: queue.SimpleQueue[Delta | Exception | None] = queue.SimpleQueue()
        return Stream(self.submit(prompt, params, deliver=pieces.put, **options), pieces)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[PromptOptions]
    ) -> AsyncGenerator[Delta]:
        """Yield what `stream` yields, for asyncio. The request is submitted with the first piece that is asked for; leaving the loop over
        it, or cancelling the task, cancels it."""
        import asyncio

        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Delta | Exception] = asyncio.Queue()

        def deliver(piece: Delta | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        sampling, hints = split_options(options)
        params = merge_params(params, sampling)
        if params.grammar is not None:
            await _run_in_thread(self.compile_grammar, params.grammar, tenant=hints.get("tenant", ""))
        request = self.submit(prompt, params, deliver=deliver, **hints)
        try:
            while True:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.completion is not None:
                    return
        finally:
            request.cancel()

    # ------------------------------------------------------------------ fill in the middle

    def infill(self, prefix: str, suffix: str, params: SamplingParams | None = None, **options: Unpack[InfillOptions]) -> Completion:
        """Write what stands between two texts, as an editor asks for at its cursor. The model must have been trained to.

        `extra`: further files or parts of files, (path, text) or {path: text}, the least useful first; what does not fit is left out, then
        the beginning of the prefix and the end of the suffix. `path`: of the file being edited, `repo`: the repository's name; only prompts
        with further files show them. `options` as in `complete`. Control tokens in the texts are text.

        Raises UnsupportedModelError for a model without such tokens, and what `complete` raises.
        """
        ids, params, hints = self._prepare_infill(prefix, suffix, params, options)
        return self.complete(ids, params, **hints)

    async def ainfill(self, prefix: str, suffix: str, params: SamplingParams | None = None, **options: Unpack[InfillOptions]) -> Completion:
        """Fill in as `infill` does, for asyncio. Cancelling the task cancels the request."""
        return await read_last(self.astream_infill(prefix, suffix, params, **options))

    def stream_infill(self, prefix: str, suffix: str, params: SamplingParams | None = None, **options: Unpack[InfillOptions]) -> Stream:
        """Yield what `infill` writes as it is written, as `stream` does."""
        ids, params, hints = self._prepare_infill(prefix, suffix, params, options)
        return self.stream(ids, params, **hints)

    async def astream_infill(
        self, prefix: str, suffix: str, params: SamplingParams | None = None, **options: Unpack[InfillOptions]
    ) -> AsyncGenerator[Delta]:
        """Yield what `infill` writes as it is written, as `astream` does."""
        ids, params, hints = await _run_in_thread(self._prepare_infill, prefix, suffix, params, options)
        async with contextlib.aclosing(self.astream(ids, params, **hints)) as pieces:
            async for piece in pieces:
                yield piece

    def make_infill_prompt(
        self, prefix: str, suffix: str, params: SamplingParams | None = None, **files: Unpack[InfillFiles]
    ) -> tuple[list[int], SamplingParams]:
        """Return the token ids of what `infill` asks, and `params` that also end at the tokens that end a middle: for `submit`."""
        return self._prompt_maker.make_infill(prefix, suffix, merge_params(params, {}), **files)

    def _prepare_infill(
        self, prefix: str, suffix: str, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> tuple[list[int], SamplingParams, Hints]:
        """Return what `complete` takes for a request of `infill`. May take a while."""
        files, others = take_options(options, InfillFiles)
        sampling, hints = split_options(others)
        ids, params = self._prompt_maker.make_infill(prefix, suffix, merge_params(params, sampling), **files)
        return ids, params, Hints(cursor=(prefix, suffix)) | hints

    # ------------------------------------------------------------------ chats

    def chat(self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]) -> ChatReply:
        """Answer a chat through the model's own template.

        `messages`: dicts of `role` (system, user, assistant, tool) and `content`, as in OpenAI's API; `reply.message` is the next one.
        `tools`: OpenAI's declarations of functions; `tool_choice`: "auto", "none", "required" or a tool's name. `parallel_tool_calls`
        (False: one call at most), `chat_template_kwargs` (what the template reads beside, such as {"enable_thinking": False}),
        `continue_final_message` (go on with the assistant's last message); other `options` as in `complete`. Without `max_tokens` or
        `params`, the answer may fill the context. Control tokens in messages are text.

        Raises UnsupportedModelError for a model without a template, InvalidInputError for messages that it refuses, and what `complete`
        raises.
        """
        chat, hints = self._make_chat(messages, params, options)
        return chat.read_reply(self.complete(chat.ids, chat.params, **hints))

    async def achat(self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]) -> ChatReply:
        """Answer as `chat` does, for asyncio. Cancelling the task cancels the request."""
        chat, hints = await _run_in_thread(self._make_chat, messages, params, options)
        return chat.read_reply(await read_last(self.astream(chat.ids, chat.params, **hints)))

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]) -> ChatStream:
        """Yield pieces of what `chat` returns as they are written; the last one carries the reply.

        Closing or dropping the iterator cancels the request.
        """
        chat, hints = self._make_chat(messages, params, options)
        return ChatStream(self.stream(chat.ids, chat.params, **hints), chat)

    async def astream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[ChatDelta]:
        """Yield what `stream_chat` yields, for asyncio, as `astream` does."""
        chat, hints = await _run_in_thread(self._make_chat, messages, params, options)
        async with contextlib.aclosing(self.astream(chat.ids, chat.params, **hints)) as pieces:
            async for piece in pieces:
                if (delta := chat.read_delta(piece)) is not None:
                    yield delta

    def make_chat_prompt(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> tuple[list[int], SamplingParams]:
        """Return the token ids of what `chat` asks, and `params` that hold the text to calls if they have to: for `submit`."""
        chat, _ = self._make_chat(messages, params, options)
        return chat.ids, chat.params

    def _make_chat(self, messages: Messages, params: SamplingParams | None, options: Mapping[str, Any]) -> tuple[ChatInput, Hints]:
        of_chat, others = take_options(options, ChatFields)
        sampling, hints = split_options(others)
        if params is not None:
            params, sampling = merge_params(params, sampling), {}
        return self._prompt_maker.make_chat(messages, params, **of_chat, **sampling), hints

    @cached_property
    def _prompt_maker(self) -> PromptMaker:
        from ngramspec.engine.prompting import PromptMaker  # takes time, which completions do not need

        return PromptMaker(self._encoding, self.max_model_len, self._grammars.compile)


def _is_several(prompt: Any) -> bool:
    """Return whether this is a list of prompts, not one prompt (text, or a list of ids)."""
    return isinstance(prompt, (list, tuple, np.ndarray)) and len(prompt) > 0 and (isinstance(prompt[0], str) or np.ndim(prompt[0]) == 1)
