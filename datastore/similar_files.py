"""Which files of a store are like this request: once per request, the text of the nearest ones for the sequence's own tables.

A piece of a file, or the end of a prompt, becomes a vector of hashed token n-grams; no model is involved. Building a segment makes the
records (`embed`), which lie in it as plain arrays; reading them makes a FAISS index in memory, segment by segment and on first use.
Knows nothing of files on disk, nor of what is drafted from the text. Whatever the records say, the worst is unhelpful text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .code_cache import njit
from .format import Segment, vector_dtype

if TYPE_CHECKING:
    from .reader import Snapshot

DIM = 128
CHUNK = 1024
"""Tokens that one vector stands for."""
STRIDE = 896
"""From one chunk's first token to the next one's: a function that a boundary cuts is whole in one of them. 0.3 bytes per token."""
ORDERS = 3
BUDGET = 4096
"""Tokens of similar text that a request gets."""
LIKE = 0.4
"""Cosine from which text helps. Nearest chunks of foreign stores have 0.23 to 0.49, of the own repository mostly 0.5 to 0.99."""
IVF_FROM = 50_000
"""Chunks of a segment from which inverted lists are worth their training."""

_NEAREST = 32  # chunks that are looked at: they lie in fewer files than that
_PROBED = 1 / 16  # of the inverted lists
_SLOTS = 8192  # of the table that counts a chunk's n-grams; a power of two above ORDERS * CHUNK
_BLOCK = 1 << 14
_END = np.full(1, -1, np.int32)

_1, _31, _32, _33 = np.uint64(1), np.uint64(31), np.uint64(32), np.uint64(33)
_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that is like the request."""

    score: float
    """Cosine, up to 1."""
    snapshot: int
    segment: int
    doc: int
    start: int
    """Its first token within the document."""


@njit(cache=True, nogil=True, inline="always")
def _mix(h):
    """The finalizer of MurmurHash3."""
    h = (h ^ (h >> _33)) * _MIX_1
    h = (h ^ (h >> _33)) * _MIX_2
    return h ^ (h >> _33)


@njit(cache=True, nogil=True)
def _embed(tokens, first, end, out):
    """Vectors [n, DIM] float32 of the tokens first[i] .. end[i], of length 1.

    Signed feature hashing (Weinberger et al., Feature hashing for large scale multitask learning, 2009) of all n-grams up to ORDERS,
    each as 1 + log(how often), so that what a language repeats everywhere does not drown the rest.
    """
    keys, counts = np.empty(_SLOTS, np.uint64), np.empty(_SLOTS, np.int32)
    mask = np.uint64(_SLOTS - 1)
    for i in range(len(first)):
        counts[:] = 0
        for p in range(first[i], end[i]):
            h = np.uint64(0)
            for n in range(min(ORDERS, p - first[i] + 1)):
                h = _mix(h * _31 + np.uint64(tokens[p - n]) + _1)
                s = h & mask
                while counts[s] > 0 and keys[s] != h:
                    s = (s + _1) & mask
                keys[s] = h
                counts[s] += 1
        out[i] = 0
        for s in range(_SLOTS):
            if counts[s] > 0:
                weight = np.float32(1 + np.log(counts[s]))
                out[i, (keys[s] >> _32) % DIM] += weight if keys[s] >> np.uint64(63) else -weight
        norm = np.sqrt(np.sum(out[i] * out[i]))
        if norm > 0:
            out[i] /= norm


def embed(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Records of a segment to be: tokens u16|u32 [n] with separators, first tokens of its documents [n_docs] -> `vector_dtype(DIM)`."""
    ends = np.append(starts[1:], len(tokens)) - 1
    n_chunks = np.where(ends > starts, 1 + np.maximum(0, -(-(ends - starts - CHUNK) // STRIDE)), 0)
    records = np.zeros(int(n_chunks.sum()), vector_dtype(DIM))
    records["doc"] = np.repeat(np.arange(len(starts)), n_chunks)
    records["start"] = STRIDE * (np.arange(len(records)) - np.repeat(np.cumsum(n_chunks) - n_chunks, n_chunks))
    first = starts[records["doc"]] + records["start"]
    end = np.minimum(first + CHUNK, ends[records["doc"]])
    vectors = np.empty((min(len(records), _BLOCK), DIM), np.float32)
    for a in range(0, len(records), _BLOCK):
        z = min(a + _BLOCK, len(records))
        _embed(tokens, first[a:z], end[a:z], vectors)
        records["vector"][a:z] = vectors[: z - a]
    return records


def embed_request(tokens: np.ndarray) -> np.ndarray:
    """float32 [DIM]: the end of a prompt [n] int32 as if it were a chunk."""
    latest = np.asarray(tokens[-CHUNK:], np.int32).view(np.uint32)
    vector = np.empty((1, DIM), np.float32)
    _embed(latest, np.zeros(1, np.int64), np.full(1, len(latest)), vector)
    return vector[0]


class Router:
    """The similar text of one or several stores. Not thread-safe; opens nothing and reads no vector before the first request."""

    def __init__(self, snapshots: Sequence[Snapshot], ready: Sequence[Index] = ()) -> None:
        self._indices: dict[int, Index] = {}
        self.reset(snapshots, ready)

    def reset(self, snapshots: Sequence[Snapshot], ready: Sequence[Index] = ()) -> None:
        """Other stores or generations: what is known of segments that they share with the old ones, or by `ready`, stays."""
        self.snapshots = list(snapshots)
        known = self._indices | {id(index.segment): index for index in ready}
        named = {id(segment) for snapshot in snapshots for segment in snapshot.segments}
        self._indices = {key: index for key, index in known.items() if key in named}

    def load(self) -> int:
        """Index what is not indexed yet -> chunks of all segments. A request does it too for the stores it may use, if nobody has."""
        for snapshot in self.snapshots:
            for segment in snapshot.segments:
                self._index(segment)
        return sum(int(index.sound.sum()) for index in self._indices.values())

    def _index(self, segment: Segment) -> Index:
        index = self._indices.get(id(segment))
        if index is None:
            index = self._indices[id(segment)] = Index(segment)
        return index

    def nearest(self, tokens: np.ndarray, n: int = _NEAREST, stores: int = -1) -> list[Hit]:
        """The `n` chunks of live documents most like the end of a prompt [n] int32, best first; of snapshot i if bit i is in `stores`."""
        if not len(tokens):
            return []
        query = embed_request(tokens)
        hits = []
        for s, snapshot in enumerate(self.snapshots):
            if not stores >> s & 1:
                continue
            for number, (segment, entry) in enumerate(zip(snapshot.segments, snapshot.manifest.segments, strict=True)):
                for score, chunk in self._index(segment).search(query, n, entry.dead):
                    record = segment.vectors[chunk]
                    hits.append(Hit(score, s, number, int(record["doc"]), int(record["start"])))
        return sorted(hits, key=lambda hit: -hit.score)[:n]

    def similar(self, tokens: np.ndarray, budget_tokens: int = BUDGET, least: float = LIKE, stores: int = -1) -> np.ndarray:
        """Text of the files most like a prompt [n] int32 -> int32 [at most budget_tokens], the nearest file last, each followed by -1.

        A file that is longer than the room that nearer ones leave is cut to what is around its nearest chunk. Empty where no chunk's
        cosine is `least` or more, or the `stores` (see `nearest`) hold no vectors. Raises DatastoreCorruptError for a damaged record of
        a document.
        """
        room, parts, taken = budget_tokens, list[np.ndarray](), set[tuple[int, int, int]]()
        for hit in self.nearest(tokens, stores=stores):
            key = hit.snapshot, hit.segment, hit.doc
            if key in taken or room < 2 or hit.score < least:
                continue
            taken.add(key)
            snapshot = self.snapshots[hit.snapshot]
            text = around(snapshot.text_tokens(hit.segment, hit.doc), hit.start, room - 1)
            text = text[text < snapshot.manifest.vocab_size].astype(np.int32)  # a damaged body
            parts += [_END, text]
            room -= len(text) + 1
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)


def around(text: np.ndarray, start: int, length: int) -> np.ndarray:
    """At most `length` tokens of a document, around its chunk at `start`: a view."""
    first = start + CHUNK // 2 - length // 2
    first = max(0, min(first, len(text) - length))
    return text[first : first + length]


def indices(snapshots: Sequence[Snapshot]) -> list[Index]:
    """What a router would make of these snapshots' vectors on first use, made now: for `ready`. From any thread."""
    return [Index(segment) for snapshot in snapshots for segment in snapshot.segments if segment.header.n_vectors]


class Index:
    """What FAISS knows of one segment: the same for every generation that has it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment  # held, so that its id is not another's
        records = segment.vectors
        self.sound = np.zeros(len(records), bool)
        self._dead: Sequence[int] = ()
        self._live = self.sound
        if not len(records) or segment.header.vector_dim != DIM:  # none, or another version's
            return
        docs = records["doc"]
        self.sound = docs < len(segment.docs)
        self.sound &= records["start"] < segment.docs["length"][np.where(self.sound, docs, 0)]
        with one_thread() as faiss:
            if len(records) < IVF_FROM:
                self.index = faiss.IndexFlatIP(DIM)
            else:
                n_lists = int(len(records) ** 0.5)
                self.index = faiss.IndexIVFFlat(faiss.IndexFlatIP(DIM), DIM, n_lists, faiss.METRIC_INNER_PRODUCT)
                self.index.cp.seed, self.index.cp.niter, self.index.cp.max_points_per_centroid = 1, 8, 64
                self.index.nprobe = max(8, int(n_lists * _PROBED))
                self.index.train(_unit(records["vector"][:: max(1, len(records) // (64 * n_lists))])[0])
            for a in range(0, len(records), _BLOCK):
                vectors, finite = _unit(records["vector"][a : a + _BLOCK])
                self.sound[a : a + _BLOCK] &= finite
                self.index.add(vectors)
        self._live = self.sound

    def search(self, query: np.ndarray, n: int, dead: Sequence[int]) -> list[tuple[float, int]]:
        """(score, chunk) of the nearest chunks whose document is not dead, best first."""
        if dead != self._dead:
            self._live = self.sound & ~np.isin(self.segment.vectors["doc"], np.array(dead, np.int64))
            self._dead = dead
        live, n_live = self._live, int(self._live.sum())
        if not n_live:
            return []
        with one_thread() as faiss:
            bits = np.packbits(live, bitorder="little")
            chosen = {"sel": faiss.IDSelectorBitmap(bits)} if n_live < len(live) else {}
            if isinstance(self.index, faiss.IndexIVF):
                options = faiss.SearchParametersIVF(nprobe=self.index.nprobe, **chosen)
            else:
                options = faiss.SearchParameters(**chosen)
            scores, chunks = self.index.search(query[None], min(n, n_live), params=options)
        return [(score, chunk) for score, chunk in zip(scores[0].tolist(), chunks[0].tolist(), strict=True) if chunk >= 0]


def _unit(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stored vectors [n, DIM] float16 -> float32 of length 1, and which are finite; the others are 0. A forged one counts no more."""
    vectors = np.ascontiguousarray(vectors, np.float32)
    finite = np.isfinite(vectors).all(axis=1)
    vectors[~finite] = 0
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6), finite


@contextlib.contextmanager
def one_thread() -> Iterator[Any]:
    """The library, imported on first use, with one thread: a team of its own would take the cores from the model's."""
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield faiss
    finally:
        faiss.omp_set_num_threads(before)
