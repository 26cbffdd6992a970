"""The engine's one entry to drafting: owns the buffers of every sequence, the weights and the other drafters; decides nothing.

Committed tokens come in (`begin`, `observe`), draft trees go out (`propose`), each step in one compiled call for the whole batch.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..types import DraftTree
from . import evidence, merge, ngram
from .base import Candidates, Drafter
from .evidence import Nodes, Outside
from .merge import Guard, Weights

log = logging.getLogger(__name__)
WEIGHTS = Path(__file__).with_name("weights.npz")
MAX_ORDER = ngram.LADDER[-1] + 1
HISTORY = 32_000
SPEC_LENGTH = 64
SPEC_ROWS = 64
RATES = (0.02, 0.02)
"""Online learning rates of mix and states."""

_NO_TOKENS = np.empty(0, np.int32)


def cold_weights() -> Weights:
    """Weights that know nothing but the meaning of a count: what learning starts from."""
    states = np.zeros((evidence.GROUPS, evidence.STATES), np.float32)
    context_groups = [*range(evidence.ORDERS), evidence.GAP]
    for visits in range(1, ngram.REACH + 1):
        for seen in range(1, 1 << visits):
            hits = seen.bit_count()
            states[context_groups, 1 << visits | seen] = np.log((hits + 0.05) / (visits - hits + 0.4)) + 0.3 * (seen & 1)
    states[context_groups, 2 << ngram.REACH :] = -2.0
    states[context_groups, (2 << ngram.REACH) + 2 * ngram.REACH + 2 :] = 3.0
    states[evidence.EXTERNAL :, 2:22] = np.log((np.arange(20) + 0.5) / (19.5 - np.arange(20)))
    mix = np.full((evidence.SETS, evidence.GROUPS + 1), 0.25, np.float32)
    mix[:, evidence.BIAS] = 0.0
    mix[: 3 * evidence.MODES, evidence.EXTERNAL : evidence.BIAS] = 1.0
    return Weights(states, mix)


def load_weights(path: Path | str = WEIGHTS) -> Weights:
    """Weights written by `save_weights`. Raises ValueError where the file does not fit this version's shapes."""
    cold = cold_weights()
    with np.load(path, allow_pickle=False) as file:
        read = Weights(*(np.ascontiguousarray(file[name], np.float32) for name in Weights._fields))
    for name, a, b in zip(Weights._fields, read, cold, strict=True):
        if a.shape != b.shape or not np.isfinite(a).all():
            raise ValueError(f"{path}: {name} must be finite and of shape {b.shape}, got shape {a.shape}")
    return read


def save_weights(path: Path | str, weights: Weights) -> None:
    np.savez_compressed(path, allow_pickle=False, **{name: a.astype(np.float16) for name, a in zip(Weights._fields, weights, strict=True)})


def _power_of_two(n: int) -> int:
    return 1 << max(int(n) - 1, 1).bit_length()


class Proposer:
    """Draft trees for up to `max_seqs` sequences at a time. Not thread-safe: one caller, the engine's loop.

    `max_order` is the longest n-gram in the tables (2 to 25), `history` the latest tokens that they remember (16 to 60000);
    a tree has at most `spec_rows` nodes and `spec_length` levels. `source_names[tree.sources[i]]` says who proposed node i.
    """

    source_names: list[str]

    def __init__(
        self,
        *,
        vocab_size: int,
        max_order: int = MAX_ORDER,
        history: int = HISTORY,
        spec_length: int = SPEC_LENGTH,
        spec_rows: int = SPEC_ROWS,
        max_seqs: int = 64,
        drafters: Sequence[Drafter] = (),
        use_ngram: bool = True,
        weights: Weights | None = None,
        rates: tuple[float, float] = RATES,
    ) -> None:
        for name, value, lo, hi in (
            ("vocab_size", vocab_size, 1, 2**31 - 1),
            ("max_order", max_order, 2, MAX_ORDER),
            ("history", history, 16, ngram.MAX_HISTORY),
            ("spec_length", spec_length, 0, 4096),
            ("spec_rows", spec_rows, 0, 4096),
            ("max_seqs", max_seqs, 1, 65536),
            ("number of drafters", len(drafters), 0, evidence.MAX_DRAFTERS),
        ):
            if not lo <= value <= hi:
                raise ValueError(f"{name} must be {lo} to {hi}, got {value}")
        self.vocab_size, self.history, self.spec_length = vocab_size, history, spec_length
        self.drafters: list[Drafter | None] = list(drafters)
        self.source_names = ["ngram"] * use_ngram + [d.name for d in drafters]
        self._first_source = int(use_ngram)
        self._rates = np.array(rates, np.float64)
        self.weights = weights if weights is not None else load_weights() if WEIGHTS.exists() else cold_weights()
        self._contexts = np.array([n for n in ngram.LADDER if n < max_order and use_ngram], np.int32)
        self._states = np.zeros((max_seqs, ngram.STATE_COLUMNS), np.int64)
        self._buffers: list[np.ndarray | None] = [None] * max_seqs
        self._guard = Guard(np.zeros(max_seqs, np.int64), np.zeros((max_seqs, 4), np.int64))
        rows = max_seqs * (spec_rows + 1)
        self._nodes = Nodes(
            token=np.zeros(rows, np.int32),
            parent=np.zeros(rows, np.int32),
            depth=np.zeros(rows, np.int32),
            prob=np.zeros(rows, np.float64),
            source=np.zeros(rows, np.uint8),
            place=np.zeros((rows, 3), np.int64),
            hits=np.zeros(rows, np.int64),
            top=np.zeros(rows, np.int32),
            outside=np.full((rows, evidence.MAX_DRAFTERS), -2, np.int32),
            set=np.zeros(rows, np.int32),
            n=np.full(rows, -1, np.int32),
            cand_token=np.zeros(rows * evidence.WIDTH, np.int32),
            scale=np.ones(rows),
            cand_prob=np.zeros(rows * evidence.WIDTH),
            cand_state=np.zeros((rows * evidence.WIDTH, evidence.GROUPS), np.int16),
        )
        self._work = evidence.new_work()
        self._last_trees: dict[int, DraftTree] = {}

    def begin(self, slot: int, tokens: np.ndarray, *, banned: Sequence[int] = (), stops: Sequence[int] = ()) -> None:
        """A sequence starts, or resumes after preemption, with these committed tokens [n] int32.

        `banned` tokens are never drafted; a stop may be drafted, but nothing behind it.
        """
        if self._buffers[slot] is not None:
            self.end(slot)
        tokens = np.ascontiguousarray(tokens, np.int32)
        kept = tokens[-(self.history + ngram.LADDER[-1]) :]
        self._allocate(slot, cap=len(kept) + 64, entries=(len(kept) + 64) * (len(self._contexts) + 1))
        ngram.seed(self._states[slot], self._contexts, kept, self.history)
        codes = np.unique([2 * t for t in stops if t not in set(banned)] + [2 * t + 1 for t in banned]).astype(np.int64)
        if len(codes) > self._guard.codes.shape[1]:
            wider = np.zeros((len(self._buffers), _power_of_two(len(codes))), np.int64)
            wider[:, : self._guard.codes.shape[1]] = self._guard.codes
            self._guard = Guard(self._guard.n, wider)
        self._guard.n[slot] = len(codes)
        self._guard.codes[slot, : len(codes)] = codes
        for d in range(len(self.drafters)):
            self._ask(d, "begin", slot, tokens)

    def propose(self, slots: np.ndarray, max_depth: np.ndarray, cost_ms: np.ndarray, base_rows: int, max_nodes: int) -> list[DraftTree]:
        """One tree per slot (possibly empty), together at most `max_nodes` nodes: those that make most tokens per second.

        slots [B] int32; max_depth [B] int32, deepest useful node (0: no draft); cost_ms [R+1] float64, time of a pass with T rows at
        index T; base_rows, the rows that the pass carries without drafts.
        """
        slots = np.ascontiguousarray(slots, np.int32)
        outside, n_drafters = self._outside(slots, max_nodes)
        start, tokens, parents, probs, sources = merge.grow(
            self._states,
            self._contexts,
            slots,
            np.ascontiguousarray(max_depth, np.int32),
            np.ascontiguousarray(cost_ms, np.float64),
            base_rows,
            max_nodes,
            self.spec_length,
            self._nodes,
            self.weights,
            self._guard,
            outside,
            n_drafters,
            self._first_source,
            self._work,
        )
        cuts = start.tolist()
        trees = [DraftTree(tokens[a:b], parents[a:b], probs[a:b], sources[a:b]) for a, b in itertools.pairwise(cuts)]
        if n_drafters:
            self._last_trees = dict(zip(slots.tolist(), trees, strict=True))
        return trees

    def observe(self, slots: np.ndarray, accepted: list[np.ndarray], paths: list[np.ndarray]) -> None:
        """After the walk: what was appended to each sequence, and which nodes of its last tree are on the accepted path.

        accepted[b] [k] int32: path tokens, then the model's own pick, cut where the sequence ended; paths[b] [j] int32 in depth order.
        A slot that was not proposed for learns nothing.
        """
        slots = np.ascontiguousarray(slots, np.int32)
        new_start, new = _concatenate(accepted)
        path_start, path = _concatenate(paths)
        b = 0
        while True:
            b = merge.settle(
                self._states,
                self._contexts,
                slots,
                b,
                new_start,
                new,
                path_start,
                path,
                self.history,
                self._nodes,
                len(self.drafters),
                self.weights,
                self._rates,
                self._work,
            )
            if b == len(slots):
                break
            self._grow_buffer(int(slots[b]), int(new_start[b + 1] - new_start[b]))
        for d, drafter in enumerate(self.drafters):
            if drafter is not None:
                for b, slot in enumerate(slots.tolist()):
                    self._ask(d, "observe", slot, np.asarray(accepted[b], np.int32), self._rejected(slot, d, paths[b]))
        self._last_trees.clear()

    def end(self, slot: int) -> None:
        """Free the slot's memory. Unknown or free slots are left alone."""
        if self._buffers[slot] is None:
            return
        self._buffers[slot] = None
        self._states[slot] = 0
        self._last_trees.pop(slot, None)
        for d in range(len(self.drafters)):
            self._ask(d, "end", slot)

    def chain(self, slot: int, length: int) -> np.ndarray:
        """The tables' own prediction, without probabilities: [n] int32, n <= length, the longest context's most frequent continuations."""
        return ngram.chain(self._states[slot], self._contexts, length)

    def memory(self, slot: int) -> int:
        """Bytes that the tables of a slot take."""
        buffer = self._buffers[slot]
        return 0 if buffer is None else buffer.nbytes

    def _allocate(self, slot: int, cap: int, entries: int) -> None:
        """A fresh zeroed buffer with room for `cap` tokens and so many table entries; the state row starts over."""
        K = len(self._contexts) + 1
        cap, size = _power_of_two(cap), _power_of_two(entries + (entries >> 1) + 4)
        buffer = np.zeros(2 * size + 8 + (cap * (K + 1) + 1) // 2, np.uint64)
        address = (buffer.ctypes.data + 63) & ~63
        state = self._states[slot]
        state[:] = 0
        state[ngram.TABLE], state[ngram.SHIFT] = address, 65 - size.bit_length()
        state[ngram.TOKENS], state[ngram.CAP] = address + 16 * size, cap
        state[ngram.LINKS] = state[ngram.TOKENS] + 4 * cap
        state[ngram.FOLLOW], state[ngram.DRAFTED], state[ngram.HITS] = -1, -1, 1
        self._buffers[slot] = buffer

    def _grow_buffer(self, slot: int, n: int) -> None:
        old, keep = self._states[slot].copy(), self._buffers[slot]
        assert keep is not None, f"slot {slot} was never begun"
        length = min(int(old[ngram.LENGTH]), self.history + ngram.LADDER[-1]) + n
        entries = int(old[ngram.ENTRIES]) + n * (len(self._contexts) + 1)
        self._allocate(slot, cap=length + length // 8, entries=entries + entries // 8)
        new = self._states[slot]
        for column in (ngram.LENGTH, ngram.START, ngram.ENTRIES, ngram.FOLLOW, ngram.MATCHED, ngram.MISSES, ngram.HITS, ngram.DRAFTED):
            new[column] = old[column]
        ngram.move(old, new, self._contexts)

    def _ask(self, d: int, what: str, *args: object) -> object:
        """Call drafter d; one that raises is switched off."""
        drafter = self.drafters[d]
        if drafter is None:
            return None
        try:
            return getattr(drafter, what)(*args)
        except Exception:
            log.exception("drafter %r failed in %s and is switched off", getattr(drafter, "name", d), what)
            self.drafters[d] = None
            return None

    def _outside(self, slots: np.ndarray, budget: int) -> tuple[Outside, int]:
        """Every drafter's trees, laid out sequence by sequence, and the number of drafters (0 if none is on)."""
        if not any(d is not None for d in self.drafters):
            return _NO_OUTSIDE, 0
        D, seqs = len(self.drafters), slots.tolist()
        trees: list[Candidates] = [_NO_CANDIDATES] * (D * len(seqs))
        for d in range(D):
            answer = self._ask(d, "propose", seqs, budget)
            for b, tree in enumerate(answer if isinstance(answer, (list, tuple)) else ()):
                if b < len(seqs) and self._sound(d, tree):
                    trees[b * D + d] = tree
        start = np.zeros(len(trees) + 1, np.int64)
        start[1:] = np.cumsum([len(t.tokens) for t in trees])
        tokens = np.concatenate([np.asarray(t.tokens, np.int32) for t in trees])
        parents = np.concatenate([np.asarray(t.parents, np.int32) for t in trees])
        return Outside(start, tokens, parents, np.concatenate([np.asarray(t.probs, np.float32) for t in trees])), D

    def _sound(self, d: int, tree: Candidates) -> bool:
        """Whether an external tree can be trusted as far as its shape goes; if not, its drafter is switched off."""
        try:
            tokens, parents, probs = (np.asarray(a) for a in (tree.tokens, tree.parents, tree.probs))
            n = len(tokens)
            ok = tokens.shape == parents.shape == probs.shape == (n,)
            ok = ok and bool(((parents >= -1) & (parents < np.arange(n)) & (tokens >= 0) & (tokens < self.vocab_size) & (probs >= 0)).all())
        except Exception:
            ok = False
        if not ok and self.drafters[d] is not None:
            log.error("drafter %r gave a malformed tree and is switched off", self.source_names[self._first_source + d])
            self.drafters[d] = None
        return ok

    def _rejected(self, slot: int, d: int, path: np.ndarray) -> np.ndarray:
        tree = self._last_trees.get(slot)
        if tree is None:
            return _NO_TOKENS
        mine = tree.sources == self._first_source + d
        mine[np.asarray(path, np.int64)] = False
        return tree.tokens[mine]


_NO_CANDIDATES = Candidates(_NO_TOKENS, _NO_TOKENS, np.empty(0, np.float32))
_NO_OUTSIDE = Outside(np.zeros(1, np.int64), _NO_TOKENS, _NO_TOKENS, np.empty(0, np.float32))


def _concatenate(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    start = np.zeros(len(arrays) + 1, np.int64)
    if arrays:
        np.cumsum([len(a) for a in arrays], out=start[1:])
    return start, np.concatenate(arrays, dtype=np.int32, casting="unsafe") if start[-1] else _NO_TOKENS


def warmup() -> None:
    """Compile, or load from the cache on disk, everything that a step needs. Safe to call from another thread."""
    proposer = Proposer(vocab_size=16, spec_rows=4, max_seqs=1, weights=cold_weights())
    slots, cost = np.zeros(1, np.int32), np.ones(8)
    proposer.begin(0, np.array([1, 2, 3, 1, 2], np.int32), stops=[5])
    trees = proposer.propose(slots, np.full(1, 4, np.int32), cost, 1, 4)
    proposer.observe(slots, [np.full(40, 3, np.int32)], [np.arange(min(len(trees[0]), 1), dtype=np.int32)])
    proposer.observe(slots, [np.full(400, 3, np.int32)], [_NO_TOKENS])
    proposer.end(0)
