"""The step, for all running sequences at once: schedule → draft → pack → forward → walk → commit.

Owns the scheduler, the runner and the proposer, and moves data between them; each knows nothing of the others.
Not thread-safe: `engine` calls it from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ngramspec.batch.cost import CostModel
from ngramspec.batch.pack import Span, depths, pack
from ngramspec.batch.rejection import lenient, reject
from ngramspec.batch.sampling import FRACTION_BITS, token_logprob, uniform_bits
from ngramspec.batch.types import BLOCK, DraftTree, TokenLogprob
from ngramspec.batch.verify import follow, walk
from ngramspec.core.scheduler import ScheduledRows, Scheduler
from ngramspec.core.sequence import Sequence
from ngramspec.datastore.reader import Datastore
from ngramspec.datastore.router import Index, indices
from ngramspec.drafting.base import Text
from ngramspec.drafting.evidence import likeliest
from ngramspec.drafting.proposer import Proposer
from ngramspec.drafting.single import SingleDrafter
from ngramspec.drafting.suffix import NAME as DATASTORE
from ngramspec.drafting.suffix import SuffixDrafter
from ngramspec.model.runner import Output, Runner

NO_TOKEN = np.array([-1], np.int32)

Steps: TypeAlias = Iterator[tuple[int, int, TokenLogprob | None]]
"""Accepted tokens in order: (token, the draft node that carried it or -1, its log-probability where asked for)."""


@dataclass(frozen=True)
class Acceptance:
    """How drafts are accepted."""

    rejection: bool = False
    """Drawn drafts by rejection sampling (Leviathan et al., algorithm 1), above temperature 0: exact in distribution, another text.
    False: all drafts by the walk, the same text."""
    lenience: float = 1.0
    """Of Leviathan et al., appendix A.5, in (0, 1]: below 1 the model takes what it holds a little less likely, and nothing is exact."""

    def walks(self, seq: Sequence) -> bool:
        """A sequence's tokens are the model's own picks."""
        return self.lenience == 1 and not (self.rejection and seq.params.temperature > 0)


class Core:
    def __init__(
        self,
        runner: Runner,
        proposer: Proposer | SingleDrafter | None,
        cost: CostModel,
        on_error: Callable[[Sequence, Exception], None],
        acceptance: Acceptance | None = None,
    ) -> None:
        """`proposer` None: no speculation. `on_error` is told of a sequence that failed alone; the others go on."""
        self.runner, self.cost = runner, cost
        self.on_error, self.acceptance = on_error, acceptance or Acceptance()
        self.scheduler = Scheduler(runner.pool, runner.max_rows)
        self.use(proposer)
        self.similar = True
        """Draft from the datastores' files that are most like a request."""
        self.n_passes = 0

    def use(self, proposer: Proposer | SingleDrafter | None) -> None:
        """Draft with this one, None: not at all. Not while sequences run.

        Raises what its drafters raise at `bind`, and UnsupportedModelError where they want states that the runner cannot tell.
        """
        self.proposer = proposer
        self.runner.keep_states(proposer is not None and proposer.needs_hidden_states)
        if proposer is not None:
            proposer.bind(self.runner)
        self.scheduler.has_room = proposer.has_room if proposer is not None else lambda n_tokens: True

    def add(self, seq: Sequence) -> None:
        if self.proposer is None:
            seq.speculation = False
        self.scheduler.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, wherever it stands; its blocks are free when this returns."""
        slot = self.scheduler.remove(seq)
        if slot >= 0 and self.proposer is not None:
            self.proposer.end(slot)

    def index(self, store: Datastore) -> list[Index]:
        """What `draft_from` would have to make for a store, made now. From any thread."""
        return [] if self.proposer is None or not self.similar else indices([store.snapshot])

    def draft_from(self, stores: Mapping[str, Datastore], ready: Several[Index] | None = None) -> None:
        """Draft from these datastores from the next step on, for running sequences too. Raises ValueError."""
        if not isinstance(self.proposer, Proposer):
            if stores and self.proposer is not None:
                raise ValueError(f"{self.proposer.source_names[0]} drafts alone, without datastores")
            return
        if not stores:
            self.proposer.datastore = None
        elif self.proposer.datastore is not None:
            self.proposer.datastore.use(stores, ready or ())
        else:
            drafter = SuffixDrafter(stores, len(self.runner.pool.n_blocks_of), similar=self.similar, ready=ready)
            for seq in self.scheduler.running:
                if seq.speculation:
                    drafter.begin(seq.slot, seq.tokens, seq.datastores)
            self.proposer.datastore = drafter

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[Sequence]:
        """One pass of the model; returns the sequences that got tokens. Finished ones have been removed.

        `meanwhile` is called while the pass is under way, or where there is none.
        """
        work, admitted, preempted = self.scheduler.schedule()
        if self.proposer is not None:
            for slot in preempted:
                self.proposer.end(slot)
            for seq in admitted:
                if seq.speculation:
                    self.proposer.begin(
                        seq.slot,
                        seq.tokens,
                        banned=_banned(seq),
                        stops=tuple(seq.stop_ids),
                        prediction=seq.prediction,
                        n_output=seq.n_output,
                        tenant=seq.tenant,
                        datastores=seq.datastores,
                        text=Text(seq.sampler, seq.n_prompt, seq.limit),
                    )
        if not work:
            meanwhile()
            return []
        self._draft(work)
        spans = [self._span(w) for w in work]
        batch = pack(spans, self.runner.pool, self.runner.rows_per_item)
        started = time.perf_counter()
        output = self.runner.forward(batch)
        self.n_passes += 1
        meanwhile()
        sampled = output.sampled
        if all(w.n_rows == 1 for w in work):
            self.cost.observe(len(batch.input_ids), (time.perf_counter() - started) * 1e3)
        return self._commit(work, spans, output, sampled)

    def _draft(self, work: list[ScheduledRows]) -> None:
        """Give every sequence that picks in this pass its tree, and room for the tree's KV."""
        for w in work:
            w.seq.tree = None
        seqs = [w.seq for w in work if w.samples and w.seq.max_depth > 0]
        if self.proposer is None or not seqs:
            return
        for seq in seqs:
            seq.drafting_paused = not seq.drafting_paused and self.proposer.is_unpredictable(seq.slot)
        slots = np.array([seq.slot for seq in seqs], np.int32)
        limits = np.array([0 if seq.drafting_paused else seq.max_depth for seq in seqs], np.int32)
        base = sum(w.n_rows for w in work)
        trees = self.proposer.propose(slots, limits, self.cost.table, base, self.cost.max_rows - base)
        pool = self.runner.pool
        for seq, tree in zip(seqs, trees, strict=True):
            n = len(tree)
            while n and not pool.reserve(seq.slot, seq.n_tokens + n):  # a full pool: fewer guesses
                n //= 2
            seq.tree = tree.first(n) if n else None

    def _commit(self, work: list[ScheduledRows], spans: list[Span], output: Output, sampled: np.ndarray | None) -> list[Sequence]:
        """`sampled` [N] int32: what the device picked, if it did."""
        changed: list[Sequence] = []
        observed: list[tuple[int, np.ndarray, np.ndarray]] = []
        row, at = 0, 0
        for b, (w, span) in enumerate(zip(work, spans, strict=True)):
            seq = w.seq
            begin, row = row, row + span.n_logits
            head, at = at, at + span.n_rows  # the sequence's rows in the batch
            root = begin + span.logits - 1
            first = span.start + w.n_rows
            try:
                if seq.lacks_prompt_logprobs:
                    seq.score_prompt(span.start, output.logits(begin, begin + w.n_rows))
                if not w.samples:
                    self._hear(seq, output, span, np.arange(head, at))
                    seq.computed = first
                    self._register(seq)
                    continue
                if self.proposer is not None and self.proposer.needs_topk and seq.speculation and not seq.drafting_paused:
                    self._recycle(seq, output, root, row)
                if sampled is not None and span.sampler is not None and span.sampler.on_device:
                    steps = self._follow(seq, sampled[root:row])
                elif self.acceptance.walks(seq):
                    steps = self._walk(seq, output.logits(root, row))
                else:
                    steps = self._judge(seq, output.logits(root, row))
                accepted, path = self._accept(seq, steps)
                self._hear(seq, output, span, np.concatenate([np.arange(head, head + w.n_rows), head + w.n_rows + path]))
                self._record(seq, len(accepted), path)
            except Exception as e:  # this sequence alone: its logits, its text
                self.remove(seq)
                self.on_error(seq, e)
                continue
            changed.append(seq)
            output.commit(b, first, first + path)
            seq.computed = first + len(path)
            self._register(seq)
            if seq.finished:
                self.remove(seq)
                if self.proposer is not None and seq.speculation and seq.tenant is not None:
                    self.proposer.remember(seq.tokens[seq.n_prompt :], seq.tenant)
                continue
            self.runner.pool.truncate_to(seq.slot, seq.computed)
            if seq.speculation:
                observed.append((seq.slot, accepted, path))
        if self.proposer is not None and observed:
            slots, tokens, paths = zip(*observed, strict=True)
            self.proposer.observe(np.array(slots, np.int32), list(tokens), list(paths))
        return changed

    def _register(self, seq: Sequence) -> None:
        """Let others take over the blocks that are full of the sequence's tokens."""
        n_full = seq.computed // BLOCK
        if seq.block_hashes is not None and n_full > self.runner.pool.registered[seq.slot]:
            seq.block_hashes.extend(seq.tokens)
            self.runner.pool.register(seq.slot, seq.block_hashes.hashes[:n_full])

    def _recycle(self, seq: Sequence, output: Output, root: int, end: int) -> None:
        """Let the proposer keep the model's own candidates behind the last token and every draft token: the rows from `root` to `end`."""
        assert self.proposer is not None
        last, before = seq.tokens[-1:], seq.tokens[-2:-1] if seq.n_tokens > 1 else NO_TOKEN
        if seq.tree is not None:
            last = np.concatenate([last, seq.tree.tokens])
            before = np.concatenate([before, last[1 + seq.tree.parents]])
        candidates = output.candidates(root, end) or likeliest(output.logits(root, end))
        self.proposer.record_topk(seq.slot, before, last, *candidates)

    def _hear(self, seq: Sequence, output: Output, span: Span, rows: np.ndarray) -> None:
        """Let the proposer have the hidden states in these rows of the batch [n], which are the sequence's from the span's start on."""
        if self.proposer is not None and self.proposer.needs_hidden_states and seq.speculation:
            self.proposer.on_hidden_states(seq.slot, span.start, output.states(rows))

    def _walk(self, seq: Sequence, rows: np.ndarray) -> Steps:
        """What the model accepts, picked from its logits rows [1 + nodes, V] as the steps are taken."""
        logprob = None

        def sample(row: int) -> int:
            nonlocal logprob
            token, logprob = seq.sample(rows[row])
            return token

        for token, node in walk(seq.tree, sample):
            yield token, node, logprob

    def _follow(self, seq: Sequence, sampled: np.ndarray) -> Steps:
        """The same where the device has picked the tokens after all rows [1 + nodes] int32. Raises NotFiniteError."""
        path = [] if seq.tree is None else follow(seq.tree.tokens, seq.tree.parents, sampled).tolist()
        for row, node in zip([-1, *path], [*path, -1], strict=True):
            yield seq.take(int(sampled[row + 1])), node, None

    def _judge(self, seq: Sequence, rows: np.ndarray) -> Steps:
        """The same where drafts are not accepted by the walk; see `Acceptance`."""
        n = seq.n_output

        def uniform(depth: int, k: int) -> float:
            lane = 2 * k + 2  # lane 0 is the drafters' too, where they guess what the request would pick
            return uniform_bits(seq.sampler.seed, seq.sampler.index, n + depth, lane) / 2**FRACTION_BITS

        if seq.params.temperature == 0:
            steps = lenient(seq.tree, lambda row: seq.sampler.adjusted(rows[row], seq.n_output), self.acceptance.lenience)
        else:
            steps = reject(seq.tree, lambda row: seq.sampler.weights(rows[row], seq.n_output), uniform, self.acceptance.lenience)
        row, top = 0, seq.params.logprobs
        for token, node in steps:
            yield token, node, None if top is None else token_logprob(rows[row], token, top)
            row = node + 1

    def _accept(self, seq: Sequence, steps: Steps) -> tuple[np.ndarray, np.ndarray]:
        """Append what the model accepts, to the end of the text at most. Returns (tokens, nodes of the path), int32."""
        tokens, path = [], []
        for token, node, logprob in steps:
            tokens.append(token)
            source = None
            if node >= 0:
                path.append(node)
                source = self._name(seq.tree, node)
            if seq.append(token, source, logprob):
                break
        return np.array(tokens, np.int32), np.array(path, np.int32)

    def _record(self, seq: Sequence, n_tokens: int, path: np.ndarray) -> None:
        tree, stats = seq.tree, seq.choice.stats
        seq.tree = None
        stats.passes += 1
        stats.tokens += n_tokens
        if tree is not None:
            assert self.proposer is not None
            names = self.proposer.source_names
            depth = depths(tree.parents)
            _count(stats.drafted_by_source, stats.drafted_by_depth, tree.sources, depth, names)
            _count(stats.accepted_by_source, stats.accepted_by_depth, tree.sources[path], depth[path], names)
            stats.drafted += len(tree)
            stats.accepted += len(path)
            stats.drafts += 1
            stats.accepted_lengths.extend([0] * (len(path) + 1 - len(stats.accepted_lengths)))
            stats.accepted_lengths[len(path)] += 1

    def _name(self, tree: DraftTree | None, node: int) -> str:
        """The source of a draft token, with file and line where it comes from a datastore."""
        assert tree is not None
        assert self.proposer is not None
        name = self.proposer.source_names[tree.sources[node]]
        if (
            name == DATASTORE
            and tree.store_positions is not None
            and tree.store_positions[node] >= 0
            and self.proposer.datastore is not None
        ):
            return f"{name}:{self.proposer.datastore.locate(int(tree.store_positions[node]))}"
        return name

    def _span(self, work: ScheduledRows) -> Span:
        seq, first = work.seq, work.seq.computed
        logits = work.n_rows if seq.lacks_prompt_logprobs else int(work.samples)
        sampler = seq.sampler if work.samples and self.acceptance.walks(seq) else None
        return Span(seq.slot, seq.tokens[first : first + work.n_rows], first, seq.tree, logits, sampler, seq.n_prompt)


def _banned(seq: Sequence) -> tuple[int, ...]:
    return tuple(i for i, bias in seq.params.logit_bias.items() if bias <= -100)


def _count(by_source: dict[str, int], by_depth: list[int], sources: np.ndarray, depth: np.ndarray, names: list[str]) -> None:
    """Add nodes, given by their sources and depths [N], to the counts."""
    for source, n in enumerate(np.bincount(sources, minlength=1).tolist()):
        if n:
            by_source[names[source]] = by_source.get(names[source], 0) + n
    counts = np.bincount(depth, minlength=1).tolist()[1:]
    by_depth.extend([0] * (len(counts) - len(by_depth)))
    for d, n in enumerate(counts):
        by_depth[d] += n
