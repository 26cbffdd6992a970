"""PaSS, parallel speculative sampling: look-ahead tokens behind the text, whose outputs in the model's own pass are the next draft.

After Monea et al., "PaSS: Parallel Speculative Sampling" (2023). L tokens that were added to the model's vocabulary, with embeddings
trained for it, stand behind the last known token as if they were text; what the model picks behind the i-th is its guess of the token i +
1 places on. The paper drafts in one pass and verifies in the next. Here both are one: the look-ahead tokens hang in the draft tree, behind
the last known token and behind every token of the draft, so that wherever the walk ends the next draft is known.

Nothing but their ids is wanted, since a model that was trained so has their embeddings among its own; the authors published none. Any
other ids make the same text, and poor drafts. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ngramspec.outputs import DraftTree
from ngramspec.speculative.drafter import Candidates

# Assumed probability that the model accepts a token of the draft, and the factor of a look-ahead token.
GUESSED, AHEAD = 0.5, 0.1


@dataclass(slots=True)
class _SlotState:
    """The predicted tokens and the last pass of one sequence."""

    draft: list[int] = field(default_factory=list)
    """The predicted tokens after its last one."""
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    """The nodes of the last pass by (parent, token)."""
    picked: list[int] = field(default_factory=list)
    """What the model picked after the root and after every node; -1: nothing."""


class ParallelTokens:
    """Drafts from the look-ahead tokens with these ids, in their order."""

    name = "pass"

    def __init__(self, ids: Sequence[int]) -> None:
        """Raises ValueError."""
        if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
            raise ValueError(f"look-ahead tokens are different ids from 0, one or more, got {list(ids)}")
        self.ids = list(ids)
        self._texts: dict[int, _SlotState] = {}

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        self._texts[seq] = _SlotState()

    def propose(self, seqs: Sequence[int], budget: int) -> list[Candidates]:
        return [self._build_tree(self._texts[seq].draft, budget) for seq in seqs]

    def _build_tree(self, draft: list[int], budget: int) -> Candidates:
        """Return the draft, then look-ahead tokens after the last known token and after each of the draft's, nearest first."""
        draft = draft[: budget // 2]
        nodes: list[tuple[int, int, float]] = [(node - 1, token, GUESSED ** (node + 1)) for node, token in enumerate(draft)]
        taken = {(parent, token) for parent, token, _ in nodes}
        for behind in range(-1, len(draft)):
            parent, prob = behind, GUESSED ** (behind + 1)
            for token in self.ids:
                if (parent, token) in taken:  # the draft itself goes on with it
                    break
                prob *= AHEAD
                nodes.append((parent, token, prob))
                parent = len(nodes) - 1
        parents, tokens, probs = zip(*nodes[:budget], strict=True) if budget > 0 else ((), (), ())
        return Candidates(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probs, np.float32))

    def on_topk(self, seq: int, tree: DraftTree, tokens: np.ndarray) -> None:
        text = self._texts[seq]
        text.children = {edge: i for i, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
        text.picked = tokens[:, 0].tolist()

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        text, node = self._texts[seq], -1
        text.draft = []
        for token in accepted[:-1].tolist():
            node = text.children.get((node, token), -2)
        for token in self.ids:
            node = text.children.get((node, token), -2)
            if node < 0 or node + 1 >= len(text.picked) or text.picked[node + 1] < 0:
                break
            text.draft.append(text.picked[node + 1])
        text.children, text.picked = {}, []

    def end(self, seq: int) -> None:
        self._texts.pop(seq, None)
