"""Emit LLVM IR for vectors of 16 numbers: loads, stores, counted loops, codes of weights, dot products of each instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from llvmlite import binding, ir

from ngramspec.backends.cpu.codegen.targets import Target
from ngramspec.backends.cpu.formats import DEPTH, LINE, SUPER, WIDTH, QuantFormat

BYTE, HALF, WORD, LONG, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
BYTES, FLOATS, WORDS = ir.VectorType(BYTE, LINE), ir.VectorType(FLOAT, WIDTH), ir.VectorType(WORD, WIDTH)
ZEROS, NOUGHTS = ir.Constant(FLOATS, [0.0] * WIDTH), ir.Constant(WORDS, [0] * WIDTH)
GROUPS = DEPTH // 4  # Groups of four inputs in a quant block.
SUPER_SHIFT = SUPER.bit_length() - 1  # n >> SUPER_SHIFT: super-blocks of n blocks


@cache
def _make_spread(kind: Any, n: int) -> tuple[Any, Any]:
    """Make the operands, besides the scalar, with which a vector repeats it: llvmlite writes the text of a constant once."""
    return ir.Constant(ir.VectorType(kind, n), ir.Undefined), ir.Constant(ir.VectorType(WORD, n), [0] * n)


class Emitter:
    """Emits instructions on vectors of 16 floats or 64 bytes for one target."""

    def __init__(self, builder: ir.IRBuilder, target: Target) -> None:
        self.b, self.target = builder, target

    def load(self, address: Any, kind: Any, align: int) -> Any:
        value = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        value.align = align
        return value

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = align

    def add_offset(self, address: Any, distance: Any) -> Any:
        return self.b.add(address, LONG(distance) if isinstance(distance, int) else distance)

    def call(self, name: str, kind: Any, *args: Any) -> Any:
        module = self.b.module
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, [a.type for a in args]), name)
        return self.b.call(function, args)

    def spread(self, scalar: Any, n: int = WIDTH) -> Any:
        """Emit a vector that repeats this scalar."""
        undefined, first = _make_spread(scalar.type, n)
        return self.b.shuffle_vector(self.b.insert_element(undefined, scalar, WORD(0)), undefined, first)

    @staticmethod
    @cache
    def splat_words(number: int) -> Any:
        return ir.Constant(WORDS, [number] * WIDTH)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.share(lambda e, *args: e.call("llvm.fma.v16f32", FLOATS, *args), "fma_16", a, b, c)  # there 16 calls of a library

    def share(self, write: Callable[..., Any], name: str, *args: Any) -> Any:
        """Emit what `write(emitter, *args)` does: as a function if plain x86-64 takes many instructions, and LLVM long, for it."""
        if self.target.cpu != "x86-64":
            return write(self, *args)
        function = self.b.module.globals.get(name)
        if function is None:
            inside = Emitter(ir.IRBuilder(), self.target)
            function = ir.Function(self.b.module, ir.FunctionType(args[0].type, [a.type for a in args]), name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            inside.b.position_at_end(function.append_basic_block())
            inside.b.ret(write(inside, *function.args))
        return self.b.call(function, args)

    def to_floats(self, integers: Any) -> Any:
        return self.b.sitofp(integers, FLOATS)

    def load_halves(self, address: Any) -> Any:
        """Load 16 float16 at this address as float32."""
        bits = self.load(address, ir.VectorType(HALF, WIDTH), 2)
        if self.target.halves:
            return self.b.fpext(self.b.bitcast(bits, ir.VectorType(ir.HalfType(), WIDTH)), FLOATS)
        return widen_halves(self.b, bits)

    def load_scales(self, fmt: QuantFormat, address: Any) -> Any:
        """Load a block's 16 half scales at this address as float32."""
        if not fmt.powers:
            return self.load_halves(address)
        bits = self.b.zext(self.load(address, ir.VectorType(HALF, WIDTH), 2), WORDS)
        return self.b.bitcast(self.b.shl(bits, self.splat_words(16)), FLOATS)

    def load_super_scales(self, fmt: QuantFormat, address: Any) -> Any:
        """Load a super-block's 16 half scales at this address as float32, times the format's power of two."""
        halves = self.load_halves(address)
        return self.b.fmul(halves, ir.Constant(FLOATS, [2.0**fmt.exponent] * WIDTH)) if fmt.exponent else halves

    def load_bytes_as_words(self, address: Any) -> Any:
        """Load 16 unsigned bytes at this address as int32."""
        return self.b.zext(self.load(address, ir.VectorType(BYTE, WIDTH), 1), WORDS)

    def prefetch(self, address: Any) -> None:
        """Emit a request for the line at this address, into the second-level cache."""
        kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), WORD, WORD, WORD])
        function = self.b.module.globals.get("llvm.prefetch.p0") or ir.Function(self.b.module, kind, "llvm.prefetch.p0")
        self.b.call(function, [self.b.inttoptr(address, BYTE.as_pointer()), WORD(0), WORD(2), WORD(1)])

    @contextmanager
    def loop(self, count: Any, carried: list[Any]) -> Iterator[tuple[Any, list[Any], list[Any]]]:
        """Emit a loop of `count` turns, at least one.

        Yields the turn, the values it begins with, and a list that the caller fills with the values it ends with. Afterwards the list holds
        the values of the last turn.
        """
        before, body = self.b.block, self.b.append_basic_block("turn")
        self.b.branch(body)
        self.b.position_at_end(body)
        i = self.b.phi(LONG)
        phis = [self.b.phi(value.type) for value in carried]
        ends: list[Any] = []
        yield i, phis, ends
        last, following = self.b.block, self.b.add(i, LONG(1))
        i.add_incoming(LONG(0), before)
        i.add_incoming(following, last)
        for phi, start, end in zip(phis, carried, ends, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(end, last)
        after = self.b.append_basic_block("end")
        self.b.cbranch(self.b.icmp_signed("<", following, count), body, after)
        self.b.position_at_end(after)

    # ------------------------------------------------------------------ codes

    def make_code_reader(self, fmt: QuantFormat, address: Any) -> Callable[[int], Any]:
        """Return a function from a group to its codes (64 bytes as 16 words) in the quant block whose codes lie at this address."""
        planes, at = [], address
        for bits in fmt.planes:
            planes.append((bits, [self.load(self.add_offset(at, LINE * v), WORDS, LINE) for v in range(bits)]))
            at = self.add_offset(at, LINE * bits)

        def emit_group(g: int) -> Any:
            value, low = None, 0
            for bits, vectors in planes:
                per = 8 // bits
                vector, shift = (vectors[g % 4], g // 4 * 4) if bits == 4 else (vectors[g // per], g % per * bits)
                if bits < 8:
                    mask = ((1 << bits) - 1) << low
                    if shift > low:
                        vector = self.b.lshr(vector, self.splat_words(shift - low))
                    elif shift < low:
                        vector = self.b.shl(vector, self.splat_words(low - shift))
                    vector = self.b.and_(vector, self.splat_words(mask * 0x01010101))
                value = vector if value is None else self.b.or_(value, vector)
                low += bits
            return self.look_up_values(value, fmt.values, fmt.zero) if fmt.values else value

        return emit_group

    def look_up_values(self, codes: Any, values: Sequence[int], zero: int) -> Any:
        """Emit values[code] + zero for 64 codes of 4 bits, one per byte."""
        table = [value + zero for value in values]
        codes = self.b.bitcast(codes, BYTES)
        if self.target.dot == "vnni512":
            return self.b.bitcast(self.call("llvm.x86.avx512.pshuf.b.512", BYTES, ir.Constant(BYTES, table * 4), codes), WORDS)
        if self.target.dot in ("vnni256", "maddubs"):
            kind = ir.VectorType(BYTE, 32)
            parts = [self.call("llvm.x86.avx2.pshuf.b", kind, ir.Constant(kind, table * 2), part) for part in self.split(codes, 32)]
            return self.b.bitcast(self.join(parts), WORDS)

        def select(e: Emitter, codes: Any) -> Any:
            result = ir.Constant(BYTES, [table[0]] * LINE)
            for code in range(1, 16):
                here = e.b.icmp_unsigned("==", codes, ir.Constant(BYTES, [code] * LINE))
                result = e.b.select(here, ir.Constant(BYTES, [table[code]] * LINE), result)
            return result

        return self.b.bitcast(self.share(select, "look_up", codes), WORDS)

    def split(self, vector: Any, n: int) -> list[Any]:
        """Split a vector into pieces of n elements."""
        whole = vector.type.count
        kind = ir.VectorType(WORD, n)
        undefined = ir.Constant(vector.type, ir.Undefined)
        return [self.b.shuffle_vector(vector, undefined, ir.Constant(kind, list(range(i, i + n)))) for i in range(0, whole, n)]

    def join(self, parts: list[Any]) -> Any:
        while len(parts) > 1:
            n = parts[0].type.count
            order = ir.Constant(ir.VectorType(WORD, 2 * n), list(range(2 * n)))
            parts = [self.b.shuffle_vector(a, b, order) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def emit_products(self, code: Callable[[int], Any], x_at: Sequence[Any], bits: int, starts: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Emit `starts` [rows][parts] plus the integer dot products of a quant block: sums of 16 int32 each.

        `code` is a function from a group to unsigned codes of `bits` bits; `x_at` holds the addresses of the rows' int8 codes. With two
        parts, each half of the block has a sum of its own.
        """
        sums = [list(row) for row in starts]
        if self.target.dot == "maddubs":
            return self._emit_pair_products(code, x_at, bits, sums)
        for g in range(GROUPS):
            for row, address in zip(sums, x_at, strict=True):
                part = g * len(row) // GROUPS
                row[part] = self.emit_dot(row[part], code(g), self.load(self.add_offset(address, 4 * g), WORD, 4), bits)
        return sums

    def emit_scaled_products(self, code: Callable[[int], Any], x_at: Sequence[Any], bits: int, scale: Any, totals: list[Any]) -> list[Any]:
        """Emit the rows' totals, int32, plus the integer dot products of a quant block times `scale`, words from 0 to 2^15 - 1.

        `code`, `x_at`, `bits` are those of `emit_products`; sums of 16 codes have to fit into 16 bits.
        """
        if self.target.dot == "maddubs":
            return [total for (total,) in self._emit_pair_products(code, x_at, bits, [[total] for total in totals], scale)]
        totals = list(totals)
        by_pairs = self.target.dot == "vnni256"  # which multiplies and adds words of 16 bits in one instruction
        n_parts = 2 if by_pairs else 1
        for part in range(n_parts):
            sums = [NOUGHTS] * len(x_at)
            for g in range(part * GROUPS // n_parts, (part + 1) * GROUPS // n_parts):
                for row, address in enumerate(x_at):
                    sums[row] = self.emit_dot(sums[row], code(g), self.load(self.add_offset(address, 4 * g), WORD, 4), bits)
            for row, one in enumerate(sums):
                totals[row] = self.dot_pairs(totals[row], one, scale) if by_pairs else self.b.add(totals[row], self.b.mul(one, scale))
        return totals

    def dot_pairs(self, total: Any, a: Any, b: Any) -> Any:
        """Emit total[i] + the products of the int16 of a[i] and b[i], on x86; all are vectors of words.

        VNNI's instruction is emitted as assembly: LLVM would take it apart, as multiplying and adding one after the other is sooner done.
        """
        n = 16 if self.target.chains > 6 else 8
        assembly, registers = ("vpdpwssd $3, $2, $0", "v") if n == 16 else ("{vex} vpdpwssd $3, $2, $0", "x")
        parts = []
        for t, *both in zip(*(self.split(each, n) for each in (total, a, b)), strict=True):
            if self.target.dot == "maddubs":
                name = "llvm.x86.avx512.pmaddw.d.512" if n == 16 else "llvm.x86.avx2.pmadd.wd"
                product = self.call(name, t.type, *(self.b.bitcast(each, ir.VectorType(HALF, 2 * n)) for each in both))
                parts.append(self.b.add(t, product))
            else:
                shape, places = ir.FunctionType(t.type, [t.type] * 3), f"={registers},0,{registers},{registers}"
                parts.append(self.b.call(ir.InlineAsm(shape, assembly, places), [t, *both]))
        return self.join(parts)

    def _emit_pair_products(
        self, code: Callable[[int], Any], x_at: Sequence[Any], bits: int, sums: list[list[Any]], scale: Any = None
    ) -> list[list[Any]]:
        """Emit `emit_products`, or with `scale` `emit_scaled_products`, with instructions that multiply pairs of bytes into 16-bit sums.

        Sums stay in 16 bits as long as they cannot overflow. Codes of 8 bits are split into halves, since a pair of their products would
        overflow.
        """
        halves = [(0, 4), (4, 4)] if bits == 8 else [(0, bits)]  # by how much each is shifted, and its bits
        n_fit = (2**15 - 1) // (2 * 127 * (2 ** halves[0][1] - 1))
        n_parts = len(sums[0])
        period = min(n_fit, GROUPS // n_parts)
        pairs, wide = ir.VectorType(HALF, 16), ir.VectorType(WORD, 8)
        scales = [None] * 2
        if scale is not None:
            scales = [self.b.bitcast(each, pairs) for each in self.split(self.b.or_(scale, self.b.shl(scale, self.splat_words(16))), 8)]
        most = 5 // len(halves)  # rows whose sums fit into the registers, two of each
        at_once = -(-len(x_at) // -(-len(x_at) // most))
        for start in range(0, len(x_at), at_once):
            rows = range(start, min(start + at_once, len(x_at)))
            fresh: dict[tuple[int, int, int], Any] = {}  # sums in 16 bits: of row, half and piece
            for g in range(GROUPS):
                pieces = [
                    (half, n, piece)
                    for half, part in enumerate(self._split_halves(code(g), halves))
                    for n, piece in enumerate(self.split(self.b.bitcast(part, BYTES), 32))
                ]
                for r in rows:
                    x = self.b.bitcast(self.spread(self.load(self.add_offset(x_at[r], 4 * g), WORD, 4), 8), ir.VectorType(BYTE, 32))
                    for half, n, piece in pieces:
                        two, key = self.call("llvm.x86.avx2.pmadd.ub.sw", pairs, piece, x), (r, half, n)
                        fresh[key] = self.b.add(fresh[key], two) if key in fresh else two
                fresh = dict(zip(fresh, self.pin_registers(list(fresh.values())), strict=True))
                if (g + 1) % period == 0:
                    part = g * n_parts // GROUPS
                    for r, half in sorted({key[:2] for key in fresh}):
                        worth = ir.Constant(pairs, [1 << halves[half][0]] * 16)
                        four = [self.call("llvm.x86.avx2.pmadd.wd", wide, fresh.pop((r, half, n)), scales[n] or worth) for n in range(2)]
                        sums[r][part] = self.b.add(sums[r][part], self.join(four))
        return sums

    def pin_registers(self, values: list[Any]) -> list[Any]:
        """Pin these values to registers at this point, so that the compiler moves no sum across it; return them."""
        n = len(values)
        kind = ir.FunctionType(ir.LiteralStructType([value.type for value in values]), [value.type for value in values])
        constraints = ",".join(["=v" if self.target.chains > 6 else "=x"] * n + [str(k) for k in range(n)])
        kept = self.b.call(ir.InlineAsm(kind, "", constraints), values)
        return [self.b.extract_value(kept, k) for k in range(n)]

    def _split_halves(self, codes: Any, halves: Sequence[tuple[int, int]]) -> list[Any]:
        if len(halves) == 1:
            return [codes]
        return [self.b.and_(self.b.lshr(codes, self.splat_words(shift)), self.splat_words(0x0F0F0F0F)) for shift, _ in halves]

    def emit_dot(self, total: Any, codes: Any, four: Any, bits: int) -> Any:
        """Emit total[i] + the products of 4 unsigned codes of `bits` bits with the 4 signed bytes of the word `four`; exact on every
        target.
        """
        kind = self.target.dot
        if kind == "vnni512":
            return self.call("llvm.x86.avx512.vpdpbusd.512", WORDS, total, *self.cast_operands(total, codes, self.spread(four), LINE))
        if kind == "vnni256":
            pieces = zip(self.split(total, 8), self.split(codes, 8), strict=True)
            x = self.spread(four, 8)
            name = "llvm.x86.avx512.vpdpbusd.256"
            return self.join([self.call(name, t.type, t, *self.cast_operands(t, c, x, 32)) for t, c in pieces])
        if kind in ("usdot", "neon"):
            if kind == "neon" and bits == 8:
                codes = self.b.xor(codes, self.splat_words(0x80808080))  # as signed bytes: 128 less
            name = f"llvm.aarch64.neon.{'usdot' if kind == 'usdot' else 'sdot'}.v4i32.v16i8"
            x = self.b.bitcast(self.spread(four, 4), ir.VectorType(BYTE, 16))
            sums = [
                self.call(name, t.type, t, c, x)
                for t, c in zip(self.split(total, 4), self.split(self.b.bitcast(codes, BYTES), 16), strict=True)
            ]
            return self.join(sums)
        for j in range(4):
            code = self.b.and_(self.b.lshr(codes, self.splat_words(8 * j)), self.splat_words(255))
            x = self.b.ashr(self.b.shl(four, WORD(24 - 8 * j)), WORD(24))
            total = self.b.add(total, self.b.mul(code, self.spread(x)))
        return total

    def emit_pair_dot(self, total: Any, integers: Any, two: Any) -> Any:
        """Emit total[i] + the products of the 2 int16 of integers[i] with those of the word `two`; exact."""
        if self.target.dot in ("vnni512", "maddubs", "vnni256"):
            return self.dot_pairs(total, integers, self.spread(two))
        low, high = self.b.ashr(self.b.shl(two, WORD(16)), WORD(16)), self.b.ashr(two, WORD(16))
        first = self.b.ashr(self.b.shl(integers, self.splat_words(16)), self.splat_words(16))
        total = self.b.add(total, self.b.mul(first, self.spread(low)))
        return self.b.add(total, self.b.mul(self.b.ashr(integers, self.splat_words(16)), self.spread(high)))

    def cast_operands(self, total: Any, codes: Any, x: Any, n: int) -> tuple[Any, Any]:
        """Cast operands to the types that the instruction's declaration has: words up to LLVM 21, bytes from 22 on."""
        if binding.llvm_version_info[0] < 22:
            return codes, x
        kind = ir.VectorType(BYTE, n)
        return self.b.bitcast(codes, kind), self.b.bitcast(x, kind)


def widen_halves(b: Any, bits: Any) -> Any:
    """Convert float16 bits, one or a vector of them, to float32 by integer arithmetic; finite numbers alone."""
    n = getattr(bits.type, "count", 0)
    kind, floats = (ir.VectorType(WORD, n), ir.VectorType(FLOAT, n)) if n else (WORD, FLOAT)

    def make_words(number: int) -> Any:
        return ir.Constant(kind, [number] * n if n else number)

    wide = b.zext(bits, kind)
    size = b.bitcast(b.shl(b.and_(wide, make_words(0x7FFF)), make_words(13)), floats)
    scaled = b.fmul(size, ir.Constant(floats, [2.0**112] * n if n else 2.0**112))
    return b.bitcast(b.or_(b.bitcast(scaled, kind), b.shl(b.and_(wide, make_words(0x8000)), make_words(16))), floats)
