"""Cache what the first start learns about a model, so that later starts need neither transformers' models nor a comparison with them.

Two things are cached. A *derived folder* per model holds what transformers derives from the header of a GGUF file
(`gguf_hf_mapping.derive`) or from a folder with safetensors (`folder_cache.write_folder`): kilobytes of config and tensor names, megabytes
of tokenizer, no weights. A *start record* per model, version, settings and processor holds what a start has measured and decided: a small
JSON document whose content this module does not know.

Nothing is read that is not intact. A derived folder has a manifest with the files' paths, sizes, times and the SHA-256 of their headers,
the versions that made it, and the size and CRC-32 of every file in it; a start record begins with its own SHA-256. What is missing,
truncated, altered, or of another file or version is made again. A new folder appears by rename and is made under a lock, so that processes
that start together make it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import math
import platform
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ngramspec.datastore.cache_dir import expand_home
from ngramspec.datastore.partial_files import write_whole
from ngramspec.errors import UnsupportedModelError
from ngramspec.models import gguf
from ngramspec.models.expert_weights import join_experts, join_rows, transpose_experts
from ngramspec.models.folder_cache import ModelFolder, NotCachedError, read_source
from ngramspec.models.gated_heads import GATES, JOINED, join_gates
from ngramspec.models.gguf import Gguf, GgufTensor
from ngramspec.models.gguf_metadata import read_layer_number
from ngramspec.models.head_parameters import HEAD
from ngramspec.models.latent_weights import KEYS, VALUES, join_heads, split_heads
from ngramspec.models.smollm2 import smollm2_gguf
from ngramspec.models.tensor_source import (
    KINDS,
    ComputedTensor,
    DividedTensor,
    FileTensor,
    NumberTensor,
    RepeatedTensor,
    StoredTensor,
    TensorSource,
    WeightFile,
    ZeroTensor,
    count_divided_rows,
    interleaved_rows,
)
from ngramspec.models.tensor_use import TensorUse
from ngramspec.tokenizer.deferred import DeferredTokenizer

log = logging.getLogger(__name__)

Progress = Callable[[str], None]
_Model = TypeVar("_Model", Gguf, ModelFolder)

RECORD_FORMAT, FOLDER_FORMAT = 2, 13  # versions of the two layouts on disk
MANIFEST = "derived.json"
_CONVERTED = "converted.json"  # manifest of a whole model in float32, which earlier versions cached
_DIGEST = 2 * hashlib.sha256().digest_size  # characters of a hexadecimal SHA-256

_TRANSFORMERS = importlib.metadata.version("transformers")  # importing it takes a second

TENSOR_NAMES = "tensors.json"  # of a GGUF file, per parameter: the fields of its TensorUse
ROPE_FACTORS = "rope_freqs.weight"  # tensor that divides the frequencies of rotary angles: Llama 3's scaling, not in the metadata
_ONE_ROW = "shared_expert_gate.weight"  # A matrix whose one row is a vector in the file.
_VECTORS = (".A_log", ".D", ".mamba.norm.weight", ".mixer.norm.weight")  # Have several dimensions in some files.
_CONVOLUTION = "conv1d.weight"  # Has a dimension of 1 that the file leaves out.
RULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "same": lambda x: x,
    "minus one": lambda x: x - 1,
    "transposed": lambda x: x.T,
    "log of negative": lambda x: np.log(-x.astype(np.float64)),
}


# ------------------------------------------------------------------ start records


@dataclass(frozen=True, slots=True)
class StartRecord:
    """A document about a model: the hexadecimal SHA-256 of what follows, then JSON. If it cannot be written, nothing is cached."""

    path: Path
    file: Gguf | ModelFolder

    def read(self) -> dict[str, Any] | None:
        """Return the document as it was written; None if there is none, or it is not intact."""
        try:
            raw = self.path.read_bytes()
            found = json.loads(raw[_DIGEST:]) if raw[:_DIGEST] == _digest(raw[_DIGEST:]) else None
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, document: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(document).encode()
            write_whole(self.path, _digest(text) + text)


def find_start_record(spec: str, settings: tuple[object, ...], cache_dir: Path) -> StartRecord | None:
    """Return the record of the GGUF file or folder that `spec` names, with settings that change its content; None if it names neither."""
    with contextlib.suppress(Exception):  # whoever opens the model reports what is wrong with it
        path = smollm2_gguf() if spec == "smollm2" else expand_home(spec)
        if not gguf.is_gguf(path) and not (path / "config.json").is_file():
            return None
        file = gguf.read(path) if path.is_file() else ModelFolder(path)
        key = [RECORD_FORMAT, _TRANSFORMERS, _describe_processor(), digest_code(), file.identify_files(), list(map(str, settings))]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        return StartRecord(cache_dir / "starts" / f"{name}.json", file)
    return None


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _describe_processor() -> list[str]:
    """Describe what distinguishes this machine's arithmetic from another's."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return [platform.machine(), hashlib.sha256(line.encode()).hexdigest()]
    return [platform.machine(), platform.processor()]


def digest_code() -> str:
    """Return a digest of the code that computes logits: a change of it is another version."""
    root = Path(__file__).parent.parent
    files = sorted(root.glob("*.py"))
    for room in ("backends", "kv_cache", "models", "sampling"):
        files += [root / room / "__init__.py", *sorted((root / room).rglob("[!_]*.py"))]  # fails if the room has moved
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


# ------------------------------------------------------------------ derived folders


def get_derived_folder(
    file: Gguf, derive: Callable[[Gguf, Path], None], cache_dir: Path, progress: Progress, stack: contextlib.ExitStack
) -> Path:
    """Return the folder that `derive` fills for a file, made if there is none that is intact.

    If the cache cannot be used, the folder is a temporary one that `stack` removes. Raises what `derive` raises, except OSError.
    """
    try:
        return _make_cached_folder(file, derive, cache_dir, progress)
    except OSError as error:
        progress(f"the cache {cache_dir} cannot be used ({error}): reading {file.name} for this run only")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ngramspec-")))
        derive(file, folder)
        return folder


def keep_folder(path: Path, write: Callable[[Path], None], cache_dir: Path) -> None:
    """Have `write` fill the derived folder of a folder with safetensors unless it is intact, or the model cannot be kept so."""
    try:
        _make_cached_folder(ModelFolder(path), lambda _, folder: write(folder), cache_dir, log.debug)
    except (NotCachedError, OSError) as error:
        log.debug("%s is opened anew at every start: %s", path, error)


def get_folder_path(file: Gguf | ModelFolder, cache_dir: Path) -> Path:
    """Return the path of a file's derived folder, whether or not it exists."""
    digest = hashlib.sha256(bytes(file.path.resolve())).hexdigest()
    return cache_dir / "models" / f"{file.name}-{digest[:16]}"


def is_intact(folder: Path, file: Gguf | ModelFolder) -> bool:
    """Return whether a derived folder is of this file as it is now and of this version, and holds every file byte for byte as written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        files: dict[str, Any] = manifest["files"]
        return (
            manifest == _describe_origin(file) | {"files": files}
            and "config.json" in files
            and {path.name for path in folder.iterdir()} == {*files, MANIFEST}
            and all([path.stat().st_size, zlib.crc32(path.read_bytes())] == files[path.name] for path in map(folder.joinpath, files))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def remove_converted(cache_dir: Path, progress: Progress) -> None:
    """Remove the float32 copies of whole models that earlier versions cached, and report how much space that frees."""
    n_bytes = 0
    for manifest in (cache_dir / "models").glob(f"*/{_CONVERTED}"):
        folder = manifest.parent
        if folder.is_symlink() or not (folder / "model.safetensors").is_file():
            continue
        with contextlib.suppress(OSError):
            n_bytes += sum(path.stat().st_size for path in folder.iterdir())
            shutil.rmtree(folder)
            folder.with_name(folder.name + ".lock").unlink(missing_ok=True)
    if n_bytes:
        progress(f"removed converted models of an earlier version from {cache_dir / 'models'}: {n_bytes / 1e6:.0f} MB")


def _make_cached_folder(file: _Model, derive: Callable[[_Model, Path], None], cache_dir: Path, progress: Progress) -> Path:
    folder = get_folder_path(file, cache_dir)
    if is_intact(folder, file):
        return folder
    from filelock import FileLock, Timeout  # imports asyncio, which a later start need not wait for

    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        lock = FileLock(f"{folder}.lock")
        try:
            stack.enter_context(lock.acquire(blocking=False))
        except Timeout:
            progress(f"waiting for another process that reads {file.name}")
            stack.enter_context(lock.acquire())
        if is_intact(folder, file):
            return folder
        progress(f"reading {file.name}: tokenizer and config (kept for the next start)")
        partial = folder.with_name(folder.name + ".partial")
        _remove(partial)
        partial.mkdir()
        try:
            derive(file, partial)
            _write_manifest(partial, file)
            _remove(folder)
            partial.rename(folder)
        finally:
            _remove(partial)
    return folder


def _describe_origin(file: Gguf | ModelFolder) -> dict[str, Any]:
    return {"format": FOLDER_FORMAT, "transformers": _TRANSFORMERS, **file.identify_files()}


def _write_manifest(folder: Path, file: Gguf | ModelFolder) -> None:
    files = {path.name: [path.stat().st_size, zlib.crc32(path.read_bytes())] for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(_describe_origin(file) | {"files": files}, indent=1))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ------------------------------------------------------------------ reading a derived folder


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model opened by its derived folder; nothing was compared with transformers' model."""

    source: TensorSource
    tokenizer: Any
    name: str
    config: dict[str, Any]
    eos_token_ids: tuple[int, ...]

    @property
    def trained(self) -> int:
        """Longest text that the model was trained for."""
        return int(self.config.get("max_position_embeddings") or 4096)


def reopen_model(
    file: Gguf | ModelFolder, tokenizer: Any, cache_dir: Path, begin: Callable[[CachedModel], None] = lambda _: None
) -> CachedModel | None:
    """Open a model by its derived folder, with `tokenizer` or else its own; None if the folder is not intact.

    None for a folder of safetensors with another tokenizer, too: what ends a text there depends on the tokenizer. `begin` is called with
    the model before its tokenizer is read, which takes as long as memory for its weights. Raises what `begin` raises.
    """
    folder = get_folder_path(file, cache_dir)
    if not is_intact(folder, file) or (tokenizer is not None and isinstance(file, ModelFolder)):
        return None
    opened = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, UnsupportedModelError):
        config = json.loads((folder / "config.json").read_bytes())
        ends = read_end_token_ids(folder, tokenizer)
        source = read_source(file, folder) if isinstance(file, ModelFolder) else read_tensor_source(file, folder)
        opened = CachedModel(source, tokenizer, file.name, config, ends)
    if opened is None:
        return None
    begin(opened)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return opened if opened.tokenizer else replace(opened, tokenizer=DeferredTokenizer(folder))
    return None


def read_end_token_ids(folder: Path, given: Any = None) -> tuple[int, ...]:
    """Read the ids that end a text, and add that of `given`, a tokenizer that replaces the file's own."""
    generation = json.loads((folder / "generation_config.json").read_bytes())
    own = getattr(given, "eos_token_id", None)
    return tuple(sorted({*generation["eos_token_id"], *([own] if isinstance(own, int) else [])}))


def read_tensor_source(file: Gguf, folder: Path) -> TensorSource:
    """Locate all parameters that `derive` has named; nothing is compared with a model. Raises UnsupportedModelError."""
    files = {header.path: WeightFile(header.path) for header in file.headers}
    names = read_tensor_names(folder)
    stored = {name: _locate_parameter(file, files, name, use) for name, use in names.items() if not name.startswith(HEAD)}
    return TensorSource(stored | locate_head(file, files, names) | locate_heads(file, files, names), file.n_bytes)


def locate_head(file: Gguf, files: dict[Path, WeightFile], names: dict[str, TensorUse]) -> dict[str, StoredTensor]:
    """Locate the parameters of the head that predicts further tokens; none if one of them is not as it should be."""
    with contextlib.suppress(UnsupportedModelError):
        return {name: _locate_parameter(file, files, name, use) for name, use in names.items() if name.startswith(HEAD)}
    return {}


def locate_heads(file: Gguf, files: dict[Path, WeightFile], names: dict[str, TensorUse]) -> dict[str, StoredTensor]:
    """Locate the matrices of heads that are no parameters: see `latent_weights`, `gated_heads`. Raises UnsupportedModelError."""
    ends = tuple(f".{part}.weight" for part in (KEYS, VALUES))

    def locate(name: str) -> StoredTensor:
        return _locate_parameter(file, files, name, names[name])

    gates = {name: name.replace(GATES, "q_proj") for name in names if name.endswith(f".{GATES}.weight") and names[name].heads}
    joined = {
        gate.replace(GATES, JOINED): join_gates(locate(queries), locate(gate), names[gate].heads)
        for gate, queries in gates.items() if queries in names
    }  # fmt: skip
    return {name: locate(name) for name in names if name.endswith(ends)} | joined


def _locate_parameter(file: Gguf, files: dict[Path, WeightFile], name: str, use: TensorUse) -> StoredTensor:
    """Locate a parameter in the shape that its rule gives it. Raises UnsupportedModelError."""
    shape = file.tensors[use.tensor].shape
    if use.rule == "zeros":
        shape = shape[:1]
    if use.rule in ("head keys", "head values"):
        plain, n_keys = locate_tensor(file, files, file.tensors[use.tensor]), use.parts[0][1]
        if len(shape) != 2 or shape[0] % use.heads or shape[0] // use.heads <= n_keys:
            raise UnsupportedModelError(
                f"{file.path}: {use.tensor} is {list(shape)}; accepted: {use.heads} heads of more than {n_keys} rows"
            )
        return split_heads(plain, use.heads, n_keys)[use.rule == "head values"]
    if use.rule == "joined heads" and use.other in file.tensors and len(shape) == len(file.tensors[use.other].shape) == 3:
        return apply_rule(file, files, use, (shape[0] * (shape[2] + file.tensors[use.other].shape[1]), shape[1]))
    if name.endswith(_ONE_ROW) and len(shape) == 1:
        shape = (1, *shape)
    if name.endswith(_CONVOLUTION) and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    if use.end:
        shape = (use.end - use.first, *shape[1:])
    if use.rule == "repeated":
        shape = (shape[0] + 2 * (use.heads - 1) * count_divided_rows(1, use.parts), *shape[1:])
    if use.rule == "divided":
        shape = (count_divided_rows(use.heads, use.parts), *shape[1:])
    if name.endswith(_VECTORS):
        shape = (math.prod(shape),)
    if use.other:
        shape = (2 * shape[0], *shape[1:]) if use.rule == "joined" else (shape[0], 2 * shape[1], *shape[2:])
    if use.rule == "transposed" or (use.rule == "in turns" and len(shape) == 3):
        shape = (*shape[:-2], shape[-1], shape[-2])
    return apply_rule(file, files, use, shape)


def read_tensor_names(folder: Path) -> dict[str, TensorUse]:
    """Read what `derive` has named. Raises OSError, ValueError, TypeError."""
    return {name: TensorUse(*use) for name, use in json.loads((folder / TENSOR_NAMES).read_bytes()).items()}


def apply_rule(file: Gguf, files: dict[Path, WeightFile], use: TensorUse, shape: tuple[int, ...]) -> StoredTensor:
    """Return the parameter of this shape that is made of a tensor. Raises UnsupportedModelError."""
    if use.rule == "number":
        return NumberTensor(kind="F32", shape=shape or (1,), number=read_layer_number(file, use.tensor, use.first))
    plain = locate_tensor(file, files, file.tensors[use.tensor])
    if use.other and use.other not in file.tensors:
        raise UnsupportedModelError(f"{file.path}: it has the tensor {use.tensor}, and lacks {use.other}")
    if use.rule == "joined heads":
        other, n_keys, (n_rows, rank) = locate_tensor(file, files, file.tensors[use.other]), use.parts[0][1], shape
        if (plain.shape, other.shape) != ((use.heads, rank, n_keys), (use.heads, n_rows // use.heads - n_keys, rank)):
            raise UnsupportedModelError(
                f"{file.path}: config and weights disagree: {use.tensor} is {list(plain.shape)} and {use.other} {list(other.shape)}, for "
                f"{list(shape)} by the config"
            )
        return join_heads(plain, other)
    if use.other:
        return _join_tensors(file, plain, locate_tensor(file, files, file.tensors[use.other]), use, shape)
    rule = use.rule
    if rule == "zeros":
        return ZeroTensor(kind="F32", shape=shape)
    if use.end:
        at = plain.offset + use.first * (plain.row_bytes if len(plain.shape) > 1 else plain.row_bytes // plain.shape[-1])
        width = plain.shape[-1:] if len(plain.shape) > 1 else ()
        plain = FileTensor(kind=plain.kind, shape=(use.end - use.first, *width), file=plain.file, offset=at)
    there = (*plain.shape[:-2], *plain.shape[:-3:-1]) if rule == "transposed" else plain.shape
    if len(shape) == 1 and KINDS[plain.kind][0] == 1:
        there = (math.prod(there),)
    if rule == "divided" and shape == there == (count_divided_rows(1, use.parts),):
        rows = np.concatenate([np.arange(*part) for part in use.parts])
        return ComputedTensor(kind="F32", shape=shape, stored=plain, compute=lambda x: x[rows])
    if rule == "divided" and shape == (count_divided_rows(use.heads, use.parts), there[-1]):
        return DividedTensor(kind=plain.kind, shape=shape, stored=plain, n_groups=use.heads, parts=use.parts)
    if rule == "repeated":
        n_added = shape[0] - there[0]
        if shape[-1] == there[-1] and n_added > 0 and n_added % (2 * (use.heads - 1)) == 0:
            plain = FileTensor(kind=plain.kind, shape=(there[0], *shape[1:]), file=plain.file, offset=plain.offset)
            return RepeatedTensor(kind=plain.kind, shape=shape, stored=plain, times=use.heads)
    if rule in ("divided", "repeated") or [n for n in there if n > 1] != [n for n in shape if n > 1]:
        raise UnsupportedModelError(
            f"{file.path}: config and weights disagree: {use.tensor} is {list(there)} in the file and {list(shape)} by the config"
        )
    if rule in ("interleaved", "halved"):
        n_halved = use.parts[0][1] if rule == "halved" else 0
        if len(shape) == 2:
            return replace(plain, shape=shape, interleaved=use.heads, n_halved=n_halved)
        order = interleaved_rows(np.arange(shape[0]), shape[0], use.heads, n_halved)
        return ComputedTensor(kind="F32", shape=shape, stored=plain, compute=lambda x: x[order])
    if rule == "transposed" and len(shape) == 3:
        return transpose_experts(plain)
    if rule == "same":
        return FileTensor(kind=plain.kind, shape=shape, file=plain.file, offset=plain.offset)
    return ComputedTensor(kind="F32", shape=shape, stored=plain, compute=RULES[rule])


def _join_tensors(file: Gguf, gate: FileTensor, up: FileTensor, use: TensorUse, shape: tuple[int, ...]) -> StoredTensor:
    """Return the parameter that joins two tensors of experts. Raises UnsupportedModelError."""
    in_turns, divisible = use.rule == "in turns", use.rule == "joined" or len(shape) != 2
    in_blocks = max(KINDS[each.kind][0] for each in (gate, up)) > 1
    if gate.shape != up.shape or len(gate.shape) != len(shape) or (in_blocks and not divisible):
        raise UnsupportedModelError(
            f"{file.path}: {use.tensor} is {gate.kind} {list(gate.shape)}, {use.other} {up.kind} {list(up.shape)}; accepted: two of the "
            f"same shape, for a parameter {list(shape)}"
        )
    if use.rule == "joined":
        joined: StoredTensor = join_rows(*(replace(each, shape=(1, *each.shape)) for each in (gate, up)))
    elif in_turns and len(shape) == 2:
        columns = join_experts(
            *(FileTensor(kind=b.kind, shape=(*b.shape, 1), file=b.file, offset=b.offset) for b in (gate, up)), in_turns=True
        )
        joined = ComputedTensor(kind="F32", shape=columns.shape[:2], stored=columns, compute=lambda x: x[:, :, 0])
    else:
        joined = join_experts(gate, up, in_turns=in_turns)
        joined = transpose_experts(joined) if in_turns else joined
    if joined.shape != shape:
        raise UnsupportedModelError(
            f"{file.path}: config and weights disagree: {use.tensor} is {list(gate.shape)} in the file, half of {list(shape)} by the config"
        )
    return joined


def locate_tensor(file: Gguf, files: dict[Path, WeightFile], tensor: GgufTensor) -> FileTensor:
    """Return a tensor as it lies in its file. Raises UnsupportedModelError for a type that is not supported."""
    if tensor.kind not in KINDS:
        n_alike = sum(other.kind == tensor.kind for other in file.tensors.values())
        raise UnsupportedModelError(
            f"{file.path}: {n_alike} of its {len(file.tensors)} tensors, such as {tensor.name}, have type {tensor.kind}; accepted: "
            f"{', '.join(KINDS)}. Another file of the same repository may have these alone: one whose name ends in Q4_K_M, Q8_0 or IQ2_M"
        )
    return FileTensor(kind=tensor.kind, shape=tensor.shape, file=files[tensor.path], offset=tensor.offset)
