"""Say how a parameter of transformers' model is made of a tensor of a GGUF file: what a derived folder keeps of its mapping."""

from __future__ import annotations

from typing import NamedTuple

from ngramspec.models.tensor_source import RowParts


class TensorUse(NamedTuple):
    """How a parameter is made of a tensor."""

    tensor: str
    rule: str = "same"
    """One of `start_cache.RULES`, "zeros", "interleaved", "halved", "repeated", "divided", "joined": the rows of `other` follow,
    "number": one of the metadata's, "in turns": outputs of `tensor` and `other` alternate, "joined heads", "head keys" or "head values":
    see `latent_weights`."""
    heads: int = 0
    """Heads of an interleaving rule or of latent attention, value heads per key head where those of keys are repeated, groups of rows
    that are divided, or heads of gates (`gated_heads`)."""
    first: int = 0
    """The first row that belongs to the parameter, or the index of a number in the array whose key is `tensor`."""
    end: int = 0
    """The row after the last one; 0: all rows belong to it."""
    other: str = ""
    """Another tensor, whose rows follow, of experts in every expert."""
    parts: RowParts = ()
    """Rows of each group that a divided tensor has for the parameter, or of each head for its keys, or those that are halved, or of all
    keys that are repeated."""
