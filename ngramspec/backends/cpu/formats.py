"""How quantised weights are kept in memory: what a block of each of GGML's formats becomes in a panel of 16 outputs.

A panel holds 16 outputs and all their inputs, in three parts, each beginning at a multiple of 64 bytes: the scales of its blocks of 32
inputs, those of its super-blocks of 256, the codes. No part of a weight is rounded or widened: a panel has the bytes that the file has.
Constants and layouts; no code runs here, nothing knows models.

The codes of a block are bit planes, lowest bits first, each of them vectors of 64 bytes: byte 4 i + j of a vector belongs to output i and
to input 4 g + j, where g, the group, is which of a byte's bits are meant. The plane of 4 bits has vector v with groups v (low half) and
v + 4; that of 2 bits has vector v with groups 4 v to 4 v + 3, lowest first; that of one bit has one vector with groups 0 to 7; that of 8
bits one vector a group.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

WIDTH = 16
"""Outputs of a panel."""
DEPTH = 32
"""Inputs of a block."""
SUPER = 8
"""Blocks of a super-block."""
LINE = 64
"""Bytes at multiples of which parts of a panel begin."""

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of GGML's IQ4_NL and IQ4_XS stand for (ggml-common.h)."""


class QuantFormat(NamedTuple):
    """A weight is scale · (code - zero), or scale · code - offset; codes are unsigned."""

    planes: tuple[int, ...]
    """Bits of each plane."""
    zero: int = 0
    by_16: bool = False
    """Scales of 16 inputs each, not of 32."""
    half_scales: bool = True
    """The scale of a block is a float16 of its own; else an integer times the float16 of its super-block."""
    scale_zero: int = 0
    """What the integer is less than the byte that is kept."""
    offsets: bool = False
    """Offsets in the way of the scales: of a half scale the float16 that is added, else integers times a float16 that are taken off."""
    values: tuple[int, ...] | None = None
    """What a code of 4 bits stands for."""

    @property
    def scale_bytes(self) -> int:
        """Of a block of a panel."""
        each = 2 * WIDTH if self.half_scales else WIDTH * (1 + self.by_16)
        return each * (1 + self.offsets)

    @property
    def super_bytes(self) -> int:
        """Of a super-block of a panel."""
        return 0 if self.half_scales else 2 * WIDTH * (1 + self.offsets)

    @property
    def code_bytes(self) -> int:
        """Of a block of a panel."""
        return sum(self.planes) * DEPTH * WIDTH // 8

    def super_at(self, n_blocks: int) -> int:
        """Where in a panel the super-blocks' scales begin."""
        return _whole(n_blocks * self.scale_bytes)

    def codes_at(self, n_blocks: int) -> int:
        """Where in a panel the codes begin."""
        return self.super_at(n_blocks) + _whole(-(-n_blocks // SUPER) * self.super_bytes)

    def panel_bytes(self, n_blocks: int) -> int:
        return self.codes_at(n_blocks) + n_blocks * self.code_bytes


def _whole(n_bytes: int) -> int:
    return -(-n_bytes // LINE) * LINE


QUANTISED: dict[str, QuantFormat] = {
    "Q4_0": QuantFormat((4,), zero=8),
    "Q4_1": QuantFormat((4,), offsets=True),
    "Q5_0": QuantFormat((4, 1), zero=16),
    "Q5_1": QuantFormat((4, 1), offsets=True),
    "Q8_0": QuantFormat((8,), zero=128),
    "Q2_K": QuantFormat((2,), by_16=True, half_scales=False, offsets=True),
    "Q3_K": QuantFormat((2, 1), zero=4, by_16=True, half_scales=False, scale_zero=32),
    "Q4_K": QuantFormat((4,), half_scales=False, offsets=True),
    "Q5_K": QuantFormat((4, 1), half_scales=False, offsets=True),
    "Q6_K": QuantFormat((4, 2), zero=32, by_16=True, half_scales=False, scale_zero=128),
    "IQ4_NL": QuantFormat((4,), zero=128, values=IQ4_VALUES),
    "IQ4_XS": QuantFormat((4,), zero=128, half_scales=False, scale_zero=32, values=IQ4_VALUES),
}
"""By GGML's name."""


class PlainFormat(Enum):
    """Weights that were not quantised, by GGML's name: a block of a panel is [32, 16] numbers, those of an input side by side."""

    BF16 = "BF16"
    F16 = "F16"
    F32 = "F32"

    @property
    def itemsize(self) -> int:
        return 4 if self is PlainFormat.F32 else 2


WeightFormat = QuantFormat | PlainFormat


def format_of(kind: str) -> WeightFormat:
    """That of weights of GGML's type `kind`. Raises KeyError for one that is not read."""
    return QUANTISED[kind] if kind in QUANTISED else PlainFormat[kind]


def panel_bytes(fmt: WeightFormat, n_blocks: int) -> int:
    return fmt.panel_bytes(n_blocks) if isinstance(fmt, QuantFormat) else n_blocks * DEPTH * WIDTH * fmt.itemsize
