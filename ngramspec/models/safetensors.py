"""Find the weights of a model folder in its safetensors files.

`find_parameters` takes a folder's tensors and the model of its config, and returns a `TensorSource`. It returns None if transformers would
convert weights while loading (names of old checkpoints, experts in single tensors, other dtypes): then transformers loads the model. The
module does not know configs.

Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from ngramspec.errors import ModelNotFoundError, UnsupportedModelError
from ngramspec.models import header_limits
from ngramspec.models.tensor_source import KINDS, FileTensor, StoredTensor, TensorSource, WeightFile

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
            raise ModelNotFoundError(f"{spec}: {path.name} is missing or damaged: {error}") from error
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                tensors[name] = SafetensorsEntry(entry["dtype"], tuple(entry["shape"]), path, 8 + length + start, end - start)
    return tensors


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
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(model)):
        return None
    by_name = dict(model.named_parameters(remove_duplicate=False))
    if model.state_dict().keys() - by_name.keys():
        return None  # buffers that are saved
    prefix = f"{model.base_model_prefix}."
    known_as: dict[Any, list[str]] = {}
    for name, parameter in by_name.items():
        known_as.setdefault(parameter, []).append(name)
    files: dict[Path, WeightFile] = {}
    stored: dict[str, StoredTensor] = {}
    for parameter, names in known_as.items():
        candidates = [n for name in names for n in (name, name.removeprefix(prefix))]
        one = next((known[n] for n in candidates if n in known), None)
        if one is None:
            found = next((tensors[n] for n in candidates if n in tensors), None)
            if found is None or found.dtype not in KINDS:
                return None
            if found.path not in files:
                files[found.path] = WeightFile(found.path)
            one = FileTensor(kind=found.dtype, shape=found.shape, file=files[found.path], offset=found.offset)
        if one.shape != tuple(parameter.shape):
            return None
        stored |= dict.fromkeys(names, one)
    return TensorSource(stored, sum(tensor.n_bytes for tensor in tensors.values()))
