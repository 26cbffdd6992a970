"""Draft with one drafter alone, its trees as it returns them: without mixing, calibration or a budget by cost.

For drafters of the literature, which decide themselves how much they draft, and for drafts accepted by rejection sampling, which needs the
distribution that each token was drawn from. Knows no model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ngramspec.datastore.reader import Datastore
from ngramspec.datastore.similar_files import VectorIndex
from ngramspec.outputs import DraftTree
from ngramspec.speculative.drafter import (
    DRAFT_DEFAULTS,
    NOTHING,
    Candidates,
    CanDraw,
    Drafter,
    DraftParams,
    NeedsHiddenStates,
    NeedsKvRoom,
    NeedsModel,
    NeedsSequenceInfo,
    NeedsTopK,
    PassTopK,
    RunningSequence,
    Speculator,
    is_sound,
    iterate_topk,
)

log = logging.getLogger(__name__)


class SingleDrafter(Speculator):
    """Drafts with one drafter; if it raises it is switched off, and nothing is drafted any more."""

    active = True

    def __init__(self, drafter: Drafter, *, vocab_size: int, spec_length: int, spec_rows: int, draws: bool = False) -> None:
        """Cut trees to `spec_rows` nodes and `spec_length` levels. `draws`: have the drafter sample its tokens, if it can."""
        self.vocab_size, self.spec_length, self.spec_rows = vocab_size, spec_length, spec_rows
        self.drafter: Drafter | None = drafter
        self.source_names = [drafter.name]
        self.needs_topk, self.reads_hidden_states = isinstance(drafter, NeedsTopK), isinstance(drafter, NeedsHiddenStates)
        self.keeps_kv = isinstance(drafter, NeedsKvRoom)
        self._trees: dict[int, DraftTree] = {}
        self._begun: set[int] = set()
        if isinstance(drafter, CanDraw):
            drafter.draws = draws

    @property
    def needs_hidden_states(self) -> bool:
        return isinstance(self.drafter, NeedsHiddenStates)

    def bind(self, runner: Any) -> None:
        if isinstance(self.drafter, NeedsModel):
            self.drafter.bind(runner)

    def has_room(self, n_tokens: Sequence[int]) -> bool:
        return not isinstance(self.drafter, NeedsKvRoom) or self._call_drafter("has_room", n_tokens) is not False

    def begin(self, slot: int, tokens: np.ndarray, params: DraftParams = DRAFT_DEFAULTS) -> None:
        self._begun.add(slot)
        self._call_drafter("begin", slot, tokens)
        if params.info is not None and isinstance(self.drafter, NeedsSequenceInfo):
            self._call_drafter("attach", slot, params.info)

    def propose(
        self, slots: np.ndarray, max_depth: np.ndarray, cost_ms: np.ndarray, base_rows: int, max_nodes: int, threshold: float = 0.0
    ) -> list[DraftTree]:
        """Return the drafter's trees. All have the same room; costs are ignored."""
        seqs, room = slots.tolist(), min(self.spec_rows, max(max_nodes, 0) // len(slots))
        answer = self._call_drafter("propose", seqs, room)
        is_list = isinstance(answer, (list, tuple)) and len(answer) in (0, len(seqs))
        if answer is not None and not (is_list and all(is_sound(candidates, self.vocab_size) for candidates in answer)):
            log.error("drafter %r gave a malformed tree and is switched off", self.source_names[0])
            self.drafter = answer = None
        answer = answer or [NOTHING] * len(seqs)
        trees = [
            self._cut_tree(candidates, min(int(depth), self.spec_length), room) for candidates, depth in zip(answer, max_depth, strict=True)
        ]
        self._trees = dict(zip(seqs, trees, strict=True))
        return trees

    def _cut_tree(self, candidates: Candidates, max_depth: int, room: int) -> DraftTree:
        """Return the nodes up to `max_depth`, as far as there is room."""
        tokens, parents = np.asarray(candidates.tokens, np.int32), np.asarray(candidates.parents, np.int32)
        depth = np.zeros(len(tokens), np.int64)
        for i, parent in enumerate(parents.tolist()):
            depth[i] = 1 + (depth[parent] if parent >= 0 else 0)
        kept = np.flatnonzero(depth <= max_depth)[:room]
        moved = np.append(np.cumsum(depth <= max_depth) - 1, -1).astype(np.int32)  # the last: the root's
        drawn_from = getattr(candidates, "drawn_from", None)
        return DraftTree(
            tokens[kept],
            moved[parents[kept]],
            np.asarray(candidates.probs, np.float32)[kept],
            np.zeros(len(kept), np.uint8),
            drawn_from=None if drawn_from is None else [drawn_from[i] for i in kept],
        )

    def on_hidden_states(self, slot: int, first: int, states: np.ndarray) -> None:
        self._call_drafter("on_hidden_states", slot, first, states)

    def observe(self, slots: np.ndarray, accepted: list[np.ndarray], paths: list[np.ndarray], seen: PassTopK | None = None) -> None:
        for slot, verified, likely in iterate_topk(seen):
            self._call_drafter("on_topk", slot, verified, likely)
        for slot, tokens, path in zip(slots.tolist(), accepted, paths, strict=True):
            tree = self._trees.get(slot)
            rejected = np.empty(0, np.int32) if tree is None else np.delete(tree.tokens, path[path >= 0])
            self._call_drafter("observe", slot, tokens, rejected)
        self._trees = {}

    def end(self, slot: int) -> None:
        if slot in self._begun:
            self._begun.remove(slot)
            self._call_drafter("end", slot)

    def use_datastores(
        self, stores: Mapping[str, Datastore], running: Iterable[RunningSequence], ready: list[VectorIndex] | None = None
    ) -> None:
        """Raise ValueError if there are any."""
        if stores:
            raise ValueError(f"{self.source_names[0]} drafts alone, without datastores")

    def _call_drafter(self, what: str, *args: object) -> Any:
        if self.drafter is None:
            return None
        try:
            return getattr(self.drafter, what)(*args)
        except Exception:
            log.exception("drafter %r failed in %s and is switched off", self.source_names[0], what)
            self.drafter = None
            return None
