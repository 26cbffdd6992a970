"""Fix the angles of LongRoPE (Phi-3, Phi-4 mini), which has one set of frequencies for short texts and one for long texts.

transformers chooses anew in every pass, by the greatest position in it, so that a row's angles depend on its mates and on what was cached
before. Here the longest text that a model is set up for decides once, as in llama.cpp and vLLM. Knows modules, nothing of passes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

KIND = "longrope"


@torch.no_grad()
def fix_angles(model: nn.Module, max_len: int) -> tuple[int, int] | None:
    """Choose the frequencies for texts of up to `max_len` tokens: the long ones if that is more than the model was first trained for.

    Returns the least and the greatest `max_len` with the same choice; None for a model without LongRoPE.
    """
    same = None
    module: Any
    for module in model.modules():
        config = getattr(module, "config", None)
        rope = getattr(config, "rope_parameters", None) or {}
        if isinstance(getattr(module, "rope_type", None), str) and rope.get("rope_type") == KIND:
            original = int(rope["original_max_position_embeddings"])
            module.inv_freq.copy_(ROPE_INIT_FUNCTIONS[KIND](config, module.inv_freq.device, seq_len=max_len)[0])
            module.rope_type = "default"  # for which transformers chooses nothing
            same = (original + 1, sys.maxsize) if max_len > original else (1, original)
    return same
