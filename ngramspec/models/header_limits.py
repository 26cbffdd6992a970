"""Check what a model's files ask for before anything is opened, parsed or made of them.

The functions take a folder, a JSON file or a config and raise a typed error if it asks for more than its tensors can account for. The
module does not know architectures: it knows the names of configuration keys.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ngramspec.errors import ModelNotFoundError, UnsupportedModelError

# Most bytes of a config, and of any other file that is parsed whole; the largest tokenizers take some 35 MB.
CONFIG_BYTES, TEXT_BYTES = 1 << 24, 1 << 28
# Most layers, experts and the like if no tensors bound them, and most values of a list; the deepest models have some 130 layers, and the
# widest layers 512 experts.
MOST_LAYERS = 4096
MOST_POSITIONS = 1 << 25  # Most tokens of context that a config may name; the largest today is 10 million.
_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"}
# Keys whose value cannot exceed the largest dimension of a tensor.
_SIZES = {
    "hidden_size", "n_embd", "d_model", "embedding_size", "intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size",
    "num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads", "head_dim", "vocab_size", "n_positions",
}  # fmt: skip
# Substrings of keys that count modules which are made one by one.
_MANY = ("layers", "expert", "labels", "modules", "blocks", "codebooks", "groups")
# Suffixes of keys that are widths of such modules; widths of parts that a model does not have may exceed every tensor.
_WIDTHS = ("_size", "_dim", "_rank")
_SHARES = {"partial_rotary_factor", "rotary_pct", "rotary_emb_fraction"}
_ACCOUNT = 32  # Most weights that one number of a packed tensor may hold.


def name_other_file(start: bytes) -> str:
    """Return what a file is that begins with `start` and was saved in place of weights, and what to do; "" if that is not known."""
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        return "it is a pointer of Git LFS; `git lfs pull` in its repository fetches the file itself"
    if start[:512].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "it is a web page; download the file itself, not the page that shows it"
    return ""


def check_files(folder: Path, spec: str) -> None:
    """Raise ModelNotFoundError if anything in a model's folder is no regular file: reading a pipe waits, reading a device never ends."""
    try:
        for entry in os.scandir(folder):
            try:
                found = entry.stat()
            except FileNotFoundError:
                continue  # a link to nothing, which is missing to whoever needs it
            if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
                raise ModelNotFoundError(f"{spec}: {entry.name} is no regular file; accepted: files, folders and links to them")
            if found.st_size > TEXT_BYTES and entry.name.endswith((".json", ".jinja", ".txt", ".model")):
                raise ModelNotFoundError(f"{spec}: {entry.name} has {found.st_size} bytes; accepted: up to {TEXT_BYTES}")
            if stat.S_ISDIR(found.st_mode) and entry.name.endswith("chat_templates"):
                check_files(Path(entry.path), spec)
    except OSError as error:
        raise ModelNotFoundError(f"{spec}: {error}") from error


def read_object(path: Path, spec: str) -> dict[str, Any]:
    """Return the object in a JSON file of the size of a config. Raises ModelNotFoundError."""
    try:
        # Without O_NONBLOCK a named pipe would be waited for.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is no regular file")
            raw = file.read(CONFIG_BYTES + 1)
        if len(raw) > CONFIG_BYTES:
            raise ValueError(f"it has more than {CONFIG_BYTES} bytes")
        found = json.loads(raw.decode(), object_hook=_special_float)
        if not isinstance(found, dict):
            raise ModelNotFoundError(f"{spec}: {path.name} holds {type(found).__name__}, not an object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelNotFoundError(f"{spec}: {path.name} cannot be read: {error}") from error
    return found


def _special_float(found: dict[str, Any]) -> Any:
    """Read {"__float__": "Infinity"}, which transformers writes for numbers that JSON lacks."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def check_sizes(config: dict[str, Any], spec: str, shapes: list[tuple[int, ...]] | None = None) -> None:
    """Raise UnsupportedModelError for a config with more layers than tensors, sizes above the widest tensor's, or absurd numbers.

    `shapes`: of all tensors; None: there are none, as for random weights.
    """
    widest = _ACCOUNT * max((n for shape in shapes for n in shape), default=0) if shapes is not None else 1 << 20
    layers = len(shapes) if shapes is not None else MOST_LAYERS
    for key, value in _iterate_values(config):
        if isinstance(value, (list, str)) and len(value) > MOST_LAYERS:
            raise UnsupportedModelError(f"{spec}: {key} has a length of {len(value)} in its config; accepted: up to {MOST_LAYERS}")
    for key, value in _iterate_numbers(config):
        least, most, why = -(1 << 31), float(1 << 31), ""
        if key in _LAYERS:
            least, most, why = 0, layers, ", by its tensors"
        elif key in _SIZES:
            least, most, why = 0, widest, ", by its tensors"
        elif key in _SHARES:
            least, most = 0, 1
        elif "max_position" in key or key in ("max_seq_len", "max_sequence_length", "seq_length"):
            least, most = 0, MOST_POSITIONS
        elif any(word in key for word in _MANY) and not key.endswith(_WIDTHS) and isinstance(value, int):
            most = max(MOST_LAYERS, widest // _ACCOUNT if "labels" not in key else 0)
        elif isinstance(value, float) or "theta" in key or "base" in key:
            continue  # a factor: it makes other numbers, not more of them
        if not least <= value <= most:
            raise UnsupportedModelError(f"{spec}: {key} is {value!r} by its config; accepted: {max(least, 0)} to {most:.0f}{why}")


def _iterate_numbers(found: Any) -> Iterator[tuple[str, int | float]]:
    """Yield every number of a config, with the key that it or the list around it has."""
    for key, value in _iterate_values(found):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield key, value


def _iterate_values(found: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value of a config, lists and objects among them, with the key that it or the list around it has."""
    left = [("", found)]
    while left:
        key, value = left.pop()
        yield key, value
        if isinstance(value, dict):
            left.extend((str(name), each) for name, each in value.items())
        elif isinstance(value, list):
            left.extend((key, each) for each in value)
