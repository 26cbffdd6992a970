"""A draft session drafts inside a host engine: it owns slots, recognises texts, remembers their output, opens predictions and datastores.

Committed tokens come in under keys of the host's choice (`begin`, `sync`, `observe`), drafts go out (`propose`, `chains`): trees, or one
chain for each text where a host verifies nothing else. It adds nothing to a host's numerics: a wrong draft costs time, never a token. Where
drafts do not pay there are none. Knows neither torch nor a host. Not thread-safe: one caller.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ngramspec.datastore.reader import Datastore
from ngramspec.defaults import ANSWERS, MAX_HISTORY
from ngramspec.errors import InvalidInputError, make_datastore_error
from ngramspec.integrations.host_step_timer import HostStepTimer
from ngramspec.outputs import DraftTree, Stats
from ngramspec.speculative.budget.cost_model import Load
from ngramspec.speculative.draft_stats import CountedPass, DraftStats
from ngramspec.speculative.drafter import NO_TREE, DraftOptions, DraftParams
from ngramspec.speculative.proposer import TreeProposer, warmup
from ngramspec.speculative.syntax import SyntaxTable

__all__ = ["Guest", "warmup"]

MAX_DEPTH, MAX_SEQS, MAX_ROWS = 256, 4096, 16384
TAIL = 16  # tokens that are compared at the end of a text whose key the host knows
_NODES = np.arange(MAX_DEPTH, dtype=np.int32)  # the nodes of a chain
SLOPE = 0.06  # time that a row is assumed to add at first, as a share of a step: right for a CPU of few cores with float32 weights


@dataclass(slots=True)
class _HostSequence:
    """What the session knows of a text of the host's."""

    slot: int
    buffer: np.ndarray  # [cap] int32
    n: int
    n_prompt: int
    tenant: str | None
    datastores: frozenset[str] | None
    used: int
    """The step in which it was last heard of."""
    tree: DraftTree | None = None
    chain: bool = False
    drafted: list[int] = field(default_factory=list)
    """The tree's tokens."""
    cooldown: int = 0
    last_cooldown: int = 0

    @property
    def tokens(self) -> np.ndarray:
        return self.buffer[: self.n]


class Guest:
    """Drafts for up to `max_seqs` texts at a time, of at most `depth` tokens each."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_seqs: int,
        depth: int,
        stops: Sequence[int] = (),
        stores: Mapping[str, Datastore] | None = None,
        answers: int = ANSWERS,
        recycle: bool = False,
        steady: bool = False,
        slope: float = SLOPE,
        syntax: SyntaxTable | None = None,
    ) -> None:
        """`stops` end a draft; `stores`: open datastores by name, made with the host's tokenizer; `answers`: tokens of finished answers
        that are remembered for each tenant; `recycle`: the host shows logits (`record_topk`); `steady`: no time is looked at, so that
        sessions that are told the same draft the same; `slope`: what a row is believed to take at first, as a share of a step;
        `syntax`: the syntax table in the host's token ids.

        Raises InvalidInputError.
        """
        for name, value, lo, hi in (
            ("vocab_size", vocab_size, 1, 2**31 - 1),
            ("max_seqs", max_seqs, 1, MAX_SEQS),
            ("depth", depth, 1, MAX_DEPTH),
            ("answers", answers, 0, MAX_HISTORY),
        ):
            if not (isinstance(value, (int, np.integer)) and not isinstance(value, bool) and lo <= value <= hi):
                raise InvalidInputError(f"{name} must be an integer from {lo} to {hi}, got {value!r}")
        if not 0 <= slope <= 10:
            raise InvalidInputError(f"slope must be from 0 to 10, got {slope!r}")
        self.vocab_size, self.depth, self.stops = int(vocab_size), int(depth), tuple(stops)
        self._drafts = TreeProposer(
            DraftOptions(
                vocab_size=self.vocab_size, max_seqs=max_seqs, spec_length=depth, spec_rows=depth, answers=answers, recycle=recycle
            ),
            syntax=syntax,
        )
        self._texts: dict[Hashable, _HostSequence] = {}
        self._free = list(range(max_seqs - 1, -1, -1))
        self._step = 0
        self.step_timer = HostStepTimer(min(max_seqs * (depth + 1), MAX_ROWS), slope, steady=steady)
        self._load, self._nodes, self._made = Load(0), 0, 0
        self._counted, self._ended_stats = DraftStats(self._drafts.source_names, self.depth), Stats()
        self.stores: dict[str, Datastore] = {}
        self.use_stores(stores or {})

    # ------------------------------------------------------------------ what the host has

    @property
    def stats(self) -> Stats:
        """Return the statistics of all texts of this session."""
        return Stats.sum((self._ended_stats, *(self._counted.read(key) for key in self._texts)))

    @property
    def recycles(self) -> bool:
        """Return whether `record_topk` is of use."""
        return self._drafts.needs_topk

    @property
    def source_names(self) -> list[str]:
        """Return the drafters' names, by which `Stats.drafted_by_source` counts."""
        return list(self._drafts.source_names)

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._texts

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._texts))

    def all_in(self, keys: Set[Hashable]) -> bool:
        """Return whether all texts have one of these keys."""
        return self._texts.keys() <= keys

    def get_length(self, key: Hashable) -> int:
        """Return the length of a text as it is known here. Raises KeyError."""
        return self._texts[key].n

    def get_tokens(self, key: Hashable) -> np.ndarray:
        """Return a text [n] int32 as it is known here. Raises KeyError."""
        return self._texts[key].tokens.copy()

    def use_stores(self, stores: Mapping[str, Datastore]) -> None:
        """Draft from these datastores from now on, for the texts under way too. Raises InvalidInputError."""
        running = ((text.slot, text.tokens, text.datastores) for text in self._texts.values())
        try:
            self._drafts.use_datastores(stores, running)
        except ValueError as error:
            raise InvalidInputError(str(error)) from error
        if self._drafts.datastore is not None:
            self._drafts.datastore.follows_changes = not self.step_timer.steady
            if self.step_timer.steady:
                self._drafts.datastore.wait_until_loaded()
        self.stores = dict(stores)

    # ------------------------------------------------------------------ texts

    def begin(
        self,
        key: Hashable,
        tokens: Sequence[int] | np.ndarray,
        *,
        n_output: int = 0,
        prediction: Sequence[int] | np.ndarray | None = None,
        tenant: str | None = "",
        datastores: Iterable[str] | None = None,
        banned: Sequence[int] = (),
        stops: Sequence[int] | None = None,
        temperature: float = 0.0,
    ) -> None:
        """A text starts, or comes back, with these tokens [n], the last `n_output` of them its output; one under this key is given up.

        `prediction` [m] is the output that is expected; answers are shared within the `tenant`, None: with nobody; `datastores`: names of
        those to draft from, None: all; `banned` tokens are never drafted; `stops`: instead of the session's own; `temperature`: at which
        its tokens are drawn, 0: the most likely ones. Where no slot is free the text gives way that was not heard of for longest. Raises
        InvalidInputError, with nothing changed.
        """
        known = self._check_ids(tokens, "text")
        foreseen = None if prediction is None else self._check_ids(prediction, "prediction")
        if not len(known) or not 0 <= n_output <= len(known):
            raise InvalidInputError(f"a text must have a token, and n_output 0 to its length, got {len(known)} tokens and {n_output!r}")
        chosen = None if datastores is None else frozenset(datastores)
        if chosen is not None and (wrong := sorted(chosen - self.stores.keys())):
            raise make_datastore_error("datastores", self.stores, wrong[0])
        if tenant is not None and not isinstance(tenant, str):
            raise InvalidInputError(f"tenant must be text or None, got {tenant!r}")
        self.end(key, finished=False)
        if not self._free:
            self.end(min(self._texts, key=lambda k: self._texts[k].used), finished=False)
        slot = self._free.pop()
        buffer = np.empty(len(known) + 256, np.int32)
        buffer[: len(known)] = known
        self._texts[key] = _HostSequence(slot, buffer, len(known), len(known) - n_output, tenant, chosen, self._step)
        params = DraftParams(
            banned=tuple(banned),
            stops=self.stops if stops is None else tuple(stops),
            prediction=foreseen,
            n_output=n_output,
            tenant=tenant,
            datastores=chosen,
            temperature=temperature,
        )
        self._drafts.begin(slot, known, params)

    def sync(self, key: Hashable, tokens: Sequence[int] | np.ndarray, **hints: Any) -> bool:
        """Take the text [n] as it is now: what is new is observed; one that does not go on from what was known begins, with the `hints` of
        `begin`, and what was known is remembered as an answer. -> whether it began. Raises InvalidInputError.

        A step adds at most `depth` + 1 tokens: a text that grew by more has a new prompt.
        """
        now = np.asarray(tokens)
        if (new := self.find_continuation(key, now, self.depth + 1)) is not None:
            self.observe([key], [new])
            return False
        self.end(key, finished=True)
        self.begin(key, tokens, **hints)
        return True

    def find_continuation(self, key: Hashable, tokens: np.ndarray, most: int) -> np.ndarray | None:
        """Return the part of tokens [n] after the known text, at most `most` tokens; None if they do not continue it."""
        text = self._texts.get(key)
        if text is None or not 0 <= len(tokens) - text.n <= most or not (tokens[: text.n] == text.tokens).all():
            return None
        return tokens[text.n :]

    def find_appended(self, key: Hashable, tokens: np.ndarray, n_new: int) -> np.ndarray | None:
        """Return what `find_continuation` would, for a host that knows whose tokens [n] these are and that a step appended the last
        `n_new`: beside the length only the last TAIL tokens known are compared."""
        text = self._texts.get(key)
        if text is None or len(tokens) - text.n != n_new:
            return None
        first = max(text.n - TAIL, 0)
        return tokens[text.n :] if tokens[first : text.n].tolist() == text.buffer[first : text.n].tolist() else None

    def observe(self, keys: Sequence[Hashable], accepted: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Learn what a step appended to each text [k]: of its last draft what the model took, then the model's own token. Unknown keys:
        nothing.

        Several steps' tokens may come at once, where the host did not ask in between.
        """
        slots, new, paths, counted = [], [], [], list[CountedPass]()
        self._step += 1
        for key, each in zip(keys, accepted, strict=True):
            text = self._texts.get(key)
            if text is None or not len(each):
                continue
            tokens = np.asarray(each, np.int32)
            path = _find_path(text, tokens)
            if text.n + len(tokens) > len(text.buffer):
                text.buffer = np.concatenate([text.tokens, np.empty(text.n + len(tokens) + 256, np.int32)])
            text.buffer[text.n : text.n + len(tokens)] = tokens
            text.n += len(tokens)
            text.used = self._step
            counted.append(CountedPass(key, len(counted), len(tokens), path, text.tree))
            text.tree = None
            self._made += len(tokens)
            slots.append(text.slot)
            new.append(tokens)
            paths.append(path)
        self._counted.add_trees(counted)
        if slots:
            self._drafts.observe(np.array(slots, np.int32), new, paths)

    def record_topk(self, key: Hashable | None, before: np.ndarray, last: np.ndarray, tokens: np.ndarray, logits: np.ndarray) -> None:
        """Keep what the model holds likely after the tokens `last` [n], each of which follows `before` [n] (-1: nothing): the text's last
        one, then its draft's; those of several texts where the key is None. tokens [n, KEPT] int32, logits [n, KEPT] float32, most likely
        first. Before `observe`."""
        if key is None or key in self._texts:
            behind = np.asarray(before, np.int32), np.asarray(last, np.int32)
            self._drafts.record_topk(*behind, np.asarray(tokens, np.int32), np.asarray(logits, np.float32))

    def end(self, key: Hashable, *, finished: bool) -> Stats:
        """The text is over -> what drafts did for it. `finished`: its output speaks in the tenant's texts that begin from now on."""
        text = self._texts.pop(key, None)
        if text is None:
            return Stats()
        if finished and text.tenant is not None and text.n > text.n_prompt:
            self._drafts.remember(text.tokens[text.n_prompt :].copy(), text.tenant)
        self._drafts.end(text.slot)
        self._free.append(text.slot)
        stats = self._counted.pop(key)
        self._ended_stats.add(stats)
        return stats

    # ------------------------------------------------------------------ drafts

    def propose(self, keys: Sequence[Hashable], room: Sequence[int], base_rows: int) -> list[DraftTree]:
        """Return one tree for each text, possibly empty; unknown keys get none.

        room [B]: deepest useful node, 0: no draft; base_rows: rows that the step carries without drafts.
        """
        return self._build_trees(keys, room, base_rows, chains=False)

    def chains(self, keys: Sequence[Hashable], room: Sequence[int], base_rows: int) -> list[list[int]]:
        """Return what `propose` would, for a host that verifies one chain for each text."""
        trees = self._build_trees(keys, room, base_rows, chains=True)
        return [self._texts[key].drafted.copy() if len(tree) else [] for key, tree in zip(keys, trees, strict=True)]

    def took(self, rows: int, ms: float, *, has_prompt: bool = False) -> None:
        """The step that was last drafted for carried this many rows, and took this long from end to end; after its `observe`.

        `has_prompt`: some of its rows were a prompt's.
        """
        load = Load(int(rows), *self._load[1:])
        self.step_timer.record_step(load, self._nodes, self._made, ms, has_prompt=has_prompt)
        self._made = 0

    def _build_trees(self, keys: Sequence[Hashable], room: Sequence[int], base_rows: int, *, chains: bool) -> list[DraftTree]:
        trees = [NO_TREE] * len(keys)
        texts = [self._texts.get(key) for key in keys]
        known = [text for text in texts if text is not None]
        n_seqs, n_keys = len(keys), sum(text.n for text in known)
        self._load, self._nodes, self._made = Load(base_rows, n_seqs, n_keys), 0, 0
        plain = self.step_timer.should_probe()
        asked = [
            (i, text, min(int(deepest), self.depth))
            for i, (text, deepest) in enumerate(zip(texts, room, strict=True))
            if text is not None and deepest > 0 and not plain and not self._drafts.cools_down(text)
        ]
        for text in known:
            text.tree = None
        if not asked:
            return trees
        self._drafts.chains = chains
        self._load = Load(base_rows, n_seqs, n_keys, len(asked))
        cost_ms, threshold = self.step_timer.plan(self._load)
        slots = np.array([text.slot for _, text, _ in asked], np.int32)
        depths = np.array([deepest for *_, deepest in asked], np.int32)
        most = max(self.step_timer.max_rows - base_rows, 0)
        for (i, text, _), tree in zip(asked, self._drafts.propose(slots, depths, cost_ms, base_rows, most, threshold), strict=True):
            text.chain = chains
            if len(tree):
                trees[i] = text.tree = tree
                text.drafted = tree.tokens.tolist()
                self._nodes += len(tree)
        return trees

    def _check_ids(self, tokens: Sequence[int] | np.ndarray, what: str) -> np.ndarray:
        """Return checked token ids [n] int32. Raises InvalidInputError."""
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise InvalidInputError(f"a {what} must be a flat list of token ids, got {tokens!r:.80}")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise InvalidInputError(f"token ids of a {what} must be 0 to {self.vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}")
        return ids.astype(np.int32)


def _find_path(text: _HostSequence, tokens: np.ndarray) -> np.ndarray:
    """Return the nodes [j] int32 of the text's last tree that were accepted by a step that appended tokens [n].

    The last token is the model's own.
    """
    path: list[int] = []
    if text.tree is None:
        return _NODES[:0]
    appended = tokens[:-1].tolist()
    if text.chain:
        n = 0
        for token, drafted in zip(appended, text.drafted, strict=False):
            if token != drafted:
                break
            n += 1
        return _NODES[:n]
    child = {(parent, token): i for i, (parent, token) in enumerate(zip(text.tree.parents.tolist(), text.drafted, strict=True))}
    node = -1
    for token in appended:
        node = child.get((node, token), -2)
        if node < 0:
            break
        path.append(node)
    return np.array(path, np.int32)
