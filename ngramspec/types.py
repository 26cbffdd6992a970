"""The data that flows through a step, and its owners. No behaviour to speak of, no torch, no model.

A `Request` (what a user asked) becomes `n` `Sequence`s; a step packs sequences and their `DraftTree`s
into a `Batch`; results leave as `Completion`s. Arrays are numpy and carry their shape in the comment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ngramspec.pack import Span

BLOCK = 32
"""Token slots per block of the KV pool, and the width of a tile of keys."""

KEPT = 8
"""The model's own candidates per token that are recycled."""

MAX_SEED = 2**64 - 1
MAX_STOPS = 64
MAX_LOGPROBS = 100
LEAST_TEMPERATURE, LEAST_PENALTY = 1e-6, 1e-3
"""Divisors of logits; with smaller ones what they divide would leave float32."""


def _require(ok: bool, name: str, value: object, accepted: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {accepted}, got {value!r}")


def _number(value: object, lo: float, hi: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and lo <= value <= hi


def _integer(value: object, lo: int, hi: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(lo <= value <= hi)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are picked. The tokens depend on these, the prompt and the seed, and on nothing else.

    Raises ValueError, naming the accepted range, for any value outside it.
    """

    max_tokens: int = 128
    """Upper bound of generated tokens, 1 or more; less where `max_model_len` ends first."""
    min_tokens: int = 0
    """No stop token or stop string ends the text before this many tokens."""
    temperature: float = 0.0
    """0 picks the most likely token (ties: the lowest id); above, samples. 0, or 1e-6 to 100."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 or -1: all."""
    top_p: float = 1.0
    """Sample among the fewest tokens that hold this share of the probability, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of tokens in prompt and output, in [0.001, 100]."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens already in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output, in [-2, 2]."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id to a number added to its logit, in [-100, 100]; -100 bans the token."""
    seed: int | None = None
    """0 to 2**64-1. None draws a fresh seed per request; it is reported in the completion."""
    n: int = 1
    """Independent samples of the same prompt, 1 to 128; sample i uses its own stream of the seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; none of them is part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the text, beside the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """The model's own end-of-sequence ids do not end the text."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many most likely ones, 0 to 100."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, all of which are then computed: no prefix cache."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        if isinstance(self.stop, str):
            put(self, "stop", (self.stop,))
        _require(
            isinstance(self.stop, (list, tuple)) and len(self.stop) <= MAX_STOPS and all(isinstance(s, str) and s for s in self.stop),
            "stop",
            self.stop,
            f"up to {MAX_STOPS} non-empty strings",
        )
        put(self, "stop", tuple(self.stop))
        _require(
            isinstance(self.stop_token_ids, (list, tuple)) and all(_integer(t, 0, 2**31 - 1) for t in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "token ids (integers from 0)",
        )
        put(self, "stop_token_ids", tuple(int(t) for t in self.stop_token_ids))
        _require(
            isinstance(self.logit_bias, dict)
            and all(_integer(t, 0, 2**31 - 1) and _number(b, -100, 100) for t, b in self.logit_bias.items()),
            "logit_bias",
            self.logit_bias,
            "a dict of token id to a number in [-100, 100]",
        )
        _require(_integer(self.max_tokens, 1, 2**31 - 1), "max_tokens", self.max_tokens, "an integer from 1 to 2147483647")
        _require(
            _integer(self.min_tokens, 0, self.max_tokens),
            "min_tokens",
            self.min_tokens,
            f"an integer from 0 to max_tokens ({self.max_tokens})",
        )
        _require(
            _number(self.temperature, LEAST_TEMPERATURE, 100) or _number(self.temperature, 0, 0),
            "temperature",
            self.temperature,
            f"0, or a number in [{LEAST_TEMPERATURE}, 100]",
        )
        _require(_integer(self.top_k, -1, 2**31 - 1), "top_k", self.top_k, "an integer from -1 (0 and -1: all)")
        put(self, "top_k", max(int(self.top_k), 0))
        _require(_number(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "a number in (0, 1]")
        _require(_number(self.min_p, 0, 1), "min_p", self.min_p, "a number in [0, 1]")
        _require(
            _number(self.repetition_penalty, LEAST_PENALTY, 100),
            "repetition_penalty",
            self.repetition_penalty,
            f"a number in [{LEAST_PENALTY}, 100]",
        )
        _require(_number(self.presence_penalty, -2, 2), "presence_penalty", self.presence_penalty, "a number in [-2, 2]")
        _require(_number(self.frequency_penalty, -2, 2), "frequency_penalty", self.frequency_penalty, "a number in [-2, 2]")
        _require(self.seed is None or _integer(self.seed, 0, MAX_SEED), "seed", self.seed, f"None or an integer from 0 to {MAX_SEED}")
        _require(_integer(self.n, 1, 128), "n", self.n, "an integer from 1 to 128")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or _integer(value, 0, MAX_LOGPROBS), name, value, f"None or an integer from 0 to {MAX_LOGPROBS}")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")


@dataclass(slots=True)
class DraftTree:
    """One sequence's draft. Nodes are in an order in which a parent precedes its children; siblings differ in token."""

    tokens: np.ndarray  # [N] int32
    parents: np.ndarray  # [N] int32, index of the parent node; -1: a child of the root (the last known token)
    probs: np.ndarray  # [N] float32, estimated probability that the model takes the whole path to the node
    sources: np.ndarray  # [N] uint8, index into the proposer's `source_names`
    places: np.ndarray | None = None  # [N] int64, where the datastore has the node; -1: nowhere
    drawn_from: list[np.ndarray] | None = None
    """Per node the distribution [V] float64 that its token was drawn from; siblings stand in the order of their draws, and may then be
    alike. None: not drawn."""

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, n: int) -> DraftTree:
        """The tree of the first n nodes."""
        if n >= len(self):
            return self
        places = None if self.places is None else self.places[:n]
        drawn_from = None if self.drawn_from is None else self.drawn_from[:n]
        return DraftTree(self.tokens[:n], self.parents[:n], self.probs[:n], self.sources[:n], places, drawn_from)


@dataclass(slots=True)
class Batch:
    """The rows of one pass, T in all, for I groups of neighbouring rows of one sequence. Made by `pack`, read by the runner."""

    input_ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int32: position in the text; the row sees positions 0..its own
    logits_rows: np.ndarray  # [N] int64: rows whose logits are wanted, rising
    items: np.ndarray  # [I, 2] int32: first and last + 1 row of the group
    owners: np.ndarray  # [I] int32: slot of the group's sequence
    tables: np.ndarray  # [I, max_blocks] int32: the block table of the group's sequence
    bases: np.ndarray  # [T] int32: from this position on, a key's slot is found through `paths`; before, slot = position
    paths: np.ndarray  # [T, depth] int32: slots of positions base, base + 1, …, the row's own (draft ancestors, then itself)
    blocks: np.ndarray  # [T] int32: block of the row's write slot
    offsets: np.ndarray  # [T] int32: its offset in that block
    parents: np.ndarray  # [T] int32: the row of a draft node's parent; -1 for all other rows
    roots: np.ndarray  # [B] int32: row of each sequence's last known token
    ends: np.ndarray  # [B] int32: its last row + 1
    spans: list[Span]  # [B]


@dataclass(slots=True)
class Stats:
    """What speculation did for one choice (or, added up, for a request or a run)."""

    passes: int = 0
    """Passes of the model that picked tokens for this text; the one that ends its prompt is the first."""
    tokens: int = 0
    """Tokens generated."""
    drafted: int = 0
    """Draft nodes verified."""
    accepted: int = 0
    """Draft nodes whose token the model chose and that became part of the text."""
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    drafted_by_depth: list[int] = field(default_factory=list)
    """[d]: nodes verified at depth d + 1."""
    accepted_by_depth: list[int] = field(default_factory=list)
    """[d]: passes that accepted a node at depth d + 1."""
    drafts: int = 0
    """Passes that verified a draft."""
    accepted_lengths: list[int] = field(default_factory=list)
    """[k]: passes with a draft that accepted k of its nodes."""

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def rows_per_pass(self) -> float:
        """Draft rows per pass, the root row not counted."""
        return self.drafted / self.passes if self.passes else 0.0

    def add(self, other: Stats) -> None:
        for name in ("passes", "tokens", "drafted", "accepted", "drafts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("drafted_by_source", "accepted_by_source"):
            mine = getattr(self, name)
            for key, count in getattr(other, name).items():
                mine[key] = mine.get(key, 0) + count
        for name in ("drafted_by_depth", "accepted_by_depth", "accepted_lengths"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, count in enumerate(theirs):
                mine[i] += count


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of a token under the model's own distribution, before any adjustment."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """The most likely tokens, most likely first."""


@dataclass(slots=True)
class Choice:
    """One generated text."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """"stop" (a stop token or string), "length", "cancelled", or None while running."""
    logprobs: list[TokenLogprob] | None = None
    draft_sources: list[str | None] = field(default_factory=list)
    """Per token: the source whose draft the model confirmed, or None where the model wrote it unaided. A token that the datastore
    proposed says where from: "datastore:path/of/file.py:12"."""
    stats: Stats = field(default_factory=Stats)
    texts: list[str] = field(default_factory=list)
    """The text of each token: what could be shown once it was there. They add up to `text`."""


@dataclass(slots=True)
class Completion:
    """The result of one prompt. `text`, `token_ids`, `stats` … are those of the first choice."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    seed: int
    exactness: str
    """"bitwise" or "numerical": what the engine's self-test found for this model, device and dtype. "distribution" where drafts were
    accepted by rejection sampling: the text is distributed as without drafts, but is another one. "lenient": it is not even that."""
    ttft_s: float = 0.0
    duration_s: float = 0.0
    queued_s: float = 0.0
    """Until a pass first carried rows of it; for a request that was cancelled before, until then."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values came from the prefix cache (for the first choice)."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per token of the prompt where `SamplingParams.prompt_logprobs` asked for them; the first token has none."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def draft_sources(self) -> list[str | None]:
        return self.choices[0].draft_sources

    @property
    def stats(self) -> Stats:
        total = Stats()
        for choice in self.choices:
            total.add(choice.stats)
        return total


@dataclass(frozen=True, slots=True)
class Beam:
    """A text that beam search found."""

    token_ids: list[int]
    """With the token that ended it, if one did."""
    text: str
    score: float
    """Sum of the tokens' log-probabilities over their number to the power of the length penalty."""


@dataclass(slots=True)
class Delta:
    """A piece of a stream: what one step added to one choice. The pieces' texts add up to the choice's text."""

    index: int
    text: str
    token_ids: list[int]
    draft_sources: list[str | None]
    finish_reason: str | None = None
    completion: Completion | None = None
    """Set on the last piece of the request."""
    texts: list[str] = field(default_factory=list)
    """The text of each token of `token_ids`. They add up to `text`, but where cancelling gives out what an earlier token held back."""
    logprobs: list[TokenLogprob] | None = None
    """One per token of `token_ids`, where `SamplingParams.logprobs` asked for them."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine is doing, and what it has done since it was started."""

    waiting: int
    """Sequences that have no place yet, or lost it to others (a request is `n` of them)."""
    running: int
    """Sequences that take part in passes."""
    kv_tokens: int
    """Tokens whose keys and values fit in the pool."""
    kv_used: int
    """Of these, in blocks that running sequences hold; a block that several share counts once."""
    kv_cached: int
    """Of these, in blocks that no sequence holds and whose prefix is known: reused, or given to others when needed."""
    prefix_queries: int
    """Tokens that were looked for in the prefix cache."""
    prefix_hits: int
    """Of these, tokens that were found there."""
    cached_tokens: int
    """Of these, tokens of new requests; the others are of preempted sequences that came back."""
    preemptions: int
    """Sequences that gave their blocks back to older ones."""
    passes: int
    """Passes of the model."""
