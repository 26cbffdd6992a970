"""Cache what opening a folder with safetensors finds out, so that later starts need neither torch nor transformers.

`write_folder` fills a derived folder (see `start_cache`) with where the model's parameters lie and with the tokenizer as transformers read
it; `read_source` opens the parameters again. What cannot be said in JSON, such as groups of AWQ, is refused, and the model is opened anew
at every start. The module reads no weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ngramspec.models import expert_weights, header_limits, latent_weights, tensor_source
from ngramspec.models.tensor_source import StoredTensor, TensorSource, WeightFile
from ngramspec.tokenizer.deferred import DeferredTokenizer

STORED_TENSORS = "stored_tensors.json"  # where the parameters lie, as `encode_source` has it
_READ = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "*chat_templates/*.jinja")  # files that decide what a model computes
_HEADER = 100_000_000  # most bytes of a safetensors header, by the format
_TYPES: dict[str, type[StoredTensor]] = {
    each.__name__: each
    for each in (
        tensor_source.FileTensor,
        tensor_source.DividedTensor,
        expert_weights.JoinedTensor,
        expert_weights.StackedTensor,
        expert_weights.TransposedTensor,
        latent_weights.JoinedHeads,
    )
}
# Texts by which a tokenizer is compared with itself as it is read back: blanks, indentation, numbers, scripts, no character at all.
_PROBES = (
    "",
    " a",
    "def f(x):\n    return 3.14159 * x  # ok\n\n\n",
    "Größe naïve\t'quoted' \r\n",
    "東京 Привет 🙂‍🔥 ﷺ e\u0301",
    "<s> </s> <|x|>",
)


class NotCachedError(Exception):
    """Something of a model that a derived folder cannot hold."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder with config.json and safetensors, in the state in which its fingerprint was first asked for."""

    path: Path

    @property
    def name(self) -> str:
        """The folder's name; of a snapshot of the hub's cache, whose name is a commit, that of its repository."""
        *_, repository, kind, name = ("", "", *self.path.resolve().parts)
        return repository.removeprefix("models--") if kind == "snapshots" else name

    def identify_files(self) -> dict[str, Any]:
        """Return what identifies the files and their state without reading weights. Raises ModelNotFoundError, OSError."""
        return {"parts": self._parts}

    @cached_property
    def _parts(self) -> list[list[Any]]:
        header_limits.check_files(self.path, str(self.path))
        parts = []
        for path in sorted({path for pattern in _READ for path in self.path.glob(pattern)}):
            status = path.stat()
            name = path.relative_to(self.path).as_posix()
            parts.append([name, str(path.resolve()), status.st_size, status.st_mtime_ns, hashlib.sha256(_read_text(path)).hexdigest()])
        return parts


def _read_text(path: Path) -> bytes:
    """Read a file, or the header of one with weights."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    with path.open("rb") as file:
        (n_bytes,) = struct.unpack("<Q", file.read(8))
        return file.read(min(n_bytes, _HEADER))


def write_folder(folder: Path, config: Mapping[str, Any], source: TensorSource, tokenizer: Any, ends: tuple[int, ...]) -> None:
    """Write a model's parameters and tokenizer into an existing folder. `config`: what a later start reads of the model's config.

    Raises NotCachedError, OSError.
    """
    (folder / STORED_TENSORS).write_text(json.dumps(encode_source(source)))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise NotCachedError("its tokenizer is none of the `tokenizers` library")
    try:
        write_tokenizer(tokenizer, folder)
        found, wanted = _describe_tokenizer(DeferredTokenizer(folder)), _describe_tokenizer(tokenizer)
    except OSError:
        raise
    except Exception as error:  # the libraries raise nothing more specific
        raise NotCachedError(f"its tokenizer cannot be written and read back: {error}") from error
    if other := [what for what, one, two in zip(_ASPECTS, found, wanted, strict=True) if one != two]:
        raise NotCachedError(f"its tokenizer has other {' and '.join(other)} if it is read from its file alone")


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files, several chat templates into its config. Raises what transformers raises."""
    tokenizer.save_pretrained(folder, save_jinja_files=not isinstance(tokenizer.chat_template, dict))  # which would make a folder


_ASPECTS = ("tokens", "special tokens", "chat template", "added tokens", "ids", "texts", "sizes")


def _describe_tokenizer(tokenizer: Any) -> tuple[Any, ...]:
    """Return what a tokenizer does, for each of `_ASPECTS`."""
    special = dict(tokenizer.special_tokens_map)
    probes = (*_PROBES, "x".join(map(str, special.values())))
    ids = [list(tokenizer(text, add_special_tokens=added)["input_ids"]) for text in probes for added in (True, False)]
    texts = [
        tokenizer.decode(each, skip_special_tokens=skips, clean_up_tokenization_spaces=False) for each in ids for skips in (True, False)
    ]
    names = [tokenizer.convert_ids_to_tokens(each) for each in ids]
    added_tokens = {number: repr(token) for number, token in tokenizer.added_tokens_decoder.items()}
    sizes = len(tokenizer), tokenizer.eos_token_id, tokenizer.bos_token_id
    return names, special, tokenizer.chat_template, added_tokens, ids, texts, sizes


def read_source(folder: ModelFolder, derived: Path) -> TensorSource:
    """Open the parameters that `write_folder` has written. Raises OSError, ValueError, KeyError, TypeError."""
    return decode_source(json.loads((derived / STORED_TENSORS).read_bytes()), folder.path)


# ------------------------------------------------------------------ parameters as JSON


def encode_source(source: TensorSource) -> dict[str, Any]:
    """Return where parameters lie: names and positions in a list of tensors, which tied parameters share. Raises NotCachedError."""
    found = dict(source)
    unique = list({id(stored): stored for stored in found.values()}.values())
    numbers = {id(stored): i for i, stored in enumerate(unique)}
    names = {name: numbers[id(stored)] for name, stored in found.items()}
    return {"n_bytes": source.n_bytes, "names": names, "tensors": [_encode(stored) for stored in unique]}


def decode_source(document: Mapping[str, Any], folder: Path) -> TensorSource:
    """Open the parameters that `encode_source` has described, of files in a folder. Raises OSError, ValueError, KeyError, TypeError."""
    open_once = cache(WeightFile)
    tensors = [_decode(each, lambda name: open_once(folder / name)) for each in document["tensors"]]
    return TensorSource({name: tensors[number] for name, number in document["names"].items()}, document["n_bytes"])


def _encode(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        if type(value).__name__ not in _TYPES:
            raise NotCachedError(f"a {type(value).__name__} is no place in a file")
        return {"type": type(value).__name__} | {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, WeightFile):
        return {"file": value.path.name}
    return [_encode(each) for each in value] if isinstance(value, tuple) else value


def _decode(value: Any, open_file: Callable[[str], WeightFile]) -> Any:
    if isinstance(value, list):
        return tuple(_decode(each, open_file) for each in value)
    if not isinstance(value, dict):
        return value
    if "file" in value and "type" not in value:
        return open_file(value["file"])
    fields = {name: _decode(each, open_file) for name, each in value.items() if name != "type"}
    return _TYPES[value["type"]](**fields)
