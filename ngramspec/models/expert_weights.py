"""Views of the weights of experts, as [E, N, K] tensors of a `tensor_source`, whichever way a model or a file has them.

transformers has the first two matrices of all experts in one parameter, as rows one after the other or in turns, and gpt-oss has it
transposed; files have one tensor for each matrix, or for each matrix of each expert. Also the groups that experts are divided into. Knows
shapes, not what is computed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ngramspec.models.tensor_source import KINDS, StoredTensor, TensorSource


@dataclass(frozen=True, kw_only=True)
class SplitTensor(StoredTensor):
    """Some rows of every expert: [E, N, K] of [E, M, K], from row `begin` on every `step`-th."""

    stored: StoredTensor
    begin: int
    step: int

    def read_rows(self, first: int, end: int) -> np.ndarray:
        (n, m), found = (self.shape[1], self.stored.shape[1]), []
        for expert, a, b in _split_by_expert(first, end, n):
            at = expert * m + self.begin
            found.append(self.stored.read_rows(at + a * self.step, at + (b - 1) * self.step + 1)[:: self.step])
        return _join(found, self.row_bytes)


@dataclass(frozen=True, kw_only=True)
class JoinedTensor(StoredTensor):
    """The rows of every expert in several tensors [E, N, K], one after the other or in turns: [E, n · N, K]. Parts of other kinds than the
    joined one are read as float32.
    """

    parts: tuple[StoredTensor, ...]
    in_turns: bool = False

    def read_rows(self, first: int, end: int) -> np.ndarray:
        found, n = [], self.parts[0].shape[1]
        if self.in_turns:
            n_parts = len(self.parts)
            for expert, a, b in _split_by_expert(first, end, n_parts * n):
                begin, past = expert * n + a // n_parts, expert * n - (-b // n_parts)
                turns = np.stack([self._read(part, begin, past) for part in self.parts], axis=1).reshape(-1, self.row_bytes)
                found.append(turns[a % n_parts :][: b - a])
            return _join(found, self.row_bytes)
        for number, a, b in _split_by_expert(first, end, n):
            expert, part = divmod(number, len(self.parts))
            found.append(self._read(self.parts[part], expert * n + a, expert * n + b))
        return _join(found, self.row_bytes)

    def _read(self, part: StoredTensor, first: int, end: int) -> np.ndarray:
        return part.read_rows(first, end) if part.kind == self.kind else np.ascontiguousarray(part.read_values(first, end)).view(np.uint8)


@dataclass(frozen=True, kw_only=True)
class StackedTensor(StoredTensor):
    """One tensor [N, K] per expert: [E, N, K]. All are of one kind."""

    parts: tuple[StoredTensor, ...]

    def read_rows(self, first: int, end: int) -> np.ndarray:
        return _join([self.parts[e].read_rows(a, b) for e, a, b in _split_by_expert(first, end, self.shape[1])], self.row_bytes)


@dataclass(frozen=True, kw_only=True)
class TransposedTensor(StoredTensor):
    """[E, N, K] of [E, K, N]. Each call reads the experts that it needs as a whole. Quant blocks have values, and no rows."""

    stored: StoredTensor

    def read_rows(self, first: int, end: int) -> np.ndarray:
        assert KINDS[self.kind][0] == 1, "quant blocks lie along the rows of the tensor that is stored"
        number = np.dtype(f"u{self.row_bytes // self.shape[2]}")
        return self._transpose(first, end, lambda a, b: self.stored.read_rows(a, b).view(number)).view(np.uint8)

    def read_values(self, first: int, end: int) -> np.ndarray:
        return self._transpose(first, end, self.stored.read_values)

    def float32(self) -> np.ndarray:
        e, n, _ = self.shape
        whole = np.empty(self.shape, np.float32)
        for i in range(e):  # an expert is read once
            whole[i] = self.read_values(i * n, (i + 1) * n)
        return whole

    def _transpose(self, first: int, end: int, read: Callable[[int, int], np.ndarray]) -> np.ndarray:
        _, n, k = self.shape
        found = [read(expert * k, (expert + 1) * k)[:, a:b].T for expert, a, b in _split_by_expert(first, end, n)]
        return np.ascontiguousarray(np.concatenate([read(0, 0)[:, :0].reshape(0, k), *found]))


@dataclass(frozen=True, kw_only=True)
class AppendedTensor(StoredTensor):
    """The rows of two matrices as float32, one after the other."""

    parts: tuple[StoredTensor, StoredTensor]

    def read_rows(self, first: int, end: int) -> np.ndarray:
        return np.concatenate([part.float32() for part in self.parts])[first:end].view(np.uint8)


def append_rows(first: StoredTensor, second: StoredTensor) -> StoredTensor:
    """Append the rows of a matrix [M, K] to those of another [N, K]: [N + M, K] float32. Both are small."""
    return AppendedTensor(kind="F32", shape=(first.shape[0] + second.shape[0], first.shape[1]), parts=(first, second))


def stack_experts(parts: list[StoredTensor]) -> StoredTensor:
    """Stack one tensor [N, K] per expert to [E, N, K]."""
    return StackedTensor(kind=parts[0].kind, shape=(len(parts), *parts[0].shape), parts=tuple(parts))


def join_experts(gate: StoredTensor, up: StoredTensor, *, in_turns: bool = False) -> StoredTensor:
    """Join two tensors [E, N, K] to [E, 2 · N, K], float32 if they are of different kinds."""
    shape = (gate.shape[0], 2 * gate.shape[1], *gate.shape[2:])
    return JoinedTensor(kind=_find_joined_kind(gate, up), shape=shape, parts=(gate, up), in_turns=in_turns)


def join_rows(first: StoredTensor, second: StoredTensor) -> StoredTensor:
    """Join two matrices, given as [E, N, K], to [E · 2 · N, K], float32 if they are of different kinds."""
    n_each, n_rows, n_in = first.shape
    return JoinedTensor(kind=_find_joined_kind(first, second), shape=(2 * n_each * n_rows, n_in), parts=(first, second))


def _find_joined_kind(first: StoredTensor, second: StoredTensor) -> str:
    return first.kind if first.kind == second.kind else "F32"


def transpose_experts(stored: StoredTensor) -> StoredTensor:
    """Transpose [E, K, N] to [E, N, K]. Quant blocks can be read again once they are transposed back."""
    if isinstance(stored, TransposedTensor):
        return stored.stored
    e, k, n = stored.shape
    return TransposedTensor(kind=stored.kind, shape=(e, n, k), stored=stored)


def split_experts(stored: StoredTensor, interleaved: bool) -> tuple[StoredTensor, StoredTensor]:
    """Split [E, 2 · N, K] into the rows of gate and of up [E, N, K]. `interleaved`: they lie in turns."""
    if isinstance(stored, JoinedTensor):
        return stored.parts[0], stored.parts[1]
    e, both, *rest = stored.shape
    n = both // 2
    begins, step = ((0, 1), 2) if interleaved else ((0, n), 1)
    gate, up = (SplitTensor(kind=stored.kind, shape=(e, n, *rest), stored=stored, begin=begin, step=step) for begin in begins)
    return gate, up


def _split_by_expert(first: int, end: int, n: int) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, first row, end) for rows first to end of experts with n rows each."""
    while first < end:
        expert, a = divmod(first, n)
        b = min(n, a + end - first)
        yield expert, a, b
        first += b - a


def _join(found: list[np.ndarray], row_bytes: int) -> np.ndarray:
    if len(found) == 1:
        return found[0]
    return np.concatenate([np.empty((0, row_bytes), np.uint8), *found])


class ExpertGroups(NamedTuple):
    """Groups of experts with consecutive numbers, some of which a router chooses first."""

    n_groups: int = 1
    top_groups: int = 1
    pairs: bool = False
    """Whether a group's score is the sum of its two best experts' scores, instead of the best."""


ONE_GROUP = ExpertGroups()


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The names of the weights of a layer's experts, and how they lie."""

    gate_up: tuple[str, str | None]
    """Names of weight [E, 2 · N, K] and bias [E, 2 · N]; of up alone, [E, N, K] without bias, if experts are not gated."""
    down: tuple[str, str | None]
    """Names of weight [E, K, N] and bias [E, K]."""
    interleaved: bool = False
    """Whether the rows of gate and up lie in turns."""
    transposed: bool = False
    """Whether both weights have their last two dimensions the other way round."""
    gated: bool = True

    def open(self, source: TensorSource) -> list[tuple[StoredTensor, np.ndarray | None]]:
        """Return weight [E, N, K] and bias [E, N] float32 of gate, up and down, or of up and down. Raises KeyError."""
        stored = [source[name] for name, _ in (self.gate_up, self.down)]
        if not self.gated:
            return [(each, None) for each in stored]
        if self.transposed:
            stored = [transpose_experts(each) for each in stored]
        biases: list[np.ndarray | None] = [None] * 3
        if self.gate_up[1] and self.down[1]:
            both, last = source[self.gate_up[1]].float32(), source[self.down[1]].float32()
            n = both.shape[1] // 2
            biases = [both[:, 0::2], both[:, 1::2], last] if self.interleaved else [both[:, :n], both[:, n:], last]
        return list(zip((*split_experts(stored[0], self.interleaved), stored[1]), biases, strict=True))

    def list_shapes(self, source: TensorSource, hidden: int) -> list[tuple[str | None, tuple[int, ...]]]:
        """List the names of weights and biases and the shapes that they must have, given that of the first. Raises KeyError, ValueError."""
        n_experts, a, b = source[self.gate_up[0]].shape
        inner = (b if self.transposed else a) // (1 + self.gated)
        shapes = [(n_experts, (1 + self.gated) * inner, hidden), (n_experts, hidden, inner)]
        if self.transposed:
            shapes = [(e, k, n) for e, n, k in shapes]
        biases = [(n_experts, 2 * inner), (n_experts, hidden)]
        names = [self.gate_up, self.down]
        return [*zip((name for name, _ in names), shapes, strict=True), *zip((bias for _, bias in names), biases, strict=True)]
