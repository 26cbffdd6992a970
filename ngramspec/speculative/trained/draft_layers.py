"""Self-speculation: the first layers of the model, with its final norm and head, draft for all of them.

They share the weights, and the keys and values of the committed tokens in the target's own pool. What a draft writes there lies where
the verification writes the same, or something else, before anybody reads it (early exit as in LayerSkip, Elhoushi et al., 2024).
The runner provides the early exit (`Runner.early_exit`); this module knows no device.
"""

from __future__ import annotations

import numpy as np

from ngramspec.backends.base import Runner
from ngramspec.speculative.trained.stepwise import LENGTH, StepwiseDrafter, StepwiseState


class DraftLayers(StepwiseDrafter):
    """Draft with the first `n_layers` layers, `length` tokens deep, in `branches` chains."""

    name = "layers"

    def __init__(self, n_layers: int, *, length: int = LENGTH, branches: int = 1) -> None:
        """Raises ValueError."""
        super().__init__(length, branches)
        if n_layers < 1:
            raise ValueError(f"draft layers must be 1 or more, got {n_layers}")
        self.n_layers = n_layers

    def bind(self, runner: Runner) -> None:
        """Raises ValueError where the model has fewer layers, UnsupportedModelError where they cannot be run by themselves."""
        self._use(runner.early_exit(self.n_layers), runner.pool, runner.rows_per_item, runner.max_rows)

    def _keep_accepted(self, seq: int, state: StepwiseState, accepted: np.ndarray) -> int:
        return len(state.tokens) + len(accepted) - 1
