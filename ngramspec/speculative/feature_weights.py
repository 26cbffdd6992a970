"""Make, load and save the weights of the tree builder: arrays in, arrays out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ngramspec.speculative import features, ngram_table
from ngramspec.speculative.recycled import GAPS
from ngramspec.speculative.syntax import LEVELS
from ngramspec.speculative.tree_builder import Weights

# The shipped weights, learned by tools/learn_mix.py and tools/learn_store.py.
WEIGHTS = Path(__file__).with_name("feature_weights.npz")


def make_cold_weights() -> Weights:
    """Return weights that know only what a count means: what learning starts from."""
    states = np.zeros((features.GROUPS, features.STATES), np.float32)
    context_groups = [*range(features.ORDERS), features.GAP]
    for visits in range(1, ngram_table.REACH + 1):
        for seen in range(1, 1 << visits):
            hits = seen.bit_count()
            states[context_groups, 1 << visits | seen] = np.log((hits + 0.05) / (visits - hits + 0.4)) + 0.3 * (seen & 1)
    states[context_groups, 2 << ngram_table.REACH :] = -2.0
    states[context_groups, (2 << ngram_table.REACH) + 2 * ngram_table.REACH + 2 :] = 3.0
    states[features.OUTPUT_CACHE : features.OUTPUT_CACHE + features.ORDERS + 1] = states[0]  # a context means the same there
    states[features.EXTERNAL :, 2:258] = np.log((np.arange(256) + 0.5) / (255.5 - np.arange(256)))
    for rank in range(features.KEPT):
        for level in range(len(GAPS) + 1):
            far = (*GAPS, 8.0)[level]
            states[[features.RECYCLED, features.RECYCLED_PAIR], 2 + rank * (len(GAPS) + 1) + level] = far - 1 if rank == 0 else -1 - far
    listed, levels = features.SYNTAX_LISTED, np.array([*LEVELS, 1.0])
    middle = (levels[:-1] + levels[1:]) / 2
    for level in range(1, len(LEVELS) + 1):
        states[features.SYNTAX, 1 + level] = np.log1p(-middle[level - 1]) - 1
        states[features.SYNTAX, [listed + 2 * level - 1, listed + 2 * level]] = np.log(middle[level - 1] / (1 - middle[level - 1]))
    mix = np.full((features.SETS, features.GROUPS + 1), 0.25, np.float32)
    mix[:, features.BIAS] = 0.0
    mix[:, features.EXTERNAL : features.BIAS] = 0.5
    mix[: 3 * features.HIT_RATE_CLASSES, features.EXTERNAL : features.BIAS] = 1.0
    return Weights(states, mix)


def load_weights(path: Path | str = WEIGHTS) -> Weights:
    """Load weights written by `save_weights`. Raises ValueError if the file does not fit this version's shapes."""
    cold = make_cold_weights()
    with np.load(path, allow_pickle=False) as file:
        read = Weights(*(np.ascontiguousarray(file[name], np.float32) for name in Weights._fields))
    for name, a, b in zip(Weights._fields, read, cold, strict=True):
        if a.shape != b.shape or not np.isfinite(a).all():
            raise ValueError(f"{path}: {name} must be finite and of shape {b.shape}, got shape {a.shape}")
    return read


def save_weights(path: Path | str, weights: Weights) -> None:
    """Save weights as float16."""
    np.savez_compressed(path, allow_pickle=False, **{name: a.astype(np.float16) for name, a in zip(Weights._fields, weights, strict=True)})
