"""What `families` has written of a GGUF file, read back without transformers' models: the tokenizer, and which tensor is which parameter.

A file's directory and the small folder enter, stored weights by the names of parameters leave. It does not know how they were found.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ngramspec.errors import UnsupportedModelError
from ngramspec.models.gguf import Gguf, GgufTensor
from ngramspec.models.tensor_source import KINDS, ComputedTensor, FileTensor, StoredTensor, TensorSource, WeightFile, interleaved_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NAMES = "tensors.json"
ROPE_FACTORS = "rope_freqs.weight"
"""What the angles' frequencies are divided by: Llama 3's scaling, which is not in the metadata."""

RULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "same": lambda x: x,
    "minus one": lambda x: x - 1,
    "transposed": lambda x: x.T,
}


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder that `derive` wrote. `from_pretrained` makes the same one, but parses its megabytes twice."""
    from transformers import PreTrainedTokenizerFast

    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    template = folder / "chat_template.jinja"
    config["chat_template"] = template.read_text(encoding="utf-8") if template.is_file() else None
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **config)


def end_token_ids(folder: Path, given: Any = None) -> tuple[int, ...]:
    """The ids that end a text, as `derive` has written them, and that of a tokenizer that was given in the place of the file's own."""
    generation = json.loads((folder / "generation_config.json").read_bytes())
    own = getattr(given, "eos_token_id", None)
    return tuple(sorted({*generation["eos_token_id"], *([own] if isinstance(own, int) else [])}))


def read_source(gguf: Gguf, folder: Path) -> TensorSource:
    """Where all parameters are that `derive` has named; nothing is compared with a model. Raises UnsupportedModelError."""
    names: dict[str, tuple[str, str, int]] = json.loads((folder / NAMES).read_bytes())
    files = {header.path: WeightFile(header.path) for header in gguf.headers}
    stored = {}
    for name, (there, rule, heads) in names.items():
        tensor = gguf.tensors[there]
        shape = tensor.shape[::-1] if rule == "transposed" else tensor.shape
        stored[name] = stored_of(gguf, files, tensor, shape, rule, heads)
    return TensorSource(stored, gguf.n_bytes)


def stored_of(gguf: Gguf, files: dict[Path, WeightFile], tensor: GgufTensor, shape: tuple[int, ...], rule: str, heads: int) -> StoredTensor:
    """A tensor as the parameter of this shape that a rule makes of it. Raises UnsupportedModelError."""
    plain = plain_of(gguf, files, tensor)
    there = plain.shape[::-1] if rule == "transposed" else plain.shape
    if [n for n in there if n > 1] != [n for n in shape if n > 1]:
        raise UnsupportedModelError(
            f"{gguf.path}: config and weights disagree: {tensor.name} is {list(there)} in the file and {list(shape)} by the config"
        )
    if rule == "interleaved" and len(shape) == 2:
        return FileTensor(kind=plain.kind, shape=shape, file=plain.file, offset=plain.offset, interleaved=heads)
    if rule == "interleaved":
        order = interleaved_rows(np.arange(shape[0]), shape[0], heads)
        return ComputedTensor(kind="F32", shape=shape, stored=plain, compute=lambda x: x[order])
    if rule == "same":
        return FileTensor(kind=plain.kind, shape=shape, file=plain.file, offset=plain.offset)
    return ComputedTensor(kind="F32", shape=shape, stored=plain, compute=RULES[rule])


def plain_of(gguf: Gguf, files: dict[Path, WeightFile], tensor: GgufTensor) -> FileTensor:
    if tensor.kind not in KINDS:
        raise UnsupportedModelError(f"{gguf.path}: tensor {tensor.name} has type {tensor.kind}; accepted: {', '.join(KINDS)}")
    return FileTensor(kind=tensor.kind, shape=tensor.shape, file=files[tensor.path], offset=tensor.offset)
