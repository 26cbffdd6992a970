"""Beam search, with drafts: width w, the same beams and scores bit for bit with drafts as without (Leviathan et al., appendix A.4).

A prompt goes in, the best w texts come out. Every beam is a sequence of its own in the pool; a beam that splits shares its blocks. A pass
verifies a draft tree after every beam, and the search goes on over its rows until it needs one that was not computed. Packing, the tree
builder and its update are those of the step. Knows the runner, free slots and the speculator; the engine calls `step` between its own
steps, in its thread.

The search is that of transformers' `generate(num_beams=w, do_sample=False)`. In each step the continuations of all beams are ranked by the
sum of their log-probabilities (ties: the earlier beam, then the lower token id). Of the first w, those that end are done; the first w
that do not end are the new beams. A text's final score is its sum over its length to the power of `length_penalty`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ngramspec.backends.base import Output, Runner
from ngramspec.errors import OutOfMemoryError
from ngramspec.grammar.constraint import Constraint
from ngramspec.kv_cache.blocks import BlockHashes
from ngramspec.outputs import BLOCK, DraftTree
from ngramspec.sampling.batch import Span, compute_depths, pack
from ngramspec.sampling.sampler import NotFiniteError, apply_mask
from ngramspec.speculative.drafter import DraftParams, PassTopK, Speculator, make_pass_topk

_FREE = np.ones(2)  # costs of rows that make every candidate worth its row
NODES_PER_BEAM = 32  # nodes that drafts are chosen from
BREADTHS = (1, 2, 4)  # nodes at one depth, divided by the width


@dataclass(slots=True)
class _Beam:
    """A beam that goes on, with its place in the pool and in the speculator."""

    tokens: np.ndarray  # [n] int32, prompt and output
    score: float
    lane: int
    """Index into `BeamSearch.slots`; the speculator's own slot."""
    computed: int
    """Tokens whose KV is in the pool."""
    block_hashes: BlockHashes
    constraint: Constraint | None
    """The grammar's state after the beam's tokens."""
    tree: DraftTree | None = None


@dataclass(slots=True)
class _Hypothesis:
    """A beam of the pass and the tokens that the search has appended since."""

    score: float
    beam: int
    new: tuple[int, ...]
    path: tuple[int, ...]
    """Nodes of the beam's tree that have the tokens `new`, as far as there are any."""
    row: int
    """Logits row after the last token; -1: not computed in this pass."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished text."""

    tokens: list[int]
    """Output, with the token that ended it."""
    score: float


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """What a search looks for."""

    width: int
    limit: int
    """Most tokens of output."""
    stop_ids: frozenset[int]
    length_penalty: float
    """Power of a text's length by which its sum is divided."""
    early_stopping: bool
    """End when `width` texts have ended, though one under way may still be better."""


class BeamSearch:
    """One search. Call `step` until it is `done`, then read `ended` (best first); call `close` in any case. Not thread-safe."""

    def __init__(
        self,
        prompt: np.ndarray,
        options: BeamOptions,
        *,
        runner: Runner,
        free_slots: list[int],
        block_hashes: BlockHashes,
        speculator: Speculator,
        cost_ms: np.ndarray,
        constraint: Constraint | None = None,
    ) -> None:
        """Make a search that starts with prompt [n] int32.

        `free_slots`: those of the pool, taken and given back here; `block_hashes`: of the prompt's blocks;
        `speculator`: for `width` sequences, used by this search alone; cost_ms [R] float64: time of a pass with T rows at index T;
        `constraint`: the state at the start of the grammar that all texts follow.
        """
        self.prompt, self.options = prompt, options
        self.runner, self.free_slots, self.speculator, self.cost_ms = runner, free_slots, speculator, cost_ms
        self.slots: list[int] = []
        self.beams = [_Beam(prompt, 0.0, 0, 0, block_hashes, constraint)]
        self.ended: list[Ended] = []
        self.stopped = False
        """The caller has stopped the search."""
        self._complete = False
        self._n_output = 0
        self._top = options.width * (1 + len(options.stop_ids))
        """Continuations of a beam that can matter: w that go on, if all that end rank before them."""

    @property
    def done(self) -> bool:
        return self.stopped or self._complete

    def step(self) -> bool:
        """Make one pass; False if there are too few free slots yet. Raises OutOfMemoryError, NotFiniteError."""
        if not self.slots and not self._begin_prompt():
            return False
        missing = len(self.beams[0].tokens) - self.beams[0].computed
        if missing > self.runner.max_rows:  # only the prompt can be that long
            beam = self.beams[0]
            piece = pack([self._make_span(beam, self.runner.max_rows, logits=0)], self.runner.pool, self.runner.rows_per_item)
            self.runner.forward(piece).get_logits(0, 0)  # waits until the next pass may be staged
            beam.computed += self.runner.max_rows
            self._register(beam)
            return True
        self._draft()
        spans = [self._make_span(beam, len(beam.tokens) - beam.computed) for beam in self.beams]
        batch = pack(spans, self.runner.pool, self.runner.rows_per_item)
        output = self.runner.forward(batch)
        sequences = [(beam.lane, int(beam.tokens[-2]) if len(beam.tokens) > 1 else -1, b) for b, beam in enumerate(self.beams)]
        likely = make_pass_topk(sequences, batch, output) if self.speculator.needs_topk else None
        texts = self._search(output, spans)
        if not self.done:
            self._commit(output, texts, likely)
        return True

    def close(self) -> None:
        """Give all slots and blocks back. A second call changes nothing."""
        for slot in self.slots:
            self.runner.pool.release(slot)
        self.free_slots.extend(self.slots)
        self.slots = []

    # ------------------------------------------------------------------ a pass

    def _begin_prompt(self) -> bool:
        if len(self.free_slots) < self.options.width:
            return False
        self.slots = [self.free_slots.pop() for _ in range(self.options.width)]
        beam = self.beams[0]
        names = beam.block_hashes.hashes[: (len(self.prompt) - 1) // BLOCK]
        taken = self.runner.pool.admit(self.slots[0], names, len(self.prompt))
        if taken < 0:
            raise self._make_full_error(len(self.prompt))
        beam.computed = taken * BLOCK
        self.speculator.begin(0, self.prompt, DraftParams(stops=tuple(self.options.stop_ids)))
        return True

    def _make_full_error(self, n: int) -> OutOfMemoryError:
        pool = self.runner.pool
        return OutOfMemoryError(
            f"a beam of {n} tokens does not fit in the KV pool beside {len(self.beams) - 1} others and what else runs: "
            f"{pool.n_available * BLOCK} of its {pool.n_positions} tokens are free; "
            "a larger kv_memory, a smaller width or less text may fit"
        )

    def _make_span(self, beam: _Beam, n_rows: int, logits: int = 1) -> Span:
        tokens = beam.tokens[beam.computed : beam.computed + n_rows]
        return Span(self.slots[beam.lane], tokens, beam.computed, beam.tree, logits)

    def _draft(self) -> None:
        """Give every beam its tree, and KV positions for its rows."""
        pool = self.runner.pool
        for beam in self.beams:
            if not pool.reserve(self.slots[beam.lane], len(beam.tokens)):
                raise self._make_full_error(len(beam.tokens))
        for beam, tree in zip(self.beams, self._choose_trees(), strict=True):
            most = min(len(tree), pool.max_blocks * BLOCK - len(beam.tokens))
            n = pool.reserve_after(self.slots[beam.lane], len(beam.tokens), most)  # a full pool: a smaller tree
            beam.tree = tree.take_first(n) if n else None

    def _choose_trees(self) -> list[DraftTree]:
        """Choose the draft nodes that make most search steps per second.

        At every depth, those of all beams together that weigh most: a node's weight is its probability times its beam's, over that of all
        beams. A step goes on only if all it needs is there: with chance M^w, where the nodes of its depth weigh M together.
        """
        n, deepest = len(self.beams), self.options.limit - self._n_output - 1
        lanes = np.array([beam.lane for beam in self.beams], np.int32)
        trees = self.speculator.propose(lanes, np.full(n, deepest, np.int32), _FREE, n, n * NODES_PER_BEAM)
        ends = np.cumsum([0] + [len(tree) for tree in trees])
        depth = np.concatenate([compute_depths(tree.parents) for tree in trees])
        parents = np.concatenate([np.where(tree.parents < 0, -1, tree.parents + end) for tree, end in zip(trees, ends, strict=False)])
        shares = np.exp(np.array([beam.score for beam in self.beams]) - self.beams[0].score)
        weights = np.repeat(shares / shares.sum(), np.diff(ends)) * np.concatenate([tree.probs for tree in trees])
        best, chosen = 1 / self.cost_ms[n], np.zeros(len(depth), np.bool_)
        for breadth in BREADTHS:
            kept, steps = np.zeros(len(depth) + 1, np.bool_), 1.0
            kept[-1] = True  # the roots
            for d in range(1, depth.max(initial=0) + 1):
                there = np.flatnonzero((depth == d) & kept[parents])
                there = there[np.argsort(-weights[there], kind="stable")[: breadth * self.options.width]]
                kept[there] = True
                steps += float(weights[there].sum()) ** self.options.width
                rows = n + int(kept.sum()) - 1
                if len(there) == 0 or rows >= len(self.cost_ms):
                    break
                if steps / self.cost_ms[rows] > best:
                    best, chosen = steps / self.cost_ms[rows], kept[:-1].copy()
        return [_select_nodes(tree, chosen[a:b]) for tree, a, b in zip(trees, ends[:-1], ends[1:], strict=True)]

    def _search(self, output: Output, spans: list[Span]) -> list[_Hypothesis]:
        """Search step after step, as long as all rows that a step needs have been computed."""
        first = np.cumsum([0] + [span.n_logits for span in spans])
        known: dict[int, list[tuple[int, float]]] = {}

        def get_continuations(h: _Hypothesis) -> list[tuple[int, float]]:
            if h.row not in known:
                constraint = self._advance_grammar(h)
                mask = None if constraint is None else constraint.mask()
                known[h.row] = find_continuations(output.get_logits(h.row, h.row + 1)[0], self._top, mask)
            return known[h.row]

        def extend_hypothesis(h: _Hypothesis, token: int, score: float) -> _Hypothesis:
            tree, root = self.beams[h.beam].tree, int(first[h.beam])
            match = () if tree is None else np.flatnonzero((tree.parents == h.row - root - 1) & (tree.tokens == token)).tolist()
            path, row = ((*h.path, match[0]), root + 1 + match[0]) if match else (h.path, -1)
            return _Hypothesis(score, h.beam, (*h.new, token), path, row)

        texts = [_Hypothesis(beam.score, b, (), (), int(first[b])) for b, beam in enumerate(self.beams)]
        while not self.done and (ranking := self._rank(texts, get_continuations)) is not None:
            texts = self._take([extend_hypothesis(texts[i], token, score) for score, i, token in ranking])
        return texts

    def _rank(
        self, texts: list[_Hypothesis], get_continuations: Callable[[_Hypothesis], list[tuple[int, float]]]
    ) -> list[tuple[float, int, int]] | None:
        """Rank the next step's continuations, best first: (score, index into `texts`, token); None if a row is needed that is not there.

        No continuation scores more than what it continues, so that a text far down needs no row.
        """
        last = self._n_output + 1 == self.options.limit
        every = sorted(
            ((t.score + logprob, i, token) for i, t in enumerate(texts) if t.row >= 0 for token, logprob in get_continuations(t)),
            key=lambda c: (-c[0], c[1], c[2]),
        )
        n = going = 0
        while n < len(every) and (n if last else going) < self.options.width:
            going += every[n][2] not in self.options.stop_ids
            n += 1
        unknown = max((t.score for t in texts if t.row < 0), default=-math.inf)
        if unknown > -math.inf and ((n if last else going) < self.options.width or unknown >= every[n - 1][0]):
            return None
        return every[:n]

    def _take(self, ranking: list[_Hypothesis]) -> list[_Hypothesis]:
        """Make a search step: put hypotheses that end into `ended`, and return those that go on."""
        self._n_output += 1
        last, w = self._n_output == self.options.limit, self.options.width
        size = self._n_output**self.options.length_penalty
        ends = [last or h.new[-1] in self.options.stop_ids for h in ranking]
        going = [h for h, end in zip(ranking, ends, strict=True) if not end][:w]
        for h, end in list(zip(ranking, ends, strict=True))[:w]:
            if end:
                output = [*self.beams[h.beam].tokens[len(self.prompt) :].tolist(), *h.new]
                self.ended.append(Ended(output, h.score / size))
        self.ended = sorted(self.ended, key=lambda e: -e.score)[:w]
        full = len(self.ended) == w
        self._complete = not going or (full and (self.options.early_stopping or going[0].score / size <= self.ended[-1].score))
        return going

    def _commit(self, output: Output, texts: list[_Hypothesis], likely: PassTopK | None) -> None:
        """Make beams of the texts: the first that continues a beam keeps its lane, the others get those of beams that none continues."""
        backwards = list(enumerate(texts))[::-1]
        first = {h.beam: i for i, h in backwards}
        kept = [self.beams[b].lane for b in first]
        free = [lane for lane in range(self.options.width) if lane not in kept]
        for lane in free:
            self.runner.pool.release(self.slots[lane])
        # a beam is split before it goes on, where it overwrites its drafts
        self.beams = [self._extend_beam(output, h) if first[h.beam] == i else self._split(h, free.pop()) for i, h in backwards][::-1]
        going = [texts[i] for i in first.values()]
        news, paths = ([np.array(a, np.int32) for a in each] for each in ([h.new for h in going], [h.path for h in going]))
        self.speculator.observe(np.array(kept, np.int32), news, paths, likely)

    def _make_beam(self, h: _Hypothesis, lane: int, block_hashes: BlockHashes) -> _Beam:
        tokens = np.append(self.beams[h.beam].tokens, np.array(h.new, np.int32))
        return _Beam(tokens, h.score, lane, len(tokens) - 1, block_hashes, self._advance_grammar(h))

    def _advance_grammar(self, h: _Hypothesis) -> Constraint | None:
        """Return the grammar's state after a hypothesis."""
        beginning = self.beams[h.beam].constraint
        if beginning is None:
            return None
        constraint = beginning.fork()
        for token in h.new:
            constraint.accept(token)
        return constraint

    def _find_positions(self, h: _Hypothesis) -> np.ndarray:
        """Return the KV positions of the nodes that have all new tokens but the last one, which the next pass computes."""
        return len(self.beams[h.beam].tokens) + np.array(h.path[: len(h.new) - 1], np.int64)

    def _extend_beam(self, output: Output, h: _Hypothesis) -> _Beam:
        old = self.beams[h.beam]
        beam = self._make_beam(h, old.lane, old.block_hashes)
        output.commit([(h.beam, len(old.tokens), self._find_positions(h))])
        self._register(beam)
        self.runner.pool.truncate_to(self.slots[beam.lane], beam.computed)
        return beam

    def _split(self, h: _Hypothesis, lane: int) -> _Beam:
        old, pool = self.beams[h.beam], self.runner.pool
        beam = self._make_beam(h, lane, old.block_hashes.copy())
        source, target = self.slots[old.lane], self.slots[lane]
        n_shared = pool.registered[source]
        slots = np.concatenate([np.arange(n_shared * BLOCK, len(old.tokens)), self._find_positions(h)])
        if not pool.fork(source, slots, target, beam.block_hashes.hashes[:n_shared]):
            raise self._make_full_error(len(beam.tokens))
        self._register(beam)
        self.speculator.begin(lane, beam.tokens, DraftParams(stops=tuple(self.options.stop_ids)))
        return beam

    def _register(self, beam: _Beam) -> None:
        beam.block_hashes.extend(beam.tokens)
        self.runner.pool.register(self.slots[beam.lane], beam.block_hashes.hashes[: beam.computed // BLOCK])


def _select_nodes(tree: DraftTree, kept: np.ndarray) -> DraftTree:
    """Return the tree of the kept nodes [N] bool; a kept node's parent is kept."""
    index = np.cumsum(kept) - 1
    parents = np.where(tree.parents < 0, -1, index[tree.parents])[kept].astype(np.int32)
    return DraftTree(tree.tokens[kept], parents, tree.probs[kept], tree.sources[kept])


def find_continuations(row: np.ndarray, n: int, mask: np.ndarray | None = None) -> list[tuple[int, float]]:
    """Return the n most likely tokens after logits row [V] float32 with their log-probabilities, best first, of equal ones the lower id.

    `mask`: the tokens that are allowed; there may be fewer than n.
    """
    x = row.astype(np.float64)
    top = x.max()
    if not np.isfinite(top):
        raise NotFiniteError
    x -= top
    total = math.log(np.exp(x).sum())
    if mask is not None:
        row = apply_mask(row, mask)
    least = np.partition(row, -n)[-n] if n < len(row) else -np.inf
    tokens = np.flatnonzero((row >= least) & (row > -np.inf))
    tokens = tokens[np.argsort(-row[tokens], kind="stable")[:n]]
    return [(int(token), float(x[token] - total)) for token in tokens]
