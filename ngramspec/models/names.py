"""Resolve the name of a model: a folder, a GGUF file, a hub repository, the shorthand smollm2, or random weights in some shape.

A name becomes a path, the name of a repository, or a typed error. Nothing here imports torch or transformers, so that a wrong name is
refused at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ngramspec.datastore.cache_dir import expand_home
from ngramspec.errors import ModelNotFoundError
from ngramspec.models import gguf, header_limits, hub
from ngramspec.models.shapes import PREFIX as RANDOM
from ngramspec.models.shapes import read_shape
from ngramspec.models.smollm2 import smollm2_gguf

ACCEPTED = (
    "a folder with config.json and safetensors, a .gguf file, a hub name such as org/name, org/name:Q4_K_M or org/name/file.gguf, smollm2, "
    "or random:NAME for random weights"
)
HUB_TOKENIZER = ["*.json", "*.model", "*.txt", "*.jinja"]
HUB_MODEL = [*HUB_TOKENIZER, "*.safetensors"]


def check_name(spec: str) -> None:
    """Resolve a name and read its config or header. Raises ModelNotFoundError, or UnsupportedModelError for a GGUF file's type."""
    if spec.startswith(RANDOM):
        read_shape(spec)
        return
    path = resolve(spec)
    if isinstance(path, str) and (wanted := hub.parse_gguf_name(path)) is not None:
        hub.list_files(wanted)
        return
    if isinstance(path, str):
        path = download(path, ["config.json"])
    if path.is_file():
        gguf.read(path)
    else:
        header_limits.check_files(path, spec)
        header_limits.read_object(path / "config.json", spec)


def resolve(spec: str) -> Path | str:
    """Return a folder or GGUF file as a path, a hub repository as its name."""
    if spec == "smollm2":
        return smollm2_gguf()
    path = expand_home(spec)
    if not spec.strip():  # which pathlib takes for the working folder
        raise ModelNotFoundError(f"a model's name must not be empty, got {spec!r}; accepted: {ACCEPTED}")
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        inside = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; name one of its GGUF files: {', '.join(inside)}" if inside else f"; accepted: {ACCEPTED}"
        raise ModelNotFoundError(f"the folder {spec!r} has no config.json, so it holds no model{hint}")
    if path.is_file():
        if gguf.is_gguf(path):
            return path
        raise ModelNotFoundError(f"the file {spec!r} is not a model; accepted: {ACCEPTED}")
    if hub.parse_gguf_name(spec) is not None and not Path(spec.partition("/")[0]).is_dir():
        return spec
    if spec.lower().endswith(".gguf") or not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", spec):
        raise ModelNotFoundError(f"there is no file or folder {spec!r}; accepted: {ACCEPTED}")
    return spec


def is_gguf_name(spec: str) -> bool:
    """Return whether a name is that of a GGUF file, here or on the hub, without asking the hub."""
    return spec == "smollm2" or spec.lower().endswith(".gguf") or gguf.is_gguf(expand_home(spec))


def download(name: str, patterns: list[str], progress: Callable[[str], None] | None = None) -> Path:
    """Return the folder of a hub repository's files by these patterns, or a GGUF file of a repository. Raises ModelNotFoundError."""
    try:
        if (wanted := hub.parse_gguf_name(name)) is not None:
            return hub.download_gguf(wanted, progress)
        return hub.download_folder(name, patterns, progress)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error}; accepted: {ACCEPTED}") from error


def locate_gguf(spec: str, progress: Callable[[str], None] | None = None) -> str:
    """Return the path of a GGUF file that is named on the hub, downloaded if the cache lacks it; any other name as it is."""
    if expand_home(spec).exists() or hub.parse_gguf_name(spec) is None:
        return spec
    return str(download(spec, [], progress))


def locate_folder(spec: str, progress: Callable[[str], None] | None = None) -> str:
    """Return the path of a folder that is named on the hub, downloaded if the cache lacks it; any other name as it is."""
    if spec.startswith(RANDOM) or isinstance(path := resolve(spec), Path):
        return spec
    return str(download(path, HUB_MODEL, progress))
