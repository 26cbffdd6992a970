"""Acceptance rules: a pass's output and a sequence's draft go in, the tokens that the sequence gets and the accepted nodes come out.

One object is one rule. It alone knows the rule's name and the exactness that the rule leaves. It appends to its sequence, and knows neither
the scheduler nor who drafted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from ngramspec.backends.base import Output
from ngramspec.engine.sequence import Sequence
from ngramspec.errors import InvalidInputError
from ngramspec.outputs import TokenLogprob
from ngramspec.sampling.batch import Span
from ngramspec.sampling.rejection import accept_leniently, reject
from ngramspec.sampling.sampler import FRACTION_BITS, uniform_bits
from ngramspec.sampling.verify import match_draft
from ngramspec.sampling_params import SamplingParams

# Accepted tokens in order: (token, the draft node that carried it or -1, its log-probability if wanted).
AcceptedTokens: TypeAlias = Iterator[tuple[int, int, TokenLogprob | None]]


class Acceptance(ABC):
    """An acceptance rule."""

    name: str
    lenience = 1.0
    matches_by_pass = True
    """Whether what a pass has matched by itself (`Output.get_matches`), where `uses_exact_match`, is accepted as it is. False if each
    sequence must go through `iterate_accepted`."""

    @abstractmethod
    def derive_exactness(self, computed: str, params: SamplingParams) -> str:
        """Return the exactness of output made with drafts if passes are `computed` "bitwise" or "numerical"."""

    @abstractmethod
    def uses_exact_match(self, params: SamplingParams) -> bool:
        """Return whether a sequence with these parameters is accepted by exact match: its tokens are its sampler's own, so that all may be
        matched at once, on the device or by `verify.match_batch`."""

    @abstractmethod
    def iterate_accepted(self, seq: Sequence, output: Output, span: Span) -> AcceptedTokens:
        """Yield the accepted tokens one by one: each may depend on those before, which have been appended."""

    def accept(self, seq: Sequence, output: Output, span: Span) -> tuple[np.ndarray, np.ndarray]:
        """Append what the model accepts of `seq.tree` and its own next token, up to where the sequence ends.

        Returns (tokens, nodes of the path), both int32.
        """
        tokens, path = [], []
        for token, node, logprob in self.iterate_accepted(seq, output, span):
            tokens.append(token)
            if node >= 0:
                path.append(node)
            if seq.append(token, logprob):
                break
        return np.array(tokens, np.int32), np.array(path, np.int32)


class ExactMatch(Acceptance):
    """Exact match: step to the child that has the model's own token (`sampling.verify`). The output is the same as without drafts."""

    name = "walk"

    def derive_exactness(self, computed: str, params: SamplingParams) -> str:
        return computed

    def uses_exact_match(self, params: SamplingParams) -> bool:
        return True

    def iterate_accepted(self, seq: Sequence, output: Output, span: Span) -> AcceptedTokens:
        """Yield tokens sampled from the logits rows of the path. Raises NotFiniteError."""
        rows = output.get_logits(span.root_logits, span.end_logits)
        logprob = None

        def sample(row: int) -> int:
            nonlocal logprob
            token, logprob = seq.sample(rows[row])
            return token

        for token, node in match_draft(seq.tree, sample):
            yield token, node, logprob


class RelaxedAcceptance(Acceptance):
    """Rejection sampling above temperature 0 if `rejection`, and lenient acceptance if `lenience` < 1 (`sampling.rejection`).

    With rejection sampling, output has the distribution that it has without drafts, but other tokens. With lenience below 1, tokens that
    the model holds a little less likely are accepted, and nothing is exact (both: Leviathan et al., 2023).
    """

    def __init__(self, *, rejection: bool, lenience: float = 1.0) -> None:
        self.name = "rejection" if rejection else "walk"
        self.rejection, self.lenience = rejection, lenience
        self._exact = ExactMatch()

    def uses_exact_match(self, params: SamplingParams) -> bool:
        return self.lenience == 1 and not (self.rejection and params.temperature > 0)

    def derive_exactness(self, computed: str, params: SamplingParams) -> str:
        if self.lenience < 1:
            return "lenient"
        return computed if self.uses_exact_match(params) else "distribution"

    def iterate_accepted(self, seq: Sequence, output: Output, span: Span) -> AcceptedTokens:
        if self.uses_exact_match(seq.params):
            yield from self._exact.iterate_accepted(seq, output, span)
            return
        rows, n, sampler = output.get_logits(span.root_logits, span.end_logits), seq.n_output, seq.sampler

        def draw_uniform(depth: int, k: int) -> float:
            lane = 2 * k + 2  # drafters that guess what the request would sample use lane 0
            return uniform_bits(sampler.seed, sampler.index, n + depth, lane) / 2**FRACTION_BITS

        if seq.params.temperature == 0:
            steps = accept_leniently(seq.tree, lambda row: sampler.adjust_logits(rows[row], seq.n_output), self.lenience)
        else:
            steps = reject(seq.tree, lambda row: sampler.compute_weights(rows[row], seq.n_output), draw_uniform, self.lenience)
        row = 0
        for token, node in steps:
            yield token, node, sampler.score(rows[row], seq.n_output, token)
            row = node + 1


def make_acceptance(name: str = "walk", lenience: float = 1.0) -> Acceptance:
    """Return the rule named "walk" (exact match) or "rejection"; `lenience` in (0, 1]. Raises InvalidInputError."""
    if name not in ("walk", "rejection"):
        raise InvalidInputError(f"acceptance must be 'walk' or 'rejection', got {name!r}")
    if not 0 < lenience <= 1:
        raise InvalidInputError(f"lenience must be a number in (0, 1], got {lenience!r}")
    return ExactMatch() if name == "walk" and lenience == 1 else RelaxedAcceptance(rejection=name == "rejection", lenience=lenience)
