"""A sequence: its tokens, its text, its end. Knows nothing of passes, pools or batches.

The step appends tokens one by one and in order, whether they were drafted or not, so that a stop token or stop string in the middle of
accepted tokens ends the sequence exactly there. Native steps append several at once (`append_native`), under the same stop rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ngramspec.engine.stop_conditions import REASONS, find_stop
from ngramspec.kv_cache.blocks import BlockHashes
from ngramspec.outputs import Choice, Delta, DraftTree, TokenLogprob
from ngramspec.sampling.sampler import Sampler, token_logprob
from ngramspec.sampling_params import SamplingParams
from ngramspec.sequence_table import RUNNING, STOP, UNPICKED


class TextSink(Protocol):
    """The interface of a detokenizer that a sequence needs."""

    stopped_by: str | None

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOptions:
    """What the sequences of one request have in common, beside the prompt and the sampling parameters."""

    max_len: int
    """Most tokens of prompt and output together."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence."""
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    """Those of `stop_ids` that are stop strings, which may be part of the text."""
    speculation: bool = True
    prediction: np.ndarray | None = None
    """[m] int32: the output that the client expects."""
    tenant: str | None = ""
    """Whose output cache is shared; None: nobody's."""
    datastores: frozenset[str] | None = None
    """Names of those that drafts may come from; None: all."""


class Sequence:
    """A `Choice` that is being written. The scheduler owns `slot` and `n_computed`, the step `tree`."""

    slot = -1
    """Place in the pool and the speculator while running."""
    n_computed = 0
    """Tokens whose keys and values are in the pool."""
    n_cached = 0
    """Tokens whose keys and values came from the prefix cache when the sequence was first admitted."""
    admitted_s: float | None = None
    """Time of the first admission, by `time.perf_counter`."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Filled in as the prompt is computed, if they are wanted; the first token has none."""
    finished = False
    tree: DraftTree | None = None
    drafting_paused = False
    """No draft is looked for in this pass: the sequence is unpredictable, and looking costs time."""
    streams = False
    """Somebody waits for the delta of each step."""
    uses_exact_match = False
    """Its tokens are its sampler's own (`Acceptance.uses_exact_match`)."""
    cooldown = last_cooldown = 0
    """Passes for which no draft will be made, and the length of the last such pause."""

    def __init__(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        sampler: Sampler,
        text: TextSink,
        options: SequenceOptions,
        *,
        index: int,
        block_hashes: BlockHashes | None = None,
    ) -> None:
        """Make a sequence that starts with prompt [n] int32. `block_hashes`: of the prompt's blocks; None: no prefix cache."""
        self.params, self.sampler, self.text, self.block_hashes = params, sampler, text, block_hashes
        self.stop_ids, self.stop_tokens, self.speculation = options.stop_ids, options.stop_tokens, options.speculation
        self.prediction, self.tenant, self.datastores = options.prediction, options.tenant, options.datastores
        self.n_prompt = self.n_tokens = len(prompt)
        most_spelled = len(params.healed.encode())  # a token spells a byte at least; `append` counts them
        self.limit = min(self.n_prompt + most_spelled + params.max_tokens, options.max_len)
        self.buffer = np.empty(self.limit, np.int32)
        self.buffer[: self.n_prompt] = prompt
        self.last_token, self.previous_token = int(prompt[-1]), int(prompt[-2]) if self.n_prompt > 1 else -1
        self.choice = Choice(index, logprobs=None if params.logprobs is None else [])
        self.min_tokens = most_spelled + params.min_tokens
        if params.prompt_logprobs is not None and index == 0:
            self.prompt_logprobs = [None]
        self.lacks_prompt_logprobs = self.prompt_logprobs is not None and self.n_prompt > 1
        """Logits of prompt rows are still wanted."""
        self._n_wordless = 0  # 1 once the last token is a stop token, which has no text
        self._closed = False
        self._new_text = ""  # not yet in a delta
        self._n_sent = 0  # tokens that are in deltas

    @property
    def tokens(self) -> np.ndarray:
        """[n_tokens] int32: prompt and output so far."""
        return self.buffer[: self.n_tokens]

    @property
    def n_output(self) -> int:
        return self.n_tokens - self.n_prompt

    @property
    def n_unsent(self) -> int:
        """Return how many tokens are in no delta yet."""
        return len(self.choice.token_ids) - self._n_sent

    @property
    def max_depth(self) -> int:
        """Return the deepest useful draft node: one more token always comes from the model itself."""
        return self.limit - self.n_tokens - 1 if self.speculation else 0

    def sample(self, row: np.ndarray) -> tuple[int, TokenLogprob | None]:
        """Sample the next token from logits row [V] -> it and its log-probability, None if that is not wanted."""
        token = self.sampler.sample(row, self.n_output)
        return token, self.sampler.score(row, self.n_output, token)

    def score_prompt(self, first: int, rows: np.ndarray) -> None:
        """Score the prompt's tokens after positions first, first + 1, … with their logits rows [n, V]."""
        known, n = self.prompt_logprobs, self.params.prompt_logprobs
        assert known is not None
        assert n is not None
        for position in range(max(first + 1, len(known)), min(first + 1 + len(rows), self.n_prompt)):
            known.append(token_logprob(rows[position - first - 1], int(self.buffer[position]), n))
        self.lacks_prompt_logprobs = len(known) < self.n_prompt

    def extend(self, tokens: np.ndarray, logprobs: list[TokenLogprob] | None = None) -> int:
        """Append tokens [n] int32, with their log-probabilities [n] if wanted, up to where the sequence ends -> how many.

        Raises NotFiniteError or InvalidInputError at -1: none could be picked.
        """
        for n, token in enumerate(tokens.tolist(), 1):
            if token < 0:
                raise self.sampler.explain_failure(self.n_output)
            if self.append(token, None if logprobs is None else logprobs[n - 1]):
                return n
        return len(tokens)

    def append_native(self, tokens: np.ndarray, state: int) -> None:
        """Append tokens [n] int32 of native steps, which have found the sequence in this `state` after the last one.

        Raises NotFiniteError or InvalidInputError if the last token is -1: none could be picked.
        """
        new = tokens[: len(tokens) - (state == UNPICKED)].tolist()
        self.buffer[self.n_tokens : self.n_tokens + len(new)] = new
        self.n_tokens += len(new)
        self.choice.token_ids += new
        self.previous_token, self.last_token = [self.previous_token, self.last_token, *new][-2:]
        if state == UNPICKED:
            raise self.sampler.explain_failure(self.n_output)
        if state != RUNNING:
            self._end(state)

    def append(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Append a token; True if it ends the sequence (the token itself stays in `token_ids`)."""
        self.buffer[self.n_tokens] = token
        self.n_tokens += 1
        self.previous_token, self.last_token = self.last_token, token
        constraint_before = self.sampler.constraint  # the sampler drops one that is over
        self.sampler.accept(token)
        choice = self.choice
        choice.n_spelled = self.sampler.n_spelled
        if constraint_before is not None and constraint_before.is_over:
            self.limit = min(self.n_prompt + choice.n_spelled + self.params.max_tokens, self.limit)
            self.min_tokens = choice.n_spelled + self.params.min_tokens
        choice.token_ids.append(token)
        if logprob is not None and choice.logprobs is not None:
            choice.logprobs.append(logprob)
        state = find_stop(self, self.stop_ids)
        if state == STOP:
            self._end(STOP)
            return True
        if self.params.stop:
            self.update_text()
        constraint = self.sampler.constraint
        if self.text.stopped_by is not None or (constraint is not None and constraint.complete):
            choice.stop_reason = self.text.stopped_by
            self.finish("stop")
        elif state != RUNNING:
            self._end(state)
        return self.finished

    def _end(self, state: int) -> None:
        """End the sequence by its tokens: `state` is what `find_stop` has found."""
        if state == STOP and self.last_token in self.stop_ids:
            self._n_wordless = 1
            token = self.last_token
            self.choice.stop_reason = self.stop_tokens.get(token, token if token in self.params.stop_token_ids else None)
        self.finish(REASONS[state])

    def finish(self, reason: str) -> None:
        self.choice.finish_reason, self.finished = reason, True
        if self.params.stop:
            self.update_text()
            if self.text.stopped_by is not None and reason == "length":  # held-back text completed a stop string
                self.choice.finish_reason, self.choice.stop_reason = "stop", self.text.stopped_by

    def update_text(self) -> None:
        """Detokenize what is new. Without stop strings nothing waits for it: it can be done during the next pass."""
        choice = self.choice
        new = [self.text.push(token) for token in choice.token_ids[len(choice.texts) : len(choice.token_ids) - self._n_wordless]]
        choice.texts += new
        choice.text += "".join(new)
        self._new_text += "".join(new)
        if self.finished and not self._closed:
            self._closed = True
            choice.texts.extend([""] * self._n_wordless)
            if rest := self.text.finish():
                self._add_text(rest)
            if self._n_wordless and self.params.include_stop_str_in_output:
                self._add_text(self.stop_tokens.get(choice.token_ids[-1], ""))

    def make_delta(self) -> Delta:
        """Return what the sequence got since the last delta, with its text brought up to date."""
        self.update_text()
        choice, n = self.choice, self._n_sent
        delta = Delta(
            choice.index,
            self._new_text,
            choice.token_ids[n:],
            choice.draft_sources[n:],
            choice.finish_reason,
            texts=choice.texts[n:],
            logprobs=choice.logprobs[n:] if choice.logprobs is not None else None,
            stop_reason=choice.stop_reason,
        )
        self._new_text, self._n_sent = "", len(choice.token_ids)
        return delta

    def _add_text(self, piece: str) -> None:
        self.choice.text += piece
        self._new_text += piece
        if self.choice.texts:
            self.choice.texts[-1] += piece
