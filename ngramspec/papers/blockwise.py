"""Blockwise parallel decoding: one layer on the model's last hidden state guesses all the tokens of a block at once.

After Stern et al., "Blockwise Parallel Decoding for Deep Autoregressive Models" (2018), section 6: a feed-forward layer takes the state [H]
to k · D hidden units, rectified, and these to k · H outputs; each output, with the state added, goes through the model's own projection.
Output i, from 0, predicts the token i + 1 places behind the state's own. The first is the model's next token, which the pass itself gives;
the others' top tokens are a chain.

The authors published no weights outside their training framework. Read here: a folder with config.json (`block_size` k, `hidden_size` D)
and blockwise.safetensors: `hidden.weight` [k·D, H], `hidden.bias` [k·D], `output.weight` [k·H, k·D], `output.bias` [k·H].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ngramspec.errors import UnsupportedModelError
from ngramspec.papers.heads import Heads, check_shapes, read_checkpoint
from ngramspec.papers.shape import best_first

# Assumed probability that an output's top token is the model's, given that those before it were.
CHANCE = 0.6


class Blockwise(Heads):
    """Drafts from a layer in the folder `path`: a chain of block_size - 1 tokens."""

    name = "blockwise"

    def __init__(self, path: str | Path) -> None:
        """Raises ModelNotFoundError, UnsupportedModelError."""
        super().__init__()
        self.where = str(path)
        config, self.tensors = read_checkpoint(path, ("blockwise.safetensors",))
        try:
            self.block, self.units = int(config["block_size"]), int(config["hidden_size"])
        except (KeyError, TypeError, ValueError) as e:
            raise UnsupportedModelError(f"{path}: config.json must say block_size and hidden_size: {e!r}") from e
        if self.block < 2 or self.units < 1:
            raise UnsupportedModelError(f"{path}: block_size must be 2 or more and hidden_size 1, got {self.block} and {self.units}")
        self.shape = best_first([[CHANCE]] * (self.block - 1), self.block - 1)

    def bind(self, runner: Any) -> None:
        """Check the layer's sizes against the model's. Raises UnsupportedModelError."""
        self._lm_head = runner.model.get_output_embeddings()
        size, units = self.block * self._lm_head.in_features, self.block * self.units
        expected = {"hidden.weight": (units, self._lm_head.in_features), "hidden.bias": (units,)}
        check_shapes(self.where, self.tensors, expected | {"output.weight": (size, units), "output.bias": (size,)})

    @torch.inference_mode()
    def find_top_tokens(self, states: np.ndarray, n_heads: int) -> np.ndarray:
        x, t = torch.from_numpy(states), self.tensors
        inside = F.relu(F.linear(x, t["hidden.weight"], t["hidden.bias"]))
        outputs = F.linear(inside, t["output.weight"], t["output.bias"]).unflatten(1, (self.block, -1)) + x[:, None]
        logits = self._lm_head(outputs[:, 1 : 1 + n_heads].flatten(0, 1))
        return logits.argmax(-1).view(len(states), n_heads, 1).numpy().astype(np.int32)
