"""No drafts: the speculator of an engine that writes one token a pass. Everything enters, nothing leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ngramspec.batch.types import DraftTree
from ngramspec.datastore.reader import Datastore
from ngramspec.datastore.router import Index

_NO_TOKENS = np.empty(0, np.int32)
_NO_TREE = DraftTree(_NO_TOKENS, _NO_TOKENS, np.empty(0, np.float32), np.empty(0, np.uint8))


class NoDrafts:
    """See `base.Speculator`."""

    active = False
    spec_length = 0
    needs_topk = False
    needs_hidden_states = False

    def __init__(self) -> None:
        self.source_names: list[str] = []

    def bind(self, runner: Any) -> None: ...

    def has_room(self, n_tokens: Sequence[int]) -> bool:
        return True

    def begin(self, slot: int, tokens: np.ndarray, **_: Any) -> None: ...

    def is_unpredictable(self, slot: int) -> bool:
        return True

    def propose(self, slots: np.ndarray, max_depth: np.ndarray, cost_ms: np.ndarray, base_rows: int, max_nodes: int) -> list[DraftTree]:
        return [_NO_TREE] * len(slots)

    def record_topk(self, slot: int, before: np.ndarray, last: np.ndarray, tokens: np.ndarray, logits: np.ndarray) -> None: ...

    def on_hidden_states(self, slot: int, first: int, states: np.ndarray) -> None: ...

    def observe(self, slots: np.ndarray, accepted: list[np.ndarray], paths: list[np.ndarray]) -> None: ...

    def end(self, slot: int) -> None: ...

    def remember(self, answer: np.ndarray, tenant: str = "") -> None: ...

    def source_of(self, tree: DraftTree, node: int) -> str:
        raise AssertionError("there are no drafts")

    def index(self, store: Datastore) -> list[Index]:
        return []

    def use_datastores(
        self,
        stores: Mapping[str, Datastore],
        running: Iterable[tuple[int, np.ndarray, frozenset[str] | None]],
        ready: Sequence[Index] | None = None,
    ) -> None: ...
