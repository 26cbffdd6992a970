"""The plain data that a step takes and returns: draft trees, and what leaves the engine. Needs neither torch nor a model.

A `DraftTree` holds one sequence's draft; results leave as a `Completion`, and while they are generated as a `Delta` per step. Arrays are
numpy, with their shape in the comment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ngramspec.field_docs import document_fields

BLOCK = 32  # KV positions per block of the pool, and the width of a tile of keys
KEPT = 8  # the model's own top-k candidates per token that are recycled


@dataclass(slots=True)
class DraftTree:
    """One sequence's draft. A parent precedes its children; siblings differ in token."""

    tokens: np.ndarray  # [N] int32
    parents: np.ndarray  # [N] int32, index of the parent node; -1: a child of the root (the last known token)
    probs: np.ndarray  # [N] float32, estimated probability that the model accepts the whole path to the node
    sources: np.ndarray  # [N] uint8, index into the speculator's `source_names`, or one past its end: forced by a grammar
    store_positions: np.ndarray | None = None  # [N] int64, the node's position in the datastore, or -1
    drawn_from: list[np.ndarray] | None = None
    """The distribution [V] float64 from which each node's token was drawn; siblings are in the order of their draws, and may then be equal.
    None: tokens were not drawn."""

    origins: np.ndarray | None = None
    """[N] int32, the index of each node in the speculator's own tree, or -1, if the tree was changed. None: it is the speculator's own."""

    def __len__(self) -> int:
        return len(self.tokens)

    def take_first(self, n: int) -> DraftTree:
        """Return the tree of the first n nodes."""
        if n >= len(self):
            return self
        store_positions = None if self.store_positions is None else self.store_positions[:n]
        drawn_from = None if self.drawn_from is None else self.drawn_from[:n]
        origins = None if self.origins is None else self.origins[:n]
        return DraftTree(self.tokens[:n], self.parents[:n], self.probs[:n], self.sources[:n], store_positions, drawn_from, origins)


@dataclass(slots=True)
class Stats:
    """Statistics of speculation for one choice or, added up, for a request or a run."""

    passes: int = 0
    """Forward passes that generated tokens of this text; the one that ends its prompt is the first."""
    tokens: int = 0
    """Tokens generated."""
    drafted: int = 0
    """Draft nodes verified."""
    accepted: int = 0
    """Draft nodes that were accepted: the model chose their token, and it became part of the text."""
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    expected_by_source: dict[str, float] = field(default_factory=dict)
    """Sum of the verified nodes' estimated probabilities: the expected value of `accepted_by_source`."""
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

    def __repr__(self) -> str:
        return f"<Stats {self.tokens} tokens in {self.passes} passes, {self.accepted} of {self.drafted} drafted accepted>"

    def add(self, other: Stats) -> None:
        for name in ("passes", "tokens", "drafted", "accepted", "drafts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("drafted_by_source", "accepted_by_source", "expected_by_source"):
            mine = getattr(self, name)
            for key, count in getattr(other, name).items():
                mine[key] = mine.get(key, 0) + count
        for name in ("drafted_by_depth", "accepted_by_depth", "accepted_lengths"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, count in enumerate(theirs):
                mine[i] += count

    @staticmethod
    def sum(parts: Iterable[Stats]) -> Stats:
        """Return the statistics of all of them together, in an object of its own."""
        total = Stats()
        for each in parts:
            total.add(each)
        return total


@dataclass(frozen=True, slots=True)
class Reliability:
    """Verified nodes of one source whose estimated probability lay between two bounds. Estimates are right if `expected` equals `made`."""

    source: str
    low: float
    high: float
    nodes: int
    expected: float
    """Sum of their probabilities, each of the whole path to the node."""
    made: int
    """Number of the nodes that were accepted."""


@dataclass(slots=True)
class TokenLogprob:
    """The log-probability of a token under the model's own distribution, before any adjustment, or as `post_sampling_probs` asks for."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """The most likely tokens, most likely first, or those of `logprob_token_ids`, in their order."""
    rank: int | None = None
    """Tokens that are likelier, plus one. None: not counted."""


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
    """The source of each token's accepted draft, or None if the model wrote the token without one. For a datastore's draft it says where
    the token comes from: "datastore:path/of/file.py:12"."""
    stats: Stats = field(default_factory=Stats)
    texts: list[str] = field(default_factory=list)
    """The text of each token: what could be shown after it. They add up to `text`."""
    stop_reason: int | str | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the text. None if the model's own end did, or nothing."""
    n_spelled: int = 0
    """How many of the tokens only spell the end of the prompt's text (`SamplingParams.healed`)."""

    @property
    def n_counted(self) -> int:
        """The number of tokens that `max_tokens` counts."""
        return len(self.token_ids) - self.n_spelled

    def __repr__(self) -> str:
        return f"<Choice {self.index} {self.text!r:.60}, {len(self.token_ids)} tokens, {self.finish_reason}>"


@dataclass(slots=True)
class Completion:
    """The result of one prompt. `text`, `token_ids`, `stats` … are those of the first choice."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    seed: int
    exactness: str
    """"bitwise" or "numerical": what the engine's self-test found for this model, device and dtype. "distribution": drafts were accepted
    by rejection sampling, so the text is distributed as without drafts, but is another one. "lenient": not even that."""
    ttft_s: float = 0.0
    duration_s: float = 0.0
    queued_s: float = 0.0
    """Time until a pass first carried rows of it, or until it was cancelled before that."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values came from the prefix cache (for the first choice)."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per token of the prompt if `SamplingParams.prompt_logprobs` asked for them; the first token has none."""
    precision: str = ""
    """Precision of products with the model's weights: "int8" (activations as 8-bit integers) or a dtype."""

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

    def split_time(self, elapsed_s: float | None = None) -> tuple[float, float]:
        """Return the seconds until the first token, without those in the queue, and the seconds after it.

        `elapsed_s`: since the start of a request that is not done yet.
        """
        whole_s = self.duration_s or elapsed_s or 0.0
        first_s = self.ttft_s or whole_s
        return max(first_s - self.queued_s, 0.0), max(whole_s - first_s, 0.0)

    @property
    def stats(self) -> Stats:
        return Stats.sum(choice.stats for choice in self.choices)

    def __repr__(self) -> str:
        others = f", {len(self.choices)} choices" if len(self.choices) != 1 else ""
        first = self.choices[0] if self.choices else Choice(0)
        return f"<Completion {first.text!r:.60}, {len(first.token_ids)} tokens, {first.finish_reason}{others}>"


@dataclass(frozen=True, slots=True)
class Beam:
    """A text that beam search found."""

    token_ids: list[int]
    """Its tokens, with the one that ended it, if one did."""
    text: str
    score: float
    """Sum of the tokens' log-probabilities over their number to the power of the length penalty."""


@dataclass(slots=True)
class Delta:
    """What one step added to one choice of a stream. The deltas' texts add up to the choice's text."""

    index: int
    text: str
    token_ids: list[int]
    draft_sources: list[str | None]
    finish_reason: str | None = None
    completion: Completion | None = None
    """Set on the last delta of the request."""
    texts: list[str] = field(default_factory=list)
    """The text of each token of `token_ids`. They add up to `text`, unless cancelling released what an earlier token held back."""
    logprobs: list[TokenLogprob] | None = None
    """One per token of `token_ids`, if `SamplingParams.logprobs` asked for them."""
    stop_reason: int | str | None = None
    """The choice's stop reason, in its last delta."""

    def __repr__(self) -> str:
        return f"<Delta {self.index} {self.text!r:.60}, {len(self.token_ids)} tokens{', the last' if self.completion else ''}>"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The state of an engine, and its counters since it was started."""

    waiting: int
    """Sequences that are not admitted yet, or were preempted (a request is `n` of them)."""
    running: int
    """Sequences that take part in passes."""
    kv_tokens: int
    """Tokens whose keys and values fit in the pool."""
    kv_used: int
    """Those in blocks that running sequences hold; a block that several share counts once."""
    kv_cached: int
    """Those in blocks that no sequence holds and whose prefix is known: they are reused, or evicted when needed."""
    prefix_queries: int
    """Tokens that were looked up in the prefix cache."""
    prefix_hits: int
    """Tokens that were found there."""
    cached_tokens: int
    """Tokens of new requests that were found there; the other hits are of preempted sequences that came back."""
    preemptions: int
    """Sequences that gave their blocks back to older ones."""
    passes: int
    """Forward passes of the model."""
    tokens_ahead: int = 0
    """Tokens of prompts that were computed before anybody asked for them."""
    speculation_gain: float = 1.0
    """Estimated speed of the last seconds in times that without drafts."""
    price_bar: float = 1.0
    """The speculation threshold's factor: more than 1 while drafts did not pay."""
    reliability: list[Reliability] = field(default_factory=list)
    """Expected against observed acceptance, a row per source and level of probability, without the last pass of each text."""


document_fields(__name__)
