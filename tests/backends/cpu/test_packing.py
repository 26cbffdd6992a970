"""Packed weights: the file's bytes in another order, of which every format gives back every weight."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from weights import EVERY, packed, random_weight, read_panels, reference_values, rows_of_kind

from ngramspec.backends.cpu import packing
from ngramspec.backends.cpu.arena import Arena
from ngramspec.backends.cpu.codegen.kernels import Kernels
from ngramspec.backends.cpu.formats import DEPTH, LINE, QUANTISED, WIDTH, PlainFormat, QuantFormat, count_panel_bytes, get_format
from ngramspec.backends.cpu.iq_blocks import BLOCK_BYTES, KINDS_OF_TABLES
from ngramspec.backends.cpu.matmul import unpack_rows
from ngramspec.backends.cpu.packing import PackedWeight, packed_bytes
from ngramspec.models.tensor_source import KINDS, row_bytes

WIDTHS = {1: (1, 31, 32, 70), 32: (32, 96, 1056), 256: (256, 768)}
"""K to try, by the weights in a block."""


def same_numbers(a: np.ndarray, b: np.ndarray) -> None:
    """Equal, where 0 and -0 are one number."""
    assert a.dtype == b.dtype == np.float32
    np.testing.assert_array_equal(a, b)


def weights_of(weight: PackedWeight) -> np.ndarray:
    """[N, K] by the description of the format alone."""
    if isinstance(weight.format, PlainFormat):
        kind = {PlainFormat.F32: np.float32, PlainFormat.F16: np.float16, PlainFormat.BF16: np.uint16}[weight.format]
        numbers = weight.data.view(kind).reshape(weight.n_panels, -1, WIDTH)
        if weight.format is PlainFormat.BF16:
            numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers.transpose(0, 2, 1).reshape(weight.n_panels * WIDTH, -1)[: weight.n_out, : weight.n_in].astype(np.float32)
    read = read_panels(weight)
    scale = read.scale.astype(np.float64)[:, :, None] * (1 if read.integers is None else read.integers)
    value = scale.repeat(DEPTH // scale.shape[2], axis=2) * read.numbers
    if read.offset is not None:
        offset = read.offset.astype(np.float64)[:, :, None] * (1 if read.offset_integers is None else read.offset_integers)
        value += offset.repeat(DEPTH // offset.shape[2], axis=2)
    return value.reshape(weight.n_out, -1).astype(np.float32)  # float64 held it all, so that it is rounded once


@pytest.mark.parametrize("kind", EVERY)
def test_every_weight_comes_back(kind: str, generic: Kernels) -> None:
    for k in WIDTHS[KINDS[kind][0]]:
        for n in (1, 16, 37):
            rows = rows_of_kind(kind, n, k, seed=n + k, special=True)
            weight, expected = packed(kind, rows), reference_values(kind, rows)
            assert (weight.n_out, weight.n_in, weight.format) == (n, k, get_format(kind))
            assert weight.data.ctypes.data % LINE == 0
            same_numbers(weights_of(weight), expected)
            same_numbers(unpack_rows(generic, weight, np.arange(n)), expected)
            order = np.array([n - 1, 0, n // 2, n // 2], np.int32)
            same_numbers(unpack_rows(generic, weight, order), expected[order])


@pytest.mark.parametrize("kind", EVERY)
def test_unpacking_on_every_target(kind: str, other: Kernels) -> None:
    rows = rows_of_kind(kind, 37, 512, special=True)
    same_numbers(unpack_rows(other, packed(kind, rows), np.arange(37)), reference_values(kind, rows))


@pytest.mark.parametrize("kind", EVERY)
def test_a_panel_has_the_bytes_of_the_file(kind: str) -> None:
    per_block = KINDS[kind][0]
    for n, k in ((48, max(per_block, 32)), (4096, 4096), (576, 1536), (37, 512)):
        filled = -(-n // WIDTH) * WIDTH
        assert random_weight(kind, WIDTH, k).data.nbytes == packed_bytes(kind, WIDTH, k)
        in_file, n_panels = filled * row_bytes(kind, k), filled // WIDTH
        # the scales' two parts end with a whole line; those of Q3_K to Q5_K and IQ4_XS are a byte each, of which the file keeps 4 or 6 bits
        most = filled * k * BLOCK_BYTES // 256 if kind in KINDS_OF_TABLES else 1.2 * in_file  # IQ1, IQ2 and IQ3: codes of 4 bits
        assert packed_bytes(kind, n, k) <= most + 2 * LINE * n_panels
        if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q6_K", "IQ4_NL", *PlainFormat.__members__):
            assert in_file <= packed_bytes(kind, n, k) < in_file + 2 * LINE * n_panels


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "BF16"])
def test_large_matrices_are_read_piece_by_piece(kind: str, generic: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of_kind(kind, 150, 512)
    monkeypatch.setattr(packing, "PIECE", 35 * rows.shape[1])  # 32 rows
    read = []

    def some(first: int, end: int) -> np.ndarray:
        read.append(end - first)
        return rows[first:end]

    weight = packing.pack(kind, (150, 512), some, Arena())
    same_numbers(unpack_rows(generic, weight, np.arange(150)), reference_values(kind, rows))
    assert max(read) == 32


@pytest.mark.parametrize("fmt", [*QUANTISED.values(), *PlainFormat])
def test_parts_of_a_panel_begin_with_a_line(fmt: QuantFormat | PlainFormat) -> None:
    for n_blocks in (1, 2, 8, 9, 48, 131):
        assert count_panel_bytes(fmt, n_blocks) % LINE == 0
        if isinstance(fmt, QuantFormat):
            assert 0 < n_blocks * fmt.scale_bytes <= fmt.super_at(n_blocks) <= fmt.codes_at(n_blocks) < count_panel_bytes(fmt, n_blocks)
            assert fmt.super_at(n_blocks) % LINE == fmt.codes_at(n_blocks) % LINE == 0


def take_rows(rows: np.ndarray, first: int, end: int) -> np.ndarray:
    return rows[first:end]


def test_threads_pack_several_weights_after_another_and_report_what_fails() -> None:
    kinds = ["Q4_K", "F16", "Q8_0"]
    rows = {kind: rows_of_kind(kind, 64, 256, seed=i) for i, kind in enumerate(kinds)}
    with packing.PackingThreads() as threads:
        weights = [packing.pack(kind, (64, 256), partial(take_rows, rows[kind]), Arena(), threads) for kind in kinds]
    for kind, weight in zip(kinds, weights, strict=True):
        assert np.array_equal(weight.data, packed(kind, rows[kind]).data)

    def read_until_the_file_ends(first: int, end: int) -> np.ndarray:
        if end > 1:
            raise OSError("the file ends")
        return rows["F16"][first:end]

    with pytest.raises(OSError, match="the file ends"), packing.PackingThreads() as threads:
        packing.pack("F16", (64, 256), read_until_the_file_ends, Arena(), threads)


def test_an_unknown_format() -> None:
    with pytest.raises(KeyError, match="TQ1_0"):
        get_format("TQ1_0")
