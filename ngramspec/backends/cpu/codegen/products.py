"""Emit matrix products: rows of activations times packed panels (`formats`), as codes of 8 bits or as float32, and unpacking of a panel.

Arguments of a kernel are those of `kernels.N_ARGUMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir

from ngramspec.backends.cpu.codegen.activations import ACT_SCALE_BYTES, BLOCK_SUMS_AT, HALF_STARTS_AT, HALF_SUMS_AT
from ngramspec.backends.cpu.codegen.emitter import FLOAT, FLOATS, HALF, LONG, NOUGHTS, SUPER_SHIFT, WORD, WORDS, ZEROS, Emitter
from ngramspec.backends.cpu.formats import DEPTH, LINE, SUPER, WIDTH, PlainFormat, QuantFormat, WeightFormat

# Places of a panel from which it is prefetched at a time: a processor's own prefetching follows each for itself, up to the end of its page.
STREAMS = 4
EXACT_BLOCKS = 4  # Blocks of 4-bit codes whose products with codes up to 127, times scales up to 63, float32 adds up exactly: below 2^24.
AT_ONCE = 2  # Rows whose sums are under way at a time with AVX-512 VNNI: their registers are free again before the next rows need some.


def emit_int8(e: Emitter, fmt: QuantFormat, n_rows: int, args: Sequence[Any]) -> None:
    b, n_panels, n_blocks, x0, x_step, q0, q_step = e.b, args[1], args[3], args[6], args[7], args[8], args[9]
    xs, qs = [x0], [q0]
    for _ in range(n_rows - 1):
        xs.append(e.b.add(xs[-1], x_step))
        qs.append(e.b.add(qs[-1], q_step))

    with b.if_then(b.icmp_signed(">", n_panels, LONG(0))), e.loop(n_panels, []) as (p, _, _):
        panel = Panel(e, fmt, p, args)
        n_turns, emit = (b.lshr(n_blocks, LONG(SUPER_SHIFT)), _emit_int8_super) if fmt.by_super else (n_blocks, _emit_int8_block)
        with e.loop(n_turns, [e.load(panel.bias_at, FLOATS, 4)] * n_rows) as (i, totals, ends):
            ends += emit(e, fmt, panel, totals, i, xs, qs)
        y = panel.y
        for total in ends:
            e.store(total, y)
            y = b.add(y, args[12])


class Panel:
    """Addresses of one panel; `next`: of the one after it, which comes into the cache, bit by bit, while this one is multiplied."""

    def __init__(self, e: Emitter, fmt: QuantFormat, p: Any, args: Sequence[Any]) -> None:
        b = e.b
        w0, _, panel_bytes, _, super_at, codes_at, _, _, _, _, bias0, y0, _ = args
        self.scales = b.add(w0, b.mul(p, panel_bytes))
        self.next = b.add(self.scales, panel_bytes)
        self.stream_bytes = b.mul(b.udiv(panel_bytes, LONG(STREAMS * LINE)), LONG(LINE))
        self.supers, self.codes = b.add(self.scales, super_at), b.add(self.scales, codes_at)
        shift = b.mul(p, LONG(4 * WIDTH))
        self.bias_at, self.y = b.add(bias0, shift), b.add(y0, shift)


def _emit_block_products(
    e: Emitter, fmt: QuantFormat, panel: Panel, i: Any, xs: list[Any], starts: list[list[Any]], scale: Any = None
) -> list[list[Any]]:
    """Emit `starts` [rows][parts] plus the dot products of block i, times `scale` if there is one.

    Codes have their zeros in them, but for what `_find_zero` takes off.
    """
    b = e.b
    prefetch_next(e, fmt, panel, i)
    codes = cache(e.make_code_reader(fmt, b.add(panel.codes, b.mul(i, LONG(fmt.code_bytes)))))
    x_at = [b.add(x, b.mul(i, LONG(DEPTH))) for x in xs]
    if scale is not None:
        return [[total] for total in e.emit_scaled_products(codes, x_at, fmt.bits, scale, [total for (total,) in starts])]
    at_once = AT_ONCE if e.target.dot == "vnni512" else len(xs)
    groups = (slice(r, r + at_once) for r in range(0, len(xs), at_once))
    return [sums for rows in groups for sums in e.emit_products(codes, x_at[rows], fmt.bits, starts[rows])]


def prefetch_next(e: Emitter, fmt: QuantFormat, panel: Panel, i: Any) -> None:
    """Emit requests for block i's share of the next panel: a STREAMS-th of it from each of as many places."""
    size = fmt.code_bytes + fmt.scale_bytes + fmt.super_bytes // SUPER
    share = -(-size // STREAMS)
    cursor = e.b.add(panel.next, e.b.mul(i, LONG(share)))
    for _ in range(STREAMS):
        for line in range(0, share, LINE):
            e.prefetch(e.add_offset(cursor, line))
        cursor = e.b.add(cursor, panel.stream_bytes)


def _find_zero(e: Emitter, fmt: QuantFormat) -> int:
    """Return the zero that codes still contain in dot products: signed ones of codes of 8 bits have taken 128 off."""
    return fmt.zero - 128 if e.target.dot == "neon" and fmt.bits == 8 else fmt.zero


def _emit_int8_block(e: Emitter, fmt: QuantFormat, panel: Panel, totals: list[Any], i: Any, xs: list[Any], qs: list[Any]) -> list[Any]:
    """Emit the totals of the rows plus block i's products."""
    b, zero = e.b, _find_zero(e, fmt)
    q_at = [b.add(q, b.mul(i, LONG(ACT_SCALE_BYTES))) for q in qs]
    sums = _emit_block_products(e, fmt, panel, i, xs, [[NOUGHTS]] * len(xs))
    scales, ends = load_block_scales(e, fmt, panel, i), []
    for q, (whole,), total in zip(q_at, sums, totals, strict=True):
        if zero:
            whole = b.sub(whole, b.mul(e.spread(e.load(e.add_offset(q, 4), WORD, 4)), e.splat_words(zero % 2**32)))
        ends.append(add_block(e, scales, whole, q, total))
    return ends


def load_block_scales(e: Emitter, fmt: QuantFormat, panel: Panel, i: Any) -> tuple[Any, Any]:
    """Emit the scale and the offset of block i; None if it has no offsets."""
    at = e.b.add(panel.scales, e.b.mul(i, LONG(fmt.scale_bytes)))
    return e.load_scales(fmt, at), e.load_halves(e.add_offset(at, 2 * WIDTH)) if fmt.offsets else None


def add_block(e: Emitter, scales: tuple[Any, Any], whole: Any, q: Any, total: Any) -> Any:
    """Emit a row's total plus a block's sum of products; the activation scales of the row's block lie at q."""
    scale, offset = scales
    total = e.fma(e.to_floats(whole), e.b.fmul(scale, e.spread(e.load(q, FLOAT, 4))), total)
    return total if offset is None else e.fma(offset, e.spread(e.load(e.add_offset(q, 12), FLOAT, 4)), total)


def _emit_int8_super(e: Emitter, fmt: QuantFormat, panel: Panel, totals: list[Any], s: Any, xs: list[Any], qs: list[Any]) -> list[Any]:
    """Emit the totals of the rows plus super-block s's products."""
    q_at = [e.b.add(q, e.b.mul(s, LONG(SUPER * ACT_SCALE_BYTES))) for q in qs]
    products = (_emit_integer_sums if fmt.integers else _emit_float_sums)(e, fmt, panel, e.b.shl(s, LONG(SUPER_SHIFT)), xs, q_at)
    whole = load_super_scales(e, fmt, panel, s)
    return [add_super(e, fmt, whole, *row) for row in zip(products, q_at, totals, strict=True)]


def _emit_integer_sums(e: Emitter, fmt: QuantFormat, panel: Panel, first: Any, xs: list[Any], q_at: list[Any]) -> list[Any]:
    """Emit the rows' sums of products, times their scales, of the super-block that begins with block `first`: integers, as float32."""
    b, n_parts = e.b, fmt.n_parts
    if not fmt.zero and e.target.dot == "vnni512":
        return _emit_sums_of_exact_chains(e, fmt, panel, first, xs)
    with e.loop(LONG(SUPER), [NOUGHTS] * len(xs)) as (j, carried, ends):
        i = b.add(first, j)
        scales = [load_integer(e, fmt, panel.scales, i, n) for n in range(n_parts)]
        if fmt.zero:
            at = [b.add(e.add_offset(q, HALF_STARTS_AT), b.mul(j, LONG(4 * n_parts))) for q in q_at]
            starts = [[e.spread(e.load(e.add_offset(row, 4 * n), WORD, 4)) for n in range(n_parts)] for row in at]
            sums = _emit_block_products(e, fmt, panel, i, xs, starts)
            for total, parts in zip(carried, sums, strict=True):
                for part, scale in zip(parts, scales, strict=True):
                    total = b.add(total, b.mul(part, scale))
                ends.append(total)
        else:
            ends += [total for (total,) in _emit_block_products(e, fmt, panel, i, xs, [[total] for total in carried], scales[0])]
    return [e.to_floats(total) for total in ends]


def _emit_sums_of_exact_chains(e: Emitter, fmt: QuantFormat, panel: Panel, first: Any, xs: list[Any]) -> list[Any]:
    """Emit what `_emit_integer_sums` does, as the sum of two chains of float32 that are exact: it is rounded once, as the integer is.

    A conversion and a fused multiply-add a block leave more of AVX-512's multipliers to dot products than two products of pairs.
    """
    b, chains = e.b, []
    for start in range(0, SUPER, EXACT_BLOCKS):
        with e.loop(LONG(EXACT_BLOCKS), [ZEROS] * len(xs)) as (j, carried, ends):
            i = b.add(e.add_offset(first, start), j)
            sums = _emit_block_products(e, fmt, panel, i, xs, [[NOUGHTS]] * len(xs))
            scale = e.to_floats(load_integer(e, fmt, panel.scales, i, 0))
            ends += [e.fma(e.to_floats(whole), scale, total) for (whole,), total in zip(sums, carried, strict=True)]
        chains.append(ends)
    return [b.fadd(*both) for both in zip(*chains, strict=True)]


def _emit_float_sums(e: Emitter, fmt: QuantFormat, panel: Panel, first: Any, xs: list[Any], q_at: list[Any]) -> list[Any]:
    """Emit the rows' sums as `_emit_integer_sums` does, but as chains of float32, of codes that have their zeros in them."""
    b, n_parts, zero = e.b, fmt.n_parts, _find_zero(e, fmt)
    sums_at = [e.add_offset(q, HALF_SUMS_AT if fmt.by_16 else BLOCK_SUMS_AT) for q in q_at]
    with e.loop(LONG(SUPER), [ZEROS] * len(xs)) as (j, carried, ends):
        i = b.add(first, j)
        sums = _emit_block_products(e, fmt, panel, i, xs, [[NOUGHTS] * n_parts for _ in xs])
        scales = [e.to_floats(load_integer(e, fmt, panel.scales, i, n)) for n in range(n_parts)]
        for r, total in enumerate(carried):
            for n, (part, scale) in enumerate(zip(sums[r], scales, strict=True)):
                if zero != fmt.zero:  # put back what was taken off the codes: sums are rounded from here on
                    at = b.add(sums_at[r], b.mul(b.add(b.mul(j, LONG(n_parts)), LONG(n)), LONG(2)))
                    of_codes = b.mul(b.sext(e.load(at, HALF, 2), WORD), WORD(fmt.zero - zero))
                    part = b.add(part, e.spread(of_codes))
                total = e.fma(e.to_floats(part), scale, total)
            ends.append(total)
    return ends


class SuperScales(NamedTuple):
    """Scales of a super-block of a panel."""

    scale: Any
    offset: Any
    """None if it has no offsets."""
    pairs: list[Any]
    """What the sums of x are multiplied with, two int16 in a word: integer offsets, or the scales that a zero has which products contain.
    Empty where there are neither."""


def load_super_scales(e: Emitter, fmt: QuantFormat, panel: Panel, s: Any) -> SuperScales:
    heads, first = e.b.add(panel.supers, e.b.mul(s, LONG(fmt.super_bytes))), e.b.shl(s, LONG(SUPER_SHIFT))
    offset = e.b.fneg(e.load_halves(e.add_offset(heads, 2 * WIDTH))) if fmt.offsets else None
    n_pairs = SUPER * fmt.n_parts // 2 if fmt.offsets or (fmt.zero and not fmt.integers) else 0
    pairs = [_load_integer_pair(e, fmt, panel, first, n) for n in range(n_pairs)]
    return SuperScales(e.load_super_scales(fmt, heads), offset, pairs)


def _load_integer_pair(e: Emitter, fmt: QuantFormat, panel: Panel, first: Any, pair: int) -> Any:
    places, shift = [divmod(2 * pair + n, fmt.n_parts) for n in range(2)], fmt.n_parts if fmt.offsets else 0
    low, high = (load_integer(e, fmt, panel.scales, e.add_offset(first, block), shift + n) for block, n in places)
    return e.b.or_(e.b.and_(low, e.splat_words(0xFFFF)), e.b.shl(high, e.splat_words(16)))


def add_super(e: Emitter, fmt: QuantFormat, scales: SuperScales, product: Any, q: Any, total: Any) -> Any:
    """Emit a row's total plus a super-block's sum of products; the activation scales of the row's super-block lie at q."""
    of_sums = NOUGHTS
    for pair, integers in enumerate(scales.pairs):
        at = e.add_offset(q, (HALF_SUMS_AT if fmt.by_16 else BLOCK_SUMS_AT) + 4 * pair)
        of_sums = e.emit_pair_dot(of_sums, integers, e.load(at, WORD, 4))
    if fmt.zero and not fmt.integers:
        product = e.fma(e.to_floats(of_sums), ir.Constant(FLOATS, [-float(fmt.zero)] * WIDTH), product)
    x_scale = e.spread(e.load(q, FLOAT, 4))
    total = e.fma(product, e.b.fmul(scales.scale, x_scale), total)
    return total if scales.offset is None else e.fma(e.to_floats(of_sums), e.b.fmul(scales.offset, x_scale), total)


def load_integer(e: Emitter, fmt: QuantFormat, scales: Any, i: Any, n: int) -> Any:
    """Load the n-th integers of block i of a panel whose scales lie at this address: the scales of its parts, then their offsets."""
    at = e.b.add(scales, e.b.add(e.b.mul(i, LONG(fmt.scale_bytes)), LONG(WIDTH * n)))
    integers = e.load_bytes_as_words(at)
    return e.b.sub(integers, e.splat_words(fmt.scale_zero)) if fmt.scale_zero and n < fmt.n_parts else integers


def _make_weight_reader(e: Emitter, fmt: WeightFormat, w: Any, super_at: Any, codes_at: Any, i: Any) -> Callable[[int], Any]:
    """Return a function from an input of block i of the panel at w to its 16 weights, float32."""
    b = e.b
    if isinstance(fmt, PlainFormat):
        here = b.add(w, b.mul(i, LONG(DEPTH * WIDTH * fmt.itemsize)))
        step = WIDTH * fmt.itemsize
        e_halves = ir.VectorType(HALF, WIDTH)

        def read_plain_weights(j: int) -> Any:
            at = e.add_offset(here, step * j)
            if fmt is PlainFormat.F32:
                return e.load(at, FLOATS, 64)
            if fmt is PlainFormat.F16:
                return e.load_halves(at)
            return b.bitcast(b.shl(b.zext(e.load(at, e_halves, 32), WORDS), e.splat_words(16)), FLOATS)

        return read_plain_weights
    scales_at = b.add(w, b.mul(i, LONG(fmt.scale_bytes)))
    code = e.make_code_reader(fmt, b.add(b.add(w, codes_at), b.mul(i, LONG(fmt.code_bytes))))
    n_parts = fmt.n_parts
    if fmt.half_scales:
        scales = [e.load_scales(fmt, scales_at)]
        offsets = [e.load_halves(e.add_offset(scales_at, 2 * WIDTH))] if fmt.offsets else None
    else:
        heads = b.add(b.add(w, super_at), b.mul(b.lshr(i, LONG(SUPER_SHIFT)), LONG(fmt.super_bytes)))
        scale = e.load_super_scales(fmt, heads)
        scales = [b.fmul(scale, e.to_floats(load_integer(e, fmt, w, i, n))) for n in range(n_parts)]
        offsets = None
        if fmt.offsets:
            least = b.fneg(e.load_halves(e.add_offset(heads, 2 * WIDTH)))
            offsets = [b.fmul(least, e.to_floats(load_integer(e, fmt, w, i, n_parts + n))) for n in range(n_parts)]
    groups: dict[int, Any] = {}

    def read_weights(j: int) -> Any:
        g, part = j // 4, j // 16 if fmt.by_16 else 0
        if g not in groups:
            groups.clear()
            groups[g] = code(g)
        number = (
            b.and_(b.lshr(groups[g], e.splat_words(8 * (j % 4))), e.splat_words(255)) if j % 4 < 3 else b.lshr(groups[g], e.splat_words(24))
        )
        if offsets is not None:
            return e.fma(scales[part], e.to_floats(number), offsets[part])
        return b.fmul(scales[part], e.to_floats(b.sub(number, e.splat_words(fmt.zero))))

    return read_weights


def _emit_tiles(e: Emitter, n_panels: Any, most: int, tile: Callable[[Any, int], None]) -> None:
    """Emit all panels, `most` at a time, then the rest one by one."""
    wide = e.b.udiv(n_panels, LONG(most)) if most > 1 else LONG(0)
    if most > 1:
        with e.b.if_then(e.b.icmp_signed(">", wide, LONG(0))), e.loop(wide, []) as (p, _, _):
            tile(e.b.mul(p, LONG(most)), most)
    done = e.b.mul(wide, LONG(most))
    rest = e.b.sub(n_panels, done)
    with e.b.if_then(e.b.icmp_signed(">", rest, LONG(0))), e.loop(rest, []) as (p, _, _):
        tile(e.b.add(done, p), 1)


def emit_float32(e: Emitter, fmt: WeightFormat, n_rows: int, args: Sequence[Any]) -> None:
    w0, n_panels, panel_bytes, n_blocks, super_at, codes_at, x0, x_step, _, _, bias0, y0, y_step = args
    b = e.b
    xs = [x0]
    for _ in range(n_rows - 1):
        xs.append(b.add(xs[-1], x_step))

    def emit_panels(first: Any, count: int) -> None:
        ws = [b.add(w0, b.mul(b.add(first, LONG(k)), panel_bytes)) for k in range(count)]
        shifts = [b.mul(b.add(first, LONG(k)), LONG(4 * WIDTH)) for k in range(count)]
        starts = [e.load(b.add(bias0, shift), FLOATS, 4) for shift in shifts]
        with e.loop(n_blocks, starts * n_rows) as (i, carried, ends):
            totals = [carried[r * count : (r + 1) * count] for r in range(n_rows)]
            x_shift = b.mul(i, LONG(4 * DEPTH))
            x_at = [b.add(x, x_shift) for x in xs]
            of = [_make_weight_reader(e, fmt, w, super_at, codes_at, i) for w in ws]
            for j in range(DEPTH):
                weights = [one(j) for one in of]
                for r in range(n_rows):
                    x = e.spread(e.load(e.add_offset(x_at[r], 4 * j), FLOAT, 4))
                    totals[r] = [e.fma(x, weight, total) for weight, total in zip(weights, totals[r], strict=True)]
            ends += [total for row in totals for total in row]
        for r in range(n_rows):
            y = b.add(y0, b.mul(LONG(r), y_step))
            for k, shift in enumerate(shifts):
                e.store(ends[r * count + k], b.add(y, shift))

    _emit_tiles(e, n_panels, max(1, min(4, e.target.chains // n_rows)), emit_panels)


def emit_unpack(e: Emitter, fmt: WeightFormat, _rows: int, args: Sequence[Any]) -> None:
    w, n_blocks, super_at, codes_at, y0 = args[:5]
    with e.loop(n_blocks, []) as (i, _, _):
        weights = _make_weight_reader(e, fmt, w, super_at, codes_at, i)
        y = e.b.add(y0, e.b.mul(i, LONG(4 * DEPTH * WIDTH)))
        for j in range(DEPTH):
            e.store(weights(j), e.add_offset(y, 4 * WIDTH * j))
