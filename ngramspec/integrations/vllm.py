"""Our drafts in vLLM: with `speculative_config={"method": "custom_class", "model": "ngramspec.integrations.vllm.Proposer",
"num_speculative_tokens": K}`.

After every step vLLM hands over its persistent batch: rows of token ids without names, which are swapped, condensed, and gone while a
request is not scheduled; steps near the model's longest text are not handed over at all. A row's text is found again by its content. Where
the runner can be seen, requests are known by their ids, with what they ask for; where it cannot, each row is mirrored, and what vanished
waits for some steps before it counts as finished. Hints of a request come as `extra_args` of its sampling parameters (`vllm_xargs` in
requests over HTTP): `prediction`, `datastore`, `tenant`, `speculation`. A wrong hint is logged and left out: it ends no request.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ngramspec.datastore.errors import DatastoreError
from ngramspec.defaults import ANSWERS
from ngramspec.errors import InvalidInputError, NgramspecError, TokenizerError, UnsupportedModelError, make_datastore_error
from ngramspec.integrations.compat import check_version, compile_drafting, open_host_syntax, open_stores, prediction_ids
from ngramspec.integrations.draft_session import MAX_SEQS, SLOPE, Guest
from ngramspec.integrations.vllm_logits import Likely, Watch
from ngramspec.outputs import Stats
from ngramspec.speculative.syntax import SyntaxTable

log = logging.getLogger(__name__)

TESTED = ("0.32", "0.33")
# Environment variable with a JSON object of settings, read if `additional_config` has none under "ngramspec".
SETTINGS = "NGRAMSPEC_VLLM"
# Steps for which a mirrored text may be absent before it counts as finished.
PATIENCE = 32
# Steps that vLLM may make without asking for drafts before a text that has grown counts as another one.
MISSED = 8
_DEVICE_SLOPE = 0.005
# Parts of the names that configurations give to layers with a recurrent state.
_RECURRENT = ("linear", "mamba", "conv", "recurrent", "delta", "ssm", "rwkv", "kda", "lightning", "retention", "hybrid")
_KINDS: dict[str, tuple[type, ...]] = {
    "datastore": (str, list, dict),
    "tokenizer": (str,),
    "answers": (int,),
    "slope": (int, float),
    "steady": (bool,),
    "recycle": (bool,),
}


class _Seat(NamedTuple):
    """The row and the object of a request when the runner last named it."""

    row: int
    request: Any
    limit: int
    """Tokens that its text may have."""


class Proposer:
    """What vLLM makes of the class's name. One for each worker; called from its one thread."""

    def __init__(self, vllm_config: Any, *_: Any, **__: Any) -> None:
        """Raises HostVersionError, InvalidInputError, DatastoreError, TokenizerMismatchError, TokenizerError, UnsupportedModelError."""
        check_version("vLLM", importlib.import_module("vllm").__version__, TESTED)
        _check_state(vllm_config.model_config)
        settings = _read_settings(vllm_config)
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        self.depth = int(vllm_config.speculative_config.num_speculative_tokens)
        self.max_len = int(model.max_model_len)
        self.model, self.tokenizer_name = (
            str(model.model),
            settings.get("tokenizer") or str(getattr(model, "tokenizer", None) or model.model),
        )
        self._tokenizer: Any = None
        vocab_size = int(model.get_vocab_size())
        several = int(vllm_config.parallel_config.tensor_parallel_size) > 1
        on_cpu = str(getattr(vllm_config.device_config, "device_type", "")) == "cpu"
        stores = settings.get("datastore") or ()
        self.guest = Guest(
            vocab_size=vocab_size,
            max_seqs=min(2 * int(scheduler.max_num_seqs), MAX_SEQS),
            depth=self.depth,
            stores=open_stores(stores, self.tokenizer, self.model, vocab_size) if stores else None,
            answers=settings.get("answers", ANSWERS),
            recycle=settings.get("recycle", not several),  # of several ranks, not all have the logits
            steady=settings.get("steady", several),
            slope=settings.get("slope", SLOPE if on_cpu else _DEVICE_SLOPE),
            syntax=self._open_syntax(vocab_size),
        )
        self.failed = False
        self._runner: Any = None
        self._watch: Watch | None = None
        self._rows: list[Hashable | None] = []  # mirrors, by row
        self._away: dict[Hashable, int] = {}  # mirrors that are in no row, and for how many steps
        self._n_mirrors = 0
        self._seats: dict[Hashable, _Seat] = {}  # where the runner is known
        self._silent: set[Hashable] = set()  # requests that want no drafts
        self._lengths: dict[Hashable, int] = {}  # of the last drafts
        self._asked_s: float | None = None
        self._warned: set[str] = set()

    def load_model(self, *_: Any, **__: Any) -> None:
        """Compiles what a step needs, so that the first request does not wait for it."""
        compile_drafting()
        runner = sys._getframe(1).f_locals.get("self")
        if hasattr(runner, "input_batch") and hasattr(runner, "requests"):
            self._runner = runner
            if self.guest.recycles:
                try:
                    self._watch = Watch(runner, self.guest.vocab_size)
                except AttributeError as error:
                    log.info("what the model holds likely is not seen in this runner: %s", error)

    @property
    def stats(self) -> Stats:
        """What drafts did in this worker."""
        return self.guest.stats

    def _open_syntax(self, vocab_size: int) -> SyntaxTable | None:
        """Return the syntax table in the model's ids; None without a tokenizer on disk, where vLLM has put it if it needs one itself."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer = self._tokenizer or AutoTokenizer.from_pretrained(self.tokenizer_name, local_files_only=True)
        except Exception as error:  # of many kinds; the host may serve without a tokenizer of transformers
            log.info("drafting without the syntax table: no tokenizer %s: %s", self.tokenizer_name, error)
            return None
        return open_host_syntax(self._tokenizer, vocab_size)

    @property
    def tokenizer(self) -> Any:
        """The model's, of transformers. Raises TokenizerError."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_name)
            except (OSError, ValueError) as error:
                raise TokenizerError(f"{self.tokenizer_name!r} has no usable tokenizer: {error}") from error
        return self._tokenizer

    # ------------------------------------------------------------------ a step

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: np.ndarray, token_ids_cpu: np.ndarray, *_: Any, **__: Any
    ) -> list[list[int]]:
        """Return a draft for each row of the batch, empty if none pays.

        sampled_token_ids: the step's new tokens per row, none if it computed a part of a prompt; num_tokens_no_spec [R]: the rows' lengths
        with them; token_ids_cpu [R, L] int32: their tokens.
        """
        if not self.failed:
            try:
                return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception:  # drafts are worth no request
                self.failed = True
                log.exception("drafting failed and is switched off; requests go on without")
        return [[] for _ in sampled_token_ids]

    def _propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: np.ndarray, token_ids_cpu: np.ndarray
    ) -> list[list[int]]:
        now = time.perf_counter()
        batch = self._get_batch(token_ids_cpu)
        rows = [i for i, sampled in enumerate(sampled_token_ids) if len(sampled)]
        texts = [token_ids_cpu[i, : int(num_tokens_no_spec[i])] for i in rows]
        keys = self._find_mirrors(rows, texts) if batch is None else [batch.req_ids[i] for i in rows]
        if batch is not None:
            self._end_finished()
        n_carried, has_prompt = 0, len(rows) < len(sampled_token_ids)
        seen, new = [], []
        for i, key, text in zip(rows, keys, texts, strict=True):
            n_carried += 1 + self._lengths.get(key, 0)
            if key in self._silent:
                continue
            more = self._find_appended(i, key, text, len(sampled_token_ids[i])) if batch is not None else None
            if more is None:
                more = self.guest.find_continuation(key, text, MISSED * (self.depth + 1))
            if more is None:
                has_prompt = True
                self._begin(key, text, len(sampled_token_ids[i]), batch is not None)
            elif len(more):
                seen.append(key)
                new.append(more)
        if self._watch is not None and batch is not None and (likely := self._watch.take()) is not None:
            self._record_topk(likely, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        self.guest.observe(seen, new)
        if self._asked_s is not None:
            self.guest.took(n_carried, (now - self._asked_s) * 1e3, has_prompt=has_prompt)
        self._asked_s = now
        return self._draft_rows(len(sampled_token_ids), rows, keys, texts, known=batch is not None)

    def _record_topk(
        self, likely: Likely, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: np.ndarray, token_ids_cpu: np.ndarray
    ) -> None:
        """Keep the model's top-k after each row's last known token and after its draft's."""
        n_new = np.array([len(sampled) for sampled in sampled_token_ids])
        n = len(n_new)
        known = num_tokens_no_spec[:n] - n_new
        if len(likely.lengths) != n or int(likely.lengths.sum()) != len(likely.tokens):
            return  # another pass's
        ends = np.cumsum(likely.lengths)
        roots, rows = ends - likely.lengths, np.arange(n)
        last, before = np.empty((2, len(likely.tokens)), np.int32)
        is_root = np.zeros(len(last), np.bool_)
        is_root[roots] = True
        last[roots], last[~is_root] = token_ids_cpu[rows, np.maximum(known - 1, 0)], likely.drafted
        before[1:] = last[:-1]
        before[roots] = np.where(known > 1, token_ids_cpu[rows, np.maximum(known - 2, 0)], -1)
        continues = np.repeat((n_new > 0) & (known > 0), likely.lengths) & (last >= 0) & (last < self.guest.vocab_size)
        if continues.all():
            self.guest.record_topk(None, before, last, likely.tokens, likely.logits)
        elif continues.any():
            self.guest.record_topk(None, before[continues], last[continues], likely.tokens[continues], likely.logits[continues])

    def _draft_rows(self, n: int, rows: list[int], keys: list[Hashable], texts: list[np.ndarray], *, known: bool) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in range(n)]
        seats, limit = self._seats if known else {}, self.max_len
        limits = [seats[key].limit if key in seats else limit for key in keys]
        room = [max(min(self.depth, limit - len(text) - 1), 0) for limit, text in zip(limits, texts, strict=True)]
        chains = self.guest.chains(keys, room, n) if rows else []
        for i, chain in zip(rows, chains, strict=True):
            drafts[i] = chain
        self._lengths = {key: len(chain) for key, chain in zip(keys, chains, strict=True)}
        return drafts

    def _begin(self, key: Hashable, text: np.ndarray, n_output: int, known: bool) -> None:
        """Begin a text that is new, or that came back changed."""
        hints: dict[str, Any] = {}
        if known:
            request = self._runner.requests[key]
            n_output = max(len(text) - int(request.num_prompt_tokens), 0)
            hints = self._read_hints(request.sampling_params)
            if not hints.pop("speculation", True):
                self._silent.add(key)
                return
        self.guest.begin(key, text, n_output=min(n_output, len(text)), **hints)

    # ------------------------------------------------------------------ whose row it is

    def _get_batch(self, token_ids_cpu: np.ndarray) -> Any:
        """Return the runner's batch if drafts are asked for it, else None: rows are then mirrored."""
        batch = getattr(self._runner, "input_batch", None)
        if batch is not None and getattr(batch, "token_ids_cpu", None) is token_ids_cpu:
            return batch
        return None

    def _find_appended(self, row: int, key: Hashable, text: np.ndarray, n_new: int) -> np.ndarray | None:
        """Return the new tokens of a request that kept its row and grew by the step's tokens, of which only the end is compared.

        None: anything else, so that the whole text must be compared.
        """
        seat, request = self._seats.get(key), self._runner.requests[key]
        if seat is not None and seat.row == row and seat.request is request:
            more = self.guest.find_appended(key, text, n_new)
            if more is not None:
                return more
        params, limit = request.sampling_params, self.max_len
        if params is not None and params.max_tokens is not None:
            limit = min(limit, request.num_prompt_tokens + params.max_tokens)
        self._seats[key] = _Seat(row, request, limit)
        return None

    def _end_finished(self) -> None:
        """Requests that the runner has forgotten are over; one that is only not scheduled stays with it."""
        requests = self._runner.requests
        if not self.guest.all_in(requests.keys()):
            for key in [key for key in self.guest if key not in requests]:
                self.guest.end(key, finished=True)
        if not self._seats.keys() <= requests.keys():
            self._seats = {key: seat for key, seat in self._seats.items() if key in requests}
        if self._silent:
            self._silent &= requests.keys()

    def _find_mirrors(self, rows: list[int], texts: list[np.ndarray]) -> list[Hashable]:
        """Return the mirror that each row's text continues: the one at its row if possible, else any."""
        most = MISSED * (self.depth + 1)
        keys: list[Hashable | None] = []
        taken: set[Hashable] = set()
        for i, text in zip(rows, texts, strict=True):
            key = self._rows[i] if i < len(self._rows) else None
            keys.append(key if key is not None and key not in taken and self.guest.find_continuation(key, text, most) is not None else None)
            taken.add(keys[-1])
        for b, text in enumerate(texts):
            if keys[b] is None:
                keys[b] = self._find_mirror(text, taken, most)
                taken.add(keys[b])
        for key in self.guest:
            self._away[key] = 0 if key in taken else self._away.get(key, 0) + 1
            if self._away[key] > PATIENCE:
                self.guest.end(key, finished=True)
        self._away = {key: n for key, n in self._away.items() if key in self.guest and n}
        self._rows = [None] * (max(rows, default=-1) + 1)
        for i, key in zip(rows, keys, strict=True):
            self._rows[i] = key
        return keys

    def _find_mirror(self, text: np.ndarray, taken: set[Hashable], most: int) -> Hashable:
        """Return the longest mirror that this text continues, or a new one."""
        free = [key for key in self.guest if key not in taken and self.guest.find_continuation(key, text, most) is not None]
        if free:
            return max(free, key=self.guest.get_length)
        self._n_mirrors += 1
        return self._n_mirrors

    # ------------------------------------------------------------------ hints

    def _read_hints(self, params: Any) -> dict[str, Any]:
        """Return the arguments of `begin` that a request's parameters give."""
        hints: dict[str, Any] = {
            "stops": sorted(getattr(params, "all_stop_token_ids", None) or getattr(params, "stop_token_ids", None) or ()),
            "temperature": float(getattr(params, "temperature", None) or 0.0),
        }
        given = getattr(params, "extra_args", None) or {}
        for name, value in given.items():
            try:
                if name in ("prediction", "datastore", "tenant", "speculation"):
                    hints |= self._read_hint(name, value)
            except (NgramspecError, DatastoreError) as error:
                if name not in self._warned:
                    self._warned.add(name)
                    log.warning("a request's %s is left out: %s (told once)", name, error)
        return hints

    def _read_hint(self, name: str, value: Any) -> dict[str, Any]:
        if name == "prediction":
            tokenizer = self.tokenizer if isinstance(value, str) else None
            return {"prediction": prediction_ids(value, tokenizer, self.guest.vocab_size)}
        if name == "datastore":
            names = [value] if isinstance(value, str) else value
            if not isinstance(names, list) or (wrong := [each for each in names if each not in self.guest.stores]):
                raise make_datastore_error("datastore", self.guest.stores, wrong if isinstance(names, list) else value)
            return {"datastores": names}
        if name == "tenant":
            if not isinstance(value, str):
                raise InvalidInputError(f"tenant must be text, got {value!r}")
            return {"tenant": value}
        if value not in (True, False):  # in JSON over HTTP there are no truth values, but 0 and 1
            raise InvalidInputError(f"speculation must be true or false, 1 or 0, got {value!r}")
        return {"speculation": bool(value)}


def stats(worker: Any) -> Stats:
    """Return a worker's draft statistics, for `llm.collective_rpc(ngramspec.integrations.vllm.stats)`."""
    return worker.model_runner.drafter.stats


def _check_state(model_config: Any) -> None:
    """Refuse models with a recurrent state: until vllm#52942 is merged, a step without drafts that follows one with accepted drafts reads
    the wrong column of it, and the text goes wrong. A drafter that may propose nothing meets that. Raises UnsupportedModelError."""
    reason = next((name for name in ("is_hybrid", "is_attention_free", "has_inner_state") if getattr(model_config, name, False)), None)
    for config in (getattr(model_config, name, None) for name in ("hf_text_config", "hf_config")):
        for inner in (config, getattr(config, "text_config", None)):
            for name in ("layer_types", "layers_block_type"):
                kinds = sorted({str(kind) for kind in getattr(inner, name, None) or ()})
                reason = reason or next((f"{name}: {kind}" for kind in kinds if any(part in kind for part in _RECURRENT)), None)
            if 0 in (getattr(inner, "attn_type_list", None) or ()):  # MiniMax: 0 is lightning attention
                reason = reason or "attn_type_list: 0"
            if getattr(inner, "linear_attn_config", None):
                reason = reason or "linear_attn_config"
    if reason:
        raise UnsupportedModelError(
            f"{getattr(model_config, 'model', 'the model')} keeps a recurrent state ({reason}): in vLLM a step without drafts after one "
            "with drafts corrupts its text (vllm#52942); accepted: models with attention alone, or vLLM without ngramspec"
        )


def _read_settings(vllm_config: Any) -> dict[str, Any]:
    """Read settings from `additional_config={"ngramspec": {...}}`, else from the environment. Raises InvalidInputError."""
    config = getattr(vllm_config, "additional_config", None)
    settings = config.get("ngramspec") if isinstance(config, dict) else None
    if settings is None:
        try:
            settings = json.loads(os.environ.get(SETTINGS) or "{}")
        except ValueError as error:
            raise InvalidInputError(f"{SETTINGS} must be a JSON object: {error}") from None
    if not isinstance(settings, dict):
        raise InvalidInputError(f"the settings of ngramspec must be an object, got {settings!r:.80}")
    for name, value in settings.items():
        if name not in _KINDS:
            raise InvalidInputError(f"ngramspec has no setting {name!r} in vLLM; it has {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[name]) or (isinstance(value, bool) and bool not in _KINDS[name]):
            raise InvalidInputError(
                f"ngramspec's setting {name} must be {' or '.join(kind.__name__ for kind in _KINDS[name])}, got {value!r:.80}"
            )
    return settings
