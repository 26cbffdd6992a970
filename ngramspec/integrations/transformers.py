"""Our drafts in transformers' `generate`: `model.generate(..., custom_generate=ngramspec.integrations.transformers.generate)`.

transformers calls `generate` with its own preparations done; its assisted decoding runs with our chains as candidates, and so for every
model that it can decode with assistance. A model has one session, which remembers answers from call to call. Beside the candidates there
are two corrections to assisted decoding: sampling draws row by row as plain sampling does, so that a seed gives the same text with drafts
and without, and a stopping criterion ends the text where it would have ended without drafts, not behind the accepted tokens.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation.candidate_generator import CandidateGenerator

from ngramspec.datastore.reader import Datastore
from ngramspec.defaults import ANSWERS
from ngramspec.errors import InvalidInputError, TokenizerError, UnsupportedModelError
from ngramspec.integrations.compat import check_version, compile_drafting, open_host_syntax, open_stores, prediction_ids
from ngramspec.integrations.draft_session import SLOPE, Guest
from ngramspec.outputs import KEPT, Stats
from ngramspec.speculative.open_datastores import Store
from ngramspec.tokenizer.encode import Prompt

log = logging.getLogger(__name__)

# The first and the last version that the tests ran with.
TESTED = ("5.23", "5.24")
DEPTH = 20
_DEVICE_SLOPE = 0.005
# Concurrent calls of `generate`, in threads, for one model.
_MAX_SEQS = 16


class Assistant:
    """Drafts for one model, in all calls of `generate`. Thread-safe."""

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        depth: int = DEPTH,
        answers: int = ANSWERS,
        recycle: bool = True,
        steady: bool = False,
    ) -> None:
        """`tokenizer`: of transformers, for predictions that are texts, datastores and the syntax table; by default the model folder's.
        `depth`: longest draft; `answers`: tokens of finished answers that are remembered; `recycle`: also draft from what the model itself
        held likely; `steady`: look at no time, so that every run drafts the same.

        Raises HostVersionError, InvalidInputError, UnsupportedModelError.
        """
        check_version("transformers", transformers.__version__, TESTED)
        if getattr(model, "_is_stateful", False) or not hasattr(model, "_assisted_decoding"):
            raise UnsupportedModelError(f"transformers cannot decode {type(model).__name__} with assistance: it cannot take tokens back")
        compile_drafting()
        self.name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._opened: dict[str, Datastore] = {}
        vocab_size = model.config.get_text_config().vocab_size
        try:
            syntax = open_host_syntax(self.tokenizer, vocab_size)
        except Exception as error:  # of many kinds; the tokenizer is needed for nothing else so far
            log.info("drafting without the syntax table: %s", error)
            syntax = None
        self.guest = Guest(
            vocab_size=vocab_size,
            max_seqs=_MAX_SEQS,
            depth=depth,
            answers=answers,
            recycle=recycle,
            steady=steady,
            slope=SLOPE if model.device.type == "cpu" else _DEVICE_SLOPE,
            syntax=syntax,
        )

    @property
    def stats(self) -> Stats:
        """What drafts did for all texts of the model."""
        with self._lock:
            return self.guest.stats

    @property
    def tokenizer(self) -> Any:
        """Raises TokenizerError."""
        if self._tokenizer is None:
            try:
                self._tokenizer = transformers.AutoTokenizer.from_pretrained(self.name, local_files_only=True)
            except (OSError, ValueError) as error:
                raise TokenizerError(f"{self.name!r} has no tokenizer beside it: assistant(model, tokenizer=…) takes one") from error
        return self._tokenizer

    def use(self, datastore: Store | Sequence[Store] | Mapping[str, Store]) -> frozenset[str]:
        """Open these stores, unless they are -> what they are called. Raises as `compat.open_stores`."""
        names: dict[str, Store] = {}
        with self._lock:
            several = [datastore] if not isinstance(datastore, (list, tuple, Mapping)) else datastore
            for name, store in several.items() if isinstance(several, Mapping) else ((_place(store), store) for store in several):
                if name not in self._opened:
                    names |= {name: store}
            if names:
                opened = open_stores(names, self.tokenizer, self.name, self.guest.vocab_size)
                self.guest.use_stores(self._opened | opened)
                self._opened |= opened
            return frozenset(several if isinstance(several, Mapping) else map(_place, several))

    def begin(self, key: object, ids: np.ndarray, **hints: Any) -> None:
        with self._lock:
            self.guest.begin(key, ids, **hints)

    def end(self, key: object, *, finished: bool) -> Stats:
        with self._lock:
            return self.guest.end(key, finished=finished)

    def draft_chain(self, key: object, room: int) -> list[int]:
        with self._lock:
            return self.guest.chains([key], [room], 1)[0]

    def observe(self, key: object, accepted: list[int]) -> None:
        with self._lock:
            self.guest.observe([key], [accepted])

    def took(self, rows: int, ms: float, *, has_prompt: bool) -> None:
        with self._lock:
            self.guest.took(rows, ms, has_prompt=has_prompt)

    def record_topk(self, key: object, last: Sequence[int], rows: torch.Tensor) -> None:
        """Keep the top-k of logits rows [n, V] after the tokens `last` [1 + n], but for its first, which precedes them."""
        logits, tokens = rows.float().topk(KEPT, dim=-1)
        with self._lock:
            self.guest.record_topk(
                key,
                np.array(last[:-1], np.int32),
                np.array(last[1:], np.int32),
                tokens.to(torch.int32).cpu().numpy(),
                logits.cpu().numpy(),
            )


_assistants: weakref.WeakKeyDictionary[Any, Assistant] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def assistant(model: Any, **settings: Any) -> Assistant:
    """Return the assistant of a model: a new one if there is none, or if `settings` of `Assistant` are given.

    Raises HostVersionError, InvalidInputError, UnsupportedModelError.
    """
    with _making:
        found = _assistants.get(model)
        if found is None or settings:
            found = _assistants[model] = Assistant(model, **settings)
    return found


def generate(
    model: Any,
    input_ids: torch.Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    synced_gpus: bool = False,
    prediction: Prompt | None = None,
    datastore: Store | Sequence[Store] | Mapping[str, Store] | None = None,
    tenant: str | None = "",
    speculation: bool = True,
    **model_kwargs: Any,
) -> Any:
    """Generate with drafts; transformers calls this as `custom_generate`.

    `prediction`: the predicted output, text or token ids; `datastore`: folders or open stores to draft from, made with the model's
    tokenizer; the output cache is shared within a `tenant`, None: with nobody; `speculation` False: plain decoding.

    Returns what `model.generate` would. Raises InvalidInputError, UnsupportedModelError, HostVersionError, TokenizerError, DatastoreError,
    TokenizerMismatchError.
    """
    streamer = streamer if streamer is not None else _streamer_of_caller()
    common = {"generation_config": generation_config, "synced_gpus": synced_gpus}
    if not speculation:
        kind = type(model)
        return kind._sample(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            **common,
            **model_kwargs,
        )
    if generation_config.num_beams != 1 or generation_config.num_return_sequences != 1 or input_ids.shape[0] != 1:
        raise InvalidInputError(
            "drafts are for one text at a time, without beams: num_beams and num_return_sequences must be 1, and input_ids of one row; got "
            f"{generation_config.num_beams}, {generation_config.num_return_sequences} and {input_ids.shape[0]}"
        )
    helper = assistant(model)
    known = input_ids[0].tolist()
    key = object()
    helper.begin(
        key,
        np.array(known, np.int32),
        prediction=prediction_ids(prediction, helper.tokenizer if isinstance(prediction, str) else None, helper.guest.vocab_size),
        tenant=tenant,
        datastores=() if datastore is None else helper.use(datastore),
        stops=_list_stop_ids(generation_config),
        temperature=float(generation_config.temperature or 0.0) if generation_config.do_sample else 0.0,
    )
    finished = False
    try:
        candidates = _Candidates(helper, key, known, generation_config.max_length, keeps=not len(logits_processor))
        ends = _Ends(stopping_criteria, streamer, len(known))
        rows = (
            _CandidateRows(logits_processor, candidates, generation_config)
            if len(logits_processor) or generation_config.do_sample
            else None
        )
        if rows is not None:
            common["generation_config"] = rows.greedy
            ends.rows = rows
        result = type(model)._assisted_decoding(
            _Assisted(model, candidates),
            input_ids,
            logits_processor=rows if rows is not None else logits_processor,
            stopping_criteria=ends,
            streamer=None if streamer is None else _Silent(),
            **common,
            **model_kwargs,
        )
        if streamer is not None:
            streamer.end()
        finished = True
        return ends.cut(result)
    finally:
        helper.end(key, finished=finished)


class _Assisted:
    """The model, but that its assisted decoding gets our candidates."""

    def __init__(self, model: Any, candidates: CandidateGenerator) -> None:
        self._model, self._candidates = model, candidates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def _get_candidate_generator(self, **_: Any) -> CandidateGenerator:
        return self._candidates


class _Candidates(CandidateGenerator):
    """Our chains, as a candidate generator of transformers."""

    def __init__(self, helper: Assistant, key: object, known: list[int], max_length: int, *, keeps: bool) -> None:
        """Draft after the `known` tokens. `keeps`: the scores received are the model's own logits."""
        self._helper, self._key, self._keeps, self._max_length = helper, key, keeps, max_length
        self.known, self.chain = known, list[int]()
        self._asked_s: float | None = None
        self._is_prompt = True

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[Any, Any]:
        now = time.perf_counter()
        if self._asked_s is not None:
            rows = (len(self.known) if self._is_prompt else 1) + len(self.chain)
            self._helper.took(rows, (now - self._asked_s) * 1e3, has_prompt=self._is_prompt)
            self._is_prompt = False
        self._asked_s = now
        self.chain = self._helper.draft_chain(self._key, self._max_length - len(self.known) - 1)
        if not self.chain:
            return input_ids, None
        chain = torch.tensor([self.chain], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, chain], dim=-1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        if self._keeps and self._helper.guest.recycles:
            before = self.known[-2:-1] or [-1]
            self._helper.record_topk(self._key, [*before, self.known[-1], *self.chain], scores[0])
        new = input_ids[0, len(self.known) :].tolist()
        self.known.extend(new)
        self._helper.observe(self._key, new)


class _CandidateRows:
    """The logits' processors for the rows of a step, as plain decoding would have called them: for each row that a token is picked from, in
    order, and for no other. Where it samples, the token is drawn here, by the same call from the same state of the generator, and the row
    that is handed on has no other token."""

    def __init__(self, processors: Any, candidates: _Candidates, config: Any) -> None:
        self._processors, self._candidates = processors, candidates
        self._samples, self._records = config.do_sample, bool(config.return_dict_in_generate and config.output_scores)
        self.greedy = copy.copy(config)
        self.greedy.do_sample = False
        self._picked = -1
        self._alive = False
        self._scores: list[torch.Tensor] = []
        self._n_known = 0

    def __len__(self) -> int:
        return 1

    def __call__(self, input_ids: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == len(self._candidates.known):
            self._alive = True
            del self._scores[self._n_known :]
        elif self._alive:
            self._alive = int(input_ids[0, -1]) == self._picked
        if not self._alive:
            return row
        scores = self._processors(input_ids, row) if len(self._processors) else row
        if self._records:
            self._scores.append(scores.clone())
        if not self._samples:
            self._picked = int(scores.argmax())
            return scores
        picked = torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1)
        self._picked = int(picked)
        return torch.full_like(scores, -torch.inf).scatter_(1, picked, 0.0)

    def get_scores(self, n: int) -> tuple[torch.Tensor, ...] | None:
        """Return the scores of the first n tokens of the output, None if they are not wanted."""
        self._n_known = n
        return tuple(self._scores[:n]) if self._records else None


class _Ends:
    """Stopping criteria checked after every token: a text ends, and is streamed, as if tokens had come one by one."""

    def __init__(self, criteria: Any, streamer: Any, n_prompt: int) -> None:
        self._criteria, self._streamer, self._n_prompt = criteria, streamer, n_prompt
        self._n = n_prompt
        self.rows: _CandidateRows | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        grown = input_ids.shape[1]
        if self.rows is not None and scores is not None:
            scores = self.rows.get_scores(grown - self._n_prompt)
        before = self._n
        done: Any = None
        while self._n < grown and (done is None or not bool(done.all())):
            self._n += 1
            done = self._criteria(input_ids[:, : self._n], None if scores is None else scores[: self._n - self._n_prompt], **kwargs)
        if self._streamer is not None:
            self._streamer.put(input_ids[:, before : self._n].cpu())
        return done

    def cut(self, result: Any) -> Any:
        """Cut what was generated after the text's end."""
        if isinstance(result, torch.Tensor):
            return result[:, : self._n]
        n_output, n_more = self._n - self._n_prompt, result.sequences.shape[1] - self._n
        result.sequences = result.sequences[:, : self._n]
        if result.get("scores") is not None:
            result.scores = result.scores[:n_output] if self.rows is None else self.rows.get_scores(n_output)
        for name in ("logits", "attentions", "hidden_states", "decoder_attentions", "decoder_hidden_states", "cross_attentions"):
            if result.get(name) is not None:
                result[name] = result[name][:n_output]
        if n_more and result.get("past_key_values") is not None:
            result.past_key_values.crop(-n_more)
        return result


class _Silent:
    """A streamer that drops everything: `_Ends` writes to the real one."""

    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def _list_stop_ids(config: Any) -> list[int]:
    """Return the token ids that end a text."""
    ids: Collection[int] | int | None = config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else [int(each) for each in ids]


def _place(store: Store) -> str:
    return str(store.path if isinstance(store, Datastore) else store)


def _streamer_of_caller() -> Any:
    """Return the streamer of the `generate` that called ours: transformers does not pass it to `custom_generate` (5.23 and before)."""
    frame = sys._getframe(2)
    return frame.f_locals.get("streamer") if frame.f_code.co_name == "generate" and "generation_mode" in frame.f_locals else None
