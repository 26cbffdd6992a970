"""Sampling a token from one row of logits: one implementation for every row, drafted or not.

Knows `SamplingParams` and numbers; no model, no draft. A `Sampler` belongs to one sequence: it carries the counts
that penalties need, along the accepted tokens. `sample(row, t)` gives the token at output position t; it depends on
the row, the parameters, the tokens before, and u(seed, n, t) from a counter-based generator (Philox4x32-10,
Salmon et al., SC 2011), and on nothing else: there is no generator state that speculation could advance differently.

Order of adjustments: grammar, logit bias, bans (`allowed_token_ids`, `bad_words`, `min_tokens`), repetition, presence and frequency
penalty; temperature; top-k, top-p over what top-k left, min-p. Tokens rank by their adjusted logit; ties are broken towards the lower
token id everywhere.

A token's weight is floor(p * 2**40) for p = exp((logit - top) / temperature), the most likely token's being 1, and every sum of
weights is one of integers: it does not depend on the order of its terms, so that a GPU's parallel sums pick the same token
(`ngramspec.backends.cuda.gpu_sampler`). All fractions of such sums (u, top-p) are integers over 2**53.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.errors import GrammarError, InvalidInputError, NgramspecError
from ngramspec.grammar.constraint import Constraint
from ngramspec.outputs import KEPT, TokenLogprob
from ngramspec.sampling.numeric import bits_of_float, exp
from ngramspec.sampling_params import SamplingParams

# The most likely token weighs 2**40. One that is e**-28 times as likely weighs nothing.
WEIGHT_BITS = 40
# u and top-p are integers over 2**53, the numbers that a float64 holds exactly.
FRACTION_BITS = 53
# Histogram by which top-k and top-p find their boundary without sorting: bins, and bins per unit of logits at temperature 1.
_BINS = 4096
_BIN_SCALE = np.float32(128.0)
# Weights summed at once while the drawn token is searched.
_STRIDE = 1024


class NotFiniteError(NgramspecError):
    """The model's logits for a token, that at an output position where one is given, are not numbers."""

    def __init__(self, position: int | None = None) -> None:
        where = "" if position is None else f" at output position {position}"
        super().__init__(f"the model's logits{where} hold no finite maximum")


@njit(cache=True, nogil=True)
def _compute_philox(c0, c1, c2, c3, k0, k1):
    """Compute Philox4x32-10: a counter of four and a key of two words of 32 bits, as uint64 → four words."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        a = np.uint64(0xD2511F53) * c0
        b = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = ((b >> half) ^ c1 ^ k0) & low, b & low, ((a >> half) ^ c3 ^ k1) & low, a & low
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@njit(cache=True, nogil=True)
def _uniform_bits(seed, sample, position, lane):
    """Return what `uniform_bits` does, for arguments that are uint64."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b, _, _ = _compute_philox(position & low, position >> half, sample, lane, seed & low, seed >> half)
    return np.int64((a >> np.uint64(5)) << np.uint64(26) | b >> np.uint64(6))


def uniform_bits(seed: int, sample: int, position: int, lane: int = 0) -> int:
    """Return u(seed, n, t) * 2**53: an integer in [0, 2**53), a function of its arguments alone. Lanes are independent of each other.

    Lane 0 picks the token; lane 1 + 2 k draws the k-th draft for the position. If drafts are accepted by rejection sampling, lane 2
    draws the token, and lane 4 + 2 k decides on the k-th draft.
    """
    return int(_uniform_bits(np.uint64(seed), np.uint64(sample), np.uint64(position), np.uint64(lane)))


def encode_top_p(top_p: float) -> int:
    """Return top-p * 2**53, an integer in [1, 2**53]; 2**53 keeps all tokens."""
    return max(1, int(top_p * 2.0**FRACTION_BITS))


def encode_min_p(min_p: float) -> int:
    """Return the least weight that min-p lets through."""
    return math.ceil(min_p * 2.0**WEIGHT_BITS)


@njit(cache=True, nogil=True)
def _apply_penalties(logits, in_prompt, counts, repetition, presence, frequency):
    """Change logits [V] in place: repetition penalty for tokens of prompt and output, presence and frequency penalty for the output's."""
    for i in range(logits.shape[0]):
        n = counts[i]
        if n > 0 or in_prompt[i]:
            logits[i] = logits[i] / repetition if logits[i] > 0 else logits[i] * repetition
        if n > 0:
            logits[i] -= presence + frequency * np.float32(n)


@njit(cache=True, nogil=True)
def _scale_by_fraction(total, fraction):
    """Return floor(total * fraction / 2**53) for total < 2**62 and fraction <= 2**53, by halves of 32 bits."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b = np.uint64(total), np.uint64(fraction)
    a1, a0, b1, b0 = a >> half, a & low, b >> half, b & low
    middle = a1 * b0 + a0 * b1 + (a0 * b0 >> half)
    return np.int64((a1 * b1 << np.uint64(11)) + (middle >> np.uint64(21)))


@njit(cache=True, nogil=True)
def _truncate_weights(logits, w, top, scale, most, mass):
    """Zero every weight but the first in the order (logit falling, id rising): `most` of them, or until their sum reaches `mass`.

    `scale` (bins per unit of logits) is such that what falls into the last bin weighs nothing.
    """
    n = logits.shape[0]
    count, weight = np.zeros(_BINS, np.int64), np.zeros(_BINS, np.int64)
    where = np.empty(n, np.int32)
    for i in range(n):
        where[i] = np.int32(min((top - logits[i]) * scale, np.float32(_BINS - 1)))
    for i in range(n):
        count[where[i]] += 1
        weight[where[i]] += w[i]
    kept, held, edge = 0, np.int64(0), 0
    while edge < _BINS - 1 and kept + count[edge] <= most and held + weight[edge] < mass:
        kept += count[edge]
        held += weight[edge]
        edge += 1
    if edge == _BINS - 1:
        return
    inside = np.empty(count[edge], np.int64)
    m = 0
    for i in range(n):
        if where[i] == edge:
            inside[m] = i
            m += 1
        elif where[i] > edge:
            w[i] = 0
    order = np.argsort(-logits[inside], kind="mergesort")
    for j in range(m):
        i = inside[order[j]]
        if kept < most and held < mass:
            kept += 1
            held += w[i]
        else:
            w[i] = 0


@njit(cache=True, nogil=True)
def _compute_weights(logits, top, temperature, top_k, share, least):
    """Return weights [V] int64, proportional to the distribution that is sampled; `top` is the greatest logit and weighs 2**40.

    `share` and `least` are what `encode_top_p` and `encode_min_p` return.
    """
    n = logits.shape[0]
    w = np.empty(n, np.int64)
    for i in range(n):
        bits = bits_of_float(exp((logits[i] - top) / temperature))  # a normal number, at most 1
        digits = np.int64(bits & np.int32(0x7FFFFF) | np.int32(0x800000)) << np.int64(WEIGHT_BITS - 23)
        w[i] = digits >> np.int64(min(np.int32(127) - (bits >> np.int32(23)), np.int32(63)))
    scale = _BIN_SCALE / temperature
    if 0 < top_k < n:
        _truncate_weights(logits, w, top, scale, top_k, np.int64(2**62))
    if share < 2**FRACTION_BITS:
        _truncate_weights(logits, w, top, scale, n, max(_scale_by_fraction(w.sum(), share), 1))
    if least > 0:
        for i in range(n):
            if w[i] < least:
                w[i] = 0
    return w


@njit(cache=True, nogil=True)
def _draw_index(w, u):
    """Return the token at which the running sum of weights, in the order of ids, passes u / 2**53 of the total."""
    goal, i = _scale_by_fraction(w.sum(), u), 0
    while i < w.shape[0]:
        here = w[i : i + _STRIDE].sum()
        if here > goal:
            break
        goal -= here
        i += _STRIDE
    while w[i] <= goal:
        goal -= w[i]
        i += 1
    return i


def _make_banned_error(position: int) -> InvalidInputError:
    return InvalidInputError(f"at output position {position} every token is banned, by logit_bias, allowed_token_ids or bad_words")


class _Entries:
    """A growing table [n] of ENTRY, and the row of each token in it."""

    def __init__(self, table: np.ndarray) -> None:
        self._rows, self._n = table, len(table)
        self.row_of = {token: row for row, token in enumerate(table["token"].tolist())}

    @property
    def table(self) -> np.ndarray:
        return self._rows[: self._n]

    def count(self, token: int) -> None:
        """Count one more occurrence of the token in the output."""
        row = self.row_of.setdefault(token, self._n)
        if row == self._n:
            if row == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros(max(row, 64), ENTRY)])
            self._rows[row]["token"] = token
            self._n += 1
        self._rows["count"][row] += 1


class DrawParams(NamedTuple):
    """Sampling parameters of sequences at temperatures above 0, one element for each [B]."""

    temperature: np.ndarray  # float32
    top_k: np.ndarray  # int64
    share: np.ndarray  # int64, top-p as `encode_top_p` returns it
    least: np.ndarray  # int64, min-p as `encode_min_p` returns it
    seed: np.ndarray  # uint64
    sample: np.ndarray  # uint64
    position: np.ndarray  # int64, of the next token in the output


@njit(cache=True, nogil=True)
def _draw_from_logits(logits, top, temperature, top_k, share, least, seed, sample, position):
    """Draw a token from logits [V] whose greatest is `top`."""
    return _draw_index(_compute_weights(logits, top, temperature, top_k, share, least), _uniform_bits(seed, sample, position, np.uint64(0)))


@njit(cache=True, nogil=True)
def draw_token(logits, top, draws, b, ahead):
    """Draw the token of sequence b, `ahead` positions after its next one, from logits [V] whose greatest is `top`."""
    position = np.uint64(draws.position[b] + ahead)
    return _draw_from_logits(
        logits, top, draws.temperature[b], draws.top_k[b], draws.share[b], draws.least[b], draws.seed[b], draws.sample[b], position
    )


@njit(cache=True, nogil=True)
def apply_mask(row, mask):
    """Return a copy of logits row [V] float32 with -inf for every token that is not in the mask [W] uint32."""
    n, out, none = row.shape[0], np.empty_like(row), np.float32(-np.inf)
    whole = min(mask.shape[0], n // 32)
    for w in range(whole):  # 32 tokens at once, whatever the word: it takes a seventh of the time of looking which there are
        for k in range(32):
            out[32 * w + k] = row[32 * w + k] if (mask[w] >> np.uint32(k)) & np.uint32(1) else none
    for i in range(32 * whole, n):
        out[i] = row[i] if i < 32 * mask.shape[0] and (mask[i // 32] >> np.uint32(i % 32)) & np.uint32(1) else none
    return out


def needs_only_logits(params: SamplingParams) -> bool:
    """Return whether tokens are a function of (logits row, seed, position) alone and no log-probabilities are wanted, so that all
    sequences can be sampled in one call, on a device too."""
    return _keeps_logits(params) and params.logprobs is None


def _keeps_logits(params: SamplingParams) -> bool:
    """Return whether logits are left as they are."""
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return _is_sparse(params) and penalties == (1.0, 0.0, 0.0) and not params.logit_bias and params.min_tokens == 0


def _is_sparse(params: SamplingParams) -> bool:
    """Return whether only the logits of a few listed tokens are adjusted, so that a device can do it."""
    return params.grammar is None and params.allowed_token_ids is None and not params.bad_words


# Adjustments of one token's logit: `bias` if it is flagged BIASED, then penalties by `count`, its occurrences in the output.
ENTRY = np.dtype([("token", np.int32), ("bias", np.float32), ("count", np.int32), ("flags", np.int32)])


class Sampler:
    """Samples the tokens of one sequence. `accept` must be called with each token that is appended."""

    # Flags of an entry: the bias is added; the token is a stop that `min_tokens` holds back; it is in the prompt.
    BIASED, HELD, PROMPT = 1, 2, 4

    def __init__(
        self,
        params: SamplingParams,
        *,
        index: int,
        seed: int,
        prompt: np.ndarray,
        vocab_size: int,
        stop_ids: frozenset[int],
        constraint: Constraint | None = None,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """Prepare the adjustments. `constraint`: of the text, which the sampler owns; `bad_words`: as token ids."""
        self.params, self.index, self.seed, self.constraint = params, index, seed, constraint
        self._vocab_size = vocab_size
        self.n_spelled = 0
        """Tokens of the output that only spell what the prompt left out: `min_tokens` and `max_tokens` do not count them."""
        self.greedy = params.temperature == 0
        self._choose_path()
        self._entries: _Entries | None = None  # made when somebody asks
        self._temperature = np.float32(params.temperature)
        self.share, self.least = encode_top_p(params.top_p), encode_min_p(float(np.float32(params.min_p)))
        self.ids = np.array([i for i in params.logit_bias if i < vocab_size], np.int64)
        self.bias = np.array([params.logit_bias[int(i)] for i in self.ids], np.float32)
        self.bias[self.bias <= -100] = -np.inf
        self.held_back = np.array(sorted(i for i in stop_ids if i < vocab_size), np.int64)
        self.allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64)
        self.bad_words = [tuple(map(int, word)) for word in bad_words if len(word)]
        self._n_recent = max(map(len, self.bad_words), default=1) - 1
        self._recent: tuple[int, ...] = ()  # the output's last tokens, as many as bad words look back at
        self.penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        if self.penalised:
            self.in_prompt = np.zeros(vocab_size, np.bool_)
            self.in_prompt[prompt] = True
            self.counts = np.zeros(vocab_size, np.int32)

    def _choose_path(self) -> None:
        """Find out what of the sampler's work a device can do."""
        params, free = self.params, self.constraint is None
        self.needs_only_logits = free and needs_only_logits(params)
        """Whether tokens are drawn from logits as they are, and nothing else is wanted, so that a pass can sample by itself."""
        self.by_entries = free and _is_sparse(params) and params.logprobs is None
        """Whether `list_entries` lists all adjustments."""
        unusual = params.post_sampling_probs or params.logprob_token_ids
        self.scores_few = free and _keeps_logits(params) and params.logprobs is not None and 0 <= params.logprobs <= KEPT and not unusual
        """Whether logits are left as they are, and the top-k of the pass is enough for the log-probabilities wanted."""

    def fork(self, index: int | None = None) -> Sampler:
        """Return a copy in the same state, which may run ahead; `index`: of another sample."""
        other = copy.copy(self)
        other.index = self.index if index is None else index
        other._entries = None
        if self.penalised:
            other.counts = self.counts.copy()
        if self.constraint is not None:
            other.constraint = self.constraint.fork()
        return other

    @property
    def is_stateless(self) -> bool:
        """Whether accepting a token changes nothing."""
        return not self.penalised and self.constraint is None and not self._n_recent

    def accept(self, token: int) -> None:
        if self._n_recent:
            self._recent = (*self._recent, token)[-self._n_recent :]
        if self.penalised:
            self.counts[token] += 1
            if self._entries is not None:
                self._entries.count(token)
        if self.constraint is not None:
            self.constraint.accept(token)
            self.n_spelled = self.constraint.n_spelled
            if self.constraint.is_over:
                self.constraint = None
                self._choose_path()

    def list_entries(self, drafted: np.ndarray | None = None) -> np.ndarray:
        """Return what `adjust_logits` does at the next position, if `by_entries`: [n] of ENTRY, each token once.

        `drafted` tokens [m] are among them if penalties will count them.
        """
        if self._entries is None:
            self._entries = self._make_entries()
        known = self._entries
        if drafted is None or not self.penalised:
            return known.table
        new = [token for token in dict.fromkeys(drafted.tolist()) if token not in known.row_of]
        more = np.zeros(len(new), ENTRY)
        more["token"] = new
        return np.concatenate([known.table, more])

    def _make_entries(self) -> _Entries:
        p, none = self.params, np.empty(0, np.int64)
        held = self.held_back if p.min_tokens else none
        written = np.flatnonzero(self.counts) if self.penalised else none
        prompt = np.flatnonzero(self.in_prompt) if p.repetition_penalty != 1 else none
        tokens = np.unique(np.concatenate([self.ids, held, written, prompt]))
        table = np.zeros(len(tokens), ENTRY)
        table["token"] = tokens
        for some, flag in ((self.ids, self.BIASED), (held, self.HELD), (prompt, self.PROMPT)):
            table["flags"][np.searchsorted(tokens, some)] |= flag
        table["bias"][np.searchsorted(tokens, self.ids)] = self.bias
        if self.penalised:
            table["count"] = self.counts[tokens]
        return _Entries(table)

    def adjust_logits(self, row: np.ndarray, position: int) -> np.ndarray:
        """Return the row [V] after grammar, bias, bans and penalties; the row itself if there are none."""
        banned = position - self.n_spelled < self.params.min_tokens and len(self.held_back)
        if not (banned or self.penalised or len(self.ids) or self.constraint or self.allowed is not None or self.bad_words):
            return row
        if self.constraint is None:
            row = row.copy()
        else:
            row = apply_mask(row, self.constraint.mask())
            ends = row[self.held_back]
        row[self.ids] += self.bias
        if self.allowed is not None:
            allowed = row[self.allowed]
            row.fill(-np.inf)
            row[self.allowed] = allowed
        for *before, last in self.bad_words:
            if len(before) <= len(self._recent) and self._recent[len(self._recent) - len(before) :] == tuple(before):
                row[last] = -np.inf
        if banned:
            row[self.held_back] = -np.inf
            if self.constraint is not None and row.max() == -np.inf:  # the text is whole before it is long enough
                row[self.held_back] = ends
        if self.penalised:
            p = self.params
            penalties = map(np.float32, (p.repetition_penalty, p.presence_penalty, p.frequency_penalty))
            _apply_penalties(row, self.in_prompt, self.counts, *penalties)
        return row

    def compute_weights(self, row: np.ndarray, position: int) -> np.ndarray:
        """Return the weights [V] int64 that sampling at temperature > 0 draws from. Raises NotFiniteError."""
        adjusted = self.adjust_logits(row, position)
        top = adjusted[self.find_best(adjusted, position)]
        weights: np.ndarray = _compute_weights(adjusted, top, self._temperature, self.params.top_k, self.share, self.least)
        return weights

    def find_best(self, adjusted: np.ndarray, position: int) -> int:
        """Return the most likely token of an adjusted row [V]. Raises GrammarError, InvalidInputError, NotFiniteError if it has none."""
        best = int(adjusted.argmax())  # not a number counts as the greatest
        if adjusted[best] == -np.inf and self.constraint is not None:
            raise GrammarError(
                f"at output position {position} the grammar allows only tokens that logit_bias, bad_words or allowed_token_ids forbid"
            )
        if adjusted[best] == -np.inf and (self.allowed is not None or self.bad_words or (self.bias == -np.inf).any()):
            raise _make_banned_error(position)
        if not np.isfinite(adjusted[best]):
            raise NotFiniteError(position)
        return best

    def explain_failure(self, position: int) -> NgramspecError:
        """Return why a device could pick no token from the logits as `list_entries` adjust them."""
        banned = self.ids[self.bias == -np.inf]
        held = self.held_back if position - self.n_spelled < self.params.min_tokens else banned
        whole = len(banned) and len(np.union1d(banned, held)) == self._vocab_size
        return _make_banned_error(position) if whole else NotFiniteError(position)

    def draw(self, weights: np.ndarray, position: int, lane: int) -> int:
        """Draw a token from weights [V] int64 by this lane's u."""
        return int(_draw_index(weights, uniform_bits(self.seed, self.index, position, lane)))

    def sample(self, row: np.ndarray, position: int) -> int:
        """Return the token at output position `position` (0 is the first) from logits row [V] float32.

        Raises NotFiniteError if the greatest logit is infinite or one is NaN.
        """
        if self.params.temperature == 0:
            return self.find_best(self.adjust_logits(row, position), position)
        return self.draw(self.compute_weights(row, position), position, 0)

    def score(self, row: np.ndarray, position: int, token: int) -> TokenLogprob | None:
        """Return the log-probability of the token at `position`, as the parameters ask for it; None: they do not.

        Raises NotFiniteError.
        """
        params = self.params
        if params.logprobs is None:
            return None
        if params.post_sampling_probs:
            weights = np.zeros(len(row))
            if self.greedy:
                weights[self.find_best(self.adjust_logits(row, position), position)] = 1
            else:
                weights[:] = self.compute_weights(row, position)
            with np.errstate(divide="ignore"):
                row = np.log(weights)
        return token_logprob(row, token, params.logprobs, params.logprob_token_ids)


def token_logprob(row: np.ndarray, token: int, n: int, instead: Sequence[int] = ()) -> TokenLogprob:
    """Return the log-probability of a token in logits row [V], with the n most likely tokens (-1: all), or with those given `instead`.

    Tokens of probability 0 are no part of them. Raises NotFiniteError.
    """
    wide = row.astype(np.float64)
    top = wide.max()
    norm = top + np.log(np.exp(wide - top).sum())
    if not np.isfinite(norm):
        raise NotFiniteError()
    n = len(row) if n < 0 else n
    likely = np.flatnonzero(row >= np.partition(row, -n)[-n]) if 0 < n < len(row) else np.arange(len(row) if n else 0)
    best = instead or likely[np.argsort(-row[likely], kind="stable")][:n].tolist()
    found = [(i, float(wide[i] - norm)) for i in best if wide[i] > -np.inf]
    return TokenLogprob(token, float(wide[token] - norm), found, 1 + int((row > row[token]).sum()))


def warmup() -> None:
    """Compile the module's functions, or load them from disk."""
    params = SamplingParams(temperature=1.0, top_k=4, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    sampler = Sampler(params, index=0, seed=0, prompt=np.zeros(1, np.int64), vocab_size=8, stop_ids=frozenset())
    sampler.sample(apply_mask(np.arange(8, dtype=np.float32), np.ones(1, np.uint32)), 0)
