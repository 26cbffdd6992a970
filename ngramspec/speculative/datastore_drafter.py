"""Draft from suffix datastores: what followed this context in the user's repository, and which of its files are like the request.

Committed tokens go in; one flat tree per sequence comes out, each node with a code for the store's confidence and its position there. It
opens no store and knows no weights. A store that has changed on disk is picked up between two steps; one that has become unreadable keeps
its last generation. Stores have LF line ends: a sequence with CRLF is looked up with LF, and its drafts are written with CRLF.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ngramspec.datastore import DatastoreError, Matcher
from ngramspec.datastore.code_cache import njit
from ngramspec.datastore.line_ends import BEGUN, CRLF, LF, LineEnds
from ngramspec.datastore.reader import Datastore
from ngramspec.datastore.similar_files import SimilarFiles, VectorIndex, build_indices
from ngramspec.datastore.tokens import load_encoder
from ngramspec.speculative.features import MAX_CODE

log = logging.getLogger(__name__)

# Longest context in tokens that is looked up.
MAX_MATCH = 64
# Seconds between two checks for a newer generation of the stores, one `stat` each.
REFRESH_S = 0.25
# Seconds between two checks whether the stores' pages are still in memory: 0.2 ms a segment, and pages that are used stay.
CHECK_PAGES_S = 5.0
# Stores that one sequence drafts from, and that stay open between requests: each has a descriptor, and a step's search passes over all.
MAX_STORES = 64
# Stores that running sequences have open together; one that begins and needs more goes without those.
MAX_OPEN = 256

_LENGTHS = np.searchsorted(np.array((3, 4, 5, 7, 9, 13, 19, 32, 64)), np.arange(65), side="right").astype(np.int64)  # 10 levels
_SHARES = np.array((0.08, 0.25, 0.5, 0.75, 0.95, 1.0))  # 7 levels
_COUNTS = np.array((2, 5))  # 3 levels
assert 10 * (len(_SHARES) + 1) * (len(_COUNTS) + 1) <= MAX_CODE + 1


class Drafts(NamedTuple):
    """One tree per sequence, flat: node i of sequence b is at start[b] + i."""

    start: np.ndarray  # [B + 1] int64
    tokens: np.ndarray  # [N] int32
    parents: np.ndarray  # [N] int32, within the tree; -1: the root
    codes: np.ndarray  # [N] int16
    positions: np.ndarray  # [N] int64, for `locate`


@njit(cache=True, nogil=True)
def _encode_codes(start, parents, counts, match, lengths, shares, levels, out):
    """Write the confidence codes: levels of the match length with the path to the node, its share among its siblings, its count."""
    depth = np.zeros(len(parents), np.int64)
    total = np.zeros(len(parents) + 1, np.int64)
    for b in range(len(start) - 1):
        a, z = start[b], start[b + 1]
        total[a : z + 1] = 0  # of the children of node i at a + 1 + i, of the root's at a; read before the next tree begins
        for i in range(a, z):
            total[a + 1 + parents[i]] += counts[i]
            depth[i] = depth[a + parents[i]] + 1 if parents[i] >= 0 else 0
        for i in range(a, z):
            share, s, c = counts[i] / total[a + 1 + parents[i]], 0, 0
            while s < len(shares) and share >= shares[s]:
                s += 1
            while c < len(levels) and counts[i] >= levels[c]:
                c += 1
            length = lengths[min(match[i] + depth[i], len(lengths) - 1)]
            out[i] = (length * (len(shares) + 1) + s) * (len(levels) + 1) + c


@njit(cache=True, nogil=True)
def _push_recent(recent, fresh, slots, start, tokens):
    """Push new tokens to the front of each slot's recent tokens, newest first."""
    M = recent.shape[1]
    for b in range(len(slots)):
        slot, n = slots[b], start[b + 1] - start[b]
        fresh[slot] = fresh[slot] + n if fresh[slot] >= 0 else -1
        kept = min(n, M)
        for i in range(M - 1, kept - 1, -1):
            recent[slot, i] = recent[slot, i - kept]
        for i in range(kept):
            recent[slot, i] = tokens[start[b + 1] - 1 - i]


def _find_line_ends(store: Datastore, found: Future[LineEnds | None]) -> None:
    """Build the translator of line ends for a store's tokenizer."""
    try:
        found.set_result(LineEnds(load_encoder(Path(store.path), store.snapshot.manifest)))
    except Exception as error:  # CRLF is then looked up as it is
        log.warning("datastore %s: its line ends cannot be translated: %s", store.path, error)
        found.set_result(None)


def warmup() -> None:
    """Compile what looks up in datastores, or load it from disk. Line ends and similar files are left to the first store."""
    drafter, slots = DatastoreDrafter({}, 1), np.zeros(1, np.int32)
    drafter.begin(0, np.zeros(2, np.int32))
    drafter.observe(slots, np.array([0, 1]), np.zeros(1, np.int32))
    drafter.propose(slots)


class DatastoreDrafter:
    """Drafts from datastores for up to `max_seqs` sequences. Not thread-safe: one caller, the proposer.

    It is no `drafter.Drafter`: the proposer gives its trees weights that were learned for its codes.
    """

    name = "datastore"

    def __init__(
        self, stores: Mapping[str, Datastore], max_seqs: int, *, similar: bool = True, ready: Sequence[VectorIndex] | None = None,
        vocab_size: int = sys.maxsize,
    ) -> None:  # fmt: skip
        """Open for these stores. `similar`: also retrieve files like a request, if a store has vectors; `ready`: their indices, made.

        `vocab_size`: token ids that the model has. No other leaves the drafter, whatever a store says: the model reads memory by them.
        """
        self._vocab_size = vocab_size
        self._retrieves_similar = similar
        self.follows_changes = True
        """Whether newer generations of the stores are picked up."""
        self._similar_files: SimilarFiles | None = None
        self._matcher = Matcher([], max_seqs, max_match=MAX_MATCH)
        self._matcher.vocab_size = vocab_size
        self._allowed: dict[int, frozenset[str] | None] = {}
        self._recent = np.full((max_seqs, MAX_MATCH), -1, np.int32)
        self._fresh = np.full(max_seqs, -1, np.int32)
        self._pending: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._refreshed_s = self._checked_pages_s = time.monotonic()
        self.stores: dict[str, Datastore] = {}
        """All, open or not."""
        self._open: list[str] = []
        """Names of the matcher's stores, in its order; those that were opened last come last."""
        self._unreadable: set[str] = set()
        self._crlf = np.zeros(max_seqs, bool)
        self.line_ends: Future[LineEnds | None] | None = None
        """Built in a thread with the first store (1 s for a large vocabulary). Sequences that begin earlier do without."""
        if similar and ready is None:
            ready = build_indices([store.snapshot for store in list(stores.values())[:MAX_STORES]])
        self.use(stores, ready or ())

    def use(self, stores: Mapping[str, Datastore], ready: Sequence[VectorIndex] = ()) -> None:
        """Look up in these stores from now on, for running sequences too. Up to MAX_STORES are opened now, others by the first sequence
        that may use them. Raises ValueError, with nothing changed."""
        before, self.stores = self.stores, dict(stores)
        try:
            kept = [name for name in self._open if name in stores]
            self._open_stores(list(dict.fromkeys([*kept, *stores]))[:MAX_STORES], ready)
        except ValueError:
            self.stores = before
            raise
        for name, store in stores.items():
            if name not in self._open:
                store.release()
        self._unreadable &= self.stores.keys()
        if self.stores and self.line_ends is None:
            self.line_ends = Future()
            store = next(iter(self.stores.values()))
            threading.Thread(target=_find_line_ends, args=(store, self.line_ends), name="ngramspec-line-ends", daemon=True).start()

    def _choose_stores(self, allowed: frozenset[str] | None) -> list[str]:
        """Return the names of the stores that a sequence drafts from: of those that it may use, the first MAX_STORES."""
        if allowed is not None and len(allowed) <= MAX_STORES:
            return [name for name in allowed if name in self.stores]
        return [name for name in self.stores if allowed is None or name in allowed][:MAX_STORES]

    def _open_stores(self, wanted: Sequence[str], ready: Sequence[VectorIndex] = ()) -> None:
        """Open these stores beside those of running sequences, and release of the others those that were used least recently."""
        running = [name for allowed in self._allowed.values() for name in self._choose_stores(allowed)]
        needed = list(dict.fromkeys([*running, *wanted]))[:MAX_OPEN]
        idle = [name for name in reversed(self._open) if name in self.stores and name not in needed]
        snapshots = {}
        for name in [*idle[: max(MAX_STORES - len(needed), 0)][::-1], *needed]:
            try:
                snapshots[name] = self.stores[name].snapshot
            except DatastoreError as error:
                self._report_unreadable(name, f"{error}; requests go without it")
        self._matcher.reset(list(snapshots.values()))
        for name in self._open:
            if name in self.stores and name not in snapshots:
                self.stores[name].release()
        self._open = list(snapshots)
        self._follow_snapshots(ready)
        if not self.follows_changes:
            self.wait_until_loaded()

    def _report_unreadable(self, name: str, what: str) -> None:
        if name not in self._unreadable:
            self._unreadable.add(name)
            log.error("datastore %s: %s", self.stores[name].path, what)

    def _follow_snapshots(self, ready: Sequence[VectorIndex] = ()) -> None:
        """Give the matcher's new snapshots to the index of similar files, and recompute which of them each sequence may use."""
        for slot, allowed in self._allowed.items():
            self._matcher.begin(slot, self._make_store_mask(allowed))
        snapshots = self._matcher.snapshots
        if self._similar_files is not None:
            self._similar_files.reset(snapshots, ready)
        elif self._retrieves_similar and any(segment.header.n_vectors for snapshot in snapshots for segment in snapshot.segments):
            self._similar_files = SimilarFiles(snapshots, ready)

    def _make_store_mask(self, allowed: frozenset[str] | None) -> int:
        names = set(self._choose_stores(allowed))
        return sum(1 << i for i, name in enumerate(self._open) if name in names)

    def begin(self, slot: int, tokens: np.ndarray, allowed: frozenset[str] | None = None) -> None:
        """Start a sequence with these committed tokens [n] int32. It uses the stores of these names, None: all; the first MAX_STORES."""
        latest = tokens[-MAX_MATCH:][::-1]
        self.refresh()
        self._apply_pending()
        wanted = self._choose_stores(allowed)
        if not set(wanted) <= set(self._open):
            self._open_stores(wanted)
        self._recent[slot] = -1
        self._recent[slot, : len(latest)] = latest
        self._fresh[slot] = -1
        self._allowed[slot] = allowed
        self._crlf[slot] = self._get_crlf_translator(tokens) is not None
        self._matcher.begin(slot, self._make_store_mask(allowed))

    def find_similar(self, prompt: np.ndarray, allowed: frozenset[str] | None = None) -> np.ndarray | None:
        """Return tokens [n] int32 of the files most like the prompt [m] int32, the nearest last; None if there are none."""
        if self._similar_files is None:
            return None
        line_ends, stores = self._get_crlf_translator(prompt), self._make_store_mask(allowed) & self._matcher.loaded_stores
        try:
            if line_ends is None:
                found = self._similar_files.find_similar(prompt, stores=stores)
            else:
                found = line_ends.to_crlf(self._similar_files.find_similar(line_ends.to_lf(prompt)[0], stores=stores))
            return found[found < self._vocab_size]
        except DatastoreError as error:
            log.error("similar files: %s; requests go without", error)
            self._similar_files, self._retrieves_similar = None, False
            return None

    @property
    def can_search(self) -> bool:
        """Whether the pages of a store are in memory: until then nothing is found, and no step waits for a disk."""
        return self._matcher.loaded_stores != 0

    def wait_until_loaded(self) -> None:
        """Return once all open stores can be searched, for callers whose drafts must not depend on time."""
        self._matcher.wait_until_loaded()
        if self._similar_files is not None:
            self._similar_files.load()

    def propose(self, slots: np.ndarray) -> Drafts:
        """Return the drafts for slots [B] int32."""
        self.refresh()
        self._apply_pending()
        contexts, fresh = self._recent[slots], self._fresh[slots]
        line_ends = self._get_line_ends() if self._crlf[slots].any() else None
        kinds = None if line_ends is None else self._put_lf(line_ends, slots, contexts, fresh)
        trees = self._matcher.propose(slots, contexts, fresh)
        self._fresh[slots] = 0
        codes = np.empty(len(trees.tokens), np.int16)
        _encode_codes(trees.start, trees.parents, trees.counts, trees.match, _LENGTHS, _SHARES, _COUNTS, codes)
        if line_ends is None or kinds is None:
            return Drafts(trees.start, trees.tokens, trees.parents, codes, trees.place)
        made = line_ends.translate_trees(trees.start, trees.tokens, trees.parents, kinds)
        return Drafts(made.start, made.tokens, made.parents, codes[made.origins], trees.place[made.origins])

    def _get_line_ends(self) -> LineEnds | None:
        return self.line_ends.result() if self.line_ends is not None and self.line_ends.done() else None

    def _get_crlf_translator(self, tokens: np.ndarray) -> LineEnds | None:
        """Return the translator of line ends if tokens [n] int32 have CRLF."""
        line_ends = self._get_line_ends()
        return line_ends if line_ends is not None and line_ends.is_crlf(tokens) else None

    def _put_lf(self, line_ends: LineEnds, slots: np.ndarray, contexts: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        """Replace CRLF by LF in the contexts [B, MAX_MATCH], newest token first, of sequences that have it. Their match starts anew, since
        what was appended may change the tokens before it. Return what they continue from [B] int8, see `LineEnds.translate_trees`."""
        kinds = np.full(len(slots), LF, np.int8)
        for b in np.flatnonzero(self._crlf[slots]).tolist():
            context = contexts[b]
            text, begun = line_ends.to_lf(context[context >= 0][::-1])
            text = text[-MAX_MATCH:]
            context[:] = -1
            context[: len(text)] = text[::-1]
            fresh[b], kinds[b] = -1, BEGUN if begun else CRLF
        return kinds

    def observe(self, slots: np.ndarray, start: np.ndarray, tokens: np.ndarray) -> None:
        """Record appended tokens [N] int32, those of sequence b at start[b] .. start[b + 1]."""
        self._pending.append((slots, start, tokens.copy()))
        if len(self._pending) == MAX_MATCH:
            self._apply_pending()

    def _apply_pending(self) -> None:
        """Push the recorded tokens: many steps at once cost a fraction of one by one."""
        for slots, start, tokens in self._pending:
            _push_recent(self._recent, self._fresh, slots, start, tokens)
        self._pending.clear()

    def end(self, slot: int) -> None:
        self._allowed.pop(slot, None)
        self._matcher.end(slot)

    def refresh(self) -> None:
        """Switch to the newest generations; checks the disk at most every REFRESH_S."""
        if not self.follows_changes or (now := time.monotonic()) - self._refreshed_s < REFRESH_S:
            return
        self._refreshed_s = now
        changed = False
        for name in self._open:
            store = self.stores[name]
            try:
                changed |= store.refresh()
                self._unreadable.discard(name)
            except DatastoreError as error:
                self._report_unreadable(name, f"{error}; its generation {store.generation} stays in use")
        if changed:
            self._matcher.reset([self.stores[name].snapshot for name in self._open])
            self._follow_snapshots()
        elif now - self._checked_pages_s >= CHECK_PAGES_S:
            self._matcher.load_pages()
            self._checked_pages_s = now

    def locate(self, place: int) -> str:
        """Return path:line of a position of the latest drafts, "" if it cannot be read."""
        try:
            where = self._matcher.locate(place)
        except (DatastoreError, ValueError):  # a damaged body
            return ""
        return f"{where.path}:{where.line}"
