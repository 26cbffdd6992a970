"""The contracts of drafting: `Speculator`, which the step asks, and `Drafter`, a source of drafts beside the n-gram tables.

Token ids enter as int32 arrays, trees leave as flat arrays. Neither knows a model; a bad draft costs time, never a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from ngramspec.datastore.reader import Datastore
from ngramspec.datastore.similar_files import VectorIndex
from ngramspec.outputs import DraftTree, Reliability
from ngramspec.sampling.batch import Batch
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.topk import likeliest


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


NO_TREE = DraftTree(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8))

Running: TypeAlias = tuple[int, np.ndarray, frozenset[str] | None]
"""Of a running sequence: slot, tokens [n] int32, names of the datastores to draft from or None for all."""


@dataclass(frozen=True, slots=True)
class Text:
    """What a drafter can know of a sequence beside its tokens."""

    sampler: Sampler
    """How the sequence's tokens are picked. A drafter runs ahead on a `fork` of it and leaves this one alone."""
    n_prompt: int
    limit: int
    """Most tokens of prompt and output together."""


class Seen(NamedTuple):
    """What the model holds likely behind the last token of some of a pass's sequences, and behind every node of their trees."""

    heard: np.ndarray
    """[H, 3] int64: of each sequence its slot (-1: it is over), the token before its last one (-1: none), its index in the batch."""
    batch: Batch
    """A sequence's rows are those from `batch.root_logits` on."""
    tokens: np.ndarray
    """[N, KEPT] int32: the likeliest of all rows whose logits were wanted, likeliest first …"""
    logits: np.ndarray
    """… with their logits [N, KEPT] float32."""


def make_seen(heard: list[tuple[int, int, int]], batch: Batch, output: Any) -> Seen | None:
    """Return the model's top-k after every row of these sequences, `heard` as in `Seen`; None for none.

    `output`: a `backends.base.Output`.
    """
    if not heard:
        return None
    n = len(batch.logits_rows)
    tokens, logits = output.candidates(0, n) or likeliest(output.logits(0, n))
    return Seen(np.array(heard, np.int64), batch, tokens, logits)


def likely_of(seen: Seen | None) -> Iterator[tuple[int, int, np.ndarray]]:
    """Of each sequence that goes on: slot, number of rows, tokens [rows, KEPT]."""
    if seen is not None:
        for slot, _, b in seen.heard.tolist():
            first, n = int(seen.batch.root_logits[b]), int(seen.batch.ends[b] - seen.batch.roots[b])
            if slot >= 0:
                yield slot, n, seen.tokens[first : first + n]


class NativeDrafting(NamedTuple):
    """What compiled code drafts with by itself, without `Speculator.propose` and `observe`."""

    draft_state: Any
    """`tree_builder.DraftState`."""
    n_steps: int
    """Steps after which the speculator must be asked again."""
    spec_length: int
    spec_rows: int
    history: int
    chains: bool
    recycles: bool
    """The model's top-k is kept."""


class Speculator:
    """What the step drafts with: the mix of all sources, one drafter by itself, or, as it stands here, nothing.

    Slots are the step's, one per running sequence. Calls for one slot are ordered begin, (propose, observe)*, end. One caller, in the
    thread that steps.
    """

    active = False
    """Whether it ever drafts."""
    source_names: list[str] = []  # noqa: RUF012  # nobody adds to it
    """What `DraftTree.sources` counts."""
    spec_length = 0
    """Deepest node."""
    spec_rows = 0
    """Most nodes of a tree."""
    needs_topk = False
    """Wants to know what the model holds likely (`Seen`)."""
    needs_hidden_states = False
    """Wants the model's last hidden states (`on_hidden_states`)."""

    def bind(self, runner: Any) -> None:
        """The `backends.base.Runner` that is drafted for, before any sequence begins. What it raises ends the engine."""

    def has_room(self, n_tokens: Sequence[int]) -> bool:
        """Whether sequences of so many tokens can begin now."""
        return True

    def begin(
        self,
        slot: int,
        tokens: np.ndarray,
        *,
        banned: Sequence[int] = (),
        stops: Sequence[int] = (),
        prediction: np.ndarray | None = None,
        n_output: int = 0,
        tenant: str | None = "",
        datastores: frozenset[str] | None = None,
        temperature: float = 0.0,
        text: Text | None = None,
    ) -> None:
        """A sequence starts, or resumes after preemption, with these committed tokens [n] int32, the last `n_output` of them its output.

        `banned` tokens are never drafted; a stop may be drafted, but nothing behind it. `prediction` [n] int32 is the output that is
        expected. Answers are shared within a `tenant`; None shares nothing. `datastores`: names of those to draft from, None: all.
        Its tokens are drawn at `temperature`; 0: the likeliest ones.
        """

    def is_unpredictable(self, slot: int) -> bool:
        """Whether next to nothing of a sequence's latest tokens was foreseen, so that it need not be looked at in every pass."""
        return False

    def propose(
        self, slots: np.ndarray, max_depth: np.ndarray, cost_ms: np.ndarray, base_rows: int, max_nodes: int, threshold: float = 0.0
    ) -> list[DraftTree]:
        """One tree per slot (possibly empty), together at most `max_nodes` nodes.

        slots [B] int32; max_depth [B] int32, deepest useful node (0: no draft); cost_ms [R+1] float64, time of a pass with T rows at
        index T; base_rows, the rows that the pass carries without drafts; price, what a millisecond is worth in tokens (0: what the pass
        itself makes in it).
        """
        return [NO_TREE] * len(slots)

    def compiled(self, slots: np.ndarray, n_tokens: int) -> NativeDrafting | None:
        """What drafts for slots [B] int32 by itself until one of them has so many tokens more, instead of `propose` and `observe`; then
        comes `advance`. None: no such thing, this time."""
        return None

    def advance(self, n_steps: int, slots: np.ndarray, appended: list[np.ndarray]) -> None:
        """So many steps were made with `compiled`, and appended[b] [k] int32 to the sequences that go on, slots [B] int32."""

    def on_hidden_states(self, slot: int, first: int, states: np.ndarray) -> None:
        """The last hidden states [n, H] float32 of the tokens at positions first, first + 1, …"""

    def observe(self, slots: np.ndarray, accepted: list[np.ndarray], paths: list[np.ndarray], seen: Seen | None = None) -> None:
        """After acceptance: what was appended to each sequence, and which nodes of its last tree are on the accepted path.

        accepted[b] [k] int32: path tokens, then the model's own next one, cut where the sequence ended; paths[b] [j] int32 in depth order,
        -1 for a token that was not in its tree, but foreseen by the sequence's grammar.
        A slot that was not proposed for learns nothing. `seen`: of sequences of the pass, those that it ended too.
        """

    def end(self, slot: int) -> None:
        """The slot's sequence is gone. Unknown or free slots are left alone."""

    def remember(self, answer: np.ndarray, tenant: str = "") -> None:
        """A sequence has finished with this output [n] int32."""

    def source_of(self, tree: DraftTree, node: int) -> str:
        """Who proposed a node, with file and line where it comes from a datastore."""
        return self.source_names[tree.sources[node]]

    def reliability(self) -> list[Reliability]:
        """What nodes promised against what came of them, by source and level of probability, as far as it is counted. From any thread."""
        return []

    def index(self, store: Datastore) -> list[VectorIndex]:
        """What `use_datastores` would have to make for a store, made now. From any thread."""
        return []

    def use_datastores(self, stores: Mapping[str, Datastore], running: Iterable[Running], ready: list[VectorIndex] | None = None) -> None:
        """Draft from these datastores from now on, for running sequences too. `ready`: their indices, where they have been made.

        Raises ValueError.
        """


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
