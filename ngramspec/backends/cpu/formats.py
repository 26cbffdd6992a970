"""Define how weights are laid out in memory: what a quant block of each of GGML's formats becomes in a packed panel of 16 outputs.

A panel holds 16 outputs with all their inputs, in three parts, each beginning at a multiple of 64 bytes: the scales of its quant blocks of
32 inputs, those of its super-blocks of 256, the codes. No part of a weight is rounded. A panel has as many bytes as the file, but for IQ1,
IQ2 and IQ3, which `iq_blocks` takes apart first.
The module holds constants and layouts only.

The codes of a block are bit planes, lowest bits first, each made of vectors of 64 bytes. Byte 4 i + j of a vector belongs to output i and
input 4 g + j; which bits of the byte are meant determines the group g. In a plane of 4 bits, vector v holds groups v (low half) and v + 4;
of 2 bits, groups 4 v to 4 v + 3, lowest first; of one bit, its single vector holds groups 0 to 7; of 8 bits, each vector holds one group.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

WIDTH = 16  # outputs of a panel
DEPTH = 32  # inputs of a quant block
SUPER = 8  # quant blocks of a super-block
LINE = 64  # bytes: parts of a panel begin at multiples of a cache line

# Values of the codes of GGML's IQ4_NL and IQ4_XS (ggml-common.h).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Values of MXFP4's codes, twice those of 4-bit floating-point numbers (E2M1): a block's scale is half of its power of two.
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Values of the codes of IQ3_S, IQ3_XXS (four times), IQ2_* (eight times) and IQ1_* (eight times), as `iq_blocks` numbers them.
_IQ3_S_VALUES = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
_IQ3_XXS_VALUES = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
_IQ2_VALUES = (8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0)
_IQ1_VALUES = (-7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0)


class QuantFormat(NamedTuple):
    """Layout of a kind of quant blocks. A weight is scale · (code - zero), or scale · code - offset; codes are unsigned."""

    planes: tuple[int, ...]
    """Bits of each plane."""
    zero: int = 0
    by_16: bool = False
    """Whether scales belong to 16 inputs each, not to 32."""
    half_scales: bool = True
    """Whether a block's scale is a float16 of its own; else it is an integer times the float16 of its super-block."""
    scale_zero: int = 0
    """Subtracted from the stored byte to get the integer scale."""
    offsets: bool = False
    """Whether there are offsets, stored like the scales: with half scales a float16 that is added, else integers times a float16 that are
    subtracted."""
    values: tuple[int, ...] | None = None
    """Values that 4-bit codes stand for; None: the codes themselves."""
    exponent: int = 0
    """The float16 of a super-block is multiplied by 2 to this."""
    powers: bool = False
    """Whether half scales are powers of two beyond float16's range, kept as bfloat16."""
    exact: bool = False
    """Whether the sum of a super-block's products, times their integer scales, is exact: in float32, since it stays below 2^24, or as an
    integer. Else it is rounded after each part."""
    integers: bool = False
    """Whether this sum is an integer, of codes less their zero if they have one."""

    @property
    def by_super(self) -> bool:
        """Whether it has super-blocks, and activations are quantised by 256 for it, not by 32."""
        return not self.half_scales

    @property
    def bits(self) -> int:
        """Bits of what a code is multiplied as."""
        return 8 if self.values else sum(self.planes)

    @property
    def n_parts(self) -> int:
        """Parts of a block that have a scale each."""
        return 2 if self.by_16 else 1

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of one block of a panel."""
        each = 2 * WIDTH if self.half_scales else WIDTH * self.n_parts
        return each * (1 + self.offsets)

    @property
    def super_bytes(self) -> int:
        """Bytes of the scales of one super-block of a panel."""
        return 0 if self.half_scales else 2 * WIDTH * (1 + self.offsets)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one block of a panel."""
        return sum(self.planes) * DEPTH * WIDTH // 8

    def super_at(self, n_blocks: int) -> int:
        """Return where in a panel the super-blocks' scales begin, in bytes."""
        return _round_up(n_blocks * self.scale_bytes)

    def codes_at(self, n_blocks: int) -> int:
        """Return where in a panel the codes begin, in bytes."""
        return self.super_at(n_blocks) + _round_up(-(-n_blocks // SUPER) * self.super_bytes)

    def count_panel_bytes(self, n_blocks: int) -> int:
        return self.codes_at(n_blocks) + n_blocks * self.code_bytes


def _round_up(n_bytes: int) -> int:
    return -(-n_bytes // LINE) * LINE


# Quant formats by GGML's name.
QUANTISED: dict[str, QuantFormat] = {
    "Q4_0": QuantFormat((4,), zero=8),
    "Q4_1": QuantFormat((4,), offsets=True),
    "Q5_0": QuantFormat((4, 1), zero=16),
    "Q5_1": QuantFormat((4, 1), offsets=True),
    "Q8_0": QuantFormat((8,), zero=128),
    "Q2_K": QuantFormat((2,), by_16=True, half_scales=False, offsets=True, exact=True),
    "Q3_K": QuantFormat((2, 1), zero=4, by_16=True, half_scales=False, scale_zero=32, exact=True),
    "Q4_K": QuantFormat((4,), half_scales=False, offsets=True, exact=True, integers=True),
    "Q5_K": QuantFormat((4, 1), half_scales=False, offsets=True),
    "Q6_K": QuantFormat((4, 2), zero=32, by_16=True, half_scales=False, scale_zero=128, exact=True, integers=True),
    "IQ4_NL": QuantFormat((4,), zero=128, values=IQ4_VALUES),
    "MXFP4": QuantFormat((4,), zero=128, values=MXFP4_VALUES, powers=True),
    "IQ4_XS": QuantFormat((4,), zero=128, half_scales=False, scale_zero=32, values=IQ4_VALUES),
    "IQ3_S": QuantFormat((4,), zero=128, half_scales=False, values=_IQ3_S_VALUES),
    "IQ3_XXS": QuantFormat((4,), zero=128, half_scales=False, values=_IQ3_XXS_VALUES, exponent=-2),
    "IQ2_XXS": QuantFormat((4,), zero=128, half_scales=False, values=_IQ2_VALUES, exponent=-3),
    "IQ2_XS": QuantFormat((4,), zero=128, by_16=True, half_scales=False, values=_IQ2_VALUES, exponent=-3),
    "IQ2_S": QuantFormat((4,), zero=128, by_16=True, half_scales=False, values=_IQ2_VALUES, exponent=-3),
    "IQ1_S": QuantFormat((4,), zero=128, half_scales=False, values=_IQ1_VALUES, exponent=-3),
    "IQ1_M": QuantFormat((4,), zero=128, by_16=True, half_scales=False, values=_IQ1_VALUES, exponent=-3),
}


class PlainFormat(Enum):
    """Weights that are not quantised, by GGML's name: a block of a panel is [32, 16] numbers, the 16 of one input side by side."""

    BF16 = "BF16"
    F16 = "F16"
    F32 = "F32"

    @property
    def itemsize(self) -> int:
        return 4 if self is PlainFormat.F32 else 2


WeightFormat = QuantFormat | PlainFormat


def get_format(kind: str) -> WeightFormat:
    """Return the layout of weights of GGML's type `kind`. Raises KeyError if it is not supported."""
    return QUANTISED[kind] if kind in QUANTISED else PlainFormat[kind]


def count_panel_bytes(fmt: WeightFormat, n_blocks: int) -> int:
    return fmt.count_panel_bytes(n_blocks) if isinstance(fmt, QuantFormat) else n_blocks * DEPTH * WIDTH * fmt.itemsize
