"""Medusa heads: small networks on the model's last hidden state, each of which guesses one token further ahead.

After Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024). Head i, from 0, predicts the
token i + 2 places behind the state's own: residual blocks x + SiLU(W x + b), then a projection to the vocabulary. The heads know nothing of
each other's tokens, so the draft is a static tree of combinations of their most likely ones.

Reads the published format: a folder with config.json (medusa_num_heads, medusa_num_layers) and medusa_lm_head.safetensors or .pt.
"""

from __future__ import annotations

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional as F

from ngramspec.errors import ModelNotFoundError, UnsupportedModelError
from ngramspec.papers.shape import Shape, best_first
from ngramspec.speculative.drafter import NOTHING, Candidates

# Assumed probability that the first head's candidate of each rank is the model's token, and its factor per further head.
RANKS = (0.6, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01)
FADING = 0.8


def read_checkpoint(folder: str | Path, files: Sequence[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read config.json and, as float32, the tensors of the first of these files that exists.

    Raises ModelNotFoundError if one of the two does not exist, UnsupportedModelError if it cannot be read.
    """
    folder = Path(folder)
    weights = next((folder / name for name in files if (folder / name).is_file()), None)
    if weights is None or not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} must hold config.json and {' or '.join(files)}")
    try:
        config = json.loads((folder / "config.json").read_text())
        if weights.suffix == ".safetensors":
            tensors = load_file(weights)
        else:
            tensors = torch.load(weights, map_location="cpu", weights_only=True)
        return config, {name: tensor.float() for name, tensor in tensors.items()}
    except (ValueError, SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, AttributeError) as e:
        raise UnsupportedModelError(f"{folder}: config.json and {weights.name} cannot be read: {e}") from e


def check_shapes(where: str, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, Sequence[int]]) -> None:
    """Raises UnsupportedModelError for a tensor that is not there, that has another shape, or that is not expected."""
    for name, shape in expected.items():
        if name not in tensors:
            raise UnsupportedModelError(f"{where}: there is no tensor {name!r}")
        if tuple(tensors[name].shape) != tuple(shape):
            raise UnsupportedModelError(f"{where}: {name!r} must be {list(shape)}, is {list(tensors[name].shape)}")
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise UnsupportedModelError(f"{where}: unknown tensors {', '.join(map(repr, unknown[:4]))}")


class Heads(ABC):
    """Drafts of a fixed shape from the state of the token before the last one, the latest that a pass has computed."""

    shape: Shape
    """Which ranks of which head are nodes."""

    def __init__(self) -> None:
        self._states: dict[int, np.ndarray] = {}  # [H], of the token before the last one

    @abstractmethod
    def find_top_tokens(self, states: np.ndarray, n_heads: int) -> np.ndarray:
        """Return the first heads' top tokens [n, n_heads, ranks] int32 after states [n, H], most likely first."""

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        self._states.pop(seq, None)

    def on_hidden_states(self, seq: int, first: int, states: np.ndarray) -> None:
        self._states[seq] = states[-1]

    def propose(self, seqs: Sequence[int], budget: int) -> list[Candidates]:
        parents, depths, ranks, probs = (column[:budget] for column in self.shape)
        known = [seq for seq in seqs if seq in self._states]
        if not known or not len(parents):
            return [NOTHING] * len(seqs)
        likely = self.find_top_tokens(np.stack([self._states[seq] for seq in known]), int(depths.max()) + 1)
        trees = {seq: Candidates(tokens[depths, ranks], parents, probs) for seq, tokens in zip(known, likely, strict=True)}
        return [trees.get(seq, NOTHING) for seq in seqs]

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:  # noqa: B027  # none of them does more
        """Do nothing: only hidden states are needed."""

    def end(self, seq: int) -> None:
        self._states.pop(seq, None)


class Medusa(Heads):
    """Drafts from heads in the folder `path`: the best `nodes` nodes of a tree over each head's `top` most likely tokens.

    63 nodes are the size of the authors' own trees.
    """

    name = "medusa"

    def __init__(self, path: str | Path, nodes: int = 63, top: int = 10) -> None:
        """Raises ModelNotFoundError, UnsupportedModelError, and ValueError for sizes out of range."""
        super().__init__()
        if nodes < 1 or not 1 <= top <= len(RANKS):
            raise ValueError(f"Medusa heads take nodes from 1 and top from 1 to {len(RANKS)}, got {nodes}, {top}")
        self.where = str(path)
        config, tensors = read_checkpoint(path, ("medusa_lm_head.safetensors", "medusa_lm_head.pt"))
        try:
            self.n_heads, self.n_blocks = int(config["medusa_num_heads"]), int(config["medusa_num_layers"])
        except (KeyError, TypeError, ValueError) as e:
            raise UnsupportedModelError(f"{path}: config.json must say medusa_num_heads and medusa_num_layers: {e!r}") from e
        numbers = {name: name.partition(".")[0] for name in tensors}  # files may hold more heads than are wanted
        self.tensors = {name: tensors[name] for name, i in numbers.items() if not i.isdecimal() or int(i) < self.n_heads}
        self.shape = best_first([[chance * FADING**i for chance in RANKS[:top]] for i in range(self.n_heads)], nodes)
        self.top = top

    def bind(self, runner: Any) -> None:
        """Check the heads' sizes against the model's. Raises UnsupportedModelError."""
        self._lm_head = runner.model.get_output_embeddings()
        hidden = self._lm_head.in_features
        expected: dict[str, tuple[int, ...]] = {}
        for i in range(self.n_heads):
            for block in range(self.n_blocks):
                expected[f"{i}.{block}.linear.weight"], expected[f"{i}.{block}.linear.bias"] = (hidden, hidden), (hidden,)
            if f"0.{self.n_blocks}.weight" in self.tensors:  # else, as the authors' second version, all share the model's own projection
                expected[f"{i}.{self.n_blocks}.weight"] = (runner.vocab_size, hidden)
        check_shapes(self.where, self.tensors, expected)

    @torch.inference_mode()
    def find_top_tokens(self, states: np.ndarray, n_heads: int) -> np.ndarray:
        found = []
        for i in range(n_heads):
            x = torch.from_numpy(states)
            for block in range(self.n_blocks):
                linear = f"{i}.{block}.linear."
                x = x + F.silu(F.linear(x, self.tensors[linear + "weight"], self.tensors[linear + "bias"]))
            projection = self.tensors.get(f"{i}.{self.n_blocks}.weight")
            logits = self._lm_head(x) if projection is None else F.linear(x, projection)
            found.append(logits.topk(self.top).indices)
        return torch.stack(found, 1).numpy().astype(np.int32)
