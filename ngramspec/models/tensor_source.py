"""Read weights from files a few rows at a time.

A `TensorSource` maps the name of a parameter of transformers' model to a `StoredTensor`: its kind, its shape, and its rows as bytes in the
model's order. Files are not mapped into memory: a row is read when it is asked for, so a file that shrinks raises a typed error. This
module does not know file formats, tensor names, or what callers do with the rows.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ngramspec.errors import ModelNotFoundError, UnsupportedModelError

# Supported kinds by GGML's name: (weights per quant block, bytes per quant block).
KINDS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}

# Ends of the names of routers, which choose experts: they are small, and what they choose is sensitive to rounding.
_ROUTERS = (".gate.weight", ".router.weight", ".router.proj.weight", "shared_expert_gate.weight")
CHUNK = 1 << 22  # Weights that are dequantised at a time while a tensor is read whole.


@dataclass(frozen=True, kw_only=True)
class StoredTensor(ABC):
    """One parameter of a model. A vector is one row."""

    kind: str
    """One of KINDS."""
    shape: tuple[int, ...]
    """The shape in transformers' model: [N, K], [N], …"""

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the last dimension of the shape."""
        return row_bytes(self.kind, self.shape[-1])

    @abstractmethod
    def read_rows(self, first: int, end: int) -> np.ndarray:
        """Read rows first to end, [end - first, row_bytes] uint8. Raises ModelNotFoundError if the file ends before them."""

    def read_values(self, first: int, end: int) -> np.ndarray:
        """Read the same rows dequantised, [end - first, K] float32."""
        return dequantise(self.kind, self.read_rows(first, end))

    def float32(self) -> np.ndarray:
        """Read the whole parameter in its shape, bit for bit as `gguf.quants.dequantize` does. Raises as `read_rows` does."""
        whole = np.empty((self.n_rows, self.shape[-1]), np.float32)
        for first, end in iterate_row_ranges(self):
            whole[first:end] = self.read_values(first, end)
        return whole.reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class FileTensor(StoredTensor):
    """A tensor in a file, its rows one after the other."""

    file: ReadableFile
    offset: int
    """Bytes before its first byte."""
    interleaved: int = 0
    """Heads whose rows GGUF's llama stores as pairs (0, d/2), (1, d/2 + 1), … but transformers has as 0, 1, …; 0: rows are in order."""
    n_halved: int = 0
    """If there is a number, it is the other way round, for this many first rows of every head: the file has 0, 2, … and then 1, 3, …"""

    def read_rows(self, first: int, end: int) -> np.ndarray:
        assert 0 <= first <= end <= self.n_rows
        if not self.interleaved or first == end:
            return self._read(first, end)
        order = interleaved_rows(np.arange(first, end), self.n_rows, self.interleaved, self.n_halved)
        lowest = int(order.min())
        return self._read(lowest, int(order.max()) + 1)[order - lowest]

    def _read(self, first: int, end: int) -> np.ndarray:
        rows = np.empty((end - first, self.row_bytes), np.uint8)
        self.file.read_into(rows, self.offset + first * self.row_bytes)
        return rows


@dataclass(frozen=True, kw_only=True)
class ComputedTensor(StoredTensor):
    """A parameter that no file holds as the model has it: float32, computed as a whole whenever rows are read.

    Used for small or rare parameters: norms stored plus one, matrices stored transposed.
    """

    stored: StoredTensor
    compute: Callable[[np.ndarray], np.ndarray]
    """Computes the parameter from what the file holds, float32 both."""

    def read_rows(self, first: int, end: int) -> np.ndarray:
        whole = np.ascontiguousarray(self.compute(self.stored.float32()), np.float32)
        return whole.reshape(self.n_rows, self.shape[-1])[first:end].view(np.uint8)

    def float32(self) -> np.ndarray:
        return self.read_rows(0, self.n_rows).view(np.float32).reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class ZeroTensor(StoredTensor):
    """A bias that the file lacks."""

    def read_rows(self, first: int, end: int) -> np.ndarray:
        return np.zeros((end - first, self.row_bytes), np.uint8)


@dataclass(frozen=True, kw_only=True)
class NumberTensor(StoredTensor):
    """A parameter of one number, which the file's metadata state."""

    number: float

    def read_rows(self, first: int, end: int) -> np.ndarray:
        return self.float32().reshape(1, 1)[first:end].view(np.uint8)

    def float32(self) -> np.ndarray:
        return np.full(self.shape, self.number, np.float32)


@dataclass(frozen=True, kw_only=True)
class RepeatedTensor(StoredTensor):
    """Rows of queries [n], keys [n] and values, with the first two n repeated `times` times each, one round after the other.

    So GGUF's order of value heads, whose i-th belongs to key head i mod n, is that of a model with as many heads of both.
    """

    stored: StoredTensor
    times: int

    def read_rows(self, first: int, end: int) -> np.ndarray:
        n, rows = (self.shape[0] - self.stored.shape[0]) // (2 * (self.times - 1)), np.arange(first, end)
        part = np.minimum(rows // (n * self.times), 2)
        within = rows - part * n * self.times
        return read_in_order(self.stored, part * n + np.where(part < 2, within % n, within))


RowParts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class DividedTensor(StoredTensor):
    """A part of a matrix whose rows lie in groups of the same size: the same rows of every group."""

    stored: StoredTensor
    n_groups: int
    parts: RowParts
    """First row and end within a group. The first part of all groups comes before the second."""

    def read_rows(self, first: int, end: int) -> np.ndarray:
        groups = np.arange(self.n_groups)[:, None] * (self.stored.n_rows // self.n_groups)
        return read_in_order(self.stored, np.concatenate([(groups + np.arange(*part)).ravel() for part in self.parts])[first:end])


def count_divided_rows(n_groups: int, parts: RowParts) -> int:
    """Return the rows of a `DividedTensor`."""
    return n_groups * sum(end - first for first, end in parts)


def read_in_order(stored: StoredTensor, order: np.ndarray) -> np.ndarray:
    """Read the rows `order` [n] of a tensor, [n, row_bytes] uint8: those that follow each other in the file at once."""
    runs = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
    return np.concatenate([stored.read_rows(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)] or [stored.read_rows(0, 0)])


def drop_repeats(stored: StoredTensor) -> StoredTensor:
    """Return the tensor without the repeats of a `RepeatedTensor`."""
    if isinstance(stored, RepeatedTensor):
        return stored.stored
    if isinstance(stored, Q8Tensor) and isinstance(stored.stored, RepeatedTensor):
        return Q8Tensor(kind=stored.kind, shape=stored.stored.stored.shape, stored=stored.stored.stored)
    return stored


@dataclass(frozen=True, kw_only=True)
class Q8Tensor(StoredTensor):
    """The rows of another tensor in Q8_0, rounded as GGML does."""

    stored: StoredTensor

    def read_rows(self, first: int, end: int) -> np.ndarray:
        from ngramspec.models.q8_blocks import quantise_rows  # imports numba

        if self.stored.kind == "BF16":
            return quantise_rows("BF16", self.stored.read_rows(first, end))
        return quantise_rows("F32", self.stored.read_values(first, end).view(np.uint8))


class _MissingTensorError(UnsupportedModelError, KeyError):
    """A tensor that a model needs and its files lack; a KeyError, too, as `in` and `get` of a mapping expect it."""

    def __str__(self) -> str:
        return str(self.args[0])


class TensorSource(Mapping[str, StoredTensor]):
    """A model's parameters by their names in transformers' model; tied ones have several."""

    def __init__(self, stored: Mapping[str, StoredTensor], n_bytes: int) -> None:
        self._stored = stored
        self.n_bytes = n_bytes
        """Bytes of all tensors, as they lie in the files."""

    def __getitem__(self, name: str) -> StoredTensor:
        try:
            return self._stored[name]
        except KeyError:
            raise _MissingTensorError(f"the model's files have no {name}, which its architecture needs") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def to_q8_source(source: TensorSource) -> TensorSource:
    """Replace matrices of plain numbers, those of experts too, whose rows are whole blocks by Q8_0.

    Vectors and routers stay, and experts that lie transposed, as gpt-oss's do: their rows are not those that are multiplied.
    """
    block = KINDS["Q8_0"][0]

    def quantise(name: str, stored: StoredTensor) -> StoredTensor:
        plain = KINDS[stored.kind][0] == 1 and len(stored.shape) > 1 and stored.shape[-1] % block == 0
        plain = plain and not name.endswith((*_ROUTERS, "bias")) and not (len(stored.shape) == 3 and f"{name}_bias" in source)
        return Q8Tensor(kind="Q8_0", shape=stored.shape, stored=stored) if plain else stored

    return TensorSource({name: quantise(name, stored) for name, stored in source.items()}, source.n_bytes)


def row_bytes(kind: str, n: int) -> int:
    """Return the bytes of a row of n weights, a multiple of the kind's block."""
    per_block, n_bytes = KINDS[kind]
    return n // per_block * n_bytes


def iterate_row_ranges(stored: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that cover a parameter, of about CHUNK weights each."""
    step = stored.n_rows if isinstance(stored, ComputedTensor) else max(1, CHUNK // stored.shape[-1])
    for first in range(0, stored.n_rows, step):
        yield first, min(first + step, stored.n_rows)


def dequantise(kind: str, rows: np.ndarray) -> np.ndarray:
    """Dequantise [n, row_bytes] uint8 to [n, K] float32, bit for bit as `gguf.quants.dequantize`."""
    if kind == "F32":
        return rows.view(np.float32)
    if kind == "F16":
        return rows.view(np.float16).astype(np.float32)
    if kind == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if not len(rows):
        return np.empty((0, rows.shape[1] // KINDS[kind][1] * KINDS[kind][0]), np.float32)  # which gguf cannot dequantise
    from gguf import GGMLQuantizationType, quants  # not needed to start

    return quants.dequantize(rows, GGMLQuantizationType[kind])


def interleaved_rows(rows: np.ndarray, n_rows: int, n_heads: int, n_halved: int = 0) -> np.ndarray:
    """Return where rows of a query or key projection lie in llama's GGUF (`permute` of llama.cpp's conversion, reversed); with `n_halved`
    where they lie if the file has even ones before odd ones among the first of every head.
    """
    head, row = np.divmod(rows, n_rows // n_heads)
    half = (n_halved or n_rows // n_heads) // 2
    if n_halved:
        return rows - row + np.where(row < n_halved, row % 2 * half + row // 2, row)
    return head * 2 * half + row % half * 2 + row // half


class ReadableFile(Protocol):
    """What tensors read."""

    path: Path

    def read_into(self, rows: np.ndarray, offset: int) -> None:
        """Fill an array with the bytes from `offset` on. Raises ModelNotFoundError if the file ends before, or cannot be read."""


class WeightFile:
    """A file that several threads read at given positions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._lock = threading.Lock()

    def read_into(self, rows: np.ndarray, offset: int) -> None:
        """Fill an array with the bytes from `offset` on. Raises ModelNotFoundError if the file ends before, or cannot be read."""
        into, done = rows.reshape(-1).data, 0
        try:
            while done < len(into):
                n = self._read_part(into[done:], offset + done)
                if not n:
                    raise ModelNotFoundError(f"{self.path} ends at byte {offset + done}, before the weights that its header names")
                done += n
        except OSError as error:
            raise ModelNotFoundError(f"{self.path} cannot be read: {error}") from error

    def _read_part(self, into: memoryview, offset: int) -> int:
        """Read as much as the system gives at once, without a lock if it can read at a position; return the number of bytes."""
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [into], offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(into) or 0
