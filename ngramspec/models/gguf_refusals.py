"""Say why files of an architecture that `gguf_architectures` lacks are not read. Knows names alone."""

from __future__ import annotations

from collections.abc import Iterable

from ngramspec.errors import UnsupportedModelError
from ngramspec.models.gguf import Gguf

_RECURRENT = "its recurrence is not computed"
# Architectures that are refused as folders, too, and why.
_REASONS = {
    "falcon-h1": "attention and Mamba-2 beside each other in one layer are not computed",
    "llama4": "attention within chunks of a text is not computed",
    "kimi-linear": "its delta rule, with a decay for every number of a key, is not computed",
    **dict.fromkeys(("jamba", "mamba", "mamba2", "plamo2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"), _RECURRENT),
    **dict.fromkeys(("falcon", "mpt", "bloom"), "transformers does not let its attention be replaced"),
    **dict.fromkeys(("t5", "t5encoder"), "it is no decoder"),
}


def make_refusal(file: Gguf, accepted: Iterable[str]) -> UnsupportedModelError:
    """Return the error for a file of an architecture that is not among the accepted ones."""
    if file.architecture == "clip":
        return UnsupportedModelError(
            f"{file.path}: it is the part of a model that reads images or sound; accepted: the file of its text part"
        )
    reason = _REASONS.get(file.architecture)
    told = f", nor as a folder: {reason}" if reason else "; its safetensors folder may load"
    return UnsupportedModelError(
        f"{file.path}: architecture {file.architecture!r:.80} is not read from GGUF{told}; accepted: {', '.join(sorted(accepted))}"
    )
