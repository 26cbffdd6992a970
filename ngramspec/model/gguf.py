"""GGUF files as folders that load in seconds: dequantised once, kept in a cache, checked at every use.

`ensure_converted` turns a GGUF file and a dtype into the path of a folder with safetensors, config and tokenizer. The folder's
name carries the SHA-256 of the GGUF, so that a changed file is a different entry. Its manifest carries the size
and CRC-32 of every file (0.1 s for 540 MB): an entry with a missing, truncated or altered file is made anew, and
so is one that another version of transformers made. A new entry appears by rename and is made under a lock, so
that processes that start together convert once. Nothing here knows the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ngramspec.batch.errors import ModelNotFoundError, NgramspecError, UnsupportedModelError

FORMAT = 1
MANIFEST = "converted.json"
CHUNK = 1 << 22

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 32

Progress = Callable[[str], None]


def ensure_converted(gguf: Path, dtype: torch.dtype, cache_dir: Path, progress: Progress) -> Path:
    """The folder of the dequantised model, made if there is none that is whole.

    Raises UnsupportedModelError for an architecture that transformers cannot read from GGUF, ModelNotFoundError
    for a damaged GGUF, OSError where the cache cannot be written.
    """
    entry = entry_path(gguf, dtype, cache_dir)
    if is_whole(entry):
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        lock = FileLock(f"{entry}.lock")
        try:
            stack.enter_context(lock.acquire(blocking=False))
        except Timeout:
            progress(f"waiting for another process that converts {gguf.name}")
            stack.enter_context(lock.acquire())
        if is_whole(entry):
            return entry
        if entry.exists():
            progress(f"the cached copy of {gguf.name} is damaged or of another version: converting again")
        partial = entry.with_name(entry.name + ".partial")
        _remove(partial)
        partial.mkdir()
        try:
            convert(gguf, dtype, partial, progress)
            _write_manifest(partial)
            _remove(entry)
            partial.rename(entry)
        finally:
            _remove(partial)
    return entry


def entry_path(gguf: Path, dtype: torch.dtype, cache_dir: Path) -> Path:
    """Where the dequantised model is kept, whether or not it is there."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return cache_dir / "models" / f"{gguf.stem}-{digest[:16]}-{str(dtype).removeprefix('torch.')}"


def is_whole(entry: Path) -> bool:
    """Whether every file is there, byte for byte as it was written, by this version."""
    try:
        manifest = json.loads((entry / MANIFEST).read_bytes())
        files = manifest["files"]
        made_by = (manifest["format"], manifest["transformers"])
        return (
            made_by == (FORMAT, transformers.__version__)
            and {"config.json", "model.safetensors"} <= files.keys()
            and all((entry / name).stat().st_size == size for name, (size, _) in files.items())
            and all(_crc32(entry / name) == crc for name, (_, crc) in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def convert(gguf: Path, dtype: torch.dtype, folder: Path, progress: Progress) -> None:
    """Write the dequantised model, its config and tokenizer into an existing folder."""
    metadata, _ = read_header(gguf)
    progress(f"converting {gguf.name}: tokenizer")
    tokenizer = read_tokenizer(gguf)
    progress(f"converting {gguf.name}: weights (once; kept for the next start)")
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of transformers that ignores its own switch
            model = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=dtype, quantization_config=transformers.GgufConfig(dequantize=True)
            )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{gguf}: transformers {transformers.__version__} does not read GGUF models of architecture "
            f"{metadata.get('general.architecture')!r} ({error}); its safetensors folder may load"
        ) from error
    vars(model)["hf_quantizer"] = None  # the weights are plain now; save_pretrained refuses what says otherwise
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    model.generation_config.eos_token_id = sorted({end for end in ends if end is not None}) or model.generation_config.eos_token_id
    progress(f"converting {gguf.name}: writing {folder.parent}")
    try:
        model.save_pretrained(folder, max_shard_size="1TB")
    except SafetensorError as error:
        raise OSError(f"{folder} cannot be written: {error}") from error
    tokenizer.save_pretrained(folder)


def read_tokenizer(gguf: Path) -> Any:
    """The tokenizer that a GGUF carries, split into words as its `tokenizer.ggml.pre` says."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    metadata, _ = read_header(gguf)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{gguf}: transformers {transformers.__version__} does not read the tokenizer of this GGUF, architecture "
            f"{metadata.get('general.architecture')!r} ({error})"
        ) from error
    if metadata.get("tokenizer.ggml.pre") in ("smollm", "starcoder") and tokenizer.is_fast:
        # transformers ignores `pre`; these two split digits first, which decides how blanks before a number are cut.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    return tokenizer


def read_header(gguf: Path) -> tuple[dict[str, Any], int]:
    """A GGUF's scalar metadata and the number of its weights; arrays are passed over.

    Raises ModelNotFoundError where the file is no GGUF or ends too soon.
    """
    try:
        with gguf.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise NgramspecError("it does not begin with GGUF")
            version, n_tensors, n_keys = _unpack(file, "<IQQ")
            if version not in (2, 3):
                raise NgramspecError(f"version {version}; 2 and 3 are read")
            metadata = {}
            for _ in range(n_keys):
                key = _string(file)
                metadata[key] = _value(file, _unpack(file, "<I")[0])
            n_weights = last_offset = 0
            for _ in range(n_tensors):
                _string(file)
                (n_dims,) = _unpack(file, "<I")
                n_weights += math.prod(_unpack(file, f"<{min(n_dims, 8)}Q"))
                last_offset = max(last_offset, _unpack(file, "<IQ")[1])
            if file.tell() + last_offset >= gguf.stat().st_size:
                raise NgramspecError(f"it ends after {gguf.stat().st_size} bytes, before its last tensor")
            return metadata, n_weights
    except (struct.error, UnicodeDecodeError, NgramspecError) as error:
        raise ModelNotFoundError(f"{gguf} is not a whole GGUF file: {error}") from error


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    if length > CHUNK:
        raise NgramspecError(f"a string of {length} bytes at {file.tell()}")
    return file.read(length).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind in _SCALARS:
        return _unpack(file, "<" + _SCALARS[kind])[0]
    if kind != _ARRAY:
        raise NgramspecError(f"value type {kind} at {file.tell()}")
    item, count = _unpack(file, "<IQ")
    if item == _ARRAY or count > _MAX_ITEMS:
        raise NgramspecError(f"an array of {count} values of type {item} at {file.tell()}")
    if item in _SCALARS:
        file.seek(count * struct.calcsize("<" + _SCALARS[item]), os.SEEK_CUR)
    else:
        for _ in range(count):
            _value(file, item)
    return None


def _write_manifest(folder: Path) -> None:
    files = {path.name: (path.stat().st_size, _crc32(path)) for path in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "transformers": transformers.__version__, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return crc
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            for start in range(0, len(view), CHUNK):
                with view[start : start + CHUNK] as piece:
                    crc = zlib.crc32(piece, crc)
    return crc


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
