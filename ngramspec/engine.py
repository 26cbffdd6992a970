"""The engine's faces: synchronous, streaming and asynchronous, over one thread that steps.

Requests enter from any thread, are turned into sequences, and are stepped together by `core.Core`; pieces of text and
results leave through a queue per request. Knows tokenizers and threads; what a step does is `core`'s business.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Several
from concurrent.futures import Future
from typing import Any, NamedTuple, Self, Unpack, overload

import numba
import numpy as np
import torch
from transformers import PreTrainedModel

from ngramspec.batch import sampling
from ngramspec.batch.block_tables import BlockHashes
from ngramspec.batch.cost import CostModel
from ngramspec.batch.errors import EngineClosedError, NgramspecError, OutOfMemoryError, PromptTooLongError
from ngramspec.batch.params import MAX_SEED, SamplingParams
from ngramspec.batch.sampling import Sampler
from ngramspec.batch.types import BLOCK, Beam, Completion, Delta, EngineStatus
from ngramspec.core.beam import BeamSearch
from ngramspec.core.request import Deliver, Hints, Request
from ngramspec.core.sequence import Sequence
from ngramspec.core.step import Acceptance, Core
from ngramspec.core.stores import Store, named, open_store
from ngramspec.cpu.runner import CpuRunner
from ngramspec.datastore.reader import Datastore
from ngramspec.drafting import proposer as drafting
from ngramspec.drafting.base import Drafter
from ngramspec.drafting.single import SingleDrafter
from ngramspec.model.loading import LoadedModel, available_memory, eos_token_ids, load_model
from ngramspec.model.runner import Runner
from ngramspec.text.decoding import NoText, TextStream
from ngramspec.text.encoding import Encoding, Prompt

log = logging.getLogger(__name__)

Progress = Callable[[str], None]


class _Limits(NamedTuple):
    """What bounds an engine; see `Engine`."""

    max_model_len: int | None
    kv_memory: int | None
    max_seqs: int
    max_rows: int
    spec_rows: int
    spec_length: int


class _Place(NamedTuple):
    """Where an engine computes, and how; see `Engine`."""

    device: str
    dtype: torch.dtype
    gpu_memory_utilization: float
    linears: str
    graphs: bool


class Engine:
    """A model that completes text, with speculation. Thread-safe; `close()` it, or use it as a context manager.

    Raises what `loading.load_model` and `runner.Runner` raise (see `errors`), and ValueError for settings out of range.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        *,
        tokenizer: Any = None,
        device: str = "cpu",
        dtype: str = "auto",
        speculation: bool = True,
        spec_length: int = drafting.SPEC_LENGTH,
        spec_rows: int = drafting.SPEC_ROWS,
        max_order: int = drafting.MAX_ORDER,
        history: int = drafting.HISTORY,
        max_model_len: int | None = None,
        max_seqs: int = 64,
        max_rows: int | None = None,
        kv_memory: int | None = None,
        gpu_memory_utilization: float = 0.9,
        linears: str = "exact",
        graphs: bool = True,
        datastore: Store | Several[Store] | Mapping[str, Store] = (),
        prefix_cache: bool = True,
        similar: bool = True,
        answers: int = drafting.ANSWERS,
        recycle: bool = True,
        drafters: Several[Drafter] = (),
        alone: Drafter | None = None,
        acceptance: str = "walk",
        lenience: float = 1.0,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`model`: a folder, hub name, GGUF file, `smollm2`, or a loaded model (which the engine takes over and changes).

        `device`: "cpu", "cuda" or "cuda:N"; `dtype`: "float32", on CUDA also "bfloat16", which "auto" is there, and "float16".

        `spec_length`, `spec_rows`: deepest and largest draft of a sequence; `max_order`, `history`: of the n-gram tables;
        `max_model_len`: prompt and output together, default what model and memory allow; `max_seqs` run at a time, `max_rows` of
        prompts and sequences a pass (default 256, on CUDA 2,048); `kv_memory`: bytes, default a quarter of what is free, on CUDA what
        is left of the share `gpu_memory_utilization` of the device's memory; `threads`: default all cores; `progress` is told of the
        stages of loading. For comparison: on the CPU, `linears` "unpacked" keeps every weight as the float32 number that it stands for; on
        CUDA, "vendor" takes the vendor's matrix products, with which rows depend on their number, and `graphs` False launches every
        kernel by itself.

        `datastore`: folders that `ngramspec build-datastore` wrote with the model's tokenizer, or open `Datastore`s, by name or named by
        their folders; `prefix_cache`: keep what was computed for a text, as long as there is room, for others that begin alike;
        `similar`: draft from the datastores' files that are most like a request; `answers`: tokens of finished answers that later
        requests draw on, 0 for none; `recycle`: draft from the model's own candidates; `drafters`: further sources.

        `alone`: draft by this one only, as it says; `acceptance` "rejection": what a drafter draws is accepted by rejection sampling, so
        that sampled text is distributed as without drafts, but is another one; `lenience` below 1, in (0, 1]: tokens are accepted that
        the model holds a little less likely, and nothing is exact any more (both: Leviathan et al.).
        """
        if max_rows is None:
            max_rows = 256 if device == "cpu" else 2048
        _check_settings(threads, spec_length=spec_length, spec_rows=spec_rows, max_seqs=max_seqs, max_rows=max_rows)
        if acceptance not in ("walk", "rejection"):
            raise ValueError(f"acceptance must be 'walk' or 'rejection', got {acceptance!r}")
        if not 0 < lenience <= 1:
            raise ValueError(f"lenience must be above 0 and at most 1, got {lenience}")
        if alone is not None and (drafters or named(datastore)):
            raise ValueError("a drafter that drafts alone has neither other drafters nor datastores beside it")
        self.acceptance = Acceptance(acceptance == "rejection", lenience)
        place = _check_place(device, dtype, gpu_memory_utilization, linears, graphs)
        self.threads = threads or torch.get_num_threads()
        self._inbox: deque[Callable[[], None]] = deque()
        self._unfinished: set[Request] = set()
        self._gained: list[tuple[Request, Sequence]] = []  # what the last pass added and nobody was told yet
        self._requests: dict[Sequence, Request] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._n_arriving = 0  # sequences of requests that the engine's thread has not seen
        self._calls: set[Future[None]] = set()
        self._datastores: dict[str, Datastore] = {}  # replaced as a whole, never changed
        self.prefix_cache = prefix_cache
        limits = _Limits(max_model_len, kv_memory, max_seqs, max_rows, spec_rows, spec_length)

        def make_proposer() -> drafting.Proposer | SingleDrafter | None:
            if not speculation:
                return None
            if alone is not None:
                draws = self.acceptance.rejection
                return SingleDrafter(alone, vocab_size=self.vocab_size, spec_length=spec_length, spec_rows=spec_rows, draws=draws)
            return drafting.Proposer(
                vocab_size=self.vocab_size,
                max_order=max_order,
                history=history,
                spec_length=spec_length,
                spec_rows=spec_rows,
                max_seqs=max_seqs,
                answers=answers,
                recycle=recycle,
                drafters=drafters,
            )

        def load() -> None:
            self._load(model, tokenizer, progress or (lambda _: None), limits, place, make_proposer)
            self.core.similar = similar
            self._use_datastores({name: open_store(store, self._encoding, self.name) for name, store in named(datastore).items()})

        # The model is loaded in the thread that runs it. OpenMP keeps a team of workers for every thread that ever computed, and once teams
        # outnumber the cores they no longer wait awake: a pass from a second thread took 23 ms instead of 13.
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._loop, args=(load, ready), name="ngramspec-engine", daemon=True)
        self._thread.start()
        ready.result()

    def _load(
        self,
        model: str | PreTrainedModel,
        tokenizer: Any,
        say: Progress,
        limits: _Limits,
        place: _Place,
        make_proposer: Callable[[], drafting.Proposer | SingleDrafter | None],
    ) -> None:
        warmer = threading.Thread(target=_warm_up, daemon=True)
        warmer.start()
        if isinstance(model, str):
            loaded = load_model(model, dtype=place.dtype, device=place.device, tokenizer=tokenizer, progress=say)
        else:
            loaded = _adopt(model.to(torch.device(place.device)), tokenizer)  # type: ignore[arg-type]  # as torch declares it
        self.name, self.tokenizer, self.eos_token_ids = loaded.name, loaded.tokenizer, loaded.eos_token_ids
        config = loaded.model.config.get_text_config()
        trained = int(getattr(config, "max_position_embeddings", 0) or 4096)
        if limits.max_model_len is not None and not 2 <= limits.max_model_len <= trained:
            raise ValueError(f"max_model_len must be 2 to {trained}, what the model was trained for, got {limits.max_model_len}")
        self.max_model_len = limits.max_model_len or trained
        self.runner = _make_runner(loaded.model, place, limits, self.max_model_len, say)
        self.max_model_len = min(self.max_model_len, self.runner.pool.n_tokens)
        self.runner.tokenizer, self.runner.max_model_len = loaded.tokenizer, self.max_model_len
        self.exactness, self.vocab_size = self.runner.exactness, self.runner.vocab_size
        self._encoding = Encoding(loaded.tokenizer, self.vocab_size)
        say("measuring what a pass costs")
        warmer.join()
        pool = self.runner.pool
        counts = [c for c in self.runner.cost_rows if 2 * c <= min(pool.n_tokens, pool.max_blocks * BLOCK)]
        self.cost = CostModel(counts, self.runner.measure(counts), max_rows=2 * max(limits.max_rows, limits.spec_rows))
        self.core = Core(self.runner, make_proposer(), self.cost, self._failed_alone, self.acceptance)
        log.info("%s: exactness %s, %d tokens of KV", self.name, self.exactness, self.runner.pool.n_tokens)

    # ------------------------------------------------------------------ datastores

    @property
    def datastores(self) -> dict[str, Datastore]:
        """The datastores in use, by name: as they are now."""
        return dict(self._datastores)

    @property
    def stores(self) -> list[Datastore]:
        """The datastores in use."""
        return list(self._datastores.values())

    def add_datastore(self, name: str, store: Store) -> None:
        """Draft from one more datastore, or from another one under a name that is in use, for requests under way too.

        From any thread; returns when it is in force. Raises DatastoreError, ValueError, TokenizerError, EngineClosedError.
        """
        ((name, _),) = named({name: store}).items()
        opened = open_store(store, self._encoding, self.name)
        ready = self.core.index(opened)  # here: it can take seconds, in which passes go on
        self._call(lambda: self._use_datastores(self._datastores | {name: opened}, ready))

    def remove_datastore(self, name: str) -> None:
        """Draft from a datastore no longer, for requests under way neither; they go on without.

        From any thread; returns when it is in force. Raises KeyError, EngineClosedError.
        """

        def remove() -> None:
            if name not in self._datastores:
                raise KeyError(name)
            self._use_datastores({other: store for other, store in self._datastores.items() if other != name})

        self._call(remove)

    def _use_datastores(self, stores: dict[str, Datastore], ready: Several[Any] | None = None) -> None:
        self.core.draft_from(stores, ready)
        self._datastores = stores

    # ------------------------------------------------------------------ faces

    @overload
    def complete(self, prompt: str | list[int], params: SamplingParams | None = None, **hints: Unpack[Hints]) -> Completion: ...
    @overload
    def complete(
        self, prompt: list[str] | list[list[int]], params: SamplingParams | None = None, **hints: Unpack[Hints]
    ) -> list[Completion]: ...
    def complete(self, prompt: Any, params: SamplingParams | None = None, **hints: Unpack[Hints]) -> Completion | list[Completion]:
        """Complete a prompt (text or token ids), or a list of them together. Raises ValueError, PromptTooLongError, EngineClosedError."""
        several = _is_several(prompt)
        requests: list[Request] = []
        try:
            for each in prompt if several else [prompt]:
                requests.append(self.submit(each, params, **hints))
            results = [request.result() for request in requests]
        except BaseException:
            for request in requests:
                request.cancel()
            raise
        return results if several else results[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **hints: Unpack[Hints]) -> Iterator[Delta]:
        """Pieces of text as they are written; the last one carries the completion. Closing the iterator cancels the request."""
        pieces: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
        request = self.submit(prompt, params, deliver=pieces.put, **hints)

        def read() -> Iterator[Delta]:
            try:
                while True:
                    piece = pieces.get()
                    if isinstance(piece, Exception):
                        raise piece
                    yield piece
                    if piece.completion is not None:
                        return
            finally:
                request.cancel()

        return read()

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None, **hints: Unpack[Hints]) -> AsyncIterator[Delta]:
        """`stream` for asyncio. Leaving the loop over it, or cancelling the task, cancels the request."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Delta | Exception] = asyncio.Queue()

        def deliver(piece: Delta | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

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

    async def acomplete(self, prompt: Any, params: SamplingParams | None = None, **hints: Unpack[Hints]) -> Completion | list[Completion]:
        """`complete` for asyncio."""

        async def one(each: Prompt) -> Completion:
            completion = None
            async for piece in self.astream(each, params, **hints):
                completion = piece.completion
            assert completion is not None
            return completion

        if _is_several(prompt):
            return list(await asyncio.gather(*(one(each) for each in prompt)))
        return await one(prompt)

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, deliver: Deliver = lambda _: None, **hints: Unpack[Hints]
    ) -> Request:
        """Hand a prompt in and return at once. `deliver` is called in the engine's thread with each `Delta`, or the error that ends it.

        Raises ValueError, PromptTooLongError, EngineClosedError.
        """
        params = params or SamplingParams()
        ids = self.encode(prompt)
        if unknown := set(hints) - set(Hints.__annotations__):
            raise TypeError(f"unknown hint {', '.join(sorted(unknown))}; there are {', '.join(Hints.__annotations__)}")
        expected = hints.get("prediction")
        prediction = None if expected is None else self._encoding.ids(expected, "prediction", add_special_tokens=False)
        seed = params.seed if params.seed is not None else secrets.randbelow(MAX_SEED + 1)
        chosen = hints.get("datastores")
        if chosen is not None and (isinstance(chosen, str) or (unknown := set(chosen) - self._datastores.keys())):
            raise ValueError(f"datastores must be among {sorted(self._datastores)}, got {chosen if isinstance(chosen, str) else unknown!r}")
        tenant = hints.get("tenant", "")
        shares = self.prefix_cache and hints.get("prefix_cache", True) and tenant is not None
        block_hashes = BlockHashes(tenant or "", ids) if shares else None
        completion = Completion(ids.tolist(), [], seed, self._exactness(params, hints.get("speculation", True)))
        request = Request(completion, params, deliver, self._ask_to_cancel)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self.eos_token_ids))
        for index in range(params.n):
            sampler = Sampler(params, index=index, seed=seed, prompt=ids, vocab_size=self.vocab_size, stop_ids=stop_ids)
            text = (
                TextStream(self.tokenizer, completion.prompt_token_ids, params.stop, params.min_tokens)
                if self.tokenizer is not None
                else NoText()
            )
            seq = Sequence(
                ids,
                params,
                sampler,
                text,
                index=index,
                stop_ids=stop_ids,
                max_len=self.max_model_len,
                speculation=hints.get("speculation", True),
                prediction=prediction,
                tenant=tenant,
                datastores=None if chosen is None else frozenset(chosen),
                block_hashes=None if block_hashes is None else block_hashes.copy(),
            )
            request._seqs.append(seq)
            completion.choices.append(seq.choice)
        if params.prompt_logprobs is not None:
            completion.prompt_logprobs = request._seqs[0].prompt_logprobs = [None]
        with self._wake:
            self._unfinished.add(request)
            self._n_arriving += params.n
        if not self._post(lambda: self._add(request)):
            self._unfinished.discard(request)
            raise EngineClosedError("the engine is closed")
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
    ) -> list[Beam]:
        """The `width` best texts that beam search finds, best first; the same bit for bit with speculation and without (see `beam`).

        `length_penalty`: a text's score is the sum of its log-probabilities over its length to this power; `early_stopping`: end when
        `width` texts have ended, though one under way may still be better. Other requests go on, pass by pass in turn. It waits until
        `width` of the engine's `max_seqs` places are free. Drafts come from n-gram tables and the model's own candidates. An interrupt
        (KeyboardInterrupt) ends it before its next pass.
        Raises ValueError, PromptTooLongError, OutOfMemoryError, EngineClosedError.
        """
        ids = self.encode(prompt)
        _check_settings(None, width=width, max_tokens=max_tokens)
        if width > (most := min(len(self.runner.pool.n_blocks_of), self.runner.max_rows)):
            raise ValueError(f"width must be 1 to {most}, what max_seqs and max_rows allow, got {width}")
        if not -10 <= length_penalty <= 10:
            raise ValueError(f"length_penalty must be -10 to 10, got {length_penalty}")
        proposer = None
        if speculation and self.core.proposer is not None:
            proposer = drafting.Proposer(vocab_size=self.vocab_size, spec_length=self.core.proposer.spec_length, max_seqs=width, answers=0)
        search = BeamSearch(
            ids,
            width=width,
            limit=min(max_tokens, self.max_model_len - len(ids)),
            stop_ids=frozenset() if ignore_eos else frozenset(self.eos_token_ids),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            runner=self.runner,
            scheduler=self.core.scheduler,
            block_hashes=BlockHashes("" if self.prefix_cache else secrets.token_hex(), ids),
            proposer=proposer,
            cost_ms=self.core.cost.table,
        )

        over = False

        def turn() -> None:
            nonlocal over
            try:
                if not search.done:
                    self.core.n_passes += search.step()
                over = search.done
            except Exception:
                over = True
                raise
            finally:
                if over:
                    search.close()

        try:
            self._call(turn, until=lambda: over)
        except BaseException:
            search.done = True  # where the caller was interrupted, it goes no further
            raise
        return [Beam(ended.tokens, self._text(ids, ended.tokens, search.stop_ids), ended.score) for ended in search.ended]

    def _text(self, prompt: np.ndarray, tokens: list[int], stop_ids: frozenset[int]) -> str:
        """The text of an output, of which a stop token at the end is no part."""
        if self.tokenizer is None:
            return ""
        stream = TextStream(self.tokenizer, prompt.tolist())
        worded = tokens[:-1] if tokens[-1] in stop_ids else tokens
        return "".join([*map(stream.push, worded), stream.finish()])

    @property
    def promise(self) -> str:
        """What all completions can be relied on to be: `Completion.exactness` of those for which it is least."""
        return self._exactness(SamplingParams(temperature=1.0), speculation=True)

    def _exactness(self, params: SamplingParams, speculation: bool) -> str:
        if not speculation or self.core.proposer is None:
            return self.exactness
        if self.acceptance.lenience < 1:
            return "lenient"
        return "distribution" if self.acceptance.rejection and params.temperature > 0 else self.exactness

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Token ids [n] int32 of a prompt, as the model will see them. Raises ValueError, PromptTooLongError, TokenizerError."""
        ids = self._encoding.ids(prompt, "prompt")
        if len(ids) == 0:
            raise ValueError("the prompt is empty: at least one token is needed")
        if len(ids) >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens; with max_model_len {self.max_model_len}, at most {self.max_model_len - 1} fit"
            )
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is a control token: "<|im_end|>" in it is spelled out. Nothing is put before or behind it.

        From any thread. Raises TokenizerError.
        """
        return self._encoding.plain(text)

    def props(self) -> dict[str, Any]:
        """What this engine is: model, exactness, limits, measured costs."""
        counts = [int(c) for c in self.cost.counts]
        return {
            "model": self.name,
            "exactness": self.exactness,
            "device": self.runner.device,
            "dtype": self.runner.dtype,
            "threads": self.threads,
            "speculation": self.core.proposer is not None,
            "acceptance": "rejection" if self.acceptance.rejection else "walk",
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
        """Whether it takes no requests any more: it was closed, or it died."""
        return self._closed

    def status(self) -> EngineStatus:
        """What the engine is doing now. From any thread, and in no time: it waits for nothing."""
        scheduler, pool = self.core.scheduler, self.runner.pool
        n_cached = len(pool.cached)
        return EngineStatus(
            waiting=len(scheduler.waiting) + self._n_arriving,
            running=len(scheduler.running),
            kv_tokens=pool.n_tokens,
            kv_used=(pool.n_blocks - len(pool.free) - n_cached) * BLOCK,
            kv_cached=n_cached * BLOCK,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            cached_tokens=scheduler.cached_tokens,
            preemptions=scheduler.n_preempted,
            passes=self.core.n_passes,
        )

    def close(self) -> None:
        """Stop; requests under way end with EngineClosedError. Any number of times."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the engine's thread

    def _post(self, message: Callable[[], None]) -> bool:
        """Have the engine's thread do something before its next step; False where there will be none."""
        with self._wake:
            if not self._closed:
                self._inbox.append(message)
                self._wake.notify()
            return not self._closed

    def _call(self, what: Callable[[], None], until: Callable[[], bool] = lambda: True) -> None:
        """Have the engine's thread do something before its next step, and before each one until that is so, and wait for it.

        Raises what it raises, EngineClosedError.
        """
        if threading.current_thread() is self._thread:
            what()
            while not until():
                what()
            return None
        done: Future[None] = Future()

        def run() -> None:
            try:
                what()
            except Exception as e:
                done.set_exception(e)
            else:
                if not until():
                    self._post(run)  # a closed engine ends the call itself
                    return
                done.set_result(None)
            self._calls.discard(done)

        with self._wake:
            self._calls.add(done)
        if not self._post(run):
            raise EngineClosedError("the engine is closed")
        return done.result()

    def _loop(self, load: Callable[[], None], ready: Future[None]) -> None:
        error = EngineClosedError("the engine was closed")
        try:
            self._use_threads()
            load()
        except BaseException as e:
            self._closed = True
            ready.set_exception(e)
            return
        ready.set_result(None)
        try:
            while True:
                with self._wake:
                    while not (self._inbox or self.core.scheduler.has_work or self._closed):
                        self._wake.wait()
                    if self._closed:
                        break
                    messages = list(self._inbox)
                    self._inbox.clear()
                for message in messages:
                    message()
                self._step()
        except BaseException as e:
            log.exception("the engine stops")
            error = EngineClosedError(f"the engine died: {e}")
            error.__cause__ = e
        finally:
            with self._wake:
                self._closed = True
            for request in list(self._unfinished):
                self._end(request, error)
            for call in list(self._calls):
                call.set_exception(error)

    def _end(self, request: Request, error: Exception) -> None:
        self._unfinished.discard(request)
        request._fail(error)

    def _step(self) -> None:
        try:
            changed = self.core.step(self._hand_out)
        except (NgramspecError, MemoryError, RuntimeError, ValueError) as e:
            log.exception("a pass failed; its requests end")
            cause: Exception = e
            if isinstance(e, (MemoryError, torch.OutOfMemoryError)):
                cause = OutOfMemoryError(f"out of memory in a pass: {e}")
                self.core.scheduler.max_rows = max(
                    self.core.scheduler.max_rows // 2, len(self.runner.pool.n_blocks_of)
                )  # prompts in smaller pieces
            for seq in list(self.core.scheduler.running):
                if seq in self._requests:
                    self._failed_alone(seq, cause)
            return
        for seq in changed:
            request = self._requests[seq]
            if seq.finished:
                del self._requests[seq]
            self._gained.append((request, seq))
        if not (self.runner.asynchronous and self.core.scheduler.has_work):  # else while the device is at the next pass
            self._hand_out()

    def _hand_out(self) -> None:
        """Give requests what their sequences gained in the last pass."""
        gained, self._gained = self._gained, []
        for request, seq in gained:
            if request.done:
                continue
            try:
                seq.show()
            except Exception as e:  # its text
                self._fail(request, e)
            else:
                self._emit(request, seq)

    def _add(self, request: Request) -> None:
        with self._wake:
            self._n_arriving -= request.params.n
        for seq in request._seqs:
            self._requests[seq] = request
            self.core.add(seq)

    def _ask_to_cancel(self, request: Request) -> None:
        self._post(lambda: self._cancel(request))

    def _cancel(self, request: Request) -> None:
        self._hand_out()
        for seq in request._seqs:
            if seq in self._requests:
                self.core.remove(seq)
                del self._requests[seq]
                seq.finish("cancelled")
                self._gained.append((request, seq))
        self._hand_out()

    def _failed_alone(self, seq: Sequence, error: Exception) -> None:
        """End the request of a sequence that met an error."""
        self._fail(self._requests[seq], error)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request with an error, all its sequences."""
        for seq in request._seqs:
            if self._requests.pop(seq, None) is not None and (seq.slot >= 0 or seq in self.core.scheduler.waiting):
                self.core.remove(seq)
        self._end(request, error)

    def _emit(self, request: Request, seq: Sequence) -> None:
        request._emit(seq)
        if request.done:
            self._unfinished.discard(request)

    def _use_threads(self) -> None:
        torch.set_num_threads(self.threads)
        numba.set_num_threads(min(self.threads, numba.config.NUMBA_NUM_THREADS))


def _make_runner(model: PreTrainedModel, place: _Place, limits: _Limits, max_model_len: int, say: Progress) -> Runner:
    # Draft nodes stand behind the last token: room for them past the longest text.
    max_len = max_model_len + limits.spec_rows + 1
    if place.device == "cpu":
        kv_bytes = limits.kv_memory if limits.kv_memory is not None else _default_kv_bytes()
        return CpuRunner(
            model,
            max_len=max_len,
            max_seqs=limits.max_seqs,
            max_rows=limits.max_rows,
            kv_bytes=kv_bytes,
            packed=place.linears == "exact",
            progress=say,
        )
    from ngramspec.cuda.runner import CudaRunner

    return CudaRunner(
        model,
        max_len=max_len,
        max_seqs=limits.max_seqs,
        max_rows=limits.max_rows,
        kv_bytes=limits.kv_memory,
        max_depth=limits.spec_length + 1,
        memory_utilization=place.gpu_memory_utilization,
        exact=place.linears == "exact",
        graphs=place.graphs,
        progress=say,
    )


def _check_place(device: str, dtype: str, utilization: float, linears: str, graphs: bool) -> _Place:
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and (kind == "cpu" or not number.isdigit())):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if kind == "cuda":
        n_devices = torch.cuda.device_count()
        if int(number or 0) >= n_devices:
            raise ValueError(
                f"there is no device {device!r}: torch {torch.__version__} sees {n_devices or 'no'} CUDA device{'s' * (n_devices != 1)}"
            )
        device = f"cuda:{number or 0}"
    accepted = {"cpu": ("float32",), "cuda": ("bfloat16", "float16", "float32")}[kind]
    if dtype == "auto":
        dtype = accepted[0]
    if dtype not in accepted:
        raise ValueError(f"dtype on {kind} must be 'auto' or {' or '.join(map(repr, accepted))}, got {dtype!r}")
    if not 0 < utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {utilization}")
    other = {"cpu": "unpacked", "cuda": "vendor"}[kind]
    if linears not in ("exact", other):
        raise ValueError(f"linears on {kind} must be 'exact' or {other!r}, got {linears!r}")
    return _Place(device, getattr(torch, dtype), utilization, linears, graphs)


def _check_settings(threads: int | None, **at_least_one: int) -> None:
    n_cores = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= n_cores:
        raise ValueError(f"threads must be 1 to {n_cores}, got {threads}")
    for name, value in at_least_one.items():
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")


def _adopt(model: PreTrainedModel, tokenizer: Any) -> LoadedModel:
    return LoadedModel(model, tokenizer, model.config.name_or_path or type(model).__name__, eos_token_ids(model, tokenizer))


def _is_several(prompt: Any) -> bool:
    """A list of prompts, as against one prompt: text, or a list of ids."""
    return not isinstance(prompt, str) and len(prompt) > 0 and (isinstance(prompt[0], str) or np.ndim(prompt[0]) == 1)


def _default_kv_bytes() -> int:
    """A quarter of the memory that is free, 4 GiB at most; its pages are taken as they are first used."""
    free = available_memory()
    return min(4 << 30, free // 4) if free else 1 << 30


def _warm_up() -> None:
    """Compile, or load from disk, what the steps need besides the model, while the model loads."""
    drafting.warmup()
    sampling.warmup()
