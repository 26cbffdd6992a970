"""How drafts are accepted: a pass's output and a sequence's draft enter, the tokens that the sequence gets and the accepted nodes leave.

One object is one rule. It has the rule's name and knows what the rule makes of exactness; nobody else does. It appends to its sequence,
and knows neither the scheduler nor who drafted.
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
from ngramspec.sampling.rejection import lenient, reject
from ngramspec.sampling.sampler import FRACTION_BITS, token_logprob, uniform_bits
from ngramspec.sampling.verify import walk
from ngramspec.sampling_params import SamplingParams

Steps: TypeAlias = Iterator[tuple[int, int, TokenLogprob | None]]
"""Accepted tokens in order: (token, the draft node that carried it or -1, its log-probability where asked for)."""


class Acceptance(ABC):
    """A rule."""

    name: str
    lenience = 1.0
    walks_by_pass = True
    """Where the pass has walked with the tokens that the sequence's sampler takes (`Output.runs`), that is what is accepted."""

    @abstractmethod
    def exactness(self, computed: str, params: SamplingParams) -> str:
        """What a text that is written with drafts can be relied on to be, where passes are `computed`: "bitwise" or "numerical"."""

    @abstractmethod
    def samples_on_device(self, seq: Sequence) -> bool:
        """The sequence's tokens are what its sampler takes from the logits, so that all sequences may be walked at once (`verify.runs`)."""

    @abstractmethod
    def steps(self, seq: Sequence, output: Output, span: Span) -> Steps:
        """The accepted tokens, one by one: each may depend on those before, which have been appended."""

    def accept(self, seq: Sequence, output: Output, span: Span) -> tuple[np.ndarray, np.ndarray]:
        """Append what the model accepts of `seq.tree` and its own next token, to the end of the text at most.

        Returns (tokens, nodes of the path), both int32.
        """
        tokens, path = [], []
        for token, node, logprob in self.steps(seq, output, span):
            tokens.append(token)
            if node >= 0:
                path.append(node)
            if seq.append(token, logprob):
                break
        return np.array(tokens, np.int32), np.array(path, np.int32)


class Walk(Acceptance):
    """Step to the child that carries the model's own token (`sampling.verify`): the text is the same as without drafts."""

    name = "walk"

    def exactness(self, computed: str, params: SamplingParams) -> str:
        return computed

    def samples_on_device(self, seq: Sequence) -> bool:
        return True

    def steps(self, seq: Sequence, output: Output, span: Span) -> Steps:
        """Sampled from the logits rows as the steps are taken. Raises NotFiniteError."""
        rows = output.logits(span.root_logits, span.end_logits)
        logprob = None

        def sample(row: int) -> int:
            nonlocal logprob
            token, logprob = seq.sample(rows[row])
            return token

        for token, node in walk(seq.tree, sample):
            yield token, node, logprob


class Judged(Acceptance):
    """By rejection sampling above temperature 0 where `rejection` says so, and with lenience (`sampling.rejection`).

    With rejection, sampled text is distributed as without drafts, but is another one. With lenience below 1, tokens are accepted that the
    model holds a little less likely, and nothing is exact (both: Leviathan et al., 2023).
    """

    def __init__(self, *, rejection: bool, lenience: float = 1.0) -> None:
        self.name = "rejection" if rejection else "walk"
        self.rejection, self.lenience = rejection, lenience
        self._walk = Walk()

    def _walks(self, params: SamplingParams) -> bool:
        return self.lenience == 1 and not (self.rejection and params.temperature > 0)

    def exactness(self, computed: str, params: SamplingParams) -> str:
        if self.lenience < 1:
            return "lenient"
        return computed if self._walks(params) else "distribution"

    def samples_on_device(self, seq: Sequence) -> bool:
        return self._walks(seq.params)

    def steps(self, seq: Sequence, output: Output, span: Span) -> Steps:
        if self._walks(seq.params):
            yield from self._walk.steps(seq, output, span)
            return
        rows, n, sampler = output.logits(span.root_logits, span.end_logits), seq.n_output, seq.sampler

        def uniform(depth: int, k: int) -> float:
            lane = 2 * k + 2  # lane 0 is the drafters' too, where they guess what the request would sample
            return uniform_bits(sampler.seed, sampler.index, n + depth, lane) / 2**FRACTION_BITS

        if seq.params.temperature == 0:
            steps = lenient(seq.tree, lambda row: sampler.adjusted(rows[row], seq.n_output), self.lenience)
        else:
            steps = reject(seq.tree, lambda row: sampler.weights(rows[row], seq.n_output), uniform, self.lenience)
        row, top = 0, seq.params.logprobs
        for token, node in steps:
            yield token, node, None if top is None else token_logprob(rows[row], token, top)
            row = node + 1


def acceptance(name: str = "walk", lenience: float = 1.0) -> Acceptance:
    """The rule of that name: "walk" or "rejection". `lenience` in (0, 1]. Raises InvalidInputError."""
    if name not in ("walk", "rejection"):
        raise InvalidInputError(f"acceptance must be 'walk' or 'rejection', got {name!r}")
    if not 0 < lenience <= 1:
        raise InvalidInputError(f"lenience must be a number in (0, 1], got {lenience!r}")
    return Walk() if name == "walk" and lenience == 1 else Judged(rejection=name == "rejection", lenience=lenience)
