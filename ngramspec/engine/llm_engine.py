"""The engine's faces: synchronous, streaming and asynchronous, over the one thread that steps.

Prompts, parameters and hints enter from any thread and become requests of sequences; pieces of text and results leave. `step` has what a
step does, `assembly` what an engine is made of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import secrets
import threading
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, Unpack, overload

import numpy as np

from ngramspec.config import EngineConfig
from ngramspec.datastore.reader import Datastore
from ngramspec.engine import assembly, native_steps
from ngramspec.engine.acceptance import Acceptance, acceptance
from ngramspec.engine.assembly import Progress
from ngramspec.engine.background_compiler import SAMPLING, STAGES, BackgroundCompiler, warm_up
from ngramspec.engine.input_processor import InputProcessor
from ngramspec.engine.request import (
    BeamControl,
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
from ngramspec.engine.step import Core
from ngramspec.engine.streams import ChatStream, Stream, read_last
from ngramspec.engine.thread import StepThread
from ngramspec.errors import EngineClosedError, InvalidInputError, UnsupportedModelError
from ngramspec.foreign_names import explain_method, explain_options
from ngramspec.grammar import forced_tokens
from ngramspec.grammar.base import Constraint, Grammar
from ngramspec.grammar.llguidance import Grammars
from ngramspec.kv_cache.blocks import BlockHashes
from ngramspec.options import options_of
from ngramspec.outputs import BLOCK, Beam, Completion, Delta, EngineStatus
from ngramspec.prompts.chat_reply import ChatDelta, ChatReply, read_delta, read_reply
from ngramspec.prompts.suggestions import Suggestions
from ngramspec.sampling_params import MAX_SEED, SamplingParams
from ngramspec.speculative.base import Drafter, Speculator
from ngramspec.speculative.budget.cost_model import CostModel
from ngramspec.speculative.open_datastores import Store, check_store, name_datastores, open_store
from ngramspec.tokenizer.detokenizer import TextStream
from ngramspec.tokenizer.encode import Prompt, check_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ngramspec.engine.prompting import ChatInput, PromptMaker

__all__ = ["Deliver", "Engine", "Hints", "Request"]

log = logging.getLogger(__name__)
Messages: TypeAlias = Sequence[Mapping[str, Any]]
_LEAST_EXACT = SamplingParams(temperature=1.0)  # parameters for which every acceptance rule promises least


class Engine:
    """A model that completes text, with speculation. Thread-safe; `close()` it, or use it as a context manager.

    `complete` continues a text, `infill` writes between two, `chat` answers messages; each also streams (`stream`, `stream_infill`,
    `stream_chat`) and has a form for asyncio (`acomplete`, `astream`, `ainfill`, …). `help(ngramspec.EngineConfig)` lists the settings.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        *,
        tokenizer: Any = None,
        datastore: Store | Sequence[Store] | Mapping[str, Store] = (),
        drafters: Sequence[Drafter] = (),
        alone: Drafter | None = None,
        progress: Progress | None = None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        """`model`: a folder, hub name, GGUF file, `smollm2`, or a loaded model (which the engine takes over and changes).

        `options`: settings by their names in `EngineConfig`, which says what they mean; or a `config` that has them.

        `datastore`: folders that `ngramspec build-datastore` wrote with the model's tokenizer, or open `Datastore`s, by name or named by
        their folders; they are opened before the model is loaded. `drafters`: further sources of drafts; `alone`: draft by this one only,
        as it says. `progress` is called with a line of text at each stage of loading.

        Raises InvalidInputError, DatastoreError, TokenizerMismatchError, and what `models.loader.load_model` and the runner raise.
        """
        if config is not None and options:
            raise TypeError(f"give either a config or options, got both: {', '.join(options)}")
        if unknown := [name for name in options if name not in options_of(EngineConfig)]:
            raise TypeError(explain_options(unknown, [*options_of(EngineConfig), "tokenizer", "datastore", "drafters"]))
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        if not isinstance(model, str) and not hasattr(model, "state_dict"):
            raise InvalidInputError(f"model must be a folder, a GGUF file, a hub name or a loaded model of transformers, got {model!r:.80}")
        if not (tokenizer is None or callable(tokenizer)) or isinstance(tokenizer, type):
            hint = "; a Tokenizer of tokenizers becomes one by PreTrainedTokenizerFast(tokenizer_object=…)"
            raise InvalidInputError(f"tokenizer must be a loaded tokenizer of transformers, got {tokenizer!r:.80}{hint}")
        self.config = config = config or EngineConfig(**options)
        if wrong := [each for each in [*drafters, *([] if alone is None else [alone])] if not hasattr(each, "observe")]:
            raise InvalidInputError(f"a drafter must be an object with the methods of `speculative.base.Drafter`, got {wrong[0]!r:.80}")
        stores = {name: open_store(store) for name, store in name_datastores(datastore).items()}
        if alone is not None and (drafters or stores):
            raise InvalidInputError("a drafter that drafts alone has neither other drafters nor datastores beside it")
        device = assembly.check_device(config)
        self.threads, self.prefix_cache = device.threads, config.prefix_cache
        bound: assembly.BoundModel

        def load(thread: StepThread) -> Core:
            nonlocal bound

            def report(stage: str) -> None:
                thread.check_open()  # if the caller was interrupted, loading ends at the next stage
                if progress is not None:
                    progress(stage)

            def end_with_caller(code: BackgroundCompiler) -> None:
                thread.end_loading = code.close
                thread.check_open()

            bound = assembly.bind(model, tokenizer, config, device, report, bool(drafters or alone), end_with_caller)
            for store in stores.values():
                check_store(store, bound.encoding, bound.name)
            drafts = assembly.speculator(config, bound.runner, bound.cost, drafters, alone)
            core = Core(bound.runner, drafts, bound.cost, thread.fail, acceptance(config.acceptance, config.lenience))
            if bound.code is not None:
                core.lacks_code = core.lacks_sampling = True
            core.prefixes = assembly.open_prefix_store(config, bound.runner)
            if stores:
                core.use_datastores(stores)
            return core

        self.source = model if isinstance(model, str) else ""  # what the model was asked for by; "" for a loaded one
        self._thread = StepThread(load)  # returns when the model is loaded
        self.name, self.tokenizer, self.eos_token_ids = bound.name, bound.tokenizer, bound.eos_token_ids
        self.max_model_len, self.runner, self.cost, self._encoding = bound.max_model_len, bound.runner, bound.cost, bound.encoding
        self.exactness, self.vocab_size = bound.runner.exactness, bound.runner.vocab_size
        self._keep, self._architecture = bound.keep, bound.architecture
        self._suggestions = Suggestions()
        self._grammars = Grammars(bound.encoding, bound.eos_token_ids)
        self._inputs = InputProcessor(bound.encoding, self._grammars, bound.eos_token_ids, self.max_model_len, self.prefix_cache)
        self._datastores: dict[str, Datastore] = stores  # replaced as a whole, never changed
        self._code = bound.code
        weakref.finalize(self, _release, self._thread, self._code, self._grammars).atexit = False
        self._speculates = threading.Event()  # set once nothing is being compiled
        if self._code is None:
            self._speculates.set()
        else:
            self._code.progress = log.info
            threading.Thread(target=self._begin_speculation, args=(self._code,), name="ngramspec-joining", daemon=True).start()

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **options: Any) -> Self:
            """Explain the calls of other engines, which name no model as ours do."""
            if not args and "model" not in options and options:
                raise TypeError(explain_options(options, options_of(EngineConfig)))
            return super().__new__(cls)

        def __getattr__(self, name: str) -> Any:
            """Explain what other engines' methods are called here."""
            raise AttributeError(explain_method(name, [each for each in dir(Engine) if not each.startswith("_")]), name=name, obj=self)

        def __call__(self, *_: Any, **__: Any) -> Any:
            """Explain what to call."""
            raise TypeError("an Engine is not called itself; use complete(prompt, max_tokens=64), chat(messages) or infill(prefix, suffix)")

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles."""
        raise TypeError("an Engine cannot be copied or pickled: its model and its thread belong to this process; make one in each process")

    def __repr__(self) -> str:
        if "exactness" not in self.__dict__:
            return "<Engine, not loaded>"
        state = ", closed" if self.closed else ""
        return f"<Engine {self.name!r} on {self.runner.device}, {self.precision}, {self.max_model_len} tokens{state}>"

    @property
    def core(self) -> Core:
        """What the engine's thread runs. Not for other threads while requests are under way."""
        return self._thread.core

    # ------------------------------------------------------------------ parts

    @property
    def speculator(self) -> Speculator:
        """What drafts."""
        return self.core.speculator

    @property
    def acceptance(self) -> Acceptance:
        """How drafts are accepted."""
        return self.core.acceptance

    @property
    def source_names(self) -> list[str]:
        """Names of the drafters: the keys of `Stats.drafted_by_source`, and what the entries of `draft_sources` begin with."""
        return [*self.speculator.source_names, forced_tokens.SOURCE]

    def use(
        self,
        *,
        speculator: Speculator | None = None,
        cost: CostModel | None = None,
        acceptance: Acceptance | None = None,
        drafts_forced_tokens: bool | None = None,
    ) -> None:
        """Replace parts of the engine, for comparisons: what drafts, the predicted cost of passes, how drafts are accepted, whether the
        tokens that a grammar forces are drafted.

        Only while no request is under way; returns once later steps use them. Raises InvalidInputError, EngineClosedError, and what the
        speculator's drafters raise at `bind`.
        """

        def change() -> None:
            if self.core.scheduler.has_work:
                raise InvalidInputError("parts of the engine change only while no request is under way")
            if speculator is not None:
                self.core.use(speculator)
            if cost is not None:
                self.core.cost = cost
            if acceptance is not None:
                self.core.acceptance = acceptance
            if drafts_forced_tokens is not None:
                self.core.drafts_forced_tokens = drafts_forced_tokens

        self._thread.call(change)

    def time_pass(self, rows: int, context: int) -> float:
        """Return the milliseconds of one pass with `rows` rows of one sequence (a root and a chain) after `context` tokens."""
        return self.runner.time_pass(rows, context)

    # ------------------------------------------------------------------ datastores

    @property
    def datastores(self) -> dict[str, Datastore]:
        """The datastores in use, by name, in a dict of the caller's own."""
        return dict(self._datastores)

    def add_datastore(self, name: str, store: Store) -> None:
        """Add a datastore to draft from, or replace the one of this name, for running requests too.

        From any thread; returns once later steps use it. Raises DatastoreError, InvalidInputError, TokenizerError, EngineClosedError.
        """
        ((name, _),) = name_datastores({name: store}).items()
        opened = check_store(store, self._encoding, self.name)
        ready = self.speculator.index(opened)  # here: it can take seconds, in which passes go on
        self._thread.call(lambda: self._use_datastores(self._datastores | {name: opened}, ready))

    def remove_datastore(self, name: str) -> None:
        """Stop drafting from a datastore, for running requests too.

        From any thread; returns once later steps do without it. Raises KeyError, EngineClosedError.
        """

        def remove() -> None:
            if name not in self._datastores:
                raise KeyError(name)
            self._use_datastores({other: store for other, store in self._datastores.items() if other != name})

        self._thread.call(remove)

    def _use_datastores(self, stores: dict[str, Datastore], ready: list[Any] | None = None) -> None:
        self.core.use_datastores(stores, ready)
        self._datastores = stores

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
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Delta | Exception] = asyncio.Queue()

        def deliver(piece: Delta | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        sampling, hints = split_options(options)
        params = merge_params(params, sampling)
        if params.grammar is not None:
            await asyncio.to_thread(self.compile_grammar, params.grammar, tenant=hints.get("tenant", ""))
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
        ids, params, hints = await asyncio.to_thread(self._prepare_infill, prefix, suffix, params, options)
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
        return read_reply(chat.parser, self.complete(chat.ids, chat.params, **hints))

    async def achat(self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]) -> ChatReply:
        """Answer as `chat` does, for asyncio. Cancelling the task cancels the request."""
        chat, hints = await asyncio.to_thread(self._make_chat, messages, params, options)
        return read_reply(chat.parser, await read_last(self.astream(chat.ids, chat.params, **hints)))

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]) -> ChatStream:
        """Yield pieces of what `chat` returns as they are written; the last one carries the reply.

        Closing or dropping the iterator cancels the request.
        """
        chat, hints = self._make_chat(messages, params, options)
        return ChatStream(self.stream(chat.ids, chat.params, **hints), chat.parser)

    async def astream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[ChatDelta]:
        """Yield what `stream_chat` yields, for asyncio, as `astream` does."""
        chat, hints = await asyncio.to_thread(self._make_chat, messages, params, options)
        async with contextlib.aclosing(self.astream(chat.ids, chat.params, **hints)) as pieces:
            async for piece in pieces:
                if (delta := read_delta(chat.parser, piece)) is not None:
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

    # ------------------------------------------------------------------ requests

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, deliver: Deliver | None = None, final_only: bool = False,
        **options: Unpack[PromptOptions],
    ) -> Request:  # fmt: skip
        """Start a request and return it at once; its `result()` waits. `options` as in `complete`.

        `deliver` is called in the engine's thread with each `Delta`, or the error that ends the request; it must not call the engine, but
        may cancel the request. `final_only`: it is called only once, with the last delta, whose completion has all of the text, or with
        the error, so that the engine can make several steps without a stop.

        Raises InvalidInputError, PromptTooLongError, EngineClosedError, CallbackError.
        """
        self._thread.check_caller()
        sampling, hints = split_options(options)
        params = merge_params(params, sampling)
        if not isinstance(final_only, bool):
            raise InvalidInputError(f"final_only must be True or False, got {final_only!r}")
        ids = self.encode(prompt)
        self._inputs.check(params, hints, self._datastores)
        remember = None
        if (cursor := hints.get("cursor")) is not None:
            place = (hints.get("tenant", ""), *cursor)
            remember = partial(self._suggestions.add, *place)
            if hints.get("prediction") is None and (rest := self._suggestions.find(*place)) is not None:
                hints["prediction"] = rest
        completion = Completion(
            ids.tolist(),
            [],
            params.seed if params.seed is not None else secrets.randbelow(MAX_SEED + 1),
            self._exactness(params, hints.get("speculation", True)),
            precision=self.runner.precision,
        )
        seqs = self._inputs.make_sequences(ids, params, completion, hints)
        request = Request(completion, params, seqs, deliver, self._thread, final_only=final_only, remember=remember)
        self._thread.add(request)
        return request

    def beam_search(
        self,
        prompt: Prompt,
        width: int,
        max_tokens: int = 128,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        ignore_eos: bool = False,
        speculation: bool = True,
        grammar: Grammar | None = None,
        **control: Unpack[BeamControl],
    ) -> list[Beam]:
        """Return the `width` best texts that beam search finds, best first, bit for bit the same without speculation (see `papers.beam`).

        `length_penalty`: a text's score is the sum of its log-probabilities over its length to this power; `early_stopping`: end when
        `width` texts have ended, though one under way may still be better; `grammar`: what all texts follow, to their end; there may be
        fewer then. Drafts come from n-gram tables and the model's own candidates. `control`: see `BeamControl`.

        The search waits until `width` of the engine's `max_seqs` slots are free, and takes turns with other requests, pass by pass. A
        KeyboardInterrupt ends it before its next pass.
        Raises InvalidInputError, PromptTooLongError, OutOfMemoryError, EngineClosedError, CallbackError, UnsupportedModelError for a model
        with recurrent layers.
        """
        if unknown := control.keys() - BeamControl.__annotations__.keys():
            raise TypeError(f"beam_search takes no {', '.join(sorted(unknown))}")
        from ngramspec.engine.beam_turns import BeamOptions, search_beams  # the methods of `papers` are loaded when they are asked for

        if self.runner.is_recurrent:
            raise UnsupportedModelError("beam search divides sequences, which is not implemented for layers that keep a state")
        ids, tenant = self.encode(prompt), control.get("tenant", "")
        stop_ids = frozenset() if ignore_eos and grammar is None else frozenset(self.eos_token_ids)
        options = BeamOptions(width, min(max_tokens, self.max_model_len - len(ids)), stop_ids, length_penalty, early_stopping)
        block_hashes = BlockHashes(tenant if self.prefix_cache and tenant is not None else secrets.token_hex(), ids)
        constraint = None if grammar is None else self.compile_grammar(grammar, tenant=tenant)
        should_stop = control.get("should_stop", lambda: False)
        ended = search_beams(self._thread, ids, options, block_hashes, constraint, speculation=speculation, should_stop=should_stop)
        return [Beam(each.tokens, self._decode_output(ids, each.tokens, stop_ids), each.score) for each in ended]

    def _decode_output(self, prompt: np.ndarray, tokens: list[int], stop_ids: frozenset[int]) -> str:
        """Return the text of an output, without a stop token at its end."""
        if self.tokenizer is None:
            return ""
        stream = TextStream(self.tokenizer, prompt.tolist())
        worded = tokens[:-1] if tokens[-1] in stop_ids else tokens
        return "".join([*map(stream.push, worded), stream.finish()])

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Return the token ids [n] int32 of a prompt, as the model will see them.

        Raises InvalidInputError, PromptTooLongError, TokenizerError.
        """
        return self._inputs.encode(prompt)

    def encode_text(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text, without any that the tokenizer puts before or after texts. "<|im_end|>" in it is spelled out, or
        with `parse_special` the control token.

        From any thread. Raises InvalidInputError, TokenizerError.
        """
        return self._encoding.encode_text(text, parse_special=parse_special)

    def tokenize(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids of a text as `complete` would see it; `detokenize` turns them back.

        `add_special_tokens`: begin with the token that the model's tokenizer puts before texts, if it has one. `parse_special`: the text of
        a control token is that token; otherwise it is spelled out. Raises InvalidInputError, TokenizerError.
        """
        if not add_special_tokens:
            return self.encode_text(text, parse_special=parse_special)
        if parse_special:
            check_unicode(text, "tokenizer's input")
            return self._encoding.encode(text, "text").tolist()
        return self._prompt_maker.prompts.to_continue(text, parse_special=False)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, with control tokens as text or without them. Raises InvalidInputError, TokenizerError."""
        checked = self._encoding.check_ids(ids)
        return str(self._encoding.get_backend("detokenize").decode(checked.tolist(), skip_special_tokens=skip_special_tokens))

    def compile_grammar(self, grammar: Grammar, *, tenant: str | None = "") -> Constraint:
        """Return the grammar's state at the beginning of a text. What was compiled, in up to two seconds, is kept for the requests of the
        tenant; with None for nobody's.

        From any thread. Raises GrammarError, TokenizerError.
        """
        return self._grammars.compile(grammar, tenant).fork()

    # ------------------------------------------------------------------ what it is and does

    @property
    def promise(self) -> str:
        """The least `Completion.exactness` that any completion of this engine can have."""
        return self._exactness(_LEAST_EXACT, speculation=True)

    @property
    def precision(self) -> str:
        """The precision of products with the model's weights: "int8" or a dtype."""
        return self.runner.precision

    def _exactness(self, params: SamplingParams, speculation: bool) -> str:
        return self.acceptance.exactness(self.exactness, params) if speculation and self.speculator.active else self.exactness

    def props(self) -> dict[str, Any]:
        """Return what this engine is: model, exactness, limits, measured costs."""
        counts = [int(c) for c in self.cost.counts]
        return {
            "model": self.name,
            "architecture": self._architecture,
            "exactness": self.exactness,
            "device": self.runner.device,
            "dtype": self.runner.dtype,
            "precision": self.runner.precision,
            "kv_dtype": self.runner.kv_dtype,
            "threads": self.threads,
            "speculation": self.speculator.active,
            "acceptance": self.acceptance.name,
            "lenience": self.acceptance.lenience,
            "datastores": [{"name": name, **store.info()} for name, store in self._datastores.items()],
            "prefix_cache": self.prefix_cache,
            "max_model_len": self.max_model_len,
            "max_seqs": len(self.runner.pool.n_blocks_of),
            "kv_tokens": self.runner.pool.n_tokens,
            "cost_ms": {c: round(float(self.cost.table[c]), 3) for c in counts if c <= self.cost.max_rows},
            "linear_policies": {f"{n}x{k}": str(policy) for (n, k), policy in self.runner.policies.items()},
        }

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests, because it was closed or its thread died."""
        return self._thread.closed

    def status(self) -> EngineStatus:
        """Return what the engine is doing now. From any thread; waits for nothing."""
        scheduler, pool = self.core.scheduler, self.runner.pool
        n_cached = len(pool.cached)
        return EngineStatus(
            waiting=self._thread.n_waiting,
            running=len(scheduler.running),
            kv_tokens=pool.n_tokens,
            kv_used=(pool.n_blocks - len(pool.free) - n_cached) * BLOCK,
            kv_cached=n_cached * BLOCK,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            cached_tokens=scheduler.cached_tokens,
            preemptions=scheduler.n_preempted,
            passes=self.core.n_passes,
            speculation_gain=self.core.timing.threshold.gain,
            price_bar=self.core.timing.threshold.governor,
            reliability=self.speculator.reliability(),
        )

    def finish_compiling(self, progress: Progress) -> None:
        """Wait until drafting and native steps have been compiled, if this start found no machine code of them.

        Raises CallbackError, and EngineClosedError in a forked process.
        """
        self._thread.check_caller()
        if self._code is not None and not self.closed:
            self._code.progress = progress
        self._speculates.wait()

    def _begin_speculation(self, code: BackgroundCompiler) -> None:
        """Draw tokens, and draft, as soon as the code for it has been compiled; until then passes are plain, with the same texts."""

        def begin() -> None:
            if (forward := self.runner.native_forward()) is not None:
                native_steps.compile_steps(forward, self.runner.pool)
            self.core.begin_speculation()

        try:
            code.wait(*SAMPLING)
            self._thread.call(self.core.begin_sampling)
            code.wait(*STAGES)
            if not self.closed:
                warm_up()
                self._thread.call(begin)
                log.info("everything is compiled: speculation begins")
        except EngineClosedError:
            pass
        finally:
            self._speculates.set()

    def close(self) -> None:
        """Stop; requests under way end with EngineClosedError. A second call changes nothing."""
        self._thread.close()
        if self._code is not None:
            self._code.close()
        self._grammars.close()
        self._keep()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _release(thread: StepThread, code: BackgroundCompiler | None, grammars: Grammars) -> None:
    """End the thread and processes of an engine that was dropped without being closed; requests under way are finished."""
    thread.abandon()
    if code is not None:
        code.close()
    grammars.close()


def _is_several(prompt: Any) -> bool:
    """Return whether this is a list of prompts, not one prompt (text, or a list of ids)."""
    return isinstance(prompt, (list, tuple, np.ndarray)) and len(prompt) > 0 and (isinstance(prompt[0], str) or np.ndim(prompt[0]) == 1)
