"""Token healing: the first tokens of an output spell the text that the prompt's token ids leave out at their end.

Behind the token `w` a model hardly ever writes `rapper`, since ` wrapper` is a token; it does where ` w` is left out of the prompt and the
output is one whose text begins so. A `grammar.constraint.Constraint`, which holds for the first few tokens alone.
"""

from __future__ import annotations

import numpy as np

from ngramspec.tokenizer.spelling import Spelling


class Healing:
    """The state of one output that begins with a given text."""

    complete = False

    def __init__(self, spelling: Spelling, letters: str, n_spelled: int = 0) -> None:
        """Begin an output that is to spell `letters`, which are of `Spelling.to_letters`, after `n_spelled` tokens of it."""
        self._spelling, self._letters, self.n_spelled = spelling, letters, n_spelled

    @property
    def is_over(self) -> bool:
        return not self._letters

    def mask(self) -> np.ndarray:
        return self._spelling.find_mask(self._letters)

    def accept(self, token: int) -> None:
        self.n_spelled += self._spelling.is_beginning(self._letters, token)
        self._letters = self._spelling.cut(self._letters, token)

    def fork(self) -> Healing:
        return Healing(self._spelling, self._letters, self.n_spelled)

    def make_lookahead(self) -> HealingLookahead:
        return HealingLookahead(self._spelling, self._letters)


class HealingLookahead:
    """Walks ahead of an output (a `grammar.constraint.ConstraintLookahead`)."""

    def __init__(self, spelling: Spelling, letters: str) -> None:
        self._spelling, self._path = spelling, [letters]

    def step(self, token: int) -> bool:
        letters = self._path[-1]
        if letters and not self._spelling.can_begin(letters, token):
            return False
        self._path.append(self._spelling.cut(letters, token) if letters else "")
        return True

    def undo(self) -> None:
        self._path.pop()

    def get_forced_tokens(self) -> list[tuple[int, float]]:
        return []
