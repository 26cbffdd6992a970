"""Emit matrix products with AMX: a tile of up to 16 rows of codes times a tile of 16 outputs, 32 inputs deep, in one instruction.

Tiles hold integers alone, which are exact in any order. What is computed of them in float32 is what `products` computes, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from ngramspec.backends.cpu.codegen.activations import ACT_SCALE_BYTES
from ngramspec.backends.cpu.codegen.emitter import BYTE, BYTES, FLOATS, GROUPS, LONG, SUPER_SHIFT, WORDS, ZEROS, Emitter
from ngramspec.backends.cpu.codegen.products import (
    Panel,
    add_block,
    add_super,
    emit_int8,
    load_block_scales,
    load_integer,
    load_super_scales,
    prefetch_next,
)
from ngramspec.backends.cpu.formats import DEPTH, LINE, SUPER, WIDTH, QuantFormat

_ROWS = (8, 12, 16)  # Row counts with a kernel of their own; fewer rows are multiplied faster by vectors.
STEPS = 4  # Tiles of weights that are multiplied in a turn, one after another.
# Numbers of the eight tiles: those of a turn's sums, of two steps' activations, of two steps' weights.
_SUMS, _ACTIVATIONS, _WEIGHTS = 0, 4, 6
_ROWS_AT, _BYTES_AT = 48, 16  # In the configuration of tiles: how many rows each has, and how many bytes a row (Intel's manual, LDTILECFG).
_VOID = ir.VoidType()


def list_tile_rows(fmt: QuantFormat) -> tuple[int, ...]:
    """List the row counts that tiles pay for: none where scales belong to 16 inputs, half of what a product takes for 32."""
    return () if fmt.by_16 else _ROWS


def emit_int8_tiles(e: Emitter, fmt: QuantFormat, n_rows: int, args: Sequence[Any]) -> None:
    """Emit what `products.emit_int8` emits, with tiles where they pay."""
    if n_rows in list_tile_rows(fmt):
        (_SuperProduct if fmt.by_super else _BlockProduct)(e, fmt, n_rows, args).emit()
    else:
        emit_int8(e, fmt, n_rows, args)


class _Product:
    """A product of `n_rows` rows with panels.

    A turn multiplies STEPS tiles of weights that the turn before it unpacked, and scales the sums of the turn before it. So a tile of sums
    is stored long after it was computed, and nothing is loaded soon after it was stored. A group of turns is what has a scale of its own:
    the loop's body.
    """

    turns: int
    """Turns of a group."""
    dot: str

    def __init__(self, e: Emitter, fmt: QuantFormat, n_rows: int, args: Sequence[Any]) -> None:
        self.e, self.fmt, self.n_rows, self.args = e, fmt, n_rows, args
        self.n_blocks, self.x0, self.x_step, self.q0, self.q_step = args[3], args[6], args[7], args[8], args[9]
        self.codes = self.allocate(2 * STEPS * DEPTH * WIDTH)  # of this turn and of the next one
        self.sums, self.totals = self.allocate(STEPS * n_rows * LINE), self.allocate(n_rows * LINE)

    def emit(self) -> None:
        e, b, (n_panels, y_step) = self.e, self.e.b, (self.args[1], self.args[12])
        self._configure()
        with b.if_then(b.icmp_signed(">", n_panels, LONG(0))), e.loop(n_panels, []) as (p, _, _):
            panel = Panel(e, self.fmt, p, self.args)
            with e.loop(LONG(self.n_rows), []) as (r, _, _):
                e.store(e.load(panel.bias_at, FLOATS, 4), self.locate_row(self.totals, r), LINE)
            for k in range(STEPS):
                self._unpack(panel, LONG(0), k)
            self._emit_groups(panel)
            self.emit_rest(panel)
            with e.loop(LONG(self.n_rows), []) as (r, _, _):
                e.store(e.load(self.locate_row(self.totals, r), FLOATS, LINE), b.add(panel.y, b.mul(r, y_step)))
        e.call("llvm.x86.tilerelease", _VOID)

    def _emit_groups(self, panel: Panel) -> None:
        """Emit all groups, and one more turn for the sums of the last one; the first turn has none to scale."""
        e, b = self.e, self.e.b
        n_groups, n_scaled = self.count_groups()
        with e.loop(b.add(n_groups, LONG(1)), []) as (s, _, _):
            inside, before = b.icmp_signed("<", s, n_groups), b.sub(s, LONG(1))
            behind = b.and_(b.icmp_signed(">", s, LONG(0)), b.icmp_signed("<=", s, n_scaled))
            for turn in range(self.turns):
                for c in range(STEPS):
                    self._call_tile("tilestored64", _SUMS + c, self.locate_sums(c, LONG(0)), LONG(LINE))
                for c in range(STEPS):
                    e.call("llvm.x86.tilezero", _VOID, BYTE(_SUMS + c))
                scales_some = inside if turn else behind
                group = s if turn else b.select(behind, before, LONG(0))
                scale_row = self.make_scaler(panel, group, (turn - 1) % self.turns)
                here = b.add(b.mul(s, LONG(self.turns)), LONG(turn))
                for k in range(STEPS):
                    with b.if_then(inside):
                        self._multiply(here, k)
                        self._unpack(panel, e.add_offset(here, 1), k)
                    with b.if_then(scales_some):
                        for r in range(k * self.n_rows // STEPS, (k + 1) * self.n_rows // STEPS):
                            scale_row(LONG(r))

    def _multiply(self, turn: Any, k: int) -> None:
        e, b = self.e, self.e.b
        x = b.add(self.x0, b.mul(self._find_block(turn, k), LONG(DEPTH)))
        activations, weights = _ACTIVATIONS + k % 2, _WEIGHTS + k % 2
        self._call_tile("tileloadd64", activations, x, self.x_step)
        self._call_tile("tileloadd64", weights, self._locate_codes(turn, k), LONG(LINE))
        e.call(f"llvm.x86.{self.dot}", _VOID, BYTE(_SUMS + k), BYTE(activations), BYTE(weights))

    def _unpack(self, panel: Panel, turn: Any, k: int) -> None:
        """Emit the codes of a step's block, as words of four inputs."""
        e, b, fmt = self.e, self.e.b, self.fmt
        i = self._find_block(turn, k)
        prefetch_next(e, fmt, panel, i)
        code = e.make_code_reader(fmt, b.add(panel.codes, b.mul(i, LONG(fmt.code_bytes))))
        for g in range(GROUPS):
            word = code(g)
            if fmt.zero and not fmt.by_super:
                word = b.sub(b.bitcast(word, BYTES), ir.Constant(BYTES, [fmt.zero] * LINE))
            e.store(word, e.add_offset(self._locate_codes(turn, k), LINE * g), LINE)

    def _find_block(self, turn: Any, k: int) -> Any:
        """Emit the block of a step, or the last one where there is none, of which nothing is used."""
        b = self.e.b
        i, last = self.e.add_offset(b.mul(turn, LONG(STEPS)), k), b.sub(self.n_blocks, LONG(1))
        return b.select(b.icmp_signed("<", i, last), i, last)

    def _locate_codes(self, turn: Any, k: int) -> Any:
        b = self.e.b
        return b.add(self.codes, b.mul(self.e.add_offset(b.mul(b.and_(turn, LONG(1)), LONG(STEPS)), k), LONG(DEPTH * WIDTH)))

    def locate_row(self, start: Any, r: Any) -> Any:
        return self.e.b.add(start, self.e.b.mul(r, LONG(LINE)))

    def locate_sums(self, step: int, r: Any) -> Any:
        return self.locate_row(self.e.add_offset(self.sums, step * self.n_rows * LINE), r)

    def load_sums(self, step: int, r: Any) -> Any:
        return self.e.load(self.locate_sums(step, r), WORDS, LINE)

    def _configure(self) -> None:
        """Emit the sizes of the tiles: rows of sums and of activations, and words of four inputs of weights."""
        config = [0] * LINE
        config[0] = 1
        for tile in range(8):
            config[_ROWS_AT + tile] = DEPTH // 4 if tile >= _WEIGHTS else self.n_rows
            config[_BYTES_AT + 2 * tile] = DEPTH if _ACTIVATIONS <= tile < _WEIGHTS else LINE
        at = self.allocate(LINE)
        self.e.store(ir.Constant(BYTES, config), at, LINE)
        self.e.call("llvm.x86.ldtilecfg", _VOID, self.e.b.inttoptr(at, BYTE.as_pointer()))

    def _call_tile(self, name: str, tile: int, address: Any, step: Any) -> None:
        self.e.call(f"llvm.x86.{name}", _VOID, BYTE(tile), self.e.b.inttoptr(address, BYTE.as_pointer()), step)

    def allocate(self, n_bytes: int) -> Any:
        memory = self.e.b.alloca(BYTE, LONG(n_bytes))
        memory.align = LINE
        return self.e.b.ptrtoint(memory, LONG)

    def count_groups(self) -> tuple[Any, Any]:
        """Emit the number of groups, and of those whose sums the loop scales."""
        raise NotImplementedError

    def make_scaler(self, panel: Panel, group: Any, turn: int) -> Callable[[Any], None]:
        """Return a function from a row to the instructions that scale its sums of this turn."""
        raise NotImplementedError

    def emit_rest(self, panel: Panel) -> None:
        """Emit what the last turn's sums add, where they make up no whole turn."""


class _BlockProduct(_Product):
    """A turn is 4 quant blocks with a float16 scale each. Zeros are taken off codes before they are multiplied."""

    turns, dot = 1, "tdpbssd"

    def count_groups(self) -> tuple[Any, Any]:
        b = self.e.b
        return b.lshr(self.e.add_offset(self.n_blocks, STEPS - 1), LONG(2)), b.lshr(self.n_blocks, LONG(2))

    def make_scaler(self, panel: Panel, group: Any, turn: int) -> Callable[[Any], None]:
        first = self.e.b.mul(group, LONG(STEPS))
        scales = [load_block_scales(self.e, self.fmt, panel, self.e.add_offset(first, k)) for k in range(STEPS)]
        return lambda r: self._add_blocks(r, first, scales)

    def emit_rest(self, panel: Panel) -> None:
        e, b = self.e, self.e.b
        first, left = b.mul(self.count_groups()[1], LONG(STEPS)), b.and_(self.n_blocks, LONG(STEPS - 1))
        for k in range(STEPS - 1):
            with b.if_then(b.icmp_signed(">", left, LONG(k))), e.loop(LONG(self.n_rows), []) as (r, _, _):
                i = e.add_offset(first, k)
                self._add_blocks(r, i, [load_block_scales(e, self.fmt, panel, i)], k)

    def _add_blocks(self, r: Any, first: Any, scales: list[tuple[Any, Any]], step: int = 0) -> None:
        """Emit the total of row r plus the products of blocks `first` and following, which were multiplied in this step and following."""
        e, b = self.e, self.e.b
        place, q = self.locate_row(self.totals, r), b.add(b.add(self.q0, b.mul(r, self.q_step)), b.mul(first, LONG(ACT_SCALE_BYTES)))
        total = e.load(place, FLOATS, LINE)
        for k, each in enumerate(scales):
            total = add_block(e, each, self.load_sums(step + k, r), e.add_offset(q, k * ACT_SCALE_BYTES), total)
        e.store(total, place, LINE)


class _SuperProduct(_Product):
    """A group is a super-block."""

    turns, dot = SUPER // STEPS, "tdpbsud"

    def __init__(self, e: Emitter, fmt: QuantFormat, n_rows: int, args: Sequence[Any]) -> None:
        super().__init__(e, fmt, n_rows, args)
        self.products = self.allocate(n_rows * LINE)  # of the super-block so far

    def count_groups(self) -> tuple[Any, Any]:
        n_supers = self.e.b.lshr(self.n_blocks, LONG(SUPER_SHIFT))
        return n_supers, n_supers

    def make_scaler(self, panel: Panel, group: Any, turn: int) -> Callable[[Any], None]:
        e, b, fmt = self.e, self.e.b, self.fmt
        first = b.shl(group, LONG(SUPER_SHIFT))
        blocks = [e.add_offset(first, turn * STEPS + k) for k in range(STEPS)]
        scales = [e.to_floats(load_integer(e, fmt, panel.scales, i, 0)) for i in blocks]
        shift = b.mul(group, LONG(SUPER * ACT_SCALE_BYTES))
        whole = load_super_scales(e, fmt, panel, group) if turn == self.turns - 1 else None

        def scale_row(r: Any) -> None:
            place = self.locate_row(self.products, r)
            product = e.load(place, FLOATS, LINE) if turn else ZEROS
            for k, scale in enumerate(scales):
                product = e.fma(e.to_floats(self.load_sums(k, r)), scale, product)
            if whole is None:
                e.store(product, place, LINE)
                return
            place, q = self.locate_row(self.totals, r), b.add(b.add(self.q0, b.mul(r, self.q_step)), shift)
            e.store(add_super(e, fmt, whole, product, q, e.load(place, FLOATS, LINE)), place, LINE)

        return scale_row
