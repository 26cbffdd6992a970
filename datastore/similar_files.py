"""Files of a store that are like a request: once per request, the text of the nearest ones for the sequence's own tables.

A chunk of a file, or the end of a prompt, becomes a vector of hashed token n-grams; no model is involved. Building a segment makes the
records (`embed_segment`), which lie in it as plain arrays; reading them makes a FAISS index in memory, segment by segment and on first use.
Knows nothing of files on disk, nor of what is drafted from the text. Whatever the records say, the worst is unhelpful text.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from .code_cache import njit
from .format import Segment, make_vector_dtype

if TYPE_CHECKING:
    from .reader import Snapshot

log = logging.getLogger(__name__)

DIM = 128
CHUNK = 1024  # tokens that one vector stands for
# From one chunk's first token to the next one's: a function that a boundary cuts is whole in one of them. 0.3 bytes per token.
STRIDE = 896
ORDERS = 3
MAX_SIMILAR_TOKENS = 4096  # tokens of similar text that a request gets
# Cosine from which text helps. Nearest chunks of foreign stores have 0.23 to 0.49, of the own repository mostly 0.5 to 0.99.
MIN_COSINE = 0.4
IVF_FROM = 50_000  # chunks of a segment from which inverted lists are worth their training
# Chunks of a segment up to which a request waits for the index (20 ms); a larger one, 0.5 s for 85,000, is made in a thread.
INDEXED_AT_ONCE = 8_192
RETRY_S = 60.0  # after an index could not be made, for lack of memory perhaps, until a request has it tried again

_NEAREST = 32  # chunks that are looked at: they lie in fewer files than that
_PROBED = 1 / 16  # of the inverted lists
_SLOTS = 8192  # of the table that counts a chunk's n-grams; a power of two above ORDERS * CHUNK
_BLOCK = 1 << 14
_END = np.full(1, -1, np.int32)

_1, _31, _32, _33 = np.uint64(1), np.uint64(31), np.uint64(32), np.uint64(33)
_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


@dataclass(frozen=True, slots=True)
class SimilarChunk:
    """A chunk that is like the request."""

    score: float
    """Cosine, up to 1."""
    snapshot: int
    segment: int
    doc: int
    start: int
    """Its first token within the document."""


@njit(cache=True, nogil=True, inline="always")
def _mix_bits(h):
    """Return the finalizer of MurmurHash3."""
    h = (h ^ (h >> _33)) * _MIX_1
    h = (h ^ (h >> _33)) * _MIX_2
    return h ^ (h >> _33)


@njit(cache=True, nogil=True)
def _embed_chunks(tokens, first, end, out):
    """Return vectors [n, DIM] float32 of the tokens first[i] .. end[i], of length 1.

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
                h = _mix_bits(h * _31 + np.uint64(tokens[p - n]) + _1)
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
            for d in range(DIM):
                out[i, d] /= norm


def embed_segment(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return a segment's records, `make_vector_dtype(DIM)`: tokens u16|u32 [n] with separators, first tokens of its documents [n_docs]."""
    ends = np.append(starts[1:], len(tokens)) - 1
    n_chunks = np.where(ends > starts, 1 + np.maximum(0, -(-(ends - starts - CHUNK) // STRIDE)), 0)
    records = np.zeros(int(n_chunks.sum()), make_vector_dtype(DIM))
    records["doc"] = np.repeat(np.arange(len(starts)), n_chunks)
    records["start"] = STRIDE * (np.arange(len(records)) - np.repeat(np.cumsum(n_chunks) - n_chunks, n_chunks))
    first = starts[records["doc"]] + records["start"]
    end = np.minimum(first + CHUNK, ends[records["doc"]])
    vectors = np.empty((min(len(records), _BLOCK), DIM), np.float32)
    for a in range(0, len(records), _BLOCK):
        z = min(a + _BLOCK, len(records))
        _embed_chunks(tokens, first[a:z], end[a:z], vectors)
        records["vector"][a:z] = vectors[: z - a]
    return records


def embed_prompt(tokens: np.ndarray) -> np.ndarray:
    """Return the vector float32 [DIM] of the end of a prompt [n] int32, as if it were a chunk."""
    latest = np.asarray(tokens[-CHUNK:], np.int32).view(np.uint32)
    vector = np.empty((1, DIM), np.float32)
    _embed_chunks(latest, np.zeros(1, np.int64), np.full(1, len(latest)), vector)
    return vector[0]


class SimilarFiles:
    """The similar text of one or several stores. Not thread-safe; opens nothing and reads no vector before the first request."""

    def __init__(self, snapshots: Sequence[Snapshot], ready: Sequence[VectorIndex] = ()) -> None:
        self._indices: dict[int, VectorIndex] = {}
        self._made: SimpleQueue[VectorIndex] = SimpleQueue()  # by threads
        self._begun: dict[int, float] = {}
        """When a segment's index may be begun again: never while a thread makes it."""
        self.reset(snapshots, ready)

    def reset(self, snapshots: Sequence[Snapshot], ready: Sequence[VectorIndex] = ()) -> None:
        """Use other stores or generations: indices of segments that they share with the old ones, or in `ready`, stay."""
        self.snapshots = list(snapshots)
        known = self._indices | {id(index.segment): index for index in [*ready, *self._take_made()]}
        named = {id(segment) for snapshot in snapshots for segment in snapshot.segments}
        self._indices = {key: index for key, index in known.items() if key in named}

    def load(self) -> int:
        """Index what is not indexed yet -> chunks of all segments. A request does it too for the stores it may use, if nobody has."""
        for snapshot in self.snapshots:
            for segment in snapshot.segments:
                self._get_index(segment)
        return sum(int(index.sound.sum()) for index in self._indices.values())

    def _get_index(self, segment: Segment) -> VectorIndex:
        index = self._indices.get(id(segment))
        if index is None:
            index = self._indices[id(segment)] = VectorIndex(segment)
        return index

    def _prepare_index(self, segment: Segment) -> bool:
        """Return whether a segment's index is there or quickly made; else have a thread make it."""
        key = id(segment)
        if key in self._indices or len(segment.vectors) <= INDEXED_AT_ONCE:
            return True
        if time.monotonic() >= self._begun.get(key, 0.0):
            self._begun[key] = math.inf
            threading.Thread(target=self._make_index, args=(segment,), name="datastore-index", daemon=True).start()
        return False

    def _make_index(self, segment: Segment) -> None:
        """Make a segment's index; run by a thread."""
        try:
            self._made.put(VectorIndex(segment))
        except Exception as error:  # memory, or whatever FAISS raises
            log.error("similar files of %s: %s: %s; tried again in %.0f s", segment.path, type(error).__name__, error, RETRY_S)
            self._begun[id(segment)] = time.monotonic() + RETRY_S

    def _take_made(self) -> list[VectorIndex]:
        """Return the indices that threads have made since the last call."""
        made = []
        with contextlib.suppress(Empty):
            while True:
                made.append(self._made.get_nowait())
        for index in made:
            self._begun.pop(id(index.segment), None)
        return made

    def find_nearest(self, tokens: np.ndarray, n: int = _NEAREST, stores: int = -1) -> list[SimilarChunk]:
        """Return the `n` live chunks most like the end of a prompt [n] int32, best first; of snapshot i if bit i is in `stores`."""
        if not len(tokens):
            return []
        query = embed_prompt(tokens)
        self._indices |= {id(index.segment): index for index in self._take_made()}
        hits = []
        for s, snapshot in enumerate(self.snapshots):
            if not stores >> s & 1:
                continue
            for number, (segment, entry) in enumerate(zip(snapshot.segments, snapshot.manifest.segments, strict=True)):
                if not self._prepare_index(segment):
                    continue
                for score, chunk in self._get_index(segment).search(query, n, entry.tombstones):
                    record = segment.vectors[chunk]
                    hits.append(SimilarChunk(score, s, number, int(record["doc"]), int(record["start"])))
        return sorted(hits, key=lambda hit: -hit.score)[:n]

    def find_similar(
        self, tokens: np.ndarray, budget_tokens: int = MAX_SIMILAR_TOKENS, least: float = MIN_COSINE, stores: int = -1
    ) -> np.ndarray:
        """Return text of the files most like a prompt [n] int32: int32 [at most budget_tokens], the nearest file last, each followed by -1.

        A file that is longer than the room that nearer ones leave is cut to what is around its nearest chunk. Empty if no chunk's cosine is
        `least` or more, or the `stores` (see `find_nearest`) hold no vectors. Raises DatastoreCorruptError for a document's damaged record.
        """
        room, parts, taken = budget_tokens, list[np.ndarray](), set[tuple[int, int, int]]()
        for hit in self.find_nearest(tokens, stores=stores):
            key = hit.snapshot, hit.segment, hit.doc
            if key in taken or room < 2 or hit.score < least:
                continue
            taken.add(key)
            snapshot = self.snapshots[hit.snapshot]
            text = cut_around(snapshot.text_tokens(hit.segment, hit.doc), hit.start, room - 1)
            text = text[text < snapshot.manifest.vocab_size].astype(np.int32)  # a damaged body
            parts += [_END, text]
            room -= len(text) + 1
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)


def cut_around(text: np.ndarray, start: int, length: int) -> np.ndarray:
    """Return at most `length` tokens of a document, around its chunk at `start`: a view."""
    first = start + CHUNK // 2 - length // 2
    first = max(0, min(first, len(text) - length))
    return text[first : first + length]


def build_indices(snapshots: Sequence[Snapshot]) -> list[VectorIndex]:
    """Make now what `SimilarFiles` would make of these snapshots' vectors on first use: for `ready`. Any thread may call it."""
    return [VectorIndex(segment) for snapshot in snapshots for segment in snapshot.segments if segment.header.n_vectors]


class VectorIndex:
    """What FAISS knows of one segment: the same for every generation that has it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment  # held, so that its id is not another's
        records = segment.vectors
        self.sound = np.zeros(len(records), bool)
        self._tombstones: Sequence[int] = ()
        self._live = self.sound
        if not len(records) or segment.header.vector_dim != DIM:  # none, or another version's
            return
        docs = records["doc"]
        self.sound = docs < len(segment.docs)
        self.sound &= records["start"] < segment.docs["length"][np.where(self.sound, docs, 0)]
        with use_one_thread() as faiss:
            if len(records) < IVF_FROM:
                self.index = faiss.IndexFlatIP(DIM)
            else:
                n_lists = int(len(records) ** 0.5)
                self.index = faiss.IndexIVFFlat(faiss.IndexFlatIP(DIM), DIM, n_lists, faiss.METRIC_INNER_PRODUCT)
                self.index.cp.seed, self.index.cp.niter, self.index.cp.max_points_per_centroid = 1, 8, 64
                self.index.nprobe = max(8, int(n_lists * _PROBED))
                self.index.train(_normalize_vectors(records["vector"][:: max(1, len(records) // (64 * n_lists))])[0])
            for a in range(0, len(records), _BLOCK):
                vectors, finite = _normalize_vectors(records["vector"][a : a + _BLOCK])
                self.sound[a : a + _BLOCK] &= finite
                self.index.add(vectors)
        self._live = self.sound

    def search(self, query: np.ndarray, n: int, tombstones: Sequence[int]) -> list[tuple[float, int]]:
        """(score, chunk) of the nearest chunks whose document has no tombstone, best first."""
        if tombstones != self._tombstones:
            self._live = self.sound & ~np.isin(self.segment.vectors["doc"], np.array(tombstones, np.int64))
            self._tombstones = tombstones
        live, n_live = self._live, int(self._live.sum())
        if not n_live:
            return []
        with use_one_thread() as faiss:
            bits = np.packbits(live, bitorder="little")
            chosen = {"sel": faiss.IDSelectorBitmap(bits)} if n_live < len(live) else {}
            if isinstance(self.index, faiss.IndexIVF):
                options = faiss.SearchParametersIVF(nprobe=self.index.nprobe, **chosen)
            else:
                options = faiss.SearchParameters(**chosen)
            scores, chunks = self.index.search(query[None], min(n, n_live), params=options)
        return [(score, chunk) for score, chunk in zip(scores[0].tolist(), chunks[0].tolist(), strict=True) if chunk >= 0]


def _normalize_vectors(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale stored vectors [n, DIM] float16 -> float32 of length 1, and which are finite; the others are 0. A forged one counts no more."""
    vectors = np.ascontiguousarray(vectors, np.float32)
    finite = np.isfinite(vectors).all(axis=1)
    vectors[~finite] = 0
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6), finite


@contextlib.contextmanager
def use_one_thread() -> Iterator[Any]:
    """Yield the library, imported on first use, with one thread: a team of its own would take the cores from the model's."""
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield faiss
    finally:
        faiss.omp_set_num_threads(before)
