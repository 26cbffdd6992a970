"""What transformers derives from a GGUF file, kept in a small folder, so that the next start needs none of it anew.

`derived` turns a file's directory into the path of such a folder: kilobytes of config and names, megabytes of tokenizer, no weights. A
manifest carries which file it is of (path, size, time, SHA-256 of the header), by which versions it was made, and size and CRC-32 of every
file in it: what is of another file or version, missing, truncated or altered is made anew. A new folder appears by rename and is made under
a lock, so that processes that start together make it once. It does not know what is in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from filelock import FileLock, Timeout

from ngramspec.models.gguf import Gguf

FORMAT = 3
MANIFEST = "derived.json"
_CONVERTED = "converted.json"
"""The manifest of a whole model in float32, which earlier versions kept."""

Progress = Callable[[str], None]


def derived(gguf: Gguf, derive: Callable[[Gguf, Path], None], cache_dir: Path, progress: Progress, stack: contextlib.ExitStack) -> Path:
    """The folder that `derive` fills for a file, made if there is none that is whole.

    Where the cache cannot be used, it is a temporary one that `stack` removes. Raises what `derive` raises, but for OSError.
    """
    try:
        return _kept(gguf, derive, cache_dir, progress)
    except OSError as error:
        progress(f"the cache {cache_dir} cannot be used ({error}): reading {gguf.name} for this run only")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ngramspec-")))
        derive(gguf, folder)
        return folder


def entry_path(gguf: Gguf, cache_dir: Path) -> Path:
    """Where a file's folder is kept, whether or not it is there."""
    digest = hashlib.sha256(bytes(gguf.path.resolve())).hexdigest()
    return cache_dir / "models" / f"{gguf.name}-{digest[:16]}"


def is_whole(entry: Path, gguf: Gguf) -> bool:
    """Whether it is of this file as it is now, made by this version, and every file in it is there, byte for byte as it was written."""
    try:
        manifest = json.loads((entry / MANIFEST).read_bytes())
        files: dict[str, Any] = manifest["files"]
        return (
            manifest == _made_by(gguf) | {"files": files}
            and "config.json" in files
            and {path.name for path in entry.iterdir()} == {*files, MANIFEST}
            and all([path.stat().st_size, zlib.crc32(path.read_bytes())] == files[path.name] for path in map(entry.joinpath, files))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def remove_converted(cache_dir: Path, progress: Progress) -> None:
    """Remove the copies of whole models in float32 that earlier versions kept, and say how much room that makes."""
    n_bytes = 0
    for manifest in (cache_dir / "models").glob(f"*/{_CONVERTED}"):
        entry = manifest.parent
        if entry.is_symlink() or not (entry / "model.safetensors").is_file():
            continue
        with contextlib.suppress(OSError):
            n_bytes += sum(path.stat().st_size for path in entry.iterdir())
            shutil.rmtree(entry)
            entry.with_name(entry.name + ".lock").unlink(missing_ok=True)
    if n_bytes:
        progress(f"removed converted models of an earlier version from {cache_dir / 'models'}: {n_bytes / 1e6:.0f} MB")


def _kept(gguf: Gguf, derive: Callable[[Gguf, Path], None], cache_dir: Path, progress: Progress) -> Path:
    entry = entry_path(gguf, cache_dir)
    if is_whole(entry, gguf):
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        lock = FileLock(f"{entry}.lock")
        try:
            stack.enter_context(lock.acquire(blocking=False))
        except Timeout:
            progress(f"waiting for another process that reads {gguf.name}")
            stack.enter_context(lock.acquire())
        if is_whole(entry, gguf):
            return entry
        progress(f"reading {gguf.name}: tokenizer and config (kept for the next start)")
        partial = entry.with_name(entry.name + ".partial")
        _remove(partial)
        partial.mkdir()
        try:
            derive(gguf, partial)
            _write_manifest(partial, gguf)
            _remove(entry)
            partial.rename(entry)
        finally:
            _remove(partial)
    return entry


def _made_by(gguf: Gguf) -> dict[str, Any]:
    return {"format": FORMAT, "transformers": transformers.__version__, **gguf.key()}


def _write_manifest(folder: Path, gguf: Gguf) -> None:
    files = {path.name: [path.stat().st_size, zlib.crc32(path.read_bytes())] for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(_made_by(gguf) | {"files": files}, indent=1))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
