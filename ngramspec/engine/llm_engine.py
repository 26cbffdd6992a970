"""The engine: a model that is loaded once, its parts and datastores, and the one thread that steps.

Token ids, parameters and hints enter from any thread and become requests of sequences (`submit`). `generation` has the methods that make
requests of texts and chats, `step` what a step does, `assembly` what an engine is made of.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

import numpy as np

from ngramspec.config import EngineConfig
from ngramspec.datastore.reader import Datastore
from ngramspec.engine import assembly, native_steps
from ngramspec.engine.acceptance import Acceptance, make_acceptance
from ngramspec.engine.background_compiler import DRAFTING, SAMPLING, STAGES, BackgroundCompiler, Progress, warm_up
from ngramspec.engine.generation import GenerationMethods
from ngramspec.engine.input_processor import InputProcessor
from ngramspec.engine.request import BeamControl, Deliver, Hints, PromptOptions, Request, merge_params, split_options
from ngramspec.engine.step import Core
from ngramspec.engine.thread import StepThread
from ngramspec.errors import EngineClosedError, InvalidInputError, UnsupportedModelError
from ngramspec.foreign_names import explain_method, explain_options
from ngramspec.grammar import forced_tokens
from ngramspec.grammar.constraint import Constraint, Grammar
from ngramspec.grammar.llguidance import Grammars
from ngramspec.kv_cache.blocks import BlockHashes
from ngramspec.options import options_of
from ngramspec.outputs import BLOCK, Beam, Completion, EngineStatus
from ngramspec.sampling_params import MAX_SEED, SamplingParams
from ngramspec.speculative.budget.cost_model import CostModel
from ngramspec.speculative.drafter import Drafter, Speculator
from ngramspec.speculative.open_datastores import Store, check_store, name_datastores, open_store
from ngramspec.tokenizer.encode import Encoding, Prompt, check_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Deliver", "Engine", "Hints", "Request"]

log = logging.getLogger(__name__)
_LEAST_EXACT = SamplingParams(temperature=1.0)  # parameters for which every acceptance rule promises least


class Engine(GenerationMethods):
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
        """Load `model`: a folder, hub name, GGUF file, `smollm2`, or a loaded model (which the engine takes over and changes).

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
            raise InvalidInputError(f"a drafter must be an object with the methods of `speculative.drafter.Drafter`, got {wrong[0]!r:.80}")
        stores = {name: open_store(store) for name, store in name_datastores(datastore).items()}
        if alone is not None and (drafters or stores):
            raise InvalidInputError("a drafter that drafts alone has neither other drafters nor datastores beside it")
        device = assembly.check_device(config)
        assembly.make_prefix_root(config)
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

            def check_stores(tokenizer: Any, name: str) -> None:
                encoding = Encoding(tokenizer, 0)
                for store in stores.values():
                    check_store(store, encoding, name)

            bound = assembly.bind(model, tokenizer, config, device, report, bool(drafters or alone), end_with_caller, check_stores)
            drafts = assembly.make_speculator(config, bound, drafters, alone)
            core = Core(bound.runner, drafts, bound.cost, thread.fail, make_acceptance(config.acceptance, config.lenience))
            if bound.code is not None:
                core.is_compiling_drafts = core.is_compiling_sampling = True
            core.prefixes = assembly.open_prefix_store(config, bound.runner)
            if stores:
                core.use_datastores(stores)
            return core

        self.source = model if isinstance(model, str) else ""  # what the model was asked for by; "" for a loaded one
        self._thread = StepThread(load)  # returns when the model is loaded
        self.name, self.tokenizer, self.eos_token_ids = bound.name, bound.tokenizer, bound.eos_token_ids
        self.max_model_len, self.runner, self.cost, self._encoding = bound.max_model_len, bound.runner, bound.cost, bound.encoding
        self.exactness, self.vocab_size, self.syntax = bound.runner.exactness, bound.runner.vocab_size, bound.syntax
        self._save_start_record, self._architecture = bound.save_start_record, bound.architecture
        self._grammars = Grammars(bound.encoding, bound.eos_token_ids)
        self._inputs = InputProcessor(bound.encoding, self._grammars, bound.eos_token_ids, self.max_model_len, self.prefix_cache)
        self._datastores: dict[str, Datastore] = stores  # replaced as a whole, never changed
        self._code = bound.code
        weakref.finalize(self, _release, self._thread, self._code, self._grammars).atexit = False
        self._speculates = threading.Event()  # set once nothing that drafts need is being compiled
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

        def replace_parts() -> None:
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

        self._thread.call(replace_parts)

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
        exactness = self._derive_exactness(params, hints.get("speculation", True))
        ids = self._inputs.encode(prompt)
        self._inputs.check(params, hints, self._datastores)
        on_end = self._inputs.recall_suggestion(hints)
        if (list_prompts := hints.get("next_prompts")) is not None and self._inputs.shares_prefix(hints):
            on_end.append(partial(self._thread.expect_prompts, list_prompts, hints.get("tenant") or ""))
        completion = Completion(
            ids.tolist(),
            [],
            params.seed if params.seed is not None else secrets.randbelow(MAX_SEED + 1),
            exactness,
            precision=self.runner.precision,
        )
        seqs = self._inputs.make_sequences(ids, params, completion, hints)
        request = Request(completion, params, seqs, deliver, self._thread, final_only=final_only, on_end=on_end)
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
        # the methods of `papers` are loaded when they are asked for
        from ngramspec.engine.beam_turns import decode_output, search_beams
        from ngramspec.papers.beam import BeamOptions

        if self.runner.is_recurrent:
            raise UnsupportedModelError("beam search divides sequences, which is not implemented for layers that keep a state")
        ids, tenant = self.encode(prompt), control.get("tenant", "")
        stop_ids = frozenset() if ignore_eos and grammar is None else frozenset(self.eos_token_ids)
        options = BeamOptions(width, min(max_tokens, self.max_model_len - len(ids)), stop_ids, length_penalty, early_stopping)
        block_hashes = BlockHashes(tenant if self.prefix_cache and tenant is not None else secrets.token_hex(), ids)
        constraint = None if grammar is None else self.compile_grammar(grammar, tenant=tenant)
        should_stop = control.get("should_stop", lambda: False)
        ended = search_beams(self._thread, ids, options, block_hashes, constraint, speculation=speculation, should_stop=should_stop)
        return [Beam(each.tokens, "".join(decode_output(self.tokenizer, ids, each.tokens, stop_ids)), each.score) for each in ended]

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
        return self._derive_exactness(_LEAST_EXACT, speculation=True)

    @property
    def precision(self) -> str:
        """The precision of products with the model's weights: "int8" or a dtype."""
        return self.runner.precision

    def _derive_exactness(self, params: SamplingParams, speculation: bool) -> str:
        return self.acceptance.derive_exactness(self.exactness, params) if speculation and self.speculator.active else self.exactness

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
            "kv_tokens": self.runner.pool.n_positions,
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
            kv_tokens=pool.n_positions,
            kv_used=(pool.n_blocks - len(pool.free) - n_cached) * BLOCK,
            kv_cached=n_cached * BLOCK,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            cached_tokens=scheduler.cached_tokens,
            preemptions=scheduler.n_preempted,
            passes=self.core.n_passes,
            tokens_ahead=self.core.ahead.n_tokens,
            speculation_gain=self.core.timing.threshold.gain,
            price_bar=self.core.timing.threshold.governor,
            reliability=self.speculator.list_reliability(),
        )

    def finish_compiling(self, progress: Progress) -> None:
        """Wait until everything has been compiled, if this start did not find all machine code: it would begin again at the next one.

        Raises CallbackError, and EngineClosedError in a forked process.
        """
        self._thread.check_caller()
        if self._code is not None and not self.closed:
            self._code.progress = progress
            self._code.wait(*STAGES)
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
            code.wait(*(STAGES if self.datastores else DRAFTING))
            if not self.closed:
                warm_up()
                self._thread.call(begin)
                log.info("what drafts has been compiled: speculation begins")
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
        self._save_start_record()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _release(thread: StepThread, code: BackgroundCompiler | None, grammars: Grammars) -> None:
    """End the thread and processes of an engine that was dropped without being closed; requests under way are finished."""
    thread.close_when_idle()
    if code is not None:
        code.close()
    grammars.close()
