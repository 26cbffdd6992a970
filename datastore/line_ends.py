"""CRLF in requests: a store's text has LF, and a context with CRLF is looked up as the same text with LF, whose drafts get CRLF back.

A tokenizer enters as an `Encoder`, a `LineEnds` leaves, which translates token ids. Texts with other line ends have other tokens around
them: `):\\n` may be one token where `):\\r\\n` is two. What each token with LF becomes is what the tokenizer makes of its text with
CRLF; back, the longest run of tokens that one becomes is that one. If a tokenizer would have cut otherwise, a draft is worse, never a
text. The module knows nothing of stores, look-ups or requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .code_cache import njit
from .tokens import Encoder

LONGEST = 8  # tokens that one with LF may become
LF, CRLF, BEGUN = range(3)  # what a tree goes on from, see `LineEnds.translate_trees`


class Translated(NamedTuple):
    """Trees with CRLF. Node i of tree b is at start[b] + i."""

    start: np.ndarray  # [B + 1] int64
    tokens: np.ndarray  # [N] int32
    parents: np.ndarray  # [N] int32, within the tree; -1: the root
    origins: np.ndarray  # [N] int64, the node with LF that it comes from


class LineEnds:
    """How tokens of one tokenizer are written with LF and with CRLF."""

    def __init__(self, encoder: Encoder) -> None:
        """Takes up to a second for a large vocabulary: every token's text is looked at."""
        texts = encoder.decode_each_token()
        self._lf = np.array([text.count("\n") > text.count("\r") for text in texts], bool)
        self._cr = np.array(["\r" in text for text in texts], bool)
        with_lf = [token for token, text in enumerate(texts) if "\n" in text and "\r" not in text]
        wanted = [texts[token].replace("\n", "\r\n") for token in with_lf]
        runs = dict(zip(with_lf, _encode_runs(encoder, wanted), strict=True))
        self._start, self._ids = _flatten_rows(
            [runs[token] if len(runs.get(token, ())) else _one_token(token) for token in range(encoder.vocab_size)]
        )
        back = {tuple(run.tolist()): _one_token(token) for found in (_encode_runs(encoder, wanted, ""), runs.values())
                for token, run in zip(with_lf, found, strict=True) if len(run)}  # fmt: skip
        with_cr = np.flatnonzero(self._cr).tolist()
        known = [texts[token].removesuffix("\r").replace("\r\n", "\n").replace("\r", "\n") for token in with_cr]
        for token, run in zip(with_cr, _encode_runs(encoder, known, ""), strict=True):
            back.setdefault((token,), run)
        rules = sorted(back, key=lambda run: (run[0], -len(run)))
        self._rules = _LineEndRules(
            np.searchsorted([run[0] for run in rules], np.arange(encoder.vocab_size + 1)).astype(np.int64),
            *_flatten_rows([np.array(run, np.int32) for run in rules]),
            *_flatten_rows([back[run] for run in rules]),
            np.array([texts[token].endswith("\r") for token in range(encoder.vocab_size)], bool),
        )
        self._cr_token = next((token for token in with_cr if texts[token] == "\r"), -1)
        one = np.zeros(1, np.int32)
        self.to_lf(one), self.to_crlf(one)  # compiled now, not in the middle of a step
        self.translate_trees(np.array([0, 1], np.int64), one, one - 1, np.zeros(1, np.int8))

    def is_crlf(self, tokens: np.ndarray) -> bool:
        """Return whether a text [n] int32 has CRLF for most of its line ends."""
        tokens = tokens[(tokens >= 0) & (tokens < len(self._cr))]
        n_cr = int(np.count_nonzero(self._cr[tokens]))
        return n_cr > 0 and n_cr >= int(np.count_nonzero(self._lf[tokens]))

    def to_lf(self, tokens: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return a text [n] int32, oldest token first, with LF, and whether it ends in a CR whose LF is not there yet."""
        out, begun = _to_lf(np.ascontiguousarray(tokens, np.int32), self._rules)
        return out, bool(begun)

    def to_crlf(self, tokens: np.ndarray) -> np.ndarray:
        """Return a text [n] int32 with CRLF. Ids below 0 stay."""
        return _to_crlf(np.ascontiguousarray(tokens, np.int32), self._start, self._ids)

    def translate_trees(self, start: np.ndarray, tokens: np.ndarray, parents: np.ndarray, contexts: np.ndarray) -> Translated:
        """Return trees with LF as trees with CRLF. `contexts` [B] int8, what each tree goes on from: LF, which leaves it as it is, CRLF, or
        BEGUN: a CR whose LF is not there yet."""
        made = _translate_trees(start, tokens, parents, contexts, self._cr_token, self._start, self._ids)
        return Translated(made[0], *(array[: made[0][-1]] for array in made[1:]))


class _LineEndRules(NamedTuple):
    """Runs of tokens with CR, and the tokens with LF that they become. Longer runs come before shorter ones that begin alike."""

    first: np.ndarray  # [vocab_size + 1], where the runs that begin with a token are
    run_start: np.ndarray
    runs: np.ndarray
    out_start: np.ndarray
    outs: np.ndarray
    begins: np.ndarray  # bool [vocab_size], whether a token ends in CR


def _one_token(token: int) -> np.ndarray:
    return np.array([token], np.int32)


def _encode_runs(encoder: Encoder, texts: list[str], behind: str = "a") -> list[np.ndarray]:
    """Return what a tokenizer makes of texts; empty where that is more than LONGEST tokens, or does not give the text back.

    With a letter `behind` each, which is cut off: many tokenizers leave the last blank of several to the word that follows.
    """
    more = [behind and (" " + behind if text.endswith(" ") else behind) for text in texts]
    tokens, lengths = encoder.encode([text + each for text, each in zip(texts, more, strict=True)])
    found = []
    for text, run in zip(texts, np.split(tokens, np.cumsum(lengths + 1))[:-1], strict=True):
        run = run[: len(run) - 1 - bool(behind)]  # without the separator and the letter
        sound = len(run) <= LONGEST and encoder.decode(run.tolist()) == text
        found.append(run.astype(np.int32) if sound else np.zeros(0, np.int32))
    return found


def _flatten_rows(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of different lengths, flat: row i is at start[i] .. start[i + 1]."""
    start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.concatenate([*rows, np.zeros(0, np.int32)]).astype(np.int32)


@njit(cache=True, nogil=True)
def _to_lf(tokens, rules):
    most = np.int64(0)
    for r in range(len(rules.out_start) - 1):
        most = max(most, rules.out_start[r + 1] - rules.out_start[r])
    out = np.empty(len(tokens) * max(most, 1), np.int32)
    n = i = 0
    begun = False
    while i < len(tokens):
        token, taken = tokens[i], 0
        if 0 <= token < len(rules.begins):
            for r in range(rules.first[token], rules.first[token + 1]):
                a, length = rules.run_start[r], rules.run_start[r + 1] - rules.run_start[r]
                k = 1
                while k < length and i + k < len(tokens) and tokens[i + k] == rules.runs[a + k]:
                    k += 1
                if k == length:
                    for j in range(rules.out_start[r], rules.out_start[r + 1]):
                        out[n] = rules.outs[j]
                        n += 1
                    taken = length
                    break
        if taken == 0:
            out[n] = token
            n += 1
            taken = 1
        i += taken
        begun = 0 <= tokens[i - 1] < len(rules.begins) and rules.begins[tokens[i - 1]]
    return out[:n].copy(), begun


@njit(cache=True, nogil=True)
def _to_crlf(tokens, start, ids):
    n = 0
    for token in tokens:
        n += start[token + 1] - start[token] if 0 <= token < len(start) - 1 else 1
    out = np.empty(n, np.int32)
    n = 0
    for token in tokens:
        if 0 <= token < len(start) - 1:
            for j in range(start[token], start[token + 1]):
                out[n] = ids[j]
                n += 1
        else:
            out[n] = token
            n += 1
    return out


@njit(cache=True, nogil=True)
def _translate_trees(starts, tokens, parents, contexts, cr_token, start, ids):
    """Make of each node a chain of nodes; siblings that begin alike share their beginning. Nodes whose token the tokenizer does not have,
    as in a forged store, are dropped with those below them."""
    out_start = np.zeros(len(starts), np.int64)
    most = 0
    for token in tokens:
        most += start[token + 1] - start[token] if token < len(start) - 1 else 0
    out_tokens, out_parents = np.empty(most, np.int32), np.empty(most, np.int32)
    origins = np.empty(most, np.int64)
    ends = np.empty(len(tokens), np.int64)  # of each node, the last of its chain; -1: the root, -2: dropped
    n = 0
    for b in range(len(starts) - 1):
        base = n
        for i in range(starts[b], starts[b + 1]):
            at = np.int64(-1) if parents[i] < 0 else ends[starts[b] + parents[i]]
            if at == -2 or tokens[i] >= len(start) - 1:
                ends[i] = -2
                continue
            a, z = start[tokens[i]], start[tokens[i] + 1]
            if contexts[b] == LF:
                out_tokens[n], out_parents[n], origins[n] = tokens[i], at, i
                at = n - base
                n += 1
                a = z
            elif contexts[b] == BEGUN and parents[i] < 0:
                at = np.int64(-1) if z - a > 1 and ids[a] == cr_token else np.int64(-2)
                a += 1
            if at != -2:
                for j in range(a, z):
                    found = np.int64(-1)
                    for m in range(base, n):
                        if out_parents[m] == at and out_tokens[m] == ids[j]:
                            found = m - base
                            break
                    if found < 0:
                        out_tokens[n], out_parents[n], origins[n] = ids[j], at, i
                        found = n - base
                        n += 1
                    at = found
            ends[i] = at
        out_start[b + 1] = n
    return out_start, out_tokens, out_parents, origins
