"""What a start has found out about a model, kept for the next one: that it computes what transformers does, how, and what passes cost.

`reopen` opens a GGUF file whose model has been checked, from what is kept of it, without transformers' models; `Kept` is a small JSON
document for a file as it is, a version and a processor. It does not know what is in the document.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from ngramspec.models import gguf, gguf_cache, kept
from ngramspec.models.smollm2 import smollm2_gguf
from ngramspec.models.tensor_source import TensorSource

FORMAT = 2
_DIGEST = 2 * hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Kept:
    """A document about a file, in a folder: the hexadecimal SHA-256 of what follows, then JSON. If the folder cannot be written, nothing is
    kept."""

    path: Path
    file: gguf.Gguf

    def read(self) -> dict[str, Any] | None:
        """Return the document as it was written; None if there is none, or it is not whole."""
        try:
            raw = self.path.read_bytes()
            found = json.loads(raw[_DIGEST:]) if raw[:_DIGEST] == _digest(raw[_DIGEST:]) else None
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, document: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(f".{os.getpid()}")
            text = json.dumps(document).encode()
            partial.write_bytes(_digest(text) + text)
            partial.replace(self.path)


@dataclass(frozen=True, slots=True)
class Reopened:
    """A GGUF file with what is kept of it; nothing was compared with a model."""

    source: TensorSource
    tokenizer: Any
    name: str
    config: dict[str, Any]
    eos_token_ids: tuple[int, ...]


def kept_of(spec: str, settings: tuple[object, ...], cache_dir: Path) -> Kept | None:
    """The document about the file that `spec` names, with settings that change what is found out; None for what is no GGUF file."""
    with contextlib.suppress(Exception):  # what is wrong with it is said by whoever opens it
        path = smollm2_gguf() if spec == "smollm2" else Path(spec).expanduser()
        if not path.is_file() or path.suffix.lower() != ".gguf":
            return None
        file = gguf.read(path)
        key = [FORMAT, transformers.__version__, _processor(), _sources(), file.key(), list(map(str, settings))]
        return Kept(cache_dir / "starts" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json", file)
    return None


def reopen(file: gguf.Gguf, tokenizer: Any, cache_dir: Path) -> Reopened | None:
    """Open a GGUF file by what is kept of it; None where that is not whole."""
    entry = gguf_cache.entry_path(file, cache_dir)
    if not gguf_cache.is_whole(entry, file):
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        config = json.loads((entry / "config.json").read_bytes())
        ends = kept.end_token_ids(entry, tokenizer)
        tokenizer = tokenizer or kept.read_tokenizer(entry)
        return Reopened(kept.read_source(file, entry), tokenizer, file.name, config, ends)
    return None


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _processor() -> list[str]:
    """What tells this machine's arithmetic from another's."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return [platform.machine(), hashlib.sha256(line.encode()).hexdigest()]
    return [platform.machine(), platform.processor()]


def _sources() -> str:
    """Return a digest of the code that computes logits: a change of it is another version."""
    root = Path(__file__).parent.parent
    files = sorted(root.glob("*.py"))
    for room in ("backends", "kv_cache", "models", "sampling"):
        files += [root / room / "__init__.py", *sorted((root / room).rglob("[!_]*.py"))]  # fails if the room has moved
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
