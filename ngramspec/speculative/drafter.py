"""The contracts of drafting: `Speculator`, which the step calls, and `Drafter`, one more source of drafts beside the n-gram tables.

Token ids enter as int32 arrays, trees leave as flat arrays. Neither knows a model. A bad draft costs time, never a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from ngramspec.datastore.reader import Datastore
from ngramspec.datastore.similar_files import VectorIndex
from ngramspec.defaults import ANSWERS, HISTORY, MAX_HISTORY, MAX_ORDER, SPEC_LENGTH, SPEC_ROWS
from ngramspec.outputs import DraftTree, Reliability
from ngramspec.sampling.batch import Batch
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.topk import find_topk


@dataclass(slots=True)
class Candidates:
    """What one drafter proposes for one sequence: a tree in which a parent precedes its children."""

    tokens: np.ndarray  # [N] int32
    parents: np.ndarray  # [N] int32, index of the parent node; -1: directly after the last known token
    probs: np.ndarray  # [N] float32, the drafter's own estimate that the model takes the whole path to the node

    drawn_from: list[np.ndarray] | None = None
    """The distribution [V] float64 that each node's token was drawn from; siblings stand in the order of their draws. None: not drawn."""

    def __len__(self) -> int:
        return len(self.tokens)


def is_sound(candidates: object, vocab_size: int) -> bool:
    """Return whether candidates of any origin are well-formed: arrays of one length, parents first, numbers in range."""
    try:
        tokens, parents, probs = (np.asarray(getattr(candidates, name)) for name in ("tokens", "parents", "probs"))
        n, drawn_from = len(tokens), getattr(candidates, "drawn_from", None)
        ok = tokens.shape == parents.shape == probs.shape == (n,) and (drawn_from is None or len(drawn_from) == n)
        return ok and bool(((parents >= -1) & (parents < np.arange(n)) & (tokens >= 0) & (tokens < vocab_size) & (probs >= 0)).all())
    except Exception:
        return False


NOTHING = Candidates(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))
NO_TREE = DraftTree(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8))

# Slot, tokens [n] int32, and names of the datastores to draft from (None: all).
RunningSequence: TypeAlias = tuple[int, np.ndarray, frozenset[str] | None]


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """What a drafter may know of a sequence besides its tokens."""

    sampler: Sampler
    """How the sequence's tokens are sampled. A drafter that runs ahead uses a `fork` of it."""
    n_prompt: int
    limit: int
    """Most tokens of prompt and output together."""


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """What a proposer drafts from, and how much. Raises ValueError for a value out of bounds."""

    vocab_size: int
    max_seqs: int = 64
    """Sequences at a time."""
    spec_length: int = SPEC_LENGTH
    """Levels of a draft tree, at most."""
    spec_rows: int = SPEC_ROWS
    """Nodes of a draft tree, at most."""
    max_order: int = MAX_ORDER
    """The longest n-gram in the tables, 2 to 25."""
    history: int = HISTORY
    """The latest tokens of a sequence that its tables hold."""
    answers: int = ANSWERS
    """Size of a tenant's output cache in tokens; 0: none."""
    recycle: bool = True
    """Whether the target's top-k is kept and drafted from."""
    similar: bool = True
    """Whether the files of a datastore that are most like a request are drafted from."""
    use_ngram: bool = True
    """Whether the sequence's own text is drafted from."""

    def __post_init__(self) -> None:
        for name, lo, hi in (
            ("vocab_size", 1, 2**31 - 1),
            ("max_order", 2, MAX_ORDER),
            ("history", 16, MAX_HISTORY),
            ("answers", 0, MAX_HISTORY),
            ("spec_length", 0, 4096),
            ("spec_rows", 0, 4096),
            ("max_seqs", 1, 65536),
        ):
            if not lo <= (value := getattr(self, name)) <= hi:
                raise ValueError(f"{name} must be {lo} to {hi}, got {value}")


@dataclass(frozen=True, slots=True, eq=False)
class DraftParams:
    """How a sequence is drafted for."""

    banned: Sequence[int] = ()
    """Tokens that are never drafted."""
    stops: Sequence[int] = ()
    """Tokens that may be drafted, but nothing after them."""
    prediction: np.ndarray | None = None
    """The predicted output [m] int32."""
    n_output: int = 0
    """How many of the sequence's last tokens are its output."""
    tenant: str | None = ""
    """The output cache is shared within a tenant; None shares nothing."""
    datastores: frozenset[str] | None = None
    """Names of those to draft from; None: all."""
    temperature: float = 0.0
    """0 is greedy."""
    info: SequenceInfo | None = None
    """More that some drafters need."""


DRAFT_DEFAULTS = DraftParams()


class PassTopK(NamedTuple):
    """The model's top-k after the last token of some of a pass's sequences, and after every node of their trees."""

    sequences: np.ndarray
    """[H, 3] int64, per sequence: its slot (-1: it has ended), the token before its last one (-1: none), its index in the batch."""
    batch: Batch
    """The pass. A sequence's rows begin at `batch.root_logits`."""
    tokens: np.ndarray
    """[N, KEPT] int32: the top tokens of all rows whose logits were wanted, most likely first."""
    logits: np.ndarray
    """[N, KEPT] float32: their logits."""


def make_pass_topk(sequences: list[tuple[int, int, int]], batch: Batch, output: Any) -> PassTopK | None:
    """Return the model's top-k after every row of these sequences, `sequences` as in `PassTopK`; None for none.

    `output`: a `backends.base.Output`.
    """
    if not sequences:
        return None
    n = len(batch.logits_rows)
    tokens, logits = output.get_topk(0, n) or find_topk(output.get_logits(0, n))
    return PassTopK(np.array(sequences, np.int64), batch, tokens, logits)


def iterate_topk(seen: PassTopK | None) -> Iterator[tuple[int, DraftTree, np.ndarray]]:
    """Yield (slot, the tree of N nodes that it had in the pass, tokens [1 + N, KEPT]) for each sequence that continues."""
    if seen is not None:
        for slot, _, b in seen.sequences.tolist():
            first, n = int(seen.batch.root_logits[b]), int(seen.batch.ends[b] - seen.batch.roots[b])
            if slot >= 0:
                yield slot, seen.batch.spans[b].tree or NO_TREE, seen.tokens[first : first + n]


class CoolingSequence(Protocol):
    """A sequence, as far as `Speculator.cools_down` knows it."""

    slot: int
    cooldown: int
    """Passes for which no draft will be made."""
    last_cooldown: int
    """The length of the last such pause."""


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
    """What the step drafts with: the proposer, which mixes all sources, a single drafter, or this class, which drafts nothing.

    Calls for one slot are ordered begin, (propose, observe)*, end. Not thread-safe: one caller, in the thread that steps.
    """

    active = False
    """Whether it ever drafts."""
    source_names: list[str] = []  # noqa: RUF012  # nobody adds to it
    """Names by the numbers in `DraftTree.sources`."""
    spec_length = 0
    """Most levels of a tree."""
    spec_rows = 0
    """Most nodes of a tree."""
    needs_topk = False
    """Whether `observe` needs the model's top-k."""

    keeps_kv = False
    """Whether `has_room` may be false: drafters have a KV cache of their own."""
    reads_hidden_states = False
    """Whether `on_hidden_states` is ever to be called."""

    @property
    def needs_hidden_states(self) -> bool:
        """Whether `on_hidden_states` is to be called after the next pass; asked only if it `reads_hidden_states`."""
        return False

    def bind(self, runner: Any) -> None:
        """Receive the `backends.base.Runner` that is drafted for, before any sequence begins. An exception ends the engine."""

    def has_room(self, n_tokens: Sequence[int]) -> bool:
        """Return whether sequences of these lengths can begin now."""
        return True

    def begin(self, slot: int, tokens: np.ndarray, params: DraftParams = DRAFT_DEFAULTS) -> None:
        """Start a sequence, or resume it after preemption, with these committed tokens [n] int32."""

    def cools_down(self, seq: CoolingSequence) -> bool:
        """Count down or begin a sequence's cooldown; return whether it has no draft in this pass, since few of its latest tokens were
        predicted."""
        return False

    def propose(
        self, slots: np.ndarray, max_depth: np.ndarray, cost_ms: np.ndarray, base_rows: int, max_nodes: int, threshold: float = 0.0
    ) -> list[DraftTree]:
        """Return one tree per slot (possibly empty), together at most `max_nodes` nodes.

        slots [B] int32; max_depth [B] int32, deepest useful node (0: no draft); cost_ms [R+1] float64, time of a pass with T rows at
        index T; base_rows, the rows of the pass without drafts; threshold, tokens per millisecond that a node must earn (0: the best
        rate of the pass itself).
        """
        return [NO_TREE] * len(slots)

    def prepare_native(self, slots: np.ndarray, n_tokens: int) -> NativeDrafting | None:
        """Return what compiled code needs to draft for slots [B] int32 by itself, instead of `propose` and `observe`, until one of them has
        `n_tokens` more tokens; `observe_native_steps` follows. None: not possible in this step."""
        return None

    def observe_native_steps(self, n_steps: int, slots: np.ndarray, appended: list[np.ndarray]) -> None:
        """Catch up with steps made by compiled code: it appended appended[b] [k] int32 to the sequences that continue, slots [B] int32."""

    def on_hidden_states(self, slot: int, first: int, states: np.ndarray) -> None:
        """Receive the last hidden states [n, H] float32 of the tokens at positions first, first + 1, …"""

    def observe(self, slots: np.ndarray, accepted: list[np.ndarray], paths: list[np.ndarray], seen: PassTopK | None = None) -> None:
        """Learn from a pass: what was appended to each sequence, and which nodes of its last tree were accepted.

        accepted[b] [k] int32: the path's tokens, then the model's own next one, cut where the sequence ended; paths[b] [j] int32: nodes in
        order of depth, -1 for a token that was not in the tree but forced by the sequence's grammar. A slot that was not proposed for
        learns nothing. `seen` includes sequences that ended in the pass.
        """

    def end(self, slot: int) -> None:
        """Free the slot. Unknown or free slots are ignored."""

    def remember(self, answer: np.ndarray, tenant: str = "") -> None:
        """Add a finished sequence's output [n] int32 to the tenant's output cache."""

    def get_source(self, tree: DraftTree, node: int) -> str:
        """Return the name of a node's source, with file and line if it comes from a datastore."""
        return self.source_names[tree.sources[node]]

    def list_reliability(self) -> list[Reliability]:
        """Return predicted against observed acceptance by source and level of probability. Callable from any thread."""
        return []

    def index(self, store: Datastore) -> list[VectorIndex]:
        """Build now what `use_datastores` would have to build for a store. Callable from any thread."""
        return []

    def use_datastores(
        self, stores: Mapping[str, Datastore], running: Iterable[RunningSequence], ready: list[VectorIndex] | None = None
    ) -> None:
        """Draft from these datastores from now on, for running sequences too. `ready`: their indices, if `index` has built them.

        Raises ValueError.
        """


@runtime_checkable
class Drafter(Protocol):
    """One more source of drafts. Its trees are features: the proposer calibrates its probabilities.

    `seq` is the sequence's slot. Calls for one sequence are ordered begin, (propose, observe)*, end. `observe` may come without `propose`:
    a drafter that does not pay for its time is asked less often.
    An exception switches the drafter off for good (logged once) and fails no request.
    """

    name: str

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        """Start a sequence with these committed tokens [n] int32."""

    def propose(self, seqs: Sequence[int], budget: int) -> Sequence[Candidates]:
        """Return one tree per sequence, each of at most `budget` nodes, possibly empty."""
        ...

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        """Learn that `accepted` [k] int32 was appended, and that this drafter's tokens `rejected` [j] int32 were not accepted."""

    def end(self, seq: int) -> None:
        """Free what belongs to the sequence."""


@runtime_checkable
class NeedsModel(Protocol):
    """A drafter that uses the target model."""

    def bind(self, runner: Any) -> None:
        """Receive the engine's `Runner` once, before any sequence begins, in the thread that steps. An exception ends the engine."""


@runtime_checkable
class NeedsSequenceInfo(Protocol):
    """A drafter that samples as the request does, or that needs to know where the sequence ends."""

    def attach(self, seq: int, info: SequenceInfo) -> None:
        """Receive what is known of the sequence, after every `begin`."""


@runtime_checkable
class NeedsKvRoom(Protocol):
    """A drafter with a KV cache of its own: a sequence waits until there is room for it here, too."""

    def has_room(self, n_tokens: Sequence[int]) -> bool:
        """Return whether sequences of these lengths can begin besides the running ones; True for one that would never fit."""
        ...


@runtime_checkable
class CanDraw(Protocol):
    """A drafter that can sample its tokens from a distribution q, for rejection sampling."""

    draws: bool
    """Whether to sample above temperature 0, and return q in `Candidates.drawn_from`. Set before `bind`."""


@runtime_checkable
class NeedsTopK(Protocol):
    """A drafter that learns from the model's top-k."""

    def on_topk(self, seq: int, tree: DraftTree, tokens: np.ndarray) -> None:
        """Receive the model's top tokens [1 + N, KEPT] int32, most likely first, after the last known token and after each of the N nodes
        of the tree that the sequence had in the pass; -1 if there are no more. Called before `observe`."""


@runtime_checkable
class NeedsHiddenStates(Protocol):
    """A drafter that reads the model's last hidden states, as its language-model head sees them."""

    def on_hidden_states(self, seq: int, first: int, states: np.ndarray) -> None:
        """Receive the states [n, H] float32 of the committed tokens at positions first, first + 1, …: chunk by chunk for prompts, before
        `observe` for each pass. States of tokens from the prefix cache are not computed.

        A drafter with the attribute `tolerates_gaps` receives none while it pauses, and several passes' tokens in one `observe`.
        """
