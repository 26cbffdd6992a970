"""The contract of a source of drafts beside the n-gram tables. Knows no model; a bad drafter costs time, never a token.

Token ids come in as int32 arrays, candidate trees go out as flat arrays in the shape of `types.DraftTree`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ngramspec.batch.sampling import Sampler
from ngramspec.batch.types import DraftTree


@dataclass(slots=True)
class Candidates:
    """What one drafter proposes for one sequence: a tree in which a parent precedes its children."""

    tokens: np.ndarray  # [N] int32
    parents: np.ndarray  # [N] int32, index of the parent node; -1: directly after the last known token
    probs: np.ndarray  # [N] float32, the drafter's own estimate that the model takes the whole path to the node

    drawn_from: list[np.ndarray] | None = None
    """Per node the distribution [V] float64 that its token was drawn from; siblings stand in the order of their draws. None: not drawn."""

    def __len__(self) -> int:
        return len(self.tokens)


def is_sound(candidates: object, vocab_size: int) -> bool:
    """Whether candidates can be used as far as their shape goes, whoever made them."""
    try:
        tokens, parents, probs = (np.asarray(getattr(candidates, name)) for name in ("tokens", "parents", "probs"))
        n, drawn_from = len(tokens), getattr(candidates, "drawn_from", None)
        ok = tokens.shape == parents.shape == probs.shape == (n,) and (drawn_from is None or len(drawn_from) == n)
        return ok and bool(((parents >= -1) & (parents < np.arange(n)) & (tokens >= 0) & (tokens < vocab_size) & (probs >= 0)).all())
    except Exception:
        return False


@dataclass(frozen=True, slots=True)
class Text:
    """What a drafter can know of a sequence beside its tokens."""

    sampler: Sampler
    """How the sequence's tokens are picked. A drafter runs ahead on a `fork` of it and leaves this one alone."""
    n_prompt: int
    limit: int
    """Most tokens of prompt and output together."""


@runtime_checkable
class Drafter(Protocol):
    """One more source. Its trees are evidence: the mix decides how far its probabilities are believed.

    `seq` is the slot that the engine gave the sequence; calls for one sequence are ordered begin, (propose, observe)*, end, where an
    observe may come without its propose: a drafter that does not pay for its time rests, and is tried again now and then.
    An exception from any of these switches the drafter off for good (logged once) and fails no request.
    """

    name: str

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        """A sequence starts with these committed tokens [n] int32."""

    def propose(self, seqs: Sequence[int], budget: int) -> Sequence[Candidates]:
        """One candidate tree per sequence, each of at most `budget` nodes; empty where it knows nothing."""
        ...

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        """`accepted` [k] int32 was appended to the sequence; `rejected` [j] int32 are this drafter's tokens that the model did not take."""

    def end(self, seq: int) -> None:
        """The sequence is gone; free what belongs to it."""


@runtime_checkable
class NeedsModel(Protocol):
    """A drafter that computes with the model that it drafts for."""

    def bind(self, runner: Any) -> None:
        """The engine's `runner.Runner`, once, before any sequence begins and in the thread that steps. What it raises ends the engine."""


@runtime_checkable
class NeedsText(Protocol):
    """A drafter that draws as the request itself does, or that counts with the text's end."""

    def attach(self, seq: int, text: Text) -> None:
        """After every `begin`."""


@runtime_checkable
class NeedsKvRoom(Protocol):
    """A drafter that keeps keys and values of its own: a sequence waits until there is room for it here, too."""

    def has_room(self, n_tokens: Sequence[int]) -> bool:
        """Whether sequences of so many tokens can begin, beside those that have. One that could never be held is not to wait."""
        ...


@runtime_checkable
class CanDraw(Protocol):
    """A drafter whose tokens can be draws from a distribution q, for rejection sampling, or its certain guesses."""

    draws: bool
    """Above temperature 0, draw and say from what. Set before `bind`."""


@runtime_checkable
class NeedsTopK(Protocol):
    """A drafter that learns from what the model holds likely."""

    def on_topk(self, seq: int, tree: DraftTree, tokens: np.ndarray) -> None:
        """Before `observe`: the model's most likely tokens [1 + N, KEPT] int32, likeliest first, behind the last known token and behind
        each of the N nodes of the tree that this sequence had in the pass; -1 where there are no more."""


@runtime_checkable
class NeedsHiddenStates(Protocol):
    """A drafter that reads the model's last hidden states, as its language-model head sees them."""

    def on_hidden_states(self, seq: int, first: int, states: np.ndarray) -> None:
        """States [n, H] float32 of the committed tokens at positions first, first + 1, …: of prompts in pieces, of each pass before its
        `observe`. Those of tokens whose keys and values came from the prefix cache are not computed, and never heard of."""
