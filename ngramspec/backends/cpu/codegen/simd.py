"""Provide the inner loop of attention as numba intrinsics: sums of products that stay in vector registers.

A tile is some rows by some panels of 16 outputs (see `README.md`). Every output is one chain of fused multiply-adds over the inputs in
their order, so its bits depend neither on the other rows and panels of the tile nor on the width of the processor's vectors. Keys and
values are stored as float32, or as float16 whose bits an array of uint16 holds. Knows arrays alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ngramspec.backends.cpu.codegen.activations import emit_exp
from ngramspec.backends.cpu.codegen.emitter import FLOAT, FLOATS, HALF, LONG, WORD, ZEROS, Emitter, widen_halves
from ngramspec.backends.cpu.codegen.targets import get_host_target
from ngramspec.backends.cpu.formats import LINE, WIDTH
from ngramspec.outputs import BLOCK

# What is emitted here depends on the processor's registers and float16 alone: code for a level of processors (`datastore.bundled_code`) is
# the code of every processor that has it.
HOST = get_host_target()._replace(name="", dot="", cpu="", features="", tiles=False)
# Register tile: panels and rows whose sums fit into vector registers besides the weights. 6 rows by 4 panels take fewer loads than 24 rows
# by one (50 against 42 thousand million products a second).
TILE_PANELS = 4 if HOST.chains >= 24 else 2
TILE_ROWS = HOST.chains // TILE_PANELS
# Inputs per turn of the loops of `score_blocks` and keys per turn of those of `mix_blocks`. Large tiles are no faster with 8 and take a
# second more to compile, and with 2 keys a turn sums leave the registers; small ones are 10 % faster with 8.
SCORE_STEP, MIX_STEP = (2, 1) if HOST.chains >= 24 else (8, 8)
TILE_BLOCKS = TILE_PANELS * WIDTH // BLOCK  # Blocks of keys that `score_blocks` multiplies at a time.
assert TILE_BLOCKS * BLOCK == TILE_PANELS * WIDTH
# Of states of recurrent layers: columns at a time, which the first cache holds, and chains of a sum, for their latency.
COLUMNS, PARTS = 32, 4
LOWEST = -3.0e38  # A score whose weight in the softmax is zero.
_MOST = 65504.0  # The largest float16.


@intrinsic
def to_kv_dtype(typing_context, array, x):
    """Convert x, float32, to the type of an array of keys or values: itself, or the bits of the nearest finite float16."""

    def codegen(context, builder, signature, args):
        if signature.return_type == types.float32:
            return args[1]
        for bound, sign in ((_MOST, ">"), (-_MOST, "<")):
            beyond = builder.fcmp_ordered(sign, args[1], FLOAT(bound))
            args = (args[0], builder.select(beyond, FLOAT(bound), args[1]))
        if HOST.halves:
            return builder.bitcast(builder.fptrunc(args[1], ir.HalfType()), HALF)
        return _narrow_to_half(builder, args[1])

    return (types.float32 if array.dtype == types.float32 else types.uint16)(array, types.float32), codegen


def _narrow_to_half(b: Any, x: Any) -> Any:
    """Convert a finite x to the bits of the nearest float16 by integer arithmetic."""
    bits = b.bitcast(x, WORD)
    sign = b.and_(b.lshr(bits, WORD(16)), WORD(0x8000))
    size = b.and_(bits, WORD(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, WORD(13)), WORD(1))
    normal = b.lshr(b.add(b.sub(size, WORD(0x38000000)), b.add(odd, WORD(0xFFF))), WORD(13))
    small = b.sub(b.bitcast(b.fadd(b.bitcast(size, FLOAT), FLOAT(0.5)), WORD), WORD(0x3F000000))
    chosen = b.select(b.icmp_unsigned("<", size, WORD(0x38800000)), small, normal)
    return b.trunc(b.or_(sign, chosen), HALF)


@intrinsic
def load_as_float32(typing_context, array, i):
    """Return element i of a flat array of keys or values as float32."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        value = builder.load(builder.gep(data, [args[1]]))
        if array.dtype == types.float32:
            return value
        return builder.fpext(builder.bitcast(value, ir.HalfType()), FLOAT) if HOST.halves else widen_halves(builder, value)

    return types.float32(array, types.int64), codegen


@intrinsic
def replace_by_exponentials(typing_context, s, n):
    """Replace s[:n] by exp(s - max) in place, LOWEST by 0; return the sum, in 16 lanes. n is a positive multiple of 16."""

    def codegen(context, builder, signature, args):
        e = Emitter(builder, HOST)
        start = builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, LONG)
        turns = builder.sdiv(args[1], LONG(WIDTH))
        lowest = ir.Constant(FLOATS, [LOWEST] * WIDTH)
        with e.loop(turns, [lowest]) as (i, (most,), ends):
            x = e.load(builder.add(start, builder.mul(i, LONG(4 * WIDTH))), FLOATS, 4)
            ends.append(builder.select(builder.fcmp_ordered(">", x, most), x, most))
        top = FLOAT(LOWEST)
        for lane in range(WIDTH):
            x = builder.extract_element(ends[0], WORD(lane))
            top = builder.select(builder.fcmp_ordered(">", x, top), x, top)
        top = e.spread(top)
        with e.loop(turns, [ZEROS]) as (i, (total,), ends):
            at = builder.add(start, builder.mul(i, LONG(4 * WIDTH)))
            x = e.load(at, FLOATS, 4)
            y = builder.select(builder.fcmp_ordered("==", x, lowest), ZEROS, emit_exp(e, builder.fsub(x, top)))
            e.store(y, at)
            ends.append(builder.fadd(total, y))
        total = FLOAT(0.0)
        for lane in range(WIDTH):
            total = builder.fadd(total, builder.extract_element(ends[0], WORD(lane)))
        return total

    return types.float32(s, types.int64), codegen


def _emit_by_rows(builder: Any, n_rows: Any, emit: Callable[[int], None]) -> None:
    """Emit `emit(rows)` for 1 to TILE_ROWS rows and a branch to the one for n_rows."""
    after = builder.append_basic_block("rows_end")
    blocks = [builder.append_basic_block(f"rows_{rows}") for rows in range(1, TILE_ROWS + 1)]
    branch = builder.switch(n_rows, blocks[-1])
    for rows, block in enumerate(blocks, 1):
        if rows < TILE_ROWS:
            branch.add_case(LONG(rows), block)
        builder.position_at_end(block)
        emit(rows)
        builder.branch(after)
    builder.position_at_end(after)


def _get_data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return builder.ptrtoint(context.make_array(kind)(context, builder, array).data, LONG)


def _make_block_finder(e: Emitter, data: Any, table: Any, step: Any) -> Callable[[Any], Any]:
    """Return a function from an index in the table of blocks, int32, to the address of that block, `step` bytes from the next one."""

    def find(i: Any) -> Any:
        block = e.load(e.b.add(table, e.b.mul(i, LONG(4))), WORD, 4)
        return e.b.add(data, e.b.mul(e.b.sext(block, LONG), step))

    return find


def _emit_fetch(e: Emitter, address: Any, n_bytes: int) -> None:
    for line in range(0, n_bytes, LINE):
        e.prefetch(e.add_offset(address, line))


def _emit_sums(e: Emitter, size: int, xs: list[Any], ws: list[Any], totals: list[Any]) -> list[Any]:
    """Emit totals [rows · panels] plus the products of the numbers at xs [rows] and of 16 weights at each of ws [panels].

    `size`: bytes of a weight.
    """
    weights = [(e.load_halves(at) if size == 2 else e.load(at, FLOATS, 4)) for at in ws]
    ends = []
    for r, at in enumerate(xs):  # a row's number is loaded when it is needed, so that it takes no register before
        x = e.spread(e.load(at, FLOAT, 4))
        ends += [e.fma(x, weight, total) for weight, total in zip(weights, totals[r * len(ws) :], strict=False)]
    return ends


@intrinsic
def score_blocks(typing_context, queries, keys, blocks, scores):
    """Compute the scores [n_rows, TILE_BLOCKS · BLOCK] of queries [n_rows, n_dim] and the keys [n_dim, BLOCK] of blocks table[first], … .

    `queries`: address, bytes from row to row, n_rows (1 to TILE_ROWS), n_dim (a positive multiple of SCORE_STEP); `scores`: address, bytes
    from row to row. `keys` is a flat array. `blocks`: where the head's keys begin in a block and the size of a block, both in elements;
    address of the table, int32; first; ahead; last. As many blocks from table[ahead] on are fetched into the cache. Beyond table[last], its
    block is repeated.
    """
    size = keys.dtype.bitwidth // 8

    def codegen(context, builder, signature, args):
        (q, q_step, n_rows, n_dim), (key_at, block_step, table, first, ahead, last), (s, s_step) = (
            cgutils.unpack_tuple(builder, args[i]) for i in (0, 2, 3)
        )
        e = Emitter(builder, HOST)
        data = builder.add(_get_data(context, builder, keys, args[1]), builder.mul(key_at, LONG(size)))
        find = _make_block_finder(e, data, table, builder.mul(block_step, LONG(size)))

        def find_blocks(first: Any) -> list[Any]:
            numbers = [builder.add(first, LONG(k)) for k in range(TILE_BLOCKS)]
            return [find(builder.select(builder.icmp_signed("<", i, last), i, last)) for i in numbers]

        blocks, later = find_blocks(first), find_blocks(ahead)

        def emit(rows: int) -> None:
            with e.loop(builder.sdiv(n_dim, LONG(SCORE_STEP)), [ZEROS] * (rows * TILE_PANELS)) as (i, totals, ends):
                at = builder.mul(i, LONG(SCORE_STEP * size * BLOCK))
                for block in later:
                    _emit_fetch(e, builder.add(block, at), SCORE_STEP * size * BLOCK)
                d = builder.mul(i, LONG(4 * SCORE_STEP))
                xs = [builder.add(builder.add(q, builder.mul(LONG(r), q_step)), d) for r in range(rows)]
                for j in range(SCORE_STEP):
                    ws = [
                        e.add_offset(builder.add(block, at), size * (j * BLOCK + panel))
                        for block in blocks
                        for panel in range(0, BLOCK, WIDTH)
                    ]
                    totals = _emit_sums(e, size, [e.add_offset(x, 4 * j) for x in xs], ws, totals)
                ends += totals
            for r in range(rows):
                y = builder.add(s, builder.mul(LONG(r), s_step))
                for p in range(TILE_PANELS):
                    e.store(ends[r * TILE_PANELS + p], e.add_offset(y, 4 * WIDTH * p))

        _emit_by_rows(builder, n_rows, emit)
        return context.get_dummy_value()

    return types.void(queries, keys, blocks, scores), codegen


@intrinsic
def mix_blocks(typing_context, shares, values, blocks, mixed):
    """Add the products of shares [n_rows, n_blocks · BLOCK] and values [BLOCK, 16 · TILE_PANELS] to mixed [n_rows, 16 · TILE_PANELS].

    `shares`: address, bytes from row to row, n_rows (1 to TILE_ROWS); `mixed`: address, bytes from row to row. `values` is a flat array.
    `blocks`: where the values begin in a block, the distance from key to key, and the size of a block, all in elements; address of the
    table, int32; first; ahead; n_blocks. The values are those of blocks table[first], … ; as many from table[ahead] on are fetched into the
    cache.
    """
    size = values.dtype.bitwidth // 8

    def codegen(context, builder, signature, args):
        (s, s_step, n_rows), (value_at, row_step, block_step, table, first, ahead, n_blocks), (y, y_step) = (
            cgutils.unpack_tuple(builder, args[i]) for i in (0, 2, 3)
        )
        e, row_step = Emitter(builder, HOST), builder.mul(row_step, LONG(size))
        data = builder.add(_get_data(context, builder, values, args[1]), builder.mul(value_at, LONG(size)))
        find = _make_block_finder(e, data, table, builder.mul(block_step, LONG(size)))

        def emit(rows: int) -> None:
            ys = [
                e.add_offset(builder.add(y, builder.mul(LONG(r), y_step)), 4 * WIDTH * p) for r in range(rows) for p in range(TILE_PANELS)
            ]
            with e.loop(n_blocks, [e.load(at, FLOATS, 4) for at in ys]) as (t, carried, ends):
                block, later = (find(builder.add(i, t)) for i in (first, ahead))
                with e.loop(LONG(BLOCK // MIX_STEP), carried) as (i, totals, inner_ends):
                    at = builder.mul(builder.mul(i, LONG(MIX_STEP)), row_step)
                    x = builder.add(s, builder.mul(builder.add(builder.mul(t, LONG(BLOCK)), builder.mul(i, LONG(MIX_STEP))), LONG(4)))
                    xs = [builder.add(x, builder.mul(LONG(r), s_step)) for r in range(rows)]
                    for j in range(MIX_STEP):
                        key = builder.add(at, builder.mul(LONG(j), row_step))
                        _emit_fetch(e, builder.add(later, key), TILE_PANELS * size * WIDTH)
                        ws = [e.add_offset(builder.add(block, key), size * WIDTH * p) for p in range(TILE_PANELS)]
                        totals = _emit_sums(e, size, [e.add_offset(x, 4 * j) for x in xs], ws, totals)
                    inner_ends += totals
                ends += inner_ends
            for at, total in zip(ys, ends, strict=True):
                e.store(total, at)

        _emit_by_rows(builder, n_rows, emit)
        return context.get_dummy_value()

    return types.void(shares, values, blocks, mixed), codegen


@intrinsic(prefer_literal=True)
def multiply_add(typing_context, panels, rows, x, w, y, shape):
    """Add x [rows, n_inputs] · w [n_inputs, 16 panels] to y [rows, 16 panels].

    Each is (array, where it begins, its step from row to row), counted in elements. Arrays are flat, of float32, or for w of float16 as
    uint16. `shape`: n_rows, n_inputs, both positive. Rows from n_rows on repeat the last one.
    """
    n_panels, n_tile_rows = panels.literal_value, rows.literal_value
    size = w[0].dtype.bitwidth // 8

    def codegen(context, builder, signature, args):
        e = Emitter(builder, HOST)

        def get_address(i, item):
            array, at, step = cgutils.unpack_tuple(builder, args[i], 3)
            data = _get_data(context, builder, signature.args[i][0], array)
            return builder.add(data, builder.mul(at, LONG(item))), builder.mul(step, LONG(item))

        (x, x_step), (w, w_step), (y, y_step) = get_address(2, 4), get_address(3, size), get_address(4, 4)
        n_rows, n_inputs = cgutils.unpack_tuple(builder, args[5], 2)
        last = builder.sub(n_rows, LONG(1))
        lines = [builder.select(builder.icmp_signed("<", LONG(r), last), LONG(r), last) for r in range(n_tile_rows)]
        xs = [builder.add(x, builder.mul(line, x_step)) for line in lines]
        rows = [builder.add(y, builder.mul(line, y_step)) for line in lines]
        ys = [e.add_offset(row, 4 * WIDTH * p) for row in rows for p in range(n_panels)]
        with e.loop(n_inputs, [e.load(at, FLOATS, 4) for at in ys]) as (i, totals, ends):
            here, shift = builder.add(w, builder.mul(i, w_step)), builder.mul(i, LONG(4))
            ws = [e.add_offset(here, size * WIDTH * p) for p in range(n_panels)]
            ends += _emit_sums(e, size, [builder.add(at, shift) for at in xs], ws, totals)
        for at, total in zip(ys, ends, strict=True):
            e.store(total, at)
        return context.get_dummy_value()

    return types.void(panels, rows, x, w, y, shape), codegen


def _emit_sum_of_parts(builder: Any, totals: list[Any]) -> list[Any]:
    """Add the totals of PARTS chains in pairs: vectors of COLUMNS sums."""
    while len(totals) > COLUMNS // WIDTH:
        half = len(totals) // 2
        totals = [builder.fadd(a, b) for a, b in zip(totals[:half], totals[half:], strict=True)]
    return totals


def _emit_state_loop(e: Emitter, turns: Any, states: tuple[Any, ...], vectors: tuple[Any, ...], decay: Any, added: list[Any]) -> None:
    """Emit state after = decay · state before + x ⊗ added, and what y reads from it: yᵀ · state.

    `turns`: of PARTS rows; `states`: addresses of both; `vectors`: of x, of y and of room for what is read; `added`: vectors of COLUMNS.
    """
    builder, (before, after), (first, second, out), n_vectors = e.b, states, vectors, len(added)
    with e.loop(turns, [ZEROS] * (PARTS * n_vectors)) as (i, totals, ends):
        number, row = builder.mul(i, LONG(4 * PARTS)), builder.mul(i, LONG(4 * PARTS * COLUMNS))
        for part in range(PARTS):
            x, y = (e.spread(e.load(e.add_offset(builder.add(at, number), 4 * part), FLOAT, 4)) for at in (first, second))
            for c in range(n_vectors):
                place = 4 * (part * COLUMNS + c * WIDTH)
                state = e.load(e.add_offset(builder.add(before, row), place), FLOATS, 4)
                state = e.fma(x, added[c], builder.fmul(decay, state))
                e.store(state, e.add_offset(builder.add(after, row), place))
                ends.append(e.fma(y, state, totals[part * n_vectors + c]))
    for c, total in enumerate(_emit_sum_of_parts(builder, ends)):
        e.store(total, e.add_offset(out, 4 * WIDTH * c))


@intrinsic
def advance_state(typing_context, states, vectors, n_dim, rates):
    """Compute COLUMNS columns of a state [n_dim, COLUMNS] of Gated DeltaNet a token later, and what a query reads from it.

    `states`: addresses of the state before it and of room for the one after it, which may be the same. `vectors`: addresses of k and q
    [n_dim], of v [COLUMNS], and of room for what is read [COLUMNS]. `rates`: decay and beta. n_dim is a positive multiple of PARTS. A
    column's sums over n_dim are PARTS chains of fused multiply-adds, of every PARTS-th row each, whose totals are added in pairs.
    """

    def codegen(context, builder, signature, args):
        e = Emitter(builder, HOST)
        (before, after), (k, q, v, out), rates = (cgutils.unpack_tuple(builder, args[i]) for i in (0, 1, 3))
        n_vectors, (decay, beta) = COLUMNS // WIDTH, (e.spread(rate) for rate in rates)
        turns = builder.sdiv(args[2], LONG(PARTS))
        with e.loop(turns, [ZEROS] * (PARTS * n_vectors)) as (i, totals, ends):
            number, row = builder.mul(i, LONG(4 * PARTS)), builder.mul(i, LONG(4 * PARTS * COLUMNS))
            for part in range(PARTS):
                x = e.spread(e.load(e.add_offset(builder.add(k, number), 4 * part), FLOAT, 4))
                for c in range(n_vectors):
                    state = e.load(e.add_offset(builder.add(before, row), 4 * (part * COLUMNS + c * WIDTH)), FLOATS, 4)
                    ends.append(e.fma(x, state, totals[part * n_vectors + c]))
        deltas = []
        for c, total in enumerate(_emit_sum_of_parts(builder, ends)):
            target = e.load(e.add_offset(v, 4 * WIDTH * c), FLOATS, 4)
            deltas.append(builder.fmul(builder.fsub(target, builder.fmul(decay, total)), beta))
        _emit_state_loop(e, turns, (before, after), (k, q, out), decay, deltas)
        return context.get_dummy_value()

    return types.void(states, vectors, types.int64, rates), codegen


@intrinsic
def add_to_state(typing_context, states, vectors, n_dim, decay):
    """Compute COLUMNS columns of a state [n_dim, COLUMNS] of Mamba-2 a token later, and what is read from it.

    As `advance_state`, with `vectors`: addresses of B and C [n_dim], of what is added times B [COLUMNS], and of room for what is read.
    """

    def codegen(context, builder, signature, args):
        e = Emitter(builder, HOST)
        (before, after), (b, c, x, out) = (cgutils.unpack_tuple(builder, args[i]) for i in (0, 1))
        added = [e.load(e.add_offset(x, 4 * at), FLOATS, 4) for at in range(0, COLUMNS, WIDTH)]
        turns = builder.sdiv(args[2], LONG(PARTS))
        _emit_state_loop(e, turns, (before, after), (b, c, out), e.spread(args[3]), added)
        return context.get_dummy_value()

    return types.void(states, vectors, types.int64, types.float32), codegen
