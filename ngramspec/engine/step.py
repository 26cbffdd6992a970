"""The step, for all running sequences at once: schedule → draft → pack → forward → accept → commit.

Owns the scheduler, the runner and the speculator, and moves data between them; each knows nothing of the others.
Not thread-safe: `thread` calls it from one thread.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np

from ngramspec.backends.base import Output, Runner, is_out_of_memory
from ngramspec.datastore.reader import Datastore
from ngramspec.datastore.similar_files import VectorIndex
from ngramspec.engine.acceptance import Acceptance
from ngramspec.engine.native_steps import NativeSteps
from ngramspec.engine.observers import Accepted, Observers
from ngramspec.engine.prompt_ahead import PromptAhead
from ngramspec.engine.scheduler import ScheduledRows, Scheduler
from ngramspec.engine.sequence import Sequence
from ngramspec.grammar import forced_tokens
from ngramspec.kv_cache.prefix_folder import PrefixStore
from ngramspec.outputs import BLOCK, DraftTree, TokenLogprob
from ngramspec.sampling.batch import Batch, Span, pack
from ngramspec.sampling.verify import Match
from ngramspec.speculative.budget.cost_model import CostModel
from ngramspec.speculative.budget.step_timer import StepPlan, StepTimer
from ngramspec.speculative.drafter import DraftParams, SequenceInfo, Speculator, make_pass_topk

log = logging.getLogger(__name__)

_NO_TOKENS = np.empty(0, np.int32)

MOVING_SHARE = 0.1  # most of the time of steps that moving weights into large pages may take
SLOPE_ROWS = 8  # rows after those of a pass without drafts, whose mean cost decides whether forced tokens pay
IDLE_S = 0.01  # without a request, until weights are moved into large pages and prompts are computed ahead


class Core:
    """The loop of one engine and the parts that it moves data between."""

    def __init__(
        self,
        runner: Runner,
        speculator: Speculator,
        cost: CostModel,
        on_error: Callable[[Sequence, Exception], None],
        acceptance: Acceptance,
    ) -> None:
        """Take the parts of an engine. `on_error` is called with a sequence that failed alone; the others go on."""
        self.runner, self.timing, self.on_error, self.acceptance = runner, StepTimer(cost), on_error, acceptance
        self.scheduler = Scheduler(runner.pool, runner.max_rows)
        self.ahead = PromptAhead(runner)
        self.n_passes = 0
        self._max_rows = sys.maxsize  # of a pass with drafts; less once one did not fit into memory
        self.drafts_forced_tokens = True
        self.is_compiling_drafts = False
        """Whether drafting and native steps are still being compiled: passes are plain until `begin_speculation`."""
        self.is_compiling_sampling = False
        """Whether the functions that draw tokens are still being compiled: sequences that need them are not to be added (`can_run`)."""
        self.prefixes: PrefixStore | None = None
        """Keeps blocks of the prefix cache on disk; None: they are lost with the process."""
        self.has_small_pages = True
        """Some weights may still be in small pages of memory: `enlarge_page` has something to do."""
        self._move_at = 0.0  # not before then, while there is work (`time.perf_counter`)
        self._n_drafting = 0  # sequences that a draft was looked for in this step
        self._speculates = False
        self._has_drafts = False  # a sequence of this step may be drafted for
        self.use(speculator)

    @property
    def cost(self) -> CostModel:
        return self.timing.cost

    @cost.setter
    def cost(self, cost: CostModel) -> None:
        self.timing = StepTimer(cost)

    def use(self, speculator: Speculator) -> None:
        """Draft with this speculator from now on. Not while sequences run.

        Raises what its drafters raise at `bind`, and UnsupportedModelError if they need hidden states that the runner does not provide.
        """
        self.runner.keep_hidden_states(speculator.reads_hidden_states)  # raises if the runner cannot
        self.runner.keep_hidden_states(False)
        self._keeps_hidden_states = False
        self.runner.keep_candidates(speculator.needs_topk)
        speculator.bind(self.runner)
        self.speculator = speculator
        self.scheduler.has_room = speculator.has_room if speculator.keeps_kv else None
        self._observers = Observers(speculator, self.runner.pool)
        self.native_steps = NativeSteps(self.runner, speculator, self._observers)

    def _request_hidden_states(self) -> None:
        """Have the runner's next passes keep their hidden states if a drafter needs them, and else not."""
        speculator = self.speculator
        wanted = self._has_drafts and not self.is_compiling_drafts and speculator.reads_hidden_states and speculator.needs_hidden_states
        if wanted != self._keeps_hidden_states:
            self.runner.keep_hidden_states(wanted)
            self._keeps_hidden_states = wanted

    def begin_sampling(self) -> None:
        """Let sequences draw tokens from now on: the code for it has been compiled."""
        self.is_compiling_sampling = False

    def begin_speculation(self) -> None:
        """Draft and make native steps from the next step on, for running sequences too: their code has been compiled."""
        self.is_compiling_drafts = False
        for seq in self.scheduler.running:
            if seq.speculation:
                self._begin_drafting(seq)

    def use_datastores(self, stores: Mapping[str, Datastore], ready: list[VectorIndex] | None = None) -> None:
        """Draft from these datastores from the next step on, for running sequences too. Raises ValueError."""
        begun = [] if self.is_compiling_drafts else self.scheduler.running
        running = ((seq.slot, seq.tokens, seq.datastores) for seq in begun if seq.speculation)
        self.speculator.use_datastores(stores, running, ready)

    @property
    def idle_after_s(self) -> float | None:
        """Seconds without a request after which `work_idle` has something to do; None if there is nothing."""
        until_saving_s = None if self.prefixes is None else self.prefixes.idle_after_s
        if not (self.has_small_pages or self._can_compute_ahead):
            return until_saving_s
        return IDLE_S if until_saving_s is None else min(IDLE_S, until_saving_s)

    @property
    def _can_compute_ahead(self) -> bool:
        return self.ahead.has_work and not self.is_compiling_drafts and bool(self.scheduler.free_slots)

    def work_idle(self) -> None:
        """Do for some milliseconds what can wait until there is no request."""
        if self._can_compute_ahead:
            self.ahead.compute_some(self.scheduler.free_slots[-1], self.cost)
        elif self.prefixes is not None and (self.prefixes.idle_after_s == 0 or not self.has_small_pages):
            self.prefixes.save_some()
        elif self.has_small_pages:
            self.enlarge_page()

    def enlarge_page(self) -> None:
        """Move some weights into a large page of memory."""
        self.has_small_pages = self.runner.enlarge_page()

    def enlarge_page_between_steps(self) -> None:
        """Move some weights into a large page, unless that would take more than `MOVING_SHARE` of the time."""
        started = time.perf_counter()
        if started >= self._move_at:
            self.enlarge_page()
            ended = time.perf_counter()
            self._move_at = ended + (ended - started) * (1 / MOVING_SHARE - 1)

    def can_run(self, seq: Sequence) -> bool:
        """Return whether the functions that choose its tokens have been compiled."""
        return not self.is_compiling_sampling or (seq.sampler.greedy and seq.sampler.is_stateless)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        seq.speculation = seq.speculation and self.speculator.active
        seq.uses_exact_match = self.acceptance.uses_exact_match(seq.params)
        self.scheduler.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, waiting or running; its blocks are free when this returns."""
        n_registered = self.runner.pool.registered[seq.slot] if seq.slot >= 0 else 0
        slot = self.scheduler.remove(seq)
        if slot >= 0:
            self.speculator.end(slot)
        if self.prefixes is not None and n_registered and seq.block_hashes is not None:  # what releasing the slot has kept is there now
            self.prefixes.note_request(seq.block_hashes.hashes[:n_registered], seq.n_cached // BLOCK)
        self._observers.end(seq)

    def step(self, meanwhile: Callable[[], None] = lambda: None, interrupt: np.ndarray | None = None) -> list[Sequence]:
        """Make one step, or several natively, and return the sequences that got tokens. Finished ones have been removed.

        `meanwhile` is called while the pass is under way, or if there is none. Several steps are made only while `interrupt` [1] int64 is
        0; None: one step.
        """
        rows = self._schedule()
        if not rows:
            meanwhile()
            return []
        self._has_drafts = any(each.seq.speculation for each in rows)
        self._request_hidden_states()
        changed = None
        all_decode = all(each.n_rows == 1 and each.samples for each in rows)
        if interrupt is not None and all_decode and not self.is_compiling_drafts and not self._keeps_hidden_states:
            changed = self._step_natively(rows, interrupt)
        if changed is None:
            changed = self._step_with_hooks(rows, meanwhile)
        else:
            meanwhile()
        if not self.scheduler.has_work:  # the time until the next step is not this one's
            self.timing.finish_step(is_last=True)
        return changed

    def _step_with_hooks(self, rows: list[ScheduledRows], meanwhile: Callable[[], None]) -> list[Sequence]:
        """Make one step in Python, where grammars, datastores and drafters act before the pass and stop strings and samplers after it."""
        self._draft(rows)
        batch = self._pack(rows)
        try:
            output = self._forward(batch, meanwhile)
        except Exception as e:
            self.scheduler.admits = not (is_out_of_memory(e) and self._halve_rows(rows, len(batch.input_ids)))
            if self.scheduler.admits:
                raise
            log.warning("out of memory in a pass of %d rows; from now on they have half as many: %s", len(batch.input_ids), e)
            return []
        self.scheduler.admits = True
        matches = output.get_matches()
        return self._commit(self._accept(rows, batch, output, matches), batch, output)

    def _step_natively(self, rows: list[ScheduledRows], interrupt: np.ndarray) -> list[Sequence] | None:
        """Make several steps in one call; None, with nothing done, if a single one in Python must be made."""
        try:
            result = self.native_steps.run(rows, self.acceptance, self.timing, self._max_rows, interrupt)
        except MemoryError:  # a single step finds out how many rows fit
            return None
        if result is None:
            return None
        self.scheduler.admits = True
        self.n_passes += len(result.records)
        appended = list[tuple[Sequence, np.ndarray]]()
        ends = result.table[["n_new", "state"]].tolist()
        for b, (each, (n, state)) in enumerate(zip(rows, ends, strict=True)):
            seq = each.seq
            if seq.slot < 0:  # another sequence of its request has failed
                continue
            try:
                seq.append_native(result.tokens[b, :n], state)
                self._observers.record_sources(seq, result.sources[b, :n])
                appended.append((seq, result.tokens[b, :n]))
            except Exception as e:
                self._fail(seq, e)
        changed, slots, continuing = list[Sequence](), list[int](), list[np.ndarray]()
        for seq, tokens in appended:
            if seq.slot < 0:
                continue
            changed.append(seq)
            if seq.finished:
                self._finish(seq)
                continue
            self.runner.pool.truncate_to(seq.slot, seq.n_computed)
            if seq.speculation:
                slots.append(seq.slot)
                continuing.append(tokens)
        self.speculator.observe_native_steps(len(result.records), np.array(slots, np.int32), continuing)
        return changed

    def _halve_rows(self, rows: list[ScheduledRows], n_rows: int) -> bool:
        """Make smaller passes from now on, and compute later what this one was to compute. False if it could not be smaller."""
        if not self.scheduler.halve_rows(n_rows):
            return False
        self._max_rows = n_rows // 2
        for each in reversed(rows):
            each.seq.tree = None
            if self.runner.is_recurrent:  # the pass may have advanced the states of some layers
                self.speculator.end(self.scheduler.preempt(each.seq))
        return True

    def _schedule(self) -> list[ScheduledRows]:
        """Begin a step: schedule it, and notify the speculator of admitted and preempted sequences."""
        if not self.is_compiling_drafts:  # passes beside a compiler take longer, and what learns from them is being compiled
            self.timing.start_step()
        if self.prefixes is not None:
            self.prefixes.note_work()
        rows, admitted, preempted = self.scheduler.schedule(self.prefixes, self.timing.cost)
        for slot in preempted:
            self.speculator.end(slot)
        for seq in admitted:
            if seq.speculation and not self.is_compiling_drafts:
                self._begin_drafting(seq)
        return rows

    def _begin_drafting(self, seq: Sequence) -> None:
        """Start drafting for a sequence that runs from now on."""
        params = DraftParams(
            banned=tuple(token for token, bias in seq.params.logit_bias.items() if bias <= -100),
            stops=tuple(seq.stop_ids),
            prediction=seq.prediction,
            n_output=seq.n_output,
            tenant=seq.tenant,
            datastores=seq.datastores,
            temperature=seq.params.temperature,
            info=SequenceInfo(seq.sampler, seq.n_prompt, seq.limit),
        )
        self.speculator.begin(seq.slot, seq.tokens, params)

    def _draft(self, rows: list[ScheduledRows]) -> None:
        """Give every sequence that samples in this pass its tree, and KV positions for the tree."""
        for each in rows:
            each.seq.tree = None
        sampling = [each.seq for each in rows if each.samples]
        seqs = [seq for seq in sampling if seq.max_depth > 0]
        self._n_drafting, self._speculates = 0, bool(seqs) and not self.is_compiling_drafts
        if not self._speculates:
            return
        slots, depths = np.array([(seq.slot, seq.max_depth) for seq in seqs], np.int32).T.copy()
        base, keys = sum(each.n_rows for each in rows), sum(each.seq.n_tokens for each in rows)
        plain = self.timing.should_probe()
        for b, seq in enumerate(seqs):
            seq.drafting_paused = plain or (seq.sampler.constraint is None and self.speculator.cools_down(seq))
            depths[b] *= not seq.drafting_paused
        self._n_drafting = int(np.count_nonzero(depths))
        if not self._n_drafting:
            return
        plan = self.timing.plan(base, len(sampling), keys, self._n_drafting)
        most = max(min(self.timing.cost.max_rows, self._max_rows) - base, 0)
        trees = self.speculator.propose(slots, depths, plan.cost_ms, base, most, plan.threshold)
        pool, room = self.runner.pool, most - sum(map(len, trees))
        for seq, depth, tree in zip(seqs, depths.tolist(), trees, strict=True):
            if seq.sampler.constraint is not None and tree.drawn_from is None and not seq.drafting_paused:
                given, tree = tree, self._follow_grammar(seq, tree, depth, plan, base, room)
                room -= len(tree) - len(given)
            n = pool.reserve_after(seq.slot, seq.n_tokens, len(tree))  # a full pool: a smaller tree
            seq.tree = tree.take_first(n) if n else None

    def _follow_grammar(self, seq: Sequence, tree: DraftTree, depth: int, plan: StepPlan, base: int, room: int) -> DraftTree:
        """Return the tree without what the sequence's grammar forbids, and with its forced tokens if these pay, at most `depth` deep."""
        assert seq.sampler.constraint is not None
        least = plan.threshold * _compute_row_ms(plan.cost_ms, base) if self.drafts_forced_tokens else np.inf
        return forced_tokens.apply_grammar(
            tree,
            seq.sampler.constraint.make_lookahead(),
            source=len(self.speculator.source_names),
            max_depth=min(depth, self.speculator.spec_length),
            max_nodes=min(self.speculator.spec_rows, len(tree) + max(room, 0)),
            least=least,
        )

    def _pack(self, rows: list[ScheduledRows]) -> Batch:
        return pack([self._make_span(each) for each in rows], self.runner.pool, self.runner.rows_per_item)

    def _make_span(self, rows: ScheduledRows) -> Span:
        seq, first, samples = rows.seq, rows.seq.n_computed, rows.samples
        logits = rows.n_rows if seq.lacks_prompt_logprobs else int(samples)
        sampler = seq.sampler if samples and seq.uses_exact_match else None
        return Span(seq.slot, seq.buffer[first : first + rows.n_rows], first, seq.tree, logits, sampler, seq.n_prompt, samples)

    def _forward(self, batch: Batch, meanwhile: Callable[[], None]) -> Output:
        """Compute the pass."""
        n_rows, known = len(batch.input_ids), sum(len(span.tokens) for span in batch.spans)
        sampling = [span for span in batch.spans if span.samples]
        n_decoding = sum(span.start >= span.n_prompt and len(span.tokens) == 1 for span in sampling)
        has_prompt = n_decoding < len(batch.spans)
        self._request_hidden_states()  # again: a drafter that was not asked for a while may be from this step on
        self.timing.set_load(
            n_rows,
            nodes=n_rows - known,
            n_seqs=len(sampling),
            keys=sum(span.start + len(span.tokens) for span in batch.spans),
            n_drafting=self._n_drafting,
            has_prompt=has_prompt,
            n_beside=n_decoding if has_prompt else 0,
            speculates=self._speculates,
        )
        output = self.runner.forward(batch)
        self.n_passes += 1
        meanwhile()
        output.wait()
        return output

    def _accept(self, rows: list[ScheduledRows], batch: Batch, output: Output, matches: list[Match | None]) -> list[Accepted]:
        """Append to each sequence what the model accepts, which may be what the pass has matched. A sequence that fails (its logits, its
        text) ends alone."""
        results = []
        for i, (each, span, match) in enumerate(zip(rows, batch.spans, matches, strict=True)):
            seq = each.seq
            if seq.slot < 0:  # another sequence of its request has failed
                continue
            try:
                if seq.lacks_prompt_logprobs:
                    seq.score_prompt(span.start, output.get_logits(span.first_logits, span.first_logits + len(span.tokens)))
                if not span.samples:
                    tokens = path = _NO_TOKENS
                elif match is not None and self.acceptance.matches_by_pass:
                    wanted = seq.params.logprobs
                    n = seq.extend(match[0], None if wanted is None else _score_tokens(output, span, match, wanted))
                    tokens, path = match[0][:n], match[1][:n]
                else:
                    tokens, path = self.acceptance.accept(seq, output, span)
            except Exception as e:
                self._fail(seq, e)
            else:
                results.append(Accepted(seq, span, i, tokens, path))
        return results

    def _commit(self, accepted: list[Accepted], batch: Batch, output: Output) -> list[Sequence]:
        """Keep the accepted paths' keys and values and drop the rest; count the pass and let the speculator learn from it."""
        n_tokens = sum(len(each.tokens) for each in accepted)
        accepted = [each for each in accepted if each.seq.slot >= 0]
        self._commit_kv(accepted, output)
        self.timing.add_tokens(n_tokens)
        self._observers.record_pass(accepted, batch)
        for each in accepted:
            try:
                if each.seq.slot >= 0:
                    self._observers.record_sequence(each, output, states=self._keeps_hidden_states)
            except Exception as e:  # ends all sequences of its request: before any of them is finished
                self._fail(each.seq, e)
        changed, continuing = list[Sequence](), list[Accepted]()
        topk_sequences: list[tuple[int, int, int]] = []
        for each in accepted:
            seq = each.seq
            if seq.slot < 0 or not len(each.tokens):
                continue
            seq.tree = None
            changed.append(seq)
            if seq.finished:
                self._finish(seq)
            else:
                self.runner.pool.truncate_to(seq.slot, seq.n_computed)
            if seq.speculation and not self.is_compiling_drafts:
                if not seq.finished:
                    continuing.append(each)
                if self.speculator.needs_topk and not seq.drafting_paused:
                    last = each.span.start + len(each.span.tokens) - 1
                    topk_sequences.append((seq.slot, int(seq.buffer[last - 1]) if last else -1, each.index))
        if continuing or topk_sequences:
            slots = np.array([each.seq.slot for each in continuing], np.int32)
            accepted_paths = [each.tokens for each in continuing], [_map_to_own_nodes(each) for each in continuing]
            self.speculator.observe(slots, *accepted_paths, make_pass_topk(topk_sequences, batch, output))
        return changed

    def _commit_kv(self, accepted: list[Accepted], output: Output) -> None:
        """Move the paths whose KV lies elsewhere than their tokens, and set `n_computed` to the rows of known tokens and accepted paths."""
        moved, ends = [], list[int]()
        for each in accepted:
            end, n = each.span.start + len(each.span.tokens), len(each.path)
            if n and each.path[-1] >= n:
                moved.append((each.index, end, end + each.path))
            ends.append(end + n)
        if moved:
            output.commit(moved)
        for each, end in zip(accepted, ends, strict=True):
            each.seq.n_computed = end

    def _finish(self, seq: Sequence) -> None:
        self.remove(seq)
        if seq.speculation and seq.tenant is not None and not self.is_compiling_drafts:
            self.speculator.remember(seq.tokens[seq.n_prompt :], seq.tenant)

    def _fail(self, seq: Sequence, error: Exception) -> None:
        self.remove(seq)
        self.on_error(seq, error)


def _compute_row_ms(cost_ms: np.ndarray, n_rows: int) -> float:
    """Return the milliseconds that a row adds to a pass of `n_rows` rows, the mean of the next `SLOPE_ROWS`. cost_ms [R + 1] float64."""
    first, last = min(n_rows, len(cost_ms) - 2), min(n_rows + SLOPE_ROWS, len(cost_ms) - 1)
    return max(float(cost_ms[last] - cost_ms[first]), 0.0) / (last - first)


def _score_tokens(output: Output, span: Span, match: Match, n: int) -> list[TokenLogprob]:
    """Return the log-probabilities of a match's tokens, each with the `n` most likely ones."""
    return output.get_logprobs(span.root_logits + np.concatenate([[0], 1 + match[1]]), n)


def _map_to_own_nodes(accepted: Accepted) -> np.ndarray:
    """Return the accepted path [j] int32 as nodes of the speculator's own tree, -1 for nodes that are not in it."""
    tree, path = accepted.span.tree, accepted.path
    return path if tree is None or tree.origins is None else tree.origins[path]
