"""Read AWQ and GPTQ weights as quant blocks of GGML's kinds, without changing a number.

`read_groups` takes a folder's tensors and its `quantization_config`, and returns a `StoredTensor` per quantised matrix. A weight is
(code - zero) · scale, with one zero and one scale per group of inputs. If scales are float16 and all zeros are in the middle of the range,
4-bit codes become Q4_0 and 8-bit codes Q8_0. With other zeros, code - zero of 4 bits needs 5 bits with its sign, which is Q5_0. Weights
that no kind can hold become float32. Codes are unpacked a few outputs at a time, when rows are asked for. Knows no module.

Layouts: AutoAWQ's `WQLinear_GEMM` (https://github.com/casper-hansen/AutoAWQ), GPTQModel's `qweight`, `qzeros`, `scales`, `g_idx` in its
formats "gptq", which stores zeros minus one, and "gptq_v2" (https://github.com/ModelCloud/GPTQModel).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ngramspec.errors import UnsupportedModelError
from ngramspec.models.safetensors import SafetensorsEntry
from ngramspec.models.tensor_source import StoredTensor, WeightFile, dequantise

METHODS = ("awq", "gptq")
BLOCK = 32  # Weights that share a scale in GGML's quant blocks.
_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # Which four bits of an int32 hold the code of each of eight outputs.


def read_groups(tensors: Mapping[str, SafetensorsEntry], quantised: Mapping[str, Any], spec: str) -> dict[str, StoredTensor]:
    """Return the quantised matrices of a folder by the names of the parameters that they stand for.

    Raises UnsupportedModelError for an unsupported layout, ModelNotFoundError if a file ends before its tensors.
    """
    layout = _read_layout(quantised, spec)
    latest = _Latest()
    ends = ".qweight"
    return {
        f"{name.removesuffix(ends)}.weight": _make_grouped_tensor(name.removesuffix(ends), tensors, layout, latest, spec)
        for name in tensors
        if name.endswith(ends)
    }


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Layout of codes and zeros in int32s."""

    bits: int
    along_inputs: bool
    """Whether the codes of one int32 follow each other along the inputs (GPTQ), not along the outputs (AWQ). Zeros always lie along the
    outputs."""
    order: np.ndarray
    """Which `bits` bits of an int32 hold the zero, and with AWQ the code, of each output that shares it."""
    added: int
    """Added to a stored zero."""

    @property
    def shared(self) -> int:
        return 32 // self.bits

    def unpack_zeros(self, packed: np.ndarray) -> np.ndarray:
        """Unpack [n, m] int32 to [n, m · shared] uint8, along the outputs."""
        shifts = (self.bits * self.order).astype(np.uint32)
        return (packed.view(np.uint32)[:, :, None] >> shifts & ((1 << self.bits) - 1)).astype(np.uint8).reshape(len(packed), -1)

    def unpack_codes(self, packed: np.ndarray, first: int, end: int) -> np.ndarray:
        """Unpack the codes of outputs first to end: [K, end - first] uint8."""
        if self.along_inputs:
            shifts = np.arange(0, 32, self.bits, dtype=np.uint32)[:, None]
            part = np.ascontiguousarray(packed[:, first:end]).view(np.uint32)
            return (part[:, None, :] >> shifts & ((1 << self.bits) - 1)).astype(np.uint8).reshape(-1, end - first)
        start = first // self.shared
        part = np.ascontiguousarray(packed[:, start : -(-end // self.shared)])
        return self.unpack_zeros(part)[:, first - start * self.shared : end - start * self.shared]

    def compute_zeros(self, packed: np.ndarray) -> np.ndarray:
        """Unpack zeros [groups, N] uint8. They wrap: 0 minus one is the largest."""
        return self.unpack_zeros(packed) + np.uint8(self.added) & np.uint8((1 << self.bits) - 1)


def _read_layout(quantised: Mapping[str, Any], spec: str) -> GroupLayout:
    method, bits = quantised["quant_method"], quantised.get("bits", quantised.get("w_bit"))

    def check(field: str, value: Any, accepted: tuple[Any, ...]) -> None:
        if value not in accepted:
            raise UnsupportedModelError(
                f"{spec}: {method} with {field} {value!r} is not read; accepted: {', '.join(map(repr, accepted))}, or a GGUF file"
            )

    check("bits", bits, (4,) if method == "awq" else (4, 8))
    if method == "awq":
        check("version", str(quantised.get("version", "gemm")).lower(), ("gemm",))
        check("zero_point", quantised.get("zero_point", True), (True,))
        return GroupLayout(4, along_inputs=False, order=_AWQ_ORDER, added=0)
    form = quantised.get("checkpoint_format", "gptq")
    check("checkpoint_format", form, ("gptq", "gptq_v2"))
    check("dynamic", quantised.get("dynamic") or None, (None,))
    return GroupLayout(bits, along_inputs=True, order=np.arange(32 // bits), added=int(form == "gptq"))


class _Latest:
    """Reads whole tensors and keeps the latest large one, since its rows are asked for a few at a time."""

    def __init__(self) -> None:
        self._files: dict[Path, WeightFile] = {}
        self._kept: tuple[SafetensorsEntry, np.ndarray] | None = None

    def read(self, tensor: SafetensorsEntry) -> np.ndarray:
        """Read a tensor as int32 or float32. Raises ModelNotFoundError if the file ends before it."""
        if self._kept is not None and self._kept[0] == tensor:
            return self._kept[1]
        if tensor.path not in self._files:
            self._files[tensor.path] = WeightFile(tensor.path)
        raw = np.empty(tensor.n_bytes, np.uint8)
        self._files[tensor.path].read_into(raw, tensor.offset)
        return (raw.view(np.int32) if tensor.dtype == "I32" else dequantise(tensor.dtype, raw)).reshape(tensor.shape)

    def read_and_keep(self, tensor: SafetensorsEntry) -> np.ndarray:
        raw = self.read(tensor)
        self._kept = tensor, raw
        return raw


@dataclass(frozen=True, kw_only=True)
class GroupedTensor(StoredTensor):
    """A quantised matrix [N, K] whose rows are converted when they are read."""

    layout: GroupLayout
    latest: _Latest
    qweight: SafetensorsEntry
    zeros: np.ndarray
    """[N, groups] uint8"""
    scales: np.ndarray
    """[N, groups] float16; float32 if the kind is F32"""

    def read_rows(self, first: int, end: int) -> np.ndarray:
        assert 0 <= first <= end <= self.n_rows
        codes = self.layout.unpack_codes(self.latest.read_and_keep(self.qweight), first, end).T.astype(np.int16)
        n, k = codes.shape
        zeros, scales = self.zeros[first:end], self.scales[first:end]
        groups, blocks = zeros.shape[1], k // BLOCK
        signed = codes.reshape(n, groups, k // groups) - zeros[:, :, None]
        if self.kind == "F32":
            return (signed * scales[:, :, None]).reshape(n, k).view(np.uint8)
        signed = signed.reshape(n, blocks, BLOCK)
        each = np.repeat(scales, blocks // groups, axis=1)[..., None].view(np.uint8)
        if self.kind == "Q8_0":
            return np.concatenate([each, signed.astype(np.int8).view(np.uint8)], 2).reshape(n, self.row_bytes)
        whole = (signed + (8 if self.kind == "Q4_0" else 16)).astype(np.uint8)
        low, high = whole[..., : BLOCK // 2] & 15, whole[..., BLOCK // 2 :] << 4
        fifth = [] if self.kind == "Q4_0" else [np.packbits(whole >> 4, axis=2, bitorder="little")]
        return np.concatenate([each, *fifth, low | high], 2).reshape(n, self.row_bytes)


def _make_grouped_tensor(
    name: str, tensors: Mapping[str, SafetensorsEntry], layout: GroupLayout, latest: _Latest, spec: str
) -> GroupedTensor:
    """Check the tensors of one matrix and choose its kind. Raises as `read_groups` does."""

    def refuse(why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{spec}: {name} {why}; accepted: the same model as a GGUF file, or with weights as they were trained")

    parts = {part: tensors.get(f"{name}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")}
    qweight, qzeros, scales, order = (parts[part] for part in ("qweight", "qzeros", "scales", "g_idx"))
    if qweight is None or qzeros is None or scales is None:
        raise refuse(f"has no {next(part for part in ('qzeros', 'scales') if parts[part] is None)}")
    forms = [(t.dtype, len(t.shape)) for t in (qweight, qzeros)]
    if forms != [("I32", 2)] * 2 or len(scales.shape) != 2 or scales.dtype not in ("F16", "BF16", "F32"):
        raise refuse(f"is of {qweight.dtype}, {qzeros.dtype} and {scales.dtype}, where int32 and float scales are read")
    k, n = qweight.shape
    k, n = (k * layout.shared, n) if layout.along_inputs else (k, n * layout.shared)
    groups = scales.shape[0]
    whole = groups > 0 and k % groups == 0 and k // groups % BLOCK == 0 and n % layout.shared == 0
    if not whole or scales.shape[1] != n or qzeros.shape != (groups, n // layout.shared):
        raise refuse(f"has {groups} groups in {k} inputs, and groups must be whole multiples of {BLOCK}")
    if order is not None and (order.dtype != "I32" or not np.array_equal(latest.read(order), np.arange(k) // (k // groups))):
        raise refuse(
            "has its inputs in another order (g_idx of desc_act true), which is not read; g_idx is read as input // group in int32"
        )
    zeros, factors = layout.compute_zeros(latest.read(qzeros)), latest.read(scales)
    with np.errstate(over="ignore"):
        halves = factors.astype(np.float16)
    middle = bool((zeros == 1 << layout.bits - 1).all())
    if not np.array_equal(halves.astype(np.float32), factors) or (layout.bits == 8 and not middle):
        kind = "F32"
    else:
        kind = "Q8_0" if layout.bits == 8 else "Q4_0" if middle else "Q5_0"
    factors = factors if kind == "F32" else halves
    return GroupedTensor(
        kind=kind, shape=(n, k), layout=layout, latest=latest, qweight=qweight,
        zeros=np.ascontiguousarray(zeros.T), scales=np.ascontiguousarray(factors.T),
    )  # fmt: skip
