"""Picking a token from one row of logits: one implementation for every row, drafted or not.

Knows `SamplingParams` and numbers; no model, no draft. A `Picker` belongs to one sequence: it carries the counts
that penalties need, along the accepted tokens. `pick(row, t)` gives the token at output position t; it depends on
the row, the parameters, the tokens before, and u(seed, n, t) from a counter-based generator (Philox4x32-10,
Salmon et al., SC 2011), and on nothing else: there is no generator state that speculation could advance differently.

Order of adjustments: logit bias, bans (`min_tokens`), repetition, presence and frequency penalty; temperature; top-k,
top-p over what top-k left, min-p. Ties are broken towards the lower token id everywhere.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ngramspec.errors import NgramspecError
from ngramspec.numeric import exp
from ngramspec.types import SamplingParams, TokenLogprob

_BINS = 4096
_BIN_SCALE = np.float32(128.0)


class NotFiniteError(NgramspecError):
    """The model's logits for a token are not numbers."""


@njit(cache=True, nogil=True)
def _philox(counter, key):
    """Philox4x32-10: counter [4] and key [2] uint32 → [4] uint32."""
    c0, c1, c2, c3 = np.uint64(counter[0]), np.uint64(counter[1]), np.uint64(counter[2]), np.uint64(counter[3])
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    for _ in range(10):
        a = np.uint64(0xD2511F53) * c0
        b = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = ((b >> shift) ^ c1 ^ k0) & low, b & low, ((a >> shift) ^ c3 ^ k1) & low, a & low
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    out = np.empty(4, np.uint32)
    out[0], out[1], out[2], out[3] = c0, c1, c2, c3
    return out


def uniform(seed: int, sample: int, position: int) -> float:
    """u(seed, n, t) in (0, 1): 53 bits, a function of its arguments alone."""
    counter = np.array([position & 0xFFFFFFFF, position >> 32, sample, 0], np.uint32)
    a, b, *_ = _philox(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)).tolist()
    return ((a >> 5) * 67108864.0 + (b >> 6) + 0.5) / 9007199254740992.0


@njit(cache=True, nogil=True)
def _penalise(logits, in_prompt, counts, repetition, presence, frequency):
    for i in range(logits.shape[0]):
        n = counts[i]
        if n > 0 or in_prompt[i]:
            logits[i] = logits[i] / repetition if logits[i] > 0 else logits[i] * repetition
        if n > 0:
            logits[i] -= presence + frequency * np.float32(n)


@njit(cache=True, nogil=True)
def _keep(x, p, most, mass):
    """Zero every p but the first in the order (x falling, id rising): `most` of them, or until their sum reaches `mass`."""
    count, weight = np.zeros(_BINS, np.int64), np.zeros(_BINS, np.float64)
    where = np.empty(x.shape[0], np.int32)
    for i in range(x.shape[0]):
        b = np.int32(min(-x[i] * _BIN_SCALE, np.float32(_BINS - 1)))
        where[i] = b
        if p[i] > 0:
            count[b] += 1
            weight[b] += p[i]
    kept, held, edge = 0, 0.0, 0
    while edge < _BINS and kept + count[edge] <= most and held + weight[edge] < mass:
        kept += count[edge]
        held += weight[edge]
        edge += 1
    if edge == _BINS:
        return
    inside = np.empty(count[edge], np.int64)
    n = 0
    for i in range(x.shape[0]):
        if where[i] == edge and p[i] > 0:
            inside[n] = i
            n += 1
        elif where[i] > edge:
            p[i] = 0
    order = np.argsort(-x[inside], kind="mergesort")
    for j in range(n):
        i = inside[order[j]]
        if kept < most and held < mass:
            kept += 1
            held += p[i]
        else:
            p[i] = 0


@njit(cache=True, nogil=True)
def _weights(logits, temperature, top_k, top_p, min_p):
    """[V] float32, proportional to the distribution that is sampled; the most likely token weighs 1. `logits` is overwritten."""
    top = logits[0]
    for i in range(logits.shape[0]):
        top = max(top, logits[i])
    p = np.empty(logits.shape[0], np.float32)
    for i in range(logits.shape[0]):
        x = max((logits[i] - top) / temperature, np.float32(-1e4))
        logits[i] = x
        p[i] = exp(x) if x > np.float32(-87.0) else np.float32(0)
    n = logits.shape[0]
    if 0 < top_k < n:
        _keep(logits, p, top_k, np.inf)
    if top_p < 1.0:
        total = 0.0
        for i in range(n):
            total += p[i]
        _keep(logits, p, n, top_p * total)
    if min_p > 0:
        for i in range(n):
            if p[i] < min_p:
                p[i] = 0
    return p


@njit(cache=True, nogil=True)
def _draw(p, u):
    """The token at which the running sum of weights, in the order of ids, passes u of the total; -1 where there is no total."""
    total = 0.0
    for i in range(p.shape[0]):
        total += p[i]
    if not 0 < total < np.inf:
        return -1
    goal, run, last = u * total, 0.0, -1
    for i in range(p.shape[0]):
        if p[i] > 0:
            run += p[i]
            last = i
            if run > goal:
                break
    return last


class Picker:
    """Picks the tokens of one sequence; `accept` tells it each token that was appended."""

    def __init__(
        self, params: SamplingParams, *, sample: int, seed: int, prompt: np.ndarray, vocab_size: int, stop_ids: frozenset[int]
    ) -> None:
        self.params, self.sample, self.seed = params, sample, seed
        self.ids = np.array([i for i in params.logit_bias if i < vocab_size], np.int64)
        self.bias = np.array([params.logit_bias[int(i)] for i in self.ids], np.float32)
        self.bias[self.bias <= -100] = -np.inf
        self.held_back = np.array(sorted(i for i in stop_ids if i < vocab_size), np.int64)
        self.penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        if self.penalised:
            self.in_prompt = np.zeros(vocab_size, np.bool_)
            self.in_prompt[prompt] = True
            self.counts = np.zeros(vocab_size, np.int32)

    def accept(self, token: int) -> None:
        if self.penalised:
            self.counts[token] += 1

    def adjusted(self, row: np.ndarray, position: int) -> np.ndarray:
        """The row [V] after bias, bans and penalties; the row itself where there are none."""
        banned = position < self.params.min_tokens and len(self.held_back)
        if not (banned or self.penalised or len(self.ids)):
            return row
        row = row.copy()
        row[self.ids] += self.bias
        if banned:
            row[self.held_back] = -np.inf
        if self.penalised:
            p = self.params
            _penalise(
                row,
                self.in_prompt,
                self.counts,
                np.float32(p.repetition_penalty),
                np.float32(p.presence_penalty),
                np.float32(p.frequency_penalty),
            )
        return row

    def weights(self, row: np.ndarray, position: int) -> np.ndarray:
        """[V] float32: what sampling at temperature > 0 draws from, up to a factor."""
        p = self.params
        adjusted = self.adjusted(row, position)
        return _weights(adjusted.copy() if adjusted is row else adjusted, np.float32(p.temperature), p.top_k, p.top_p, np.float32(p.min_p))

    def pick(self, row: np.ndarray, position: int) -> int:
        """The token at output position `position` (0 is the first) from logits row [V] float32.

        Raises NotFiniteError where the logits are not numbers.
        """
        if self.params.temperature == 0:
            adjusted = self.adjusted(row, position)
            token = int(adjusted.argmax())
            valid = np.isfinite(adjusted[token])
        else:
            token = _draw(self.weights(row, position), uniform(self.seed, self.sample, position))
            valid = token >= 0
        if not valid:
            raise NotFiniteError(f"the model's logits at output position {position} hold no finite maximum")
        return token


def token_logprob(row: np.ndarray, token: int, n: int) -> TokenLogprob:
    """Log-probability of a token after logits row [V], and the n likeliest, under the model's own distribution, before any adjustment.

    Raises NotFiniteError.
    """
    wide = row.astype(np.float64)
    top = wide.max()
    norm = top + np.log(np.exp(wide - top).sum())
    if not np.isfinite(norm):
        raise NotFiniteError("the model's logits hold no finite maximum")
    likely = np.flatnonzero(row >= np.partition(row, -n)[-n]) if 0 < n < len(row) else np.arange(len(row) if n else 0)
    best = likely[np.argsort(-row[likely], kind="stable")][:n]
    return TokenLogprob(token, float(wide[token] - norm), [(int(i), float(wide[i] - norm)) for i in best])


def warmup() -> None:
    """Compile, or load from disk, everything here."""
    params = SamplingParams(temperature=1.0, top_k=4, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    picker = Picker(params, sample=0, seed=0, prompt=np.zeros(1, np.int64), vocab_size=8, stop_ids=frozenset())
    picker.pick(np.arange(8, dtype=np.float32), 0)
