"""The engine's entry to drafting: owns the buffers of every sequence, the weights and the other drafters.

Committed tokens come in (`begin`, `observe`), draft trees go out (`propose`), each step in one compiled call for the whole batch.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ngramspec.datastore.reader import Datastore
from ngramspec.datastore.similar_files import VectorIndex, build_indices
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import KEPT, DraftTree, Reliability
from ngramspec.sampling.batch import Span, concatenate_ragged, pack
from ngramspec.sampling.topk import find_topk
from ngramspec.sequence_table import MAX_NEW_TOKENS
from ngramspec.speculative import features, ngram_table, tree_builder
from ngramspec.speculative.budget.backoff import (
    MAX_TIME_SHARE,
    OWN_TIME_SHARE,
    DatastoreSchedule,
    DrafterBackoff,
    is_unpredictable,
    update_cooldown,
)
from ngramspec.speculative.calibration import list_reliability, new_calibration
from ngramspec.speculative.datastore_drafter import MAX_STORES, DatastoreDrafter, Drafts
from ngramspec.speculative.drafter import (
    DRAFT_DEFAULTS,
    NO_TREE,
    Candidates,
    CoolingSequence,
    Drafter,
    DraftOptions,
    DraftParams,
    NativeDrafting,
    NeedsHiddenStates,
    NeedsKvRoom,
    NeedsModel,
    NeedsSequenceInfo,
    NeedsTopK,
    PassTopK,
    RunningSequence,
    Speculator,
    is_sound,
    iterate_topk,
)
from ngramspec.speculative.feature_weights import WEIGHTS, load_weights, make_cold_weights
from ngramspec.speculative.features import ExternalTrees
from ngramspec.speculative.output_cache import OutputCache
from ngramspec.speculative.recycled import new_recycled, record_topk_rows
from ngramspec.speculative.syntax import SyntaxTable, make_empty_syntax
from ngramspec.speculative.tree_builder import NO_PROPOSER, DraftState, SourceMap, TokenBans, Weights

log = logging.getLogger(__name__)
# Rows of the table of token pairs, a power of two.
PAIRS = 1 << 16
# Online learning rates of mix and states.
RATES = (0.02, 0.05)

_NO_TOKENS = np.empty(0, np.int32)


class TreeProposer(Speculator):
    """Draft trees for all running sequences. Not thread-safe: one caller, the engine's loop.

    `source_names[tree.sources[i]]` names the source of node i. `datastore` is the drafter whose weights are shipped; `drafters` start from
    the plain meaning of their probabilities, and are asked while they pay for their time (`budget.backoff`). `syntax`: the syntax table in
    the model's tokens, None: none. `weights` None: the shipped ones. `rates`: online learning rates of mix and states.
    """

    active = True

    def __init__(
        self,
        options: DraftOptions,
        *,
        datastore: DatastoreDrafter | None = None,
        drafters: Sequence[Drafter] = (),
        syntax: SyntaxTable | None = None,
        weights: Weights | None = None,
        rates: tuple[float, float] = RATES,
    ) -> None:
        if len(drafters) >= features.MAX_DRAFTERS:
            raise ValueError(f"number of drafters must be 0 to {features.MAX_DRAFTERS - 1}, got {len(drafters)}")
        self.vocab_size, self.history = options.vocab_size, options.history
        self.spec_length, self.spec_rows, max_seqs = options.spec_length, options.spec_rows, options.max_seqs
        self.chains = False
        """Whether to draft chains, for hosts that cannot verify trees. May change from step to step."""
        self.datastore, self.similar = datastore, options.similar
        self._schedule = DatastoreSchedule(max_seqs)
        self.drafters: list[Drafter | None] = list(drafters)
        self._pausable = [bool(getattr(drafter, "tolerates_gaps", False)) for drafter in drafters]
        self._backoffs = [DrafterBackoff(OWN_TIME_SHARE if pausable else MAX_TIME_SHARE) for pausable in self._pausable]
        self._asked: list[int] = []
        """Indices of the drafters that were asked in this step."""
        self._pass_ms = 0.0
        """Predicted milliseconds of this step's pass."""
        self.source_names = [*SOURCES, DatastoreDrafter.name, *(d.name for d in drafters)]
        self._calibration = new_calibration()
        self._rates = np.array(rates, np.float64)
        self.weights = weights if weights is not None else load_weights() if WEIGHTS.exists() else make_cold_weights()
        self._contexts = np.array([n for n in ngram_table.LADDER if n < options.max_order and options.use_ngram], np.int32)
        self._own = ngram_table.TablePool(max_seqs, self.history, len(self._contexts))
        self._states, self._buffers = self._own.states, self._own.buffers
        self._output_cache = OutputCache(options.answers, self._contexts)
        self._predictions: dict[int, np.ndarray] = {}
        self._recycles = options.recycle and options.use_ngram
        self._info_readers = [d for d, drafter in enumerate(drafters) if isinstance(drafter, NeedsSequenceInfo)]
        self._topk_readers = [d for d, drafter in enumerate(drafters) if isinstance(drafter, NeedsTopK)]
        self._state_readers = [d for d, drafter in enumerate(drafters) if isinstance(drafter, NeedsHiddenStates)]
        self.needs_topk = self._recycles or bool(self._topk_readers)
        self.reads_hidden_states = bool(self._state_readers)
        self._kv_drafters = [d for d, drafter in enumerate(drafters) if isinstance(drafter, NeedsKvRoom)]
        self.keeps_kv = bool(self._kv_drafters)
        self._recycled = new_recycled(self.vocab_size, PAIRS) if self._recycles else new_recycled(0, 0)
        self._bans = TokenBans(np.zeros(max_seqs, np.int64), np.zeros((max_seqs, 4), np.int64))
        self._nodes = features.new_nodes(max_seqs * (self.spec_rows + 1))
        self._scratch = features.new_scratch()
        self._syntax = syntax if syntax is not None else make_empty_syntax()
        self._draft_state_made: DraftState | None = None
        self._last_trees: dict[int, DraftTree] = {}
        self._n_external = 0

    @property
    def _draft_state(self) -> DraftState:
        """The arrays for compiled code; made by compiled code when a draft first needs them."""
        if self._draft_state_made is None:
            self._draft_state_made = self._make_draft_state()
        return self._draft_state_made

    def _make_draft_state(self) -> DraftState:
        tables = self._states, self._output_cache.tables.states, self._contexts
        learned = self._recycled, self._calibration, SOURCE_MAP, self._syntax, self._rates
        return tree_builder.new_draft_state(*tables, self._nodes, self.weights, self._bans, *learned, self._scratch)

    @property
    def needs_hidden_states(self) -> bool:
        return any(
            self.drafters[d] is not None and not (self._pausable[d] and self._backoffs[d].n_paused_steps) for d in self._state_readers
        )

    def bind(self, runner: Any) -> None:
        for drafter in self.drafters:
            if isinstance(drafter, NeedsModel):
                drafter.bind(runner)

    def has_room(self, n_tokens: Sequence[int]) -> bool:
        return all(self._call_drafter(d, "has_room", n_tokens) is not False for d in self._kv_drafters)

    def begin(self, slot: int, tokens: np.ndarray, params: DraftParams = DRAFT_DEFAULTS) -> None:
        if self._buffers[slot] is not None:
            self.end(slot)
        tokens = np.ascontiguousarray(tokens, np.int32)
        kept = tokens[-(self.history + ngram_table.LADDER[-1]) :]
        n_similar = 0
        if self.datastore is not None:  # older than the sequence's own text, and so weaker
            self.datastore.begin(slot, tokens, params.datastores)
            pays = self._schedule.begin(slot)
            similar = self.datastore.find_similar(tokens[: len(tokens) - params.n_output], params.datastores) if pays else None
            room = self.history + ngram_table.LADDER[-1] - len(kept)
            if similar is not None and len(similar) and room > 0:
                n_similar = len(similar[-room:])
                kept = np.concatenate([similar[-room:], kept])
        banned = set(params.banned)
        codes = np.unique([2 * t for t in params.stops if t not in banned] + [2 * t + 1 for t in banned]).astype(np.int64)
        if len(codes) > self._bans.codes.shape[1]:
            wider = np.zeros((len(self._buffers), ngram_table.next_power_of_two(len(codes))), np.int64)
            wider[:, : self._bans.codes.shape[1]] = self._bans.codes
            self._bans = TokenBans(self._bans.n, wider)
            self._draft_state_made = None
        self._bans.n[slot] = len(codes)
        self._bans.codes[slot, : len(codes)] = codes
        cap = len(kept) + MAX_NEW_TOKENS
        self._own.allocate(slot, cap=cap, entries=cap * (len(self._contexts) + 1))
        state = self._states[slot]
        ngram_table.fill_tables(state, self._contexts, kept, self.history)
        state[ngram_table.OUTPUT_CACHE_ROW] = self._output_cache.find_row(params.tenant)
        state[ngram_table.N_SIMILAR], state[ngram_table.TEMPERATURE] = n_similar, math.ceil(1000 * min(params.temperature, 1000))
        if params.prediction is not None and len(params.prediction):
            self._predictions[slot] = predicted = np.ascontiguousarray(params.prediction, np.int32)
            state[ngram_table.PREDICTION_ADDRESS], state[ngram_table.PREDICTION_LENGTH] = predicted.ctypes.data, len(predicted)
            state[ngram_table.PREDICTION_AT] = 0
            if params.n_output:
                tree_builder.follow_output(state, tokens[len(tokens) - params.n_output :])
        for d in range(len(self.drafters)):
            self._call_drafter(d, "begin", slot, tokens)
        for d in self._info_readers if params.info is not None else ():
            self._call_drafter(d, "attach", slot, params.info)

    def propose(
        self, slots: np.ndarray, max_depth: np.ndarray, cost_ms: np.ndarray, base_rows: int, max_nodes: int, threshold: float = 0.0
    ) -> list[DraftTree]:
        """Return trees of the nodes that pay for their time."""
        slots = np.ascontiguousarray(slots, np.int32)
        stored = self._search_datastore(self.datastore, slots, max_depth, threshold) if self.datastore is not None else None
        external = self._collect_external(slots, max_depth, max_nodes, stored)
        start, tokens, parents, probs, sources = tree_builder.build_trees(
            self._draft_state,
            slots,
            np.minimum(max_depth, self.spec_length, dtype=np.int32),
            np.ascontiguousarray(cost_ms, np.float64),
            base_rows,
            max_nodes,
            float(threshold),
            self.chains,
            external,
        )
        cuts = start.tolist()
        trees = [DraftTree(tokens[a:b], parents[a:b], probs[a:b], sources[a:b]) for a, b in itertools.pairwise(cuts)]
        if stored is not None and len(stored.tokens):
            self._set_store_positions(slots, trees, stored)
        self._pass_ms = float(cost_ms[min(base_rows + cuts[-1], len(cost_ms) - 1)])
        if self._n_external > 1:
            self._last_trees = dict(zip(slots.tolist(), trees, strict=True))
        return trees

    def observe(self, slots: np.ndarray, accepted: list[np.ndarray], paths: list[np.ndarray], seen: PassTopK | None = None) -> None:
        slots = np.ascontiguousarray(slots, np.int32)
        rows = _NOTHING_SEEN
        if seen is not None and self._recycles:
            batch = seen.batch
            rows = (
                seen.sequences, batch.input_ids, batch.parents, batch.roots, batch.ends, batch.root_logits, seen.tokens, seen.logits,
            )  # fmt: skip
        for d in self._topk_readers:
            for slot, tree, likely in iterate_topk(seen):
                self._call_drafter(d, "on_topk", slot, tree, likely)
        draft_state, verified = self._draft_state, (*concatenate_ragged(accepted), *concatenate_ragged(paths))
        new_start, new, path_start, path = verified
        b = 0
        while True:
            b = tree_builder.update(draft_state, slots, b, verified, self.history, self._n_external, rows)
            if b == len(slots):
                break
            self._own.enlarge_buffer(int(slots[b]), int(new_start[b + 1] - new_start[b]), self._contexts)
        if self.datastore is not None:
            self.datastore.observe(slots, new_start, new)
            self._record_datastore_gains(slots, path_start, path)
        if self.drafters:
            self._observe_drafters(slots.tolist(), accepted, [path[path >= 0] for path in paths], len(new))

    def end(self, slot: int) -> None:
        if self._buffers[slot] is None:
            return
        self._own.free(slot)
        self._predictions.pop(slot, None)
        self._last_trees.pop(slot, None)
        if self.datastore is not None:
            self.datastore.end(slot)
        self._schedule.end(slot)  # also where the stores have gone since it began
        for d in range(len(self.drafters)):
            self._call_drafter(d, "end", slot)

    def remember(self, answer: np.ndarray, tenant: str = "") -> None:
        """Add a finished sequence's output [n] int32 to the tenant's output cache, which sequences that begin from now on use."""
        dropped = self._output_cache.add(answer, tenant)
        if dropped:
            self._states[self._states[:, ngram_table.OUTPUT_CACHE_ROW] == dropped, ngram_table.OUTPUT_CACHE_ROW] = 0

    def cools_down(self, seq: CoolingSequence) -> bool:
        unpredictable = seq.cooldown > 0 or is_unpredictable(int(self._states[seq.slot, ngram_table.HIT_HISTORY]))
        seq.cooldown, seq.last_cooldown, pauses = update_cooldown(seq.cooldown, seq.last_cooldown, unpredictable)
        return pauses

    def prepare_native(self, slots: np.ndarray, n_tokens: int) -> NativeDrafting | None:
        active = [d for d, drafter in enumerate(self.drafters) if drafter is not None]
        if not all(self._pausable[d] for d in active):
            return None
        n_steps = self._schedule.n_quiet_steps if self.datastore is not None else sys.maxsize
        n_steps = min([n_steps, *(self._backoffs[d].n_paused_steps - 1 for d in active)])  # the last pause's pass leaves hidden states
        if n_steps < 1:
            return None
        draft_state = self._draft_state
        while (b := tree_builder.find_full_table(self._states, slots, self._contexts, self.history, n_tokens)) < len(slots):
            self._own.enlarge_buffer(int(slots[b]), n_tokens, self._contexts)
        return NativeDrafting(draft_state, n_steps, self.spec_length, self.spec_rows, self.history, self.chains, self._recycles)

    def observe_native_steps(self, n_steps: int, slots: np.ndarray, appended: list[np.ndarray]) -> None:
        if self.datastore is not None:
            self._schedule.skip_steps(n_steps)
            self.datastore.observe(slots, *concatenate_ragged(appended))
        for d, drafter in enumerate(self.drafters):
            if drafter is not None:
                self._backoffs[d].skip_steps(n_steps)
                for slot, tokens in zip(slots.tolist(), appended, strict=True):
                    self._call_drafter(d, "observe", slot, np.asarray(tokens, np.int32), _NO_TOKENS)

    def record_topk(self, before: np.ndarray, last: np.ndarray, tokens: np.ndarray, logits: np.ndarray) -> None:
        """Keep the target's top tokens [n, KEPT] int32 and logits [n, KEPT] float32, most likely first, after tokens `last` [n] int32,
        each of which follows `before` [n] int32 (-1: nothing)."""
        if self._recycles:
            record_topk_rows(self._recycled, before, last, tokens, logits)

    def on_hidden_states(self, slot: int, first: int, states: np.ndarray) -> None:
        for d in self._state_readers:
            self._call_drafter(d, "on_hidden_states", slot, first, states)

    def get_source(self, tree: DraftTree, node: int) -> str:
        name = super().get_source(tree, node)
        if name != DatastoreDrafter.name or tree.store_positions is None or tree.store_positions[node] < 0 or self.datastore is None:
            return name
        return f"{name}:{self.datastore.locate(int(tree.store_positions[node]))}"

    def list_reliability(self) -> list[Reliability]:
        return list_reliability(self._calibration, self.source_names)

    def index(self, store: Datastore) -> list[VectorIndex]:
        """Return a store's index for similar files, unless it is opened when it is needed: beside MAX_STORES others."""
        many = self.datastore is not None and len(self.datastore.stores) >= MAX_STORES
        return build_indices([store.snapshot]) if self.similar and not many else []

    def use_datastores(
        self, stores: Mapping[str, Datastore], running: Iterable[RunningSequence], ready: list[VectorIndex] | None = None
    ) -> None:
        if not stores:
            self.datastore = None
        elif self.datastore is not None:
            self.datastore.use(stores, ready or ())
        else:
            drafter = DatastoreDrafter(stores, len(self._buffers), similar=self.similar, ready=ready, vocab_size=self.vocab_size)
            for slot, tokens, datastores in running:
                drafter.begin(slot, tokens, datastores)
                self._schedule.begin(slot)
            self.datastore = drafter

    def _search_datastore(self, datastore: DatastoreDrafter, slots: np.ndarray, max_depth: np.ndarray, threshold: float) -> Drafts | None:
        """Return the datastore's drafts for the slots [B] that are to be searched for in this step; None if there are none."""
        searched = self._schedule.choose_slots(slots, (np.asarray(max_depth) > 0) & datastore.can_search, threshold)
        if searched is None:
            return None
        if searched.all():
            return datastore.propose(slots)
        drafts = datastore.propose(slots[searched])
        start = np.zeros(len(slots) + 1, np.int64)
        start[1:][searched] = np.diff(drafts.start)
        return drafts._replace(start=np.cumsum(start))

    def _record_datastore_gains(self, slots: np.ndarray, path_start: np.ndarray, path: np.ndarray) -> None:
        """Record what the datastore brought: accepted nodes whose source it is, or a similar file."""
        searched = self._schedule.get_searched(slots)
        if searched is None or not searched.any():
            return
        batch_of = np.repeat(np.arange(len(slots)), np.diff(path_start))
        R = len(self._nodes.token) // len(self._states)
        source = self._nodes.source[slots[batch_of] * R + 1 + path]
        gained = (path >= 0) & (source >= SOURCES.index("similar")) & (source <= len(SOURCES))  # the datastore's number; drafters follow
        self._schedule.record_gains(slots[searched], np.bincount(batch_of[gained], minlength=len(slots))[searched])

    def _call_drafter(self, d: int, what: str, *args: object) -> object:
        """Call a method of drafter d, and switch it off if that raises."""
        drafter = self.drafters[d]
        if drafter is None:
            return None
        try:
            return getattr(drafter, what)(*args)
        except Exception:
            log.exception("drafter %r failed in %s and is switched off", getattr(drafter, "name", d), what)
            self.drafters[d] = None
            return None

    def _collect_external(self, slots: np.ndarray, max_depth: np.ndarray, budget: int, stored: Drafts | None) -> ExternalTrees:
        """Return all trees that come from outside the tables, sequence by sequence; set `_n_external`, how many each has."""
        active = [d for d, drafter in enumerate(self.drafters) if drafter is not None]
        self._n_external = 1 + len(self.drafters) if active else int(stored is not None)
        if not active:
            return NO_EXTERNAL if stored is None else ExternalTrees(stored.start, stored.tokens, stored.parents, stored.codes)
        D, seqs = self._n_external, slots.tolist()
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = [(_NO_TOKENS, _NO_TOKENS, _NO_CODES)] * (D * len(seqs))
        if stored is not None:
            for b, (first, end) in enumerate(itertools.pairwise(stored.start.tolist())):
                parts[b * D] = stored.tokens[first:end], stored.parents[first:end], stored.codes[first:end]
        asked = np.flatnonzero(max_depth > 0).tolist()  # the others are in a cooldown, or at their end
        self._asked = [d for d in active if asked and self._backoffs[d].should_ask()]
        for d in self._asked:
            started = time.perf_counter()
            answer = self._call_drafter(d, "propose", [seqs[b] for b in asked], budget)
            self._backoffs[d].ms += (time.perf_counter() - started) * 1e3
            for b, tree in zip(asked, answer if isinstance(answer, (list, tuple)) else (), strict=False):
                if self._check_tree(d, tree):
                    parts[b * D + 1 + d] = np.asarray(tree.tokens, np.int32), np.asarray(tree.parents, np.int32), _encode_probs(tree)
        bounds = np.zeros(len(parts) + 1, np.int64)
        bounds[1:] = np.cumsum([len(tokens) for tokens, _, _ in parts])
        return ExternalTrees(bounds, *map(np.concatenate, zip(*parts, strict=True)))

    def _set_store_positions(self, slots: np.ndarray, trees: list[DraftTree], stored: Drafts) -> None:
        """Set the store positions of the nodes that the datastore has, too."""
        R = len(self._nodes.token) // len(self._states)
        for b, (slot, tree) in enumerate(zip(slots.tolist(), trees, strict=True)):
            node = self._nodes.external[slot * R + 1 : slot * R + 1 + len(tree), features.DATASTORE]
            if stored.start[b + 1] > stored.start[b]:
                tree.store_positions = np.where(node >= 0, stored.positions[stored.start[b] + np.maximum(node, 0)], -1)

    def _check_tree(self, d: int, tree: Candidates) -> bool:
        """Return whether an external tree is well-formed; if not, switch its drafter off."""
        if ok := is_sound(tree, self.vocab_size):
            return ok
        if self.drafters[d] is not None:
            log.error("drafter %r gave a malformed tree and is switched off", self.source_names[len(SOURCES) + 1 + d])
            self.drafters[d] = None
        return False

    def _observe_drafters(self, slots: list[int], accepted: list[np.ndarray], paths: list[np.ndarray], n_new: int) -> None:
        """Record what the asked drafters brought, and call `observe` of all drafters."""
        for d in self._asked:
            gained = sum(int(self._find_drafted(slot, d)[path].sum()) for slot, path in zip(slots, paths, strict=True))
            self._backoffs[d].record_step(gained, n_new, self._pass_ms)
        for d, drafter in enumerate(self.drafters):
            if drafter is not None:
                for slot, tokens, path in zip(slots, accepted, paths, strict=True):
                    self._call_drafter(d, "observe", slot, np.asarray(tokens, np.int32), self._find_rejected(slot, d, path))
        self._asked = []
        self._last_trees.clear()

    def _find_rejected(self, slot: int, d: int, path: np.ndarray) -> np.ndarray:
        """Return the tokens of drafter d's nodes that are not on the accepted path."""
        mine = self._find_drafted(slot, d)
        mine[np.asarray(path, np.int64)] = False
        return self._last_trees.get(slot, NO_TREE).tokens[mine]

    def _find_drafted(self, slot: int, d: int) -> np.ndarray:
        """Return which nodes of a slot's last tree are drafter d's: [N] bool."""
        return self._last_trees.get(slot, NO_TREE).sources == len(SOURCES) + 1 + d


def _encode_probs(tree: Candidates) -> np.ndarray:
    """Return codes [N] int16: the drafter's probability of each node given its parent, in equal steps."""
    probs, parents = np.asarray(tree.probs, np.float32), np.asarray(tree.parents, np.int32)
    above = np.where(parents >= 0, probs[parents], np.float32(1.0)) if len(probs) else probs
    return (np.clip(probs / np.maximum(above, 1e-9), 0.0, 1.0) * features.MAX_CODE).astype(np.int16)


SOURCES = ("ngram", "answers", "prediction", "recycled", "syntax", "similar")
_GROUPS = (
    range(features.OUTPUT_CACHE),
    range(features.OUTPUT_CACHE, features.PREDICTED),
    (features.PREDICTED,),
    (features.RECYCLED, features.RECYCLED_PAIR),
    (features.SYNTAX,),
)


def _make_source_map() -> SourceMap:
    of_group = np.zeros((features.GROUPS, 1), np.uint8)
    for source, groups in enumerate(_GROUPS):
        of_group[list(groups)] = source
    of_group[features.EXTERNAL :, 0] = len(SOURCES) + np.arange(features.MAX_DRAFTERS)
    of_state = np.where(features.find_proposing_states(), of_group, np.uint8(NO_PROPOSER))
    return SourceMap(of_state, SOURCES.index("ngram"), SOURCES.index("similar"))


SOURCE_MAP = _make_source_map()
_NO_CODES = np.empty(0, np.int16)
_NOTHING_SEEN = (
    np.empty((0, 3), np.int64), np.empty(0, np.int64), *(np.empty(0, np.int32) for _ in range(4)), np.empty((0, KEPT), np.int32),
    np.empty((0, KEPT), np.float32),
)  # fmt: skip
NO_EXTERNAL = ExternalTrees(np.zeros(1, np.int64), _NO_TOKENS, _NO_TOKENS, _NO_CODES)


@functools.cache
def get_idle_drafting() -> NativeDrafting:
    """Return what compiled code needs for sequences without drafts."""
    proposer = TreeProposer(DraftOptions(vocab_size=1, max_seqs=1, spec_rows=0, answers=0, recycle=False), weights=make_cold_weights())
    drafting = proposer.prepare_native(np.empty(0, np.int32), 0)
    assert drafting is not None
    return drafting


def warmup() -> None:
    """Compile everything that a step needs, or load it from disk. Safe to call from another thread."""
    proposer = TreeProposer(DraftOptions(vocab_size=16, spec_rows=4, max_seqs=1), weights=make_cold_weights())
    slots, cost = np.zeros(1, np.int32), np.ones(8)
    tables = BlockTables(1, 1, 16)
    tables.reserve(0, 2)
    batch = pack([Span(0, np.array([1], np.int32), 0)], tables)
    proposer.remember(np.array([1, 2, 3], np.int32))
    params = DraftParams(stops=[5], prediction=np.array([3, 1], np.int32), n_output=1)
    proposer.begin(0, np.array([1, 2, 3, 1, 2], np.int32), params)
    trees = proposer.propose(slots, np.full(1, 4, np.int32), cost, 1, 4)
    seen = PassTopK(np.array([[0, -1, 0]]), batch, *find_topk(np.zeros((1, 16), np.float32)))
    proposer.observe(slots, [np.full(40, 3, np.int32)], [np.arange(min(len(trees[0]), 1), dtype=np.int32)], seen)
    proposer.observe(slots, [np.full(400, 3, np.int32)], [_NO_TOKENS])
    proposer.end(0)
