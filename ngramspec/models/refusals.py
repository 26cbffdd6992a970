"""Say why models are refused that no backend computes: one table, for folders by the types of their layers, for GGUF files by architecture.

The module knows names alone. What a layer is and what a file has is looked at by those who ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ngramspec.errors import UnsupportedModelError
from ngramspec.models.gguf import Gguf


class Reason(NamedTuple):
    """Why models are refused, and which."""

    text: str
    """What is not computed, as a part of a sentence."""
    architectures: tuple[str, ...] = ()
    """`general.architecture` of their GGUF files."""
    layer_type: str = ""
    """What their configuration in transformers calls the layers."""


OTHER_RECURRENCE = Reason(
    "its recurrence is neither Gated DeltaNet nor Mamba-2 as in Granite 4, Nemotron-H and Falcon-H1",
    ("kimi-linear", "jamba", "mamba", "mamba2", "plamo2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
    "linear_attention",
)
NO_REPLACEABLE_ATTENTION = Reason("transformers does not let its attention function be replaced", ("falcon", "mpt", "bloom"))
ENCODER_DECODER = Reason("it is an encoder-decoder", ("t5", "t5encoder"))
REASONS = (
    Reason("attention within chunks of a text, as in Llama 4, is not computed", ("llama4",), "chunked_attention"),
    OTHER_RECURRENCE,
    NO_REPLACEABLE_ATTENTION,
    ENCODER_DECODER,
)


def describe_layer_refusal(layer_type: str) -> str:
    """Return why layers of this type are refused; "" if there is nothing to say but that they are."""
    return next((reason.text for reason in REASONS if reason.layer_type == layer_type), "")


def make_architecture_refusal(file: Gguf, accepted: Iterable[str]) -> UnsupportedModelError:
    """Return the error for a file of an architecture that is not among the accepted ones."""
    if file.architecture == "clip":
        return UnsupportedModelError(
            f"{file.path}: it is the part of a model that reads images or sound; accepted: the file of its text part"
        )
    reason = next((reason.text for reason in REASONS if file.architecture in reason.architectures), "")
    told = f", nor as a folder: {reason}" if reason else "; its safetensors folder may load"
    return UnsupportedModelError(
        f"{file.path}: architecture {file.architecture!r:.80} is not read from GGUF{told}; accepted: {', '.join(sorted(accepted))}"
    )
