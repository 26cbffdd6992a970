"""Find the weights of a model folder in its safetensors files.

`find_parameters` takes a folder's tensors and the model of its config, and returns a `TensorSource`. Tensors get the names that
transformers gives them, and those of single experts are stacked. It returns None if transformers would convert weights in another way while
loading: then transformers loads the model. The module does not know configs.

Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from ngramspec.errors import ModelNotFoundError, UnsupportedModelError
from ngramspec.models import header_limits
from ngramspec.models.expert_weights import join_experts, stack_experts
from ngramspec.models.tensor_source import KINDS, FileTensor, StoredTensor, TensorSource, WeightFile

COMPARED = 1 << 24  # Bytes of two tensors that are compared at a time.
# Names of a text decoder's tensors within a model of images or sound, as patterns, and what stands in their place in one without.
TEXT_PART = {r"^language_model\.": "", r"^model\.language_model\.": "model."}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    dtype: str
    """The dtype as safetensors names it: "F32", "BF16", "I64", …"""
    shape: tuple[int, ...]
    path: Path
    offset: int
    """Bytes from the beginning of the file."""
    n_bytes: int


def read(folder: Path, spec: str) -> dict[str, SafetensorsEntry]:
    """Return all tensors of a folder's weights, from the headers alone.

    Raises ModelNotFoundError if files are missing or damaged, UnsupportedModelError if they are pickled.
    """
    tensors = {}
    for path in weight_files(folder, spec):
        if not path.is_file():
            raise ModelNotFoundError(f"{spec}: {path.name} is missing or no regular file")
        try:
            with safe_open(path, "pt"):  # checks the whole header
                pass
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header: dict[str, Any] = json.loads(file.read(length))
        except (SafetensorError, OSError, ValueError, struct.error) as error:
            why = header_limits.name_other_file(_read_start(path)) or error
            raise ModelNotFoundError(f"{spec}: {path.name} is missing or damaged: {why}") from error
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                tensors[name] = SafetensorsEntry(entry["dtype"], tuple(entry["shape"]), path, 8 + length + start, end - start)
    return tensors


def _read_start(path: Path) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(512)
    return b""


def select_text_part(tensors: dict[str, SafetensorsEntry]) -> dict[str, SafetensorsEntry]:
    """Return the tensors of the text decoder within a model of images or sound, by the names that they have in one without."""
    found = {}
    for name, entry in tensors.items():
        inner = next((re.sub(old, new, name) for old, new in TEXT_PART.items() if re.match(old, name)), None)
        if inner is not None or name.startswith("lm_head."):
            found[inner or name] = entry
    return found


def weight_files(folder: Path, spec: str) -> list[Path]:
    """Return the weight files of a folder. Raises as `read` does."""
    index = folder / "model.safetensors.index.json"
    if (single := folder / "model.safetensors").is_file():
        return [single]
    if index.is_file():
        names = header_limits.read_object(index, spec).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelNotFoundError(f"{spec}: {index.name} has no weight_map")
        for name in names.values():
            if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
                raise ModelNotFoundError(f"{spec}: {index.name} names {name!r}; accepted: safetensors files in the same folder")
        return [folder / name for name in sorted(set(names.values()))]
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickled:
        raise UnsupportedModelError(f"{spec}: its weights are pickled ({pickled[0]}) and could run code when read; accepted: safetensors")
    raise ModelNotFoundError(f"{spec}: there is no model.safetensors in {folder}")


def find_parameters(
    tensors: dict[str, SafetensorsEntry], model: PreTrainedModel, known: Mapping[str, StoredTensor] = MappingProxyType({})
) -> TensorSource | None:
    """Locate the parameters of a model on the "meta" device; None if the tensors are not the model's parameters as they are.

    `known`: parameters that several tensors stand for.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    renamed = _rename_tensors(tensors, model)
    if renamed is None:
        return None
    prefix, stored = f"{model.base_model_prefix}.", dict[str, StoredTensor]()
    for name in model.state_dict().keys() - by_name.keys():  # buffers that are saved
        entry = next((renamed[n][0][0] for n in (name, name.removeprefix(prefix)) if n in renamed), None)
        buffer = model.get_buffer(name)
        if entry is None or entry.dtype not in KINDS or tuple(entry.shape) != tuple(buffer.shape):
            return None
        stored[name] = _locate(entry, WeightFile(entry.path))
        buffer.copy_(torch.from_numpy(stored[name].float32()).view(buffer.shape))
    known_as: dict[Any, list[str]] = {}
    for name, parameter in by_name.items():
        known_as.setdefault(parameter, []).append(name)
    open_once = cache(WeightFile)
    for parameter, names in known_as.items():
        candidates = [n for name in names for n in (name, name.removeprefix(prefix))]
        one = next((known[n] for n in candidates if n in known), None)
        if one is None:
            parts = next((renamed[n] for n in candidates if n in renamed), [])
            if not parts or len({(part.dtype, part.shape) for each in parts for part in each}) != 1 or parts[0][0].dtype not in KINDS:
                return None
            one = _join_parts([[_locate(part, open_once(part.path)) for part in each] for each in parts], len(parameter.shape))
        if one.shape != tuple(parameter.shape):
            return None
        stored |= dict.fromkeys(names, one)
    return TensorSource(stored, sum(tensor.n_bytes for tensor in tensors.values()))


def has_other_head(tensors: dict[str, SafetensorsEntry], model: PreTrainedModel) -> bool:
    """Return whether the files have other weights for the head of an empty model than for its embedding, to which its config ties the head.

    transformers leaves such a head untied. Raises ModelNotFoundError if a file is shorter than its header says.
    """
    prefix, embedding = f"{model.base_model_prefix}.", model.get_input_embeddings().weight
    named = [name for name, each in model.named_parameters(remove_duplicate=False) if each is embedding]
    found = [entry for name in named if (entry := tensors.get(name) or tensors.get(name.removeprefix(prefix))) is not None]
    if len(found) < 2:
        return False
    if len({(entry.dtype, entry.shape) for entry in found}) > 1:
        return True
    first, *others = (WeightFile(entry.path) for entry in found)
    for at in range(0, found[0].n_bytes, COMPARED):
        one, other = (np.empty(min(COMPARED, found[0].n_bytes - at), np.uint8) for _ in range(2))
        first.read_into(one, found[0].offset + at)
        for entry, file in zip(found[1:], others, strict=True):
            file.read_into(other, entry.offset + at)
            if not np.array_equal(one, other):
                return True
    return False


def make_lookup(tensors: Mapping[str, SafetensorsEntry]) -> Callable[[str], StoredTensor | None]:
    """Return a function that returns a tensor by its name in the files; None if there is none, or it is of no kind that is read here."""

    open_once = cache(WeightFile)

    def get(name: str) -> StoredTensor | None:
        entry = tensors.get(name)
        return _locate(entry, open_once(entry.path)) if entry is not None and entry.dtype in KINDS else None

    return get


def _locate(entry: SafetensorsEntry, file: WeightFile) -> StoredTensor:
    return FileTensor(kind=entry.dtype, shape=entry.shape or (1,), file=file, offset=entry.offset)  # a number has no dimension


def _join_parts(parts: list[list[StoredTensor]], n_dims: int) -> StoredTensor:
    """Join the tensors of a parameter: for one matrix or several, one tensor or one for each expert."""
    stacked = [stack_experts(each) if len(each[0].shape) < n_dims else each[0] for each in parts]
    return stacked[0] if len(stacked) == 1 else join_experts(*stacked)


def _rename_tensors(tensors: dict[str, SafetensorsEntry], model: PreTrainedModel) -> dict[str, list[list[SafetensorsEntry]]] | None:
    """Return the tensors of each parameter as transformers would name it; None if it would also convert values.

    A parameter has one tensor, or one for each expert, or such a list for each of the matrices of experts that it joins.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming, rename_source_key

    steps = get_model_conversion_mapping(model)
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    if len(converters) + len(renamings) < len(steps):
        return None
    order: dict[str, int] = {}
    for converter in converters:
        kinds = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
        merges = [(MergeModulelist, 0), (Concatenate, 1)][: min(len(converter.source_patterns), 2)]
        if kinds != merges or len(converter.target_patterns) != 1 or len(converter.source_patterns) > 2:
            return None
        order |= {pattern: i for i, pattern in enumerate(converter.source_patterns)}
    found: dict[str, dict[int, dict[int, SafetensorsEntry]]] = {}
    for name, entry in tensors.items():
        parameter, pattern = rename_source_key(name, renamings, converters)
        expert = int(re.findall(r"\.(\d+)\.", name)[-1]) if pattern else 0
        found.setdefault(parameter, {}).setdefault(order[pattern] if pattern else 0, {})[expert] = entry
    return {name: [[each[i] for i in sorted(each)] for _, each in sorted(parts.items())] for name, parts in found.items()}
