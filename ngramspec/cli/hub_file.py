"""Fetch one GGUF file of a hub repository, as llama.cpp's `-hf org/name:Q4_K_M` does.

The name enters, the path of the file on this machine leaves; what is already in the hub's cache needs no connection.
"""

from __future__ import annotations

import re
from pathlib import Path

import typer

from ngramspec.cli.common import BadInputError, to_printable


def fetch_file(name: str) -> Path:
    """Return the file that `org/name[:QUANT]` names, its first part if it has several. Raises BadInputError, ModelNotFoundError."""
    repository, _, quant = name.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise BadInputError(f"-hf: must be org/name or org/name:QUANT, such as Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M, got {name!r}")
    from ngramspec.models.hub import GgufName, download_gguf

    wanted = GgufName(repository, quant or None, None)
    return download_gguf(wanted, lambda message: typer.echo(f"ngramspec: {to_printable(message)}", err=True))
