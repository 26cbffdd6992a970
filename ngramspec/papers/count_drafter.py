"""Draft from n-gram models of the request's own text, which have a distribution q: unigram, bigram, and longer ones with back-off.

The committed tokens give a chain: the most likely one, or one that is drawn from q under the request's own sampling parameters,
each node with its q, so that it can be accepted by rejection sampling (`ngramspec.sampling.rejection`). Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ngramspec.errors import GrammarError, InvalidInputError
from ngramspec.speculative.drafter import Candidates, SequenceInfo

# The lane of `sampler.uniform_bits` that draws the first draft for a position.
DRAFT_LANE = 1


class NgramModel:
    """The distribution of the next token, by interpolated Witten-Bell smoothing (Witten & Bell, 1991; in this form Chen & Goodman, 1999).

    With c(h) occurrences of a context h in the text, each with a token behind it, of which t(h) are different, and h' the context h without
    its first token: q(x | h) = (c(h x) + t(h) q(x | h')) / (c(h) + t(h)). Below the empty context stands the uniform distribution, so that
    no token is impossible. A context that has not occurred leaves q to the shorter one.
    """

    def __init__(self, order: int, vocab_size: int) -> None:
        """`order` 1 counts tokens, 2 pairs of tokens, and so on."""
        self.order, self.vocab_size = order, vocab_size
        self.tokens = np.empty(0, np.int32)

    def extend(self, tokens: np.ndarray) -> None:
        self.tokens = np.append(self.tokens, tokens)

    def get_distribution(self, context: np.ndarray) -> np.ndarray:
        """Return q [V] float64 after the tokens `context` [n], of which the last order - 1 count."""
        q = np.full(self.vocab_size, 1 / self.vocab_size)
        behind = np.arange(len(self.tokens))  # where the text goes on after the context of n tokens
        for n in range(min(self.order, len(context) + 1)):
            if n:
                behind = behind[behind >= n]
                behind = behind[self.tokens[behind - n] == context[-n]]
            if not len(behind):
                break
            found, counts = np.unique(self.tokens[behind], return_counts=True)
            q *= len(found) / (len(behind) + len(found))
            q[found] += counts / (len(behind) + len(found))
        return q


class Counts:
    """The drafter: `length` tokens in a chain from an n-gram model of each sequence's text (Leviathan et al., 2023, section 3.6)."""

    draws = False
    """Whether to draw the chain above temperature 0. Otherwise it is the most likely one, without q."""

    def __init__(self, order: int = 2, length: int = 4) -> None:
        """Raises ValueError."""
        if order < 1 or length < 1:
            raise ValueError(f"order and length must be 1 or more, got {order} and {length}")
        self.name = {1: "unigram", 2: "bigram"}.get(order, f"{order}-gram")
        self.order, self.length = order, length
        self.vocab_size = 0
        self._models: dict[int, NgramModel] = {}
        self._infos: dict[int, SequenceInfo] = {}

    def bind(self, runner: Any) -> None:
        self.vocab_size = runner.vocab_size

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        self._models[seq] = NgramModel(self.order, self.vocab_size)
        self._models[seq].extend(tokens)

    def attach(self, seq: int, info: SequenceInfo) -> None:
        self._infos[seq] = info

    def propose(self, seqs: Sequence[int], budget: int) -> list[Candidates]:
        return [self._draft_chain(self._models[seq], self._infos[seq], min(budget, self.length)) for seq in seqs]

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        self._models[seq].extend(accepted)

    def end(self, seq: int) -> None:
        self._models.pop(seq, None)
        self._infos.pop(seq, None)

    def _draft_chain(self, model: NgramModel, info: SequenceInfo, length: int) -> Candidates:
        """Draft up to `length` tokens, as many as the text can have; penalties count the drafted ones."""
        sampler = info.sampler.fork()
        draws = self.draws and sampler.params.temperature > 0
        context, first = model.tokens[-self.order :], len(model.tokens) - info.n_prompt
        probs, drawn_from = list[float](), list[np.ndarray]()
        while len(probs) < length and not (sampler.constraint is not None and sampler.constraint.complete):
            q, position = model.get_distribution(context), first + len(probs)
            row = np.log(q).astype(np.float32)
            try:
                if draws:
                    weights = sampler.compute_weights(row, position)
                    q = weights / weights.sum()
                    token = sampler.draw(weights, position, DRAFT_LANE)
                else:
                    token = sampler.find_best(sampler.adjust_logits(row, position), position)
            except (GrammarError, InvalidInputError):  # every token is banned: the request may end before that
                break
            sampler.accept(token)
            context = np.append(context, np.int32(token))
            probs.append(q[token])
            drawn_from.append(q)
        tokens, parents = context[len(context) - len(probs) :], np.arange(-1, len(probs) - 1, dtype=np.int32)
        return Candidates(tokens, parents, np.cumprod(probs, dtype=np.float32), drawn_from if draws else None)
