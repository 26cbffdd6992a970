"""Emit matrix products with AMX: tiles of up to 16 rows of codes times tiles of 16 outputs, 32 or 64 inputs deep, in one instruction.

Tiles hold integers alone, which are exact in any order. What is computed of them in float32 is what `products` computes, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from llvmlite import ir

from ngramspec.backends.cpu.codegen.activations import ACT_SCALE_BYTES, INTEGER_ZERO
from ngramspec.backends.cpu.codegen.emitter import BYTE, BYTES, FLOATS, GROUPS, HALF, LONG, SUPER_SHIFT, WORDS, ZEROS, Emitter
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

# Row counts with a kernel of their own; fewer rows are multiplied faster by vectors.
_ROWS, _FOLDED_ROWS = (8, 12, 16, 32), (8, 12, 16, 32, 64)
TILE_ROWS = 16  # Rows of a tile, at most.
STEPS = 4  # Pairs of blocks of a super-block, that are multiplied one after another.
_MINUS_ZEROS = ir.Constant(FLOATS, [-0.0] * WIDTH)
_VOID, _PAIRS = ir.VoidType(), ir.VectorType(HALF, LINE // 2)
# Numbers of the eight tiles: those of a turn's sums, of two steps' activations, of two steps' weights.
_SUMS, _ACTIVATIONS, _WEIGHTS = 0, 4, 6
_N_SUMS = _ACTIVATIONS - _SUMS  # Tiles of sums.
_ROWS_AT, _BYTES_AT = 48, 16  # In the configuration of tiles: how many rows each has, and how many bytes a row (Intel's manual, LDTILECFG).

Action = Callable[[], None]  # emits some instructions


def list_tile_rows(fmt: QuantFormat) -> tuple[int, ...]:
    """List the row counts that tiles pay for."""
    return _FOLDED_ROWS if fmt.exact else () if fmt.by_16 else _ROWS


def emit_int8_tiles(e: Emitter, fmt: QuantFormat, n_rows: int, args: Sequence[Any]) -> None:
    """Emit what `products.emit_int8` emits, with tiles where they pay."""
    if n_rows not in list_tile_rows(fmt):
        emit_int8(e, fmt, n_rows, args)
    else:
        (_FoldedProduct if fmt.exact else _SuperProduct if fmt.by_super else _BlockProduct)(e, fmt, n_rows, args).emit()


class _Unit(NamedTuple):
    """Some blocks of a panel, by their number in it. The first one's totals begin with biases, the last one's are results."""

    panel: Panel
    number: Any
    is_first: Any
    is_last: Any


class _Scaling(NamedTuple):
    """What scales the sums of a turn."""

    unit: _Unit
    rows: tuple[int, int]
    """First row and end of those whose totals the unit's products are added to."""
    actions: list[Action]


class _Product:
    """A product of `n_rows` rows with panels, unit by unit, through all panels as if they were one.

    A unit takes some turns. A turn multiplies what was unpacked before it, unpacks blocks of a later turn and scales the sums of the turn
    before it. Instructions on tiles stand apart from each other: one right after another takes up to four times as long while the other
    half of the core is busy.
    """

    dot: str
    depth: int
    """Inputs of a product."""

    def __init__(self, e: Emitter, fmt: QuantFormat, n_rows: int, args: Sequence[Any]) -> None:
        self.e, self.fmt, self.n_rows, self.args = e, fmt, n_rows, args
        self.n_blocks, self.x0, self.x_step, self.q0, self.q_step = args[3], args[6], args[7], args[8], args[9]
        self.tile_rows, self.n_tiles = min(n_rows, TILE_ROWS), 2 if n_rows > TILE_ROWS else 1
        self.totals = self.allocate(n_rows * LINE)

    def emit(self) -> None:
        e, b, n_panels = self.e, self.e.b, self.args[1]
        self._configure()
        with b.if_then(b.icmp_signed(">", n_panels, LONG(0))):
            n_units = self.count_units()
            self.emit_first_codes(self._make_unit(LONG(0), LONG(0), n_units))
            n_all = b.mul(n_panels, n_units)
            nothing = LONG(0)
            with e.loop(e.add_offset(n_all, 1), [nothing] * 4) as (g, (p_before, s_before, p, s), ends):
                wraps = b.icmp_signed(">=", e.add_offset(s, 1), n_units)
                p_next, s_next = b.select(wraps, e.add_offset(p, 1), p), b.select(wraps, nothing, e.add_offset(s, 1))
                ended = b.icmp_signed(">=", e.add_offset(g, 1), n_all)  # what is unpacked and multiplied from here on is not used
                p_next, s_next = b.select(ended, p, p_next), b.select(ended, s, s_next)
                ends += [p, s, p_next, s_next]
                before, now, after = (self._make_unit(*at, n_units) for at in ((p_before, s_before), (p, s), (p_next, s_next)))
                now = now._replace(is_last=b.and_(now.is_last, b.icmp_signed("<", g, n_all)))
                self.emit_unit(before, now, after, g)
        e.call("llvm.x86.tilerelease", _VOID)

    def _make_unit(self, p: Any, s: Any, n_units: Any) -> _Unit:
        b = self.e.b
        is_last = b.icmp_signed(">=", self.e.add_offset(s, 1), n_units)
        return _Unit(Panel(self.e, self.fmt, p, self.args), s, b.icmp_signed("==", s, LONG(0)), is_last)

    def emit_turn(self, stores: list[Action], products: list[Action], unpacks: list[Action], scales: _Scaling) -> None:
        """Emit a turn's instructions: what works on tiles spread evenly among the rest, and no sum scaled before all are stored."""
        e, b, unit, (first, end) = self.e, self.e.b, scales.unit, scales.rows
        if end > first:
            with b.if_then(unit.is_first), e.loop(LONG(end - first), []) as (r, _, _):
                e.store(e.load(unit.panel.bias_at, FLOATS, 4), self.locate_total(e.add_offset(r, first)), LINE)
        n_others = len(unpacks) + len(scales.actions)
        n_first = min(len(unpacks), n_others * len(stores) // (len(stores) + len(products)))
        for tiles, others in ((stores, unpacks[:n_first]), (products, unpacks[n_first:] + scales.actions)):
            for act in _spread_evenly(tiles, others):
                act()
        if end > first:
            with b.if_then(unit.is_last), e.loop(LONG(end - first), []) as (r, _, _):
                row = e.add_offset(r, first)
                e.store(e.load(self.locate_total(row), FLOATS, LINE), b.add(unit.panel.y, b.mul(row, self.args[12])))

    def make_reader(self, unit: _Unit, i: Any) -> Callable[[int], Any]:
        """Return a function from a group to its codes in block i of the unit's panel; its first call prefetches, too."""
        e, fmt = self.e, self.fmt

        @cache
        def begin() -> Callable[[int], Any]:
            prefetch_next(e, fmt, unit.panel, i)
            return e.make_code_reader(fmt, e.b.add(unit.panel.codes, e.b.mul(i, LONG(fmt.code_bytes))))

        return lambda g: begin()(g)

    def locate_total(self, r: Any) -> Any:
        return self.e.b.add(self.totals, self.e.b.mul(r, LONG(LINE)))

    def locate_line(self, start: Any, number: int) -> Any:
        return self.e.add_offset(start, number * LINE)

    def load_tile(self, tile: int, address: Any, step: Any) -> Action:
        return lambda: self._call_tile("tileloadd64", tile, address, step)

    def store_tile(self, tile: int, address: Any) -> Action:
        return lambda: self._call_tile("tilestored64", tile, address, LONG(LINE))

    def clear_tile(self, tile: int) -> Action:
        return lambda: self.e.call("llvm.x86.tilezero", _VOID, BYTE(tile))

    def multiply_tiles(self, dot: str, sums: int, activations: int, weights: int) -> Action:
        return lambda: self.e.call(f"llvm.x86.{dot}", _VOID, BYTE(sums), BYTE(activations), BYTE(weights))

    def _call_tile(self, name: str, tile: int, address: Any, step: Any) -> None:
        self.e.call(f"llvm.x86.{name}", _VOID, BYTE(tile), self.e.b.inttoptr(address, BYTE.as_pointer()), step)

    def _configure(self) -> None:
        """Emit the sizes of the tiles: rows of sums and of activations, and words of four inputs of weights."""
        config = [0] * LINE
        config[0] = 1
        for tile in range(8):
            config[_ROWS_AT + tile] = self.depth // 4 if tile >= _WEIGHTS else self.tile_rows
            config[_BYTES_AT + 2 * tile] = self.depth if _ACTIVATIONS <= tile < _WEIGHTS else LINE
        at = self.allocate(LINE)
        self.e.store(ir.Constant(BYTES, config), at, LINE)
        self.e.call("llvm.x86.ldtilecfg", _VOID, self.e.b.inttoptr(at, BYTE.as_pointer()))

    def allocate(self, n_bytes: int) -> Any:
        memory = self.e.b.alloca(BYTE, LONG(n_bytes))
        memory.align = LINE
        return self.e.b.ptrtoint(memory, LONG)

    def count_units(self) -> Any:
        """Emit the number of units of a panel."""
        raise NotImplementedError

    def emit_first_codes(self, unit: _Unit) -> None:
        """Emit the codes that the first turn multiplies."""
        raise NotImplementedError

    def emit_unit(self, before: _Unit, now: _Unit, after: _Unit, number: Any) -> None:
        """Emit the turns of a unit, the `number`-th of all."""
        raise NotImplementedError


def _spread_evenly(few: list[Action], many: list[Action]) -> Iterator[Action]:
    done = 0
    for i, one in enumerate(few):
        yield one
        until = (i + 1) * len(many) // len(few)
        yield from many[done:until]
        done = until
    yield from many[done:]


class _PlainProduct(_Product):
    """A product of codes as they are: each block has sums of its own, for one or two tiles of rows. A turn takes `steps` blocks."""

    depth = DEPTH

    def __init__(self, e: Emitter, fmt: QuantFormat, n_rows: int, args: Sequence[Any]) -> None:
        super().__init__(e, fmt, n_rows, args)
        self.steps = _N_SUMS // self.n_tiles
        self.codes_bytes = self.steps * DEPTH * WIDTH
        self.codes = self.allocate(2 * self.codes_bytes)  # of this turn and of the next one
        self.sums = self.allocate(self.steps * n_rows * LINE)

    def emit_first_codes(self, unit: _Unit) -> None:
        for act in self._unpack(unit, 0, self.codes):
            act()

    def emit_unit(self, before: _Unit, now: _Unit, after: _Unit, number: Any) -> None:
        e, b, n_turns = self.e, self.e.b, self.count_turns()
        for turn in range(n_turns):
            parity = b.and_(e.add_offset(b.mul(number, LONG(n_turns)), turn), LONG(1))
            here, there = (b.add(self.codes, b.mul(which, LONG(self.codes_bytes))) for which in (parity, b.xor(parity, LONG(1))))
            stores, products = [], []
            for k in range(self.steps):
                (x, x_step), weights = self.locate_inputs(now, turn, k), _WEIGHTS + k % 2
                products.append(self.load_tile(weights, e.add_offset(here, k * DEPTH * WIDTH), LONG(LINE)))
                for t in range(self.n_tiles):
                    sums, activations = _SUMS + k * self.n_tiles + t, _ACTIVATIONS + (k + t) % 2
                    stores += [self.store_tile(sums, self.locate_sums(k, t * TILE_ROWS)), self.clear_tile(sums)]
                    row = b.add(x, b.mul(x_step, LONG(t * TILE_ROWS)))
                    products += [self.load_tile(activations, row, x_step), self.multiply_tiles(self.dot, sums, activations, weights)]
            following = (now, turn + 1) if turn + 1 < n_turns else (after, 0)
            done = (now, turn - 1) if turn else (before, n_turns - 1)
            self.emit_turn(stores, products, self._unpack(*following, there), self.scale(*done))

    def find_block(self, unit: _Unit, turn: int, k: int) -> Any:
        """Emit the block of a step, or the last one where there is none, of which nothing is used."""
        b = self.e.b
        i = self.e.add_offset(b.mul(unit.number, LONG(self.count_turns() * self.steps)), turn * self.steps + k)
        last = b.sub(self.n_blocks, LONG(1))
        return b.select(b.icmp_signed("<", i, last), i, last)

    def locate_inputs(self, unit: _Unit, turn: int, k: int) -> tuple[Any, Any]:
        """Emit the address of a step's activations and the bytes between their rows."""
        return self.e.b.add(self.x0, self.e.b.mul(self.find_block(unit, turn, k), LONG(DEPTH))), self.x_step

    def _unpack(self, unit: _Unit, turn: int, to: Any) -> list[Action]:
        """List what unpacks the blocks of a turn, as words of four inputs."""
        return [act for k in range(self.steps) for act in self._unpack_block(unit, self.find_block(unit, turn, k), to, k)]

    def _unpack_block(self, unit: _Unit, i: Any, to: Any, k: int) -> list[Action]:
        e, b, fmt = self.e, self.e.b, self.fmt
        code = self.make_reader(unit, i)

        def unpack_groups(first: int) -> None:
            for g in range(first, first + 4):
                word = code(g)
                if fmt.zero and not fmt.by_super:
                    word = b.sub(b.bitcast(word, BYTES), ir.Constant(BYTES, [fmt.zero] * LINE))
                e.store(word, self.locate_line(to, k * GROUPS + g), LINE)

        return [partial(unpack_groups, first) for first in range(0, GROUPS, 4)]

    def locate_sums(self, step: int, r: int) -> Any:
        return self.locate_line(self.sums, step * self.n_rows + r)

    def load_sums(self, step: int, r: int) -> Any:
        return self.e.load(self.locate_sums(step, r), WORDS, LINE)

    def count_turns(self) -> int:
        """Return the turns of a unit."""
        raise NotImplementedError

    def scale(self, unit: _Unit, turn: int) -> _Scaling:
        """List what scales the sums of a turn, row by row."""
        raise NotImplementedError


class _BlockProduct(_PlainProduct):
    """A unit is a turn: some quant blocks with a float16 scale each. Zeros are taken off codes before they are multiplied.

    Blocks that the last unit of a panel lacks leave totals as they are: nothing, times -0, is added, which changes no number.
    """

    dot = "tdpbssd"

    def __init__(self, e: Emitter, fmt: QuantFormat, n_rows: int, args: Sequence[Any]) -> None:
        super().__init__(e, fmt, n_rows, args)
        self.nothing = self.allocate(LINE)
        e.store(ir.Constant(BYTES, [0] * LINE), self.nothing, LINE)

    def count_turns(self) -> int:
        return 1

    def count_units(self) -> Any:
        return self.e.b.udiv(self.e.add_offset(self.n_blocks, self.steps - 1), LONG(self.steps))

    def _has_block(self, unit: _Unit, k: int) -> Any:
        b = self.e.b
        return b.icmp_signed("<", self.e.add_offset(b.mul(unit.number, LONG(self.steps)), k), self.n_blocks)

    def locate_inputs(self, unit: _Unit, turn: int, k: int) -> tuple[Any, Any]:
        b, (x, step), there = self.e.b, super().locate_inputs(unit, turn, k), self._has_block(unit, k)
        return b.select(there, x, self.nothing), b.select(there, step, LONG(0))

    def scale(self, unit: _Unit, turn: int) -> _Scaling:
        e, b = self.e, self.e.b
        there = [self._has_block(unit, k) for k in range(self.steps)]
        blocks = [self.find_block(unit, turn, k) for k in range(self.steps)]
        scales = [load_block_scales(e, self.fmt, unit.panel, i) for i in blocks]
        scales = [(b.select(is_one, scale, _MINUS_ZEROS), offset) for is_one, (scale, offset) in zip(there, scales, strict=True)]
        starts = [b.add(self.q0, b.mul(i, LONG(ACT_SCALE_BYTES))) for i in blocks]

        def scale_row(r: int) -> None:
            place = self.locate_total(LONG(r))
            total = e.load(place, FLOATS, LINE)
            for k, (each, q) in enumerate(zip(scales, starts, strict=True)):
                following = add_block(e, each, self.load_sums(k, r), b.add(q, b.mul(self.q_step, LONG(r))), total)
                total = b.select(there[k], following, total) if self.fmt.offsets else following
            e.store(total, place, LINE)

        return _Scaling(unit, (0, self.n_rows), [partial(scale_row, r) for r in range(self.n_rows)])


class _SuperProduct(_PlainProduct):
    """A unit is a super-block."""

    dot = "tdpbsud"

    def __init__(self, e: Emitter, fmt: QuantFormat, n_rows: int, args: Sequence[Any]) -> None:
        super().__init__(e, fmt, n_rows, args)
        self.products = self.allocate(n_rows * LINE)  # of the super-block so far

    def count_turns(self) -> int:
        return SUPER // self.steps

    def count_units(self) -> Any:
        return self.e.b.lshr(self.n_blocks, LONG(SUPER_SHIFT))

    def scale(self, unit: _Unit, turn: int) -> _Scaling:
        e, b, fmt = self.e, self.e.b, self.fmt
        scales = [e.to_floats(load_integer(e, fmt, unit.panel.scales, self.find_block(unit, turn, k), 0)) for k in range(self.steps)]
        shift = b.mul(unit.number, LONG(SUPER * ACT_SCALE_BYTES))
        whole = load_super_scales(e, fmt, unit.panel, unit.number) if turn == self.count_turns() - 1 else None

        def scale_row(r: int) -> None:
            place = self.locate_line(self.products, r)
            product = e.load(place, FLOATS, LINE) if turn else ZEROS
            for k, scale in enumerate(scales):
                product = e.fma(e.to_floats(self.load_sums(k, r)), scale, product)
            if whole is None:
                e.store(product, place, LINE)
                return
            place, q = self.locate_total(LONG(r)), b.add(b.add(self.q0, b.mul(self.q_step, LONG(r))), shift)
            e.store(add_super(e, fmt, whole, product, q, e.load(place, FLOATS, LINE)), place, LINE)

        n_done = self.n_rows if whole else 0
        return _Scaling(unit, (0, n_done), [partial(scale_row, r) for r in range(self.n_rows)])


class _FoldedProduct(_Product):
    """A product of codes that are multiplied by their integer scales first, to one byte or two of one, so that a super-block has one sum.

    A unit is a super-block, a turn its product with one or two tiles of rows.
    """

    depth = 2 * DEPTH

    def __init__(self, e: Emitter, fmt: QuantFormat, n_rows: int, args: Sequence[Any]) -> None:
        super().__init__(e, fmt, n_rows, args)
        self.turn_rows = self.tile_rows * self.n_tiles
        self.n_turns = n_rows // self.turn_rows
        self.n_bytes = 1 if fmt.bits == 2 else 2
        self.codes_bytes = self.n_bytes * SUPER * DEPTH * WIDTH
        self.codes, self.sums = self.allocate(2 * self.codes_bytes), self.allocate(self.n_bytes * self.turn_rows * LINE)

    def count_units(self) -> Any:
        return self.e.b.lshr(self.n_blocks, LONG(SUPER_SHIFT))

    def emit_first_codes(self, unit: _Unit) -> None:
        with self.e.loop(LONG(STEPS), []) as (pair, _, _):
            for act in self._fold_pair(unit, pair, self.codes):
                act()

    def emit_unit(self, before: _Unit, now: _Unit, after: _Unit, number: Any) -> None:
        e, b = self.e, self.e.b
        here, there = (b.add(self.codes, b.mul(b.and_(e.add_offset(number, k), LONG(1)), LONG(self.codes_bytes))) for k in range(2))
        x = b.add(self.x0, b.mul(now.number, LONG(SUPER * DEPTH)))
        for turn in range(self.n_turns):
            stores, products = [], []
            for tile in range(self.n_tiles * self.n_bytes):
                stores += [self.store_tile(_SUMS + tile, self.locate_line(self.sums, tile * self.tile_rows)), self.clear_tile(_SUMS + tile)]
            for k in range(STEPS):
                for h in range(self.n_bytes):
                    products.append(self.load_tile(_WEIGHTS + h, self.locate_line(here, (k * self.n_bytes + h) * 2 * GROUPS), LONG(LINE)))
                    for t in range(self.n_tiles):
                        if h == 0:
                            row = b.mul(self.x_step, LONG(turn * self.turn_rows + t * TILE_ROWS))
                            products.append(self.load_tile(_ACTIVATIONS + t, e.add_offset(b.add(x, row), k * self.depth), self.x_step))
                        dot = "tdpbssd" if h else "tdpbsud"
                        products.append(self.multiply_tiles(dot, _SUMS + t * self.n_bytes + h, _ACTIVATIONS + t, _WEIGHTS + h))
            share = STEPS // self.n_turns
            unpacks = [act for pair in range(turn * share, (turn + 1) * share) for act in self._fold_pair(after, LONG(pair), there)]
            self.emit_turn(stores, products, unpacks, self._scale(*((now, turn - 1) if turn else (before, self.n_turns - 1))))

    def _fold_pair(self, unit: _Unit, pair: Any, to: Any) -> list[Action]:
        """List what unpacks a pair of a super-block's blocks and multiplies their codes by their scales."""
        b = self.e.b
        first = b.add(b.shl(unit.number, LONG(SUPER_SHIFT)), b.mul(pair, LONG(2)))
        place = b.add(to, b.mul(pair, LONG(self.codes_bytes // STEPS)))
        return [act for k in range(2) for act in self._fold_block(unit, self.e.add_offset(first, k), self.locate_line(place, k * GROUPS))]

    def _fold_block(self, unit: _Unit, i: Any, to: Any) -> list[Action]:
        """List what unpacks block i and multiplies its codes: low bytes of the products lie in a tile of weights, high ones in the next."""
        e, b, fmt = self.e, self.e.b, self.fmt
        code, scales = self.make_reader(unit, i), [cache(partial(self._load_scales, unit.panel, i, n)) for n in range(fmt.n_parts)]
        eight, low = ir.Constant(_PAIRS, [8] * (LINE // 2)), ir.Constant(_PAIRS, [255] * (LINE // 2))

        def fold_group(g: int) -> None:
            even, odd, zero = scales[g * fmt.n_parts // GROUPS]()
            codes = b.bitcast(code(g), BYTES)
            first, second = (e.call("llvm.x86.avx512.pmaddubs.w.512", _PAIRS, codes, each) for each in (even, odd))
            if fmt.integers and fmt.zero:
                first, second = b.sub(first, zero), b.sub(second, zero)
            if self.n_bytes == 1:
                bytes_of = [b.or_(first, b.shl(second, eight))]
            else:  # pinned, or LLVM finds two permutations, which take longer
                left, right = e.pin_registers([b.shl(second, eight), b.lshr(first, eight)])
                bytes_of = [b.or_(b.and_(first, low), left), b.or_(right, b.and_(second, b.not_(low)))]
            for h, each in enumerate(bytes_of):
                e.store(each, self.locate_line(to, h * 2 * GROUPS + g), LINE)

        return [partial(fold_group, g) for g in range(GROUPS)]

    def _load_scales(self, panel: Panel, i: Any, n: int) -> tuple[Any, Any, Any]:
        """Emit the scales of a block's n-th part, each before a zero byte and after one, and times INTEGER_ZERO."""
        e, b = self.e, self.e.b
        low = b.and_(load_integer(e, self.fmt, panel.scales, i, n), e.splat_words(255))
        even = b.or_(low, b.shl(low, e.splat_words(16)))
        odd = b.shl(even, e.splat_words(8))
        zero = b.ashr(b.bitcast(odd, _PAIRS), ir.Constant(_PAIRS, [8 - INTEGER_ZERO.bit_length() + 1] * (LINE // 2)))
        return b.bitcast(even, BYTES), b.bitcast(odd, BYTES), zero

    def _scale(self, unit: _Unit, turn: int) -> _Scaling:
        e, b = self.e, self.e.b
        whole = load_super_scales(e, self.fmt, unit.panel, unit.number)
        shift = b.mul(unit.number, LONG(SUPER * ACT_SCALE_BYTES))

        def scale_row(r: int) -> None:
            row, (tile, line) = turn * self.turn_rows + r, divmod(r, self.tile_rows)
            q = b.add(b.add(self.q0, b.mul(self.q_step, LONG(row))), shift)
            at = [self.locate_line(self.sums, (tile * self.n_bytes + h) * self.tile_rows + line) for h in range(self.n_bytes)]
            low, *high = [e.load(each, WORDS, LINE) for each in at]
            for each in high:
                low = b.add(low, b.shl(each, e.splat_words(8)))
            place = self.locate_total(LONG(row))
            e.store(add_super(e, self.fmt, whole, e.to_floats(low), q, e.load(place, FLOATS, LINE)), place, LINE)

        first = turn * self.turn_rows
        return _Scaling(unit, (first, first + self.turn_rows), [partial(scale_row, r) for r in range(self.turn_rows)])
