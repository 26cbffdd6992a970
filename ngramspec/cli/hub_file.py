"""Find and fetch one GGUF file of a hub repository, as llama.cpp's `-hf org/name:Q4_K_M` does.

The name enters, the path of the file on this machine leaves; huggingface_hub keeps it in its cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ngramspec.cli.common import BadInputError

# Which file is meant where the name says none; the first is llama.cpp's choice too.
PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


def fetch_file(name: str) -> Path:
    """Return the file that `org/name[:QUANT]` names, its first part if it has several. Raises BadInputError, and what the hub raises."""
    repository, _, quant = name.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise BadInputError(f"-hf: must be org/name or org/name:QUANT, such as Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M, got {name!r}")
    import huggingface_hub
    from huggingface_hub import errors

    try:
        files = huggingface_hub.list_repo_files(repository)
        parts = [huggingface_hub.hf_hub_download(repository, file) for file in choose_files(files, quant, repository)]
        return Path(parts[0])
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise BadInputError(f"-hf: {repository} cannot be fetched: {reason}") from error


def choose_files(files: Sequence[str], quant: str, repository: str) -> list[str]:
    """Return the file of this quantisation, or all its parts in order. Raises BadInputError that lists what there is."""
    models = sorted(file for file in files if file.lower().endswith(".gguf") and not Path(file).name.lower().startswith("mmproj"))
    if not models:
        raise BadInputError(f"-hf: {repository} has no .gguf file; --model {repository} takes safetensors")
    for wanted in [quant] if quant else PREFERRED:
        ends = re.compile(rf"(^|[-._/]){re.escape(wanted)}(-\d{{5}}-of-\d{{5}})?\.gguf$", re.IGNORECASE)
        if found := [file for file in models if ends.search(file)]:
            first = _PART.search(found[0])
            return [file for file in found if _PART.search(file)] if first else found[:1]
    if not quant:
        return models[:1]
    raise BadInputError(f"-hf: {repository} has no file for {quant!r}; it has {', '.join(models)[:600]}")
