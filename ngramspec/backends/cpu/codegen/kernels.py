"""Machine code for matrix products: some rows by the panels of a packed weight (`formats`), generated for the processor at hand.

A `Kernels` gives the address of a function for a format, a precision and a number of rows. Sums stay in vector registers, which no compiler
of plain loops would do. `int8`: the products of a block's codes with the activations' codes are integers, added up in any order, and only
the chain over the blocks is in float32. `float32`: an output is one chain of fused multiply-adds over the inputs in their order. Either way
its bits depend neither on the other rows and panels, nor on which instructions the processor has. Knows addresses alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
from llvmlite import binding, ir
from numba.core import config as numba_config

from ngramspec.backends.cpu import formats
from ngramspec.backends.cpu.formats import DEPTH, LINE, SUPER, WIDTH, PlainFormat, QuantFormat, WeightFormat
from ngramspec.sampling import numeric

BYTE, HALF, WORD, LONG, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
BYTES, FLOATS, WORDS = ir.VectorType(BYTE, LINE), ir.VectorType(FLOAT, WIDTH), ir.VectorType(WORD, WIDTH)
ZEROS, NOUGHTS = ir.Constant(FLOATS, [0.0] * WIDTH), ir.Constant(WORDS, [0] * WIDTH)

INT8_ROWS = (1, 2, 3, 4, 5, 6, 8, 12)
"""Numbers of rows that there are functions for; others are put together of these."""
FLOAT_ROWS = (1, 2, 3, 4, 6, 8, 12)
FEW_ROWS = (1, 4)
"""Of either, enough for a few passes: they compile in a seventh of the time."""
GROUPS = DEPTH // 4
"""Of a block's inputs."""
RECORD = 16
"""Bytes that describe a block of 32 activations beside their codes: float32 scale, int32 sum of the codes, int32 sum of the first 16,
float32 scale · sum."""
AHEAD = 4096
"""Bytes of a panel that are fetched before they are needed."""
LONG_PANELS = 1 << 15
"""Bytes of panels that are read side by side, from which on the next ones are too far ahead."""
KEPT = 300
"""Compiled modules that stay in the folder, the latest; a version needs some tens."""
N_ARGUMENTS = 13
"""Of a kernel, all int64: weights, panels, bytes of a panel, blocks, where in a panel the super-blocks' scales and the codes begin;
activations and the bytes between two rows; their records and the bytes between two rows' (int8 alone); biases; results and the bytes
between two rows."""


class Target(NamedTuple):
    """Which instructions are used. All give the same bits."""

    name: str
    dot: str
    """How codes are multiplied: "vnni512", "vnni256", "maddubs", "neon" or "plain"."""
    cpu: str
    features: str
    halves: bool
    """There are instructions between float16 and float32."""
    chains: int
    """Sums that fit into registers beside the weights, each of 16 outputs."""


def host_target() -> Target:
    """The best that this processor has."""
    return targets()[0]


def targets() -> list[Target]:
    """All that this processor can run, best first; the last one is plain arithmetic."""
    try:
        has = dict(binding.get_host_cpu_features())
    except RuntimeError:  # a processor that does not tell
        has = {}
    if numba_config.CPU_FEATURES:  # as whoever wants to see another processor's code sets it
        has = {name[1:]: name[0] == "+" for name in numba_config.CPU_FEATURES.split(",") if name}
    cpu = numba_config.CPU_NAME or binding.get_host_cpu_name()
    flags = ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(has.items()))
    found = []
    if has.get("avx512vnni") and has.get("avx512bw") and has.get("f16c", True):
        found.append(Target("AVX-512 VNNI", "vnni512", cpu, flags, True, 24))
    elif has.get("avx512bw"):
        found.append(Target("AVX-512", "maddubs", cpu, flags, True, 24))
    if has.get("avxvnni"):
        found.append(Target("AVX-VNNI", "vnni256", "x86-64-v3", "+avxvnni", True, 6))
    if has.get("avx2") and has.get("fma") and has.get("f16c"):
        found.append(Target("AVX2", "maddubs", "x86-64-v3", "", True, 6))
    if has.get("dotprod"):
        found.append(Target("NEON", "neon", cpu, flags, True, 6))
    plain_cpu = "x86-64" if binding.get_default_triple().startswith(("x86_64", "amd64")) else "generic"
    found.append(Target("generic", "plain", plain_cpu, "", False, 6))
    return found


class CompiledModules:
    """Machine code of modules that were compiled for a target, with a folder that keeps it for the next start (None: none)."""

    def __init__(self, target: Target, folder: Path | None = None) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        self.target, self._folder = target, folder
        self._machine = self._new_machine()
        self._engines: list[Any] = []  # they own the code

    def compile(self, name: str, source: Callable[[], str]) -> Callable[[str], int]:
        """The addresses of the functions of the module that `source` writes; `name` tells it from the others of this version."""
        key = hashlib.sha256(f"{name} {self.target} {llvmlite.__version__} {_source_digest()}".encode()).hexdigest()[:24]
        path = self._folder / f"{key}.o" if self._folder else None
        kept = _read(path)
        if kept is None:
            module = binding.parse_assembly(source())
            module.verify()
            tuning = binding.create_pipeline_tuning_options(speed_level=2)
            passes = binding.create_pass_builder(self._machine, tuning)
            passes.getModulePassManager().run(module, passes)
            kept = self._machine.emit_object(module)
            _write(path, kept)
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), self._new_machine())
        engine.add_object_file(binding.ObjectFileRef.from_data(kept))
        engine.finalize_object()
        self._engines.append(engine)
        return engine.get_function_address

    def _new_machine(self) -> Any:
        target = self.target
        return binding.Target.from_default_triple().create_target_machine(
            cpu=target.cpu, features=target.features, opt=3, jit=True, codemodel="jitdefault"
        )


class Kernels:
    """Addresses of functions by format, precision and number of rows, compiled as they are asked for. Safe from several threads."""

    def __init__(self, target: Target | None = None, folder: Path | None = None) -> None:
        self.target = target or host_target()
        self._code = CompiledModules(self.target, folder)
        self._found: dict[tuple[WeightFormat, bool, bool], dict[int, int]] = {}
        self._others: dict[str, int] = {}
        self._lock = threading.Lock()

    def of(self, fmt: WeightFormat, int8: bool, *, few: bool = False) -> dict[int, int]:
        """By number of rows: INT8_ROWS, or FLOAT_ROWS; of these `few`: FEW_ROWS."""
        assert not int8 or isinstance(fmt, QuantFormat), fmt
        with self._lock:
            if (fmt, int8, few) not in self._found:
                counts = FEW_ROWS if few else INT8_ROWS if int8 else FLOAT_ROWS
                write = _int8 if int8 else _float32
                address = self._code.compile(f"{fmt} {int8} {counts}", lambda: _module(self.target, fmt, counts, write))
                self._found[fmt, int8, few] = {rows: address(f"rows_{rows}") for rows in counts}
            return self._found[fmt, int8, few]

    def quantise(self) -> int:
        """A function of the addresses of a row [K] float32, the number of its blocks, its codes [K] int8 and their records (RECORD)."""
        return self._one("quantise", None, _quantise)

    def silu(self) -> int:
        """A function of the addresses of gate and up, the number of blocks of 32, and the address of silu(gate) · up, float32."""
        return self._one("silu", None, _silu)

    def unpack(self, fmt: WeightFormat) -> int:
        """A function of a panel's address, blocks, where scales and codes begin, and the address of the result, float32 [K, 16]."""
        return self._one(f"{fmt} unpack", fmt, _unpack)

    def _one(self, name: str, fmt: WeightFormat | None, write: Callable[..., None]) -> int:
        with self._lock:
            if name not in self._others:
                self._others[name] = self._code.compile(name, lambda: _module(self.target, fmt, (1,), write))("rows_1")
            return self._others[name]


def _module(target: Target, fmt: WeightFormat | None, counts: Sequence[int], write: Callable[..., None]) -> str:
    module = ir.Module("ngramspec")
    module.triple = binding.get_default_triple()
    for rows in counts:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [LONG] * N_ARGUMENTS), f"rows_{rows}")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        write(Emitter(builder, target), fmt, rows, function.args)
        builder.ret_void()
    return str(module)


class Emitter:
    """Instructions on vectors of 16 and of 64 bytes, for one target."""

    def __init__(self, builder: ir.IRBuilder, target: Target) -> None:
        self.b, self.target = builder, target

    def load(self, address: Any, kind: Any, align: int) -> Any:
        value = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        value.align = align
        return value

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = align

    def at(self, address: Any, distance: Any) -> Any:
        return self.b.add(address, LONG(distance) if isinstance(distance, int) else distance)

    def call(self, name: str, kind: Any, *args: Any) -> Any:
        module = self.b.module
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, [a.type for a in args]), name)
        return self.b.call(function, args)

    def spread(self, scalar: Any, n: int = WIDTH) -> Any:
        """A vector of this number."""
        kind = ir.VectorType(scalar.type, n)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, WORD(0))
        return self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(WORD, n), [0] * n))

    def words(self, number: int) -> Any:
        return ir.Constant(WORDS, [number] * WIDTH)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("llvm.fma.v16f32", FLOATS, a, b, c)

    def floats(self, integers: Any) -> Any:
        return self.b.sitofp(integers, FLOATS)

    def halves(self, address: Any) -> Any:
        """16 float16 at this address as float32."""
        bits = self.load(address, ir.VectorType(HALF, WIDTH), 2)
        if self.target.halves:
            return self.b.fpext(self.b.bitcast(bits, ir.VectorType(ir.HalfType(), WIDTH)), FLOATS)
        return widened(self.b, bits)

    def bytes_as_words(self, address: Any) -> Any:
        """16 unsigned bytes at this address."""
        return self.b.zext(self.load(address, ir.VectorType(BYTE, WIDTH), 1), WORDS)

    def prefetch(self, address: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), WORD, WORD, WORD])
        function = self.b.module.globals.get("llvm.prefetch.p0") or ir.Function(self.b.module, kind, "llvm.prefetch.p0")
        self.b.call(function, [self.b.inttoptr(address, BYTE.as_pointer()), WORD(0), WORD(3), WORD(1)])

    @contextmanager
    def loop(self, count: Any, carried: list[Any]) -> Iterator[tuple[Any, list[Any], list[Any]]]:
        """Emit a loop of `count` turns, at least one: yields the turn, the values that it begins with, and a list for those that it ends
        with, which afterwards holds what the last turn ended with.
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

    def codes(self, fmt: QuantFormat, address: Any) -> Callable[[int], Any]:
        """A function from a group to its codes, 64 bytes as 16 words, of the block whose codes lie at this address."""
        planes, at = [], address
        for bits in fmt.planes:
            planes.append((bits, [self.load(self.at(at, LINE * v), WORDS, LINE) for v in range(bits)]))
            at = self.at(at, LINE * bits)

        def group(g: int) -> Any:
            value, low = None, 0
            for bits, vectors in planes:
                per = 8 // bits
                vector, shift = (vectors[g % 4], g // 4 * 4) if bits == 4 else (vectors[g // per], g % per * bits)
                if bits < 8:
                    mask = ((1 << bits) - 1) << low
                    if shift > low:
                        vector = self.b.lshr(vector, self.words(shift - low))
                    elif shift < low:
                        vector = self.b.shl(vector, self.words(low - shift))
                    vector = self.b.and_(vector, self.words(mask * 0x01010101))
                value = vector if value is None else self.b.or_(value, vector)
                low += bits
            return self.looked_up(value, fmt.values, fmt.zero) if fmt.values else value

        return group

    def looked_up(self, codes: Any, values: Sequence[int], zero: int) -> Any:
        """values[code] + zero for codes of 4 bits, 64 bytes."""
        table = [value + zero for value in values]
        codes = self.b.bitcast(codes, BYTES)
        if self.target.dot == "vnni512":
            return self.b.bitcast(self.call("llvm.x86.avx512.pshuf.b.512", BYTES, ir.Constant(BYTES, table * 4), codes), WORDS)
        if self.target.dot in ("vnni256", "maddubs"):
            kind = ir.VectorType(BYTE, 32)
            parts = [self.call("llvm.x86.avx2.pshuf.b", kind, ir.Constant(kind, table * 2), part) for part in self.parts(codes, 32)]
            return self.b.bitcast(self.joined(parts), WORDS)
        result = ir.Constant(BYTES, [table[0]] * LINE)
        for code in range(1, 16):
            here = self.b.icmp_unsigned("==", codes, ir.Constant(BYTES, [code] * LINE))
            result = self.b.select(here, ir.Constant(BYTES, [table[code]] * LINE), result)
        return self.b.bitcast(result, WORDS)

    def parts(self, vector: Any, n: int) -> list[Any]:
        """A vector in pieces of n elements."""
        whole = vector.type.count
        kind = ir.VectorType(WORD, n)
        undefined = ir.Constant(vector.type, ir.Undefined)
        return [self.b.shuffle_vector(vector, undefined, ir.Constant(kind, list(range(i, i + n)))) for i in range(0, whole, n)]

    def joined(self, parts: list[Any]) -> Any:
        while len(parts) > 1:
            n = parts[0].type.count
            order = ir.Constant(ir.VectorType(WORD, 2 * n), list(range(2 * n)))
            parts = [self.b.shuffle_vector(a, b, order) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def products(self, codes: Sequence[Callable[[int], Any]], x_at: Sequence[Any], bits: int, n_parts: int) -> list[list[list[Any]]]:
        """[panels][rows][parts]: a block's unsigned codes of `bits` bits (a function from a group each) times the codes of activations at
        these addresses, 16 sums each; of two parts, the block's halves have one each."""
        if self.target.dot == "maddubs":
            return self._products_of_pairs(codes, x_at, bits, n_parts)
        sums = [[[NOUGHTS] * n_parts for _ in x_at] for _ in codes]
        for g in range(GROUPS):
            vectors, part = [code(g) for code in codes], g * n_parts // GROUPS
            for r, address in enumerate(x_at):
                four = self.load(self.at(address, 4 * g), WORD, 4)
                for k, vector in enumerate(vectors):
                    sums[k][r][part] = self.dot(sums[k][r][part], vector, four, bits)
        return sums

    def _products_of_pairs(
        self, codes: Sequence[Callable[[int], Any]], x_at: Sequence[Any], bits: int, n_parts: int
    ) -> list[list[list[Any]]]:
        """Two products are added up in 16 bits, and several such sums as long as they fit; codes of 8 bits in two halves, of which two
        products would not."""
        halves = [(0, 4), (4, 4)] if bits == 8 else [(0, bits)]  # by how much each is shifted, and its bits
        n_fit = (2**15 - 1) // (2 * 127 * (2 ** halves[0][1] - 1))
        period = min(n_fit, GROUPS // n_parts)
        pairs, wide = ir.VectorType(HALF, 16), ir.VectorType(WORD, 8)
        sums: list[list[list[Any]]] = [[[NOUGHTS] * n_parts for _ in x_at] for _ in codes]
        most = max(5 // (len(codes) * len(halves)), 1)  # rows whose sums fit into the registers, two of each
        at_once = -(-len(x_at) // -(-len(x_at) // most))
        for start in range(0, len(x_at), at_once):
            rows = range(start, min(start + at_once, len(x_at)))
            fresh: dict[tuple[int, int, int, int], Any] = {}  # sums in 16 bits: of row, panel, half and piece
            for g in range(GROUPS):
                pieces = [
                    (k, half, n, piece)
                    for k, code in enumerate(codes)
                    for half, part in enumerate(self._halves(code(g), halves))
                    for n, piece in enumerate(self.parts(self.b.bitcast(part, BYTES), 32))
                ]
                for r in rows:
                    x = self.b.bitcast(self.spread(self.load(self.at(x_at[r], 4 * g), WORD, 4), 8), ir.VectorType(BYTE, 32))
                    for k, half, n, piece in pieces:
                        two, key = self.call("llvm.x86.avx2.pmadd.ub.sw", pairs, piece, x), (r, k, half, n)
                        fresh[key] = self.b.add(fresh[key], two) if key in fresh else two
                fresh = dict(zip(fresh, self.held(list(fresh.values())), strict=True))
                if (g + 1) % period == 0:
                    part = g * n_parts // GROUPS
                    for r, k, half in sorted({key[:3] for key in fresh}):
                        worth = ir.Constant(pairs, [1 << halves[half][0]] * 16)
                        four = [self.call("llvm.x86.avx2.pmadd.wd", wide, fresh.pop((r, k, half, n)), worth) for n in range(2)]
                        sums[k][r][part] = self.b.add(sums[k][r][part], self.joined(four))
        return sums

    def held(self, values: list[Any]) -> list[Any]:
        """The same, as they are in registers at this place: the compiler moves no sum across it."""
        n = len(values)
        kind = ir.FunctionType(ir.LiteralStructType([value.type for value in values]), [value.type for value in values])
        constraints = ",".join(["=x"] * n + [str(k) for k in range(n)])
        kept = self.b.call(ir.InlineAsm(kind, "", constraints), values)
        return [self.b.extract_value(kept, k) for k in range(n)]

    def _halves(self, codes: Any, halves: Sequence[tuple[int, int]]) -> list[Any]:
        if len(halves) == 1:
            return [codes]
        return [self.b.and_(self.b.lshr(codes, self.words(shift)), self.words(0x0F0F0F0F)) for shift, _ in halves]

    def dot(self, total: Any, codes: Any, four: Any, bits: int) -> Any:
        """total[i] + the products of 4 unsigned codes of `bits` bits with the 4 signed bytes of the word `four`; the rest is as exact."""
        kind = self.target.dot
        if kind == "vnni512":
            return self.call("llvm.x86.avx512.vpdpbusd.512", WORDS, total, *self.operands(total, codes, self.spread(four), LINE))
        if kind == "vnni256":
            pieces = zip(self.parts(total, 8), self.parts(codes, 8), strict=True)
            x = self.spread(four, 8)
            name = "llvm.x86.avx512.vpdpbusd.256"
            return self.joined([self.call(name, t.type, t, *self.operands(t, c, x, 32)) for t, c in pieces])
        if kind == "neon":
            flipped = self.b.xor(codes, self.words(0x80808080)) if bits == 8 else codes  # as signed bytes: 128 less
            x = self.b.bitcast(self.spread(four, 4), ir.VectorType(BYTE, 16))
            sums = [
                self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", t.type, t, c, x)
                for t, c in zip(self.parts(total, 4), self.parts(self.b.bitcast(flipped, BYTES), 16), strict=True)
            ]
            return self.joined(sums)
        for j in range(4):
            code = self.b.and_(self.b.lshr(codes, self.words(8 * j)), self.words(255))
            x = self.b.ashr(self.b.shl(four, WORD(24 - 8 * j)), WORD(24))
            total = self.b.add(total, self.b.mul(code, self.spread(x)))
        return total

    def operands(self, total: Any, codes: Any, x: Any, n: int) -> tuple[Any, Any]:
        """As the instruction's declaration has them: words up to LLVM 21, bytes from 22 on."""
        if binding.llvm_version_info[0] < 22:
            return codes, x
        kind = ir.VectorType(BYTE, n)
        return self.b.bitcast(codes, kind), self.b.bitcast(x, kind)


def widened(b: Any, bits: Any) -> Any:
    """float16 bits, one or a vector of them, as float32 by integer arithmetic; finite numbers alone."""
    n = getattr(bits.type, "count", 0)
    kind, floats = (ir.VectorType(WORD, n), ir.VectorType(FLOAT, n)) if n else (WORD, FLOAT)

    def words(number: int) -> Any:
        return ir.Constant(kind, [number] * n if n else number)

    wide = b.zext(bits, kind)
    size = b.bitcast(b.shl(b.and_(wide, words(0x7FFF)), words(13)), floats)
    scaled = b.fmul(size, ir.Constant(floats, [2.0**112] * n if n else 2.0**112))
    return b.bitcast(b.or_(b.bitcast(scaled, kind), b.shl(b.and_(wide, words(0x8000)), words(16))), floats)


def _int8(e: Emitter, fmt: QuantFormat, n_rows: int, args: Sequence[Any]) -> None:
    n_panels, n_blocks, x0, x_step, q0, q_step = args[1], args[3], args[6], args[7], args[8], args[9]
    xs, qs = [x0], [q0]
    for _ in range(n_rows - 1):
        xs.append(e.b.add(xs[-1], x_step))
        qs.append(e.b.add(qs[-1], q_step))

    def tile(first: Any, count: int) -> None:
        panels = [_Panel(e, fmt, e.b.add(first, LONG(k)), args) for k in range(count)]
        # the next panels' same block, or of long panels what is a little further
        whole = e.b.mul(args[2], LONG(count))
        ahead = e.b.select(e.b.icmp_signed(">", whole, LONG(LONG_PANELS)), LONG(AHEAD), whole)
        with e.loop(n_blocks, [panel.bias for panel in panels for _ in range(n_rows)]) as (i, carried, ends):
            totals = [carried[k * n_rows : (k + 1) * n_rows] for k in range(count)]
            ends += _int8_block(e, fmt, panels, totals, i, xs, qs, ahead)
        for k, panel in enumerate(panels):
            y = panel.y
            for total in ends[k * n_rows : (k + 1) * n_rows]:
                e.store(total, y)
                y = e.b.add(y, args[12])

    _in_tiles(e, n_panels, 2 if 1 < n_rows <= e.target.chains // 4 else 1, tile)


def _in_tiles(e: Emitter, n_panels: Any, most: int, tile: Callable[[Any, int], None]) -> None:
    """All panels, as many at a time as `most`, then one by one."""
    wide = e.b.udiv(n_panels, LONG(most)) if most > 1 else LONG(0)
    if most > 1:
        with e.b.if_then(e.b.icmp_signed(">", wide, LONG(0))), e.loop(wide, []) as (p, _, _):
            tile(e.b.mul(p, LONG(most)), most)
    done = e.b.mul(wide, LONG(most))
    rest = e.b.sub(n_panels, done)
    with e.b.if_then(e.b.icmp_signed(">", rest, LONG(0))), e.loop(rest, []) as (p, _, _):
        tile(e.b.add(done, p), 1)


class _Panel:
    """Addresses of one panel."""

    def __init__(self, e: Emitter, fmt: QuantFormat, p: Any, args: Sequence[Any]) -> None:
        b = e.b
        w0, _, panel_bytes, _, super_at, codes_at, _, _, _, _, bias0, y0, _ = args
        self.scales = b.add(w0, b.mul(p, panel_bytes))
        self.supers, self.codes = b.add(self.scales, super_at), b.add(self.scales, codes_at)
        shift = b.mul(p, LONG(4 * WIDTH))
        self.bias, self.y = e.load(b.add(bias0, shift), FLOATS, 4), b.add(y0, shift)


def _int8_block(
    e: Emitter, fmt: QuantFormat, panels: list[_Panel], totals: list[list[Any]], i: Any, xs: list[Any], qs: list[Any], ahead: Any
) -> list[Any]:
    """Totals [panels][rows] plus block i's products, one list."""
    b = e.b
    bits = 8 if fmt.values else sum(fmt.planes)
    # a signed dot product of codes of 8 bits has taken 128 off them already
    zero = fmt.zero - 128 if e.target.dot == "neon" and bits == 8 else fmt.zero
    n_rows, n_parts = len(xs), 2 if fmt.by_16 else 1
    codes = []
    for panel in panels:
        here = b.add(panel.codes, b.mul(i, LONG(fmt.code_bytes)))
        for line in range(0, fmt.code_bytes, LINE):
            e.prefetch(e.at(b.add(here, ahead), line))
        codes.append(e.codes(fmt, here))
    x_at = [b.add(x, b.mul(i, LONG(DEPTH))) for x in xs]
    q_at = [b.add(q, b.mul(i, LONG(RECORD))) for q in qs]
    sums = e.products(codes, x_at, bits, n_parts)
    ends = []
    for k, panel in enumerate(panels):
        scales_at = b.add(panel.scales, b.mul(i, LONG(fmt.scale_bytes)))
        integers: list[Any] | None = None  # of the block's parts
        offsets: list[Any] | None = None
        if fmt.half_scales:
            scale = e.halves(scales_at)
            offset = e.halves(e.at(scales_at, 2 * WIDTH)) if fmt.offsets else None
        else:
            heads = b.add(panel.supers, b.mul(b.lshr(i, LONG(SUPER.bit_length() - 1)), LONG(fmt.super_bytes)))
            scale = e.halves(heads)
            offset = b.fneg(e.halves(e.at(heads, 2 * WIDTH))) if fmt.offsets else None
            integers = [b.sub(e.bytes_as_words(e.at(scales_at, WIDTH * n)), e.words(fmt.scale_zero)) for n in range(n_parts)]
            if fmt.offsets:
                offsets = [e.bytes_as_words(e.at(scales_at, WIDTH * (n_parts + n))) for n in range(n_parts)]
        for r in range(n_rows):
            x_scale = e.spread(e.load(q_at[r], FLOAT, 4))
            whole, first = (e.load(e.at(q_at[r], 4 * n), WORD, 4) for n in (1, 2))
            of_part, parts = [first, b.sub(whole, first)] if fmt.by_16 else [whole], sums[k][r]
            if zero:
                parts = [b.sub(s, e.spread(b.mul(x_sum, WORD(zero % 2**32)))) for s, x_sum in zip(parts, of_part, strict=True)]
            if integers is not None:
                parts = [b.mul(s, n) for s, n in zip(parts, integers, strict=True)]
            end = e.fma(e.floats(parts[0] if len(parts) == 1 else b.add(*parts)), b.fmul(scale, x_scale), totals[k][r])
            if offsets is not None:
                parts = [b.mul(n, e.spread(x_sum)) for n, x_sum in zip(offsets, of_part, strict=True)]
                end = e.fma(e.floats(parts[0] if len(parts) == 1 else b.add(*parts)), b.fmul(offset, x_scale), end)
            elif fmt.offsets:
                end = e.fma(offset, e.spread(e.load(e.at(q_at[r], 12), FLOAT, 4)), end)
            ends.append(end)
    return ends


def _weights(e: Emitter, fmt: WeightFormat, w: Any, super_at: Any, codes_at: Any, i: Any) -> Callable[[int], Any]:
    """A function from an input of block i of the panel at w to its 16 weights, float32."""
    b = e.b
    if isinstance(fmt, PlainFormat):
        here = b.add(w, b.mul(i, LONG(DEPTH * WIDTH * fmt.itemsize)))
        step = WIDTH * fmt.itemsize
        e_halves = ir.VectorType(HALF, WIDTH)

        def plain(j: int) -> Any:
            at = e.at(here, step * j)
            if fmt is PlainFormat.F32:
                return e.load(at, FLOATS, 64)
            if fmt is PlainFormat.F16:
                return e.halves(at)
            return b.bitcast(b.shl(b.zext(e.load(at, e_halves, 32), WORDS), e.words(16)), FLOATS)

        return plain
    scales_at = b.add(w, b.mul(i, LONG(fmt.scale_bytes)))
    code = e.codes(fmt, b.add(b.add(w, codes_at), b.mul(i, LONG(fmt.code_bytes))))
    n_parts = 2 if fmt.by_16 else 1
    if fmt.half_scales:
        scales = [e.halves(scales_at)]
        offsets = [e.halves(e.at(scales_at, 2 * WIDTH))] if fmt.offsets else None
    else:
        heads = b.add(b.add(w, super_at), b.mul(b.lshr(i, LONG(SUPER.bit_length() - 1)), LONG(fmt.super_bytes)))
        scale = e.halves(heads)
        integers = [b.sub(e.bytes_as_words(e.at(scales_at, WIDTH * k)), e.words(fmt.scale_zero)) for k in range(n_parts)]
        scales = [b.fmul(scale, e.floats(k)) for k in integers]
        offsets = None
        if fmt.offsets:
            least = b.fneg(e.halves(e.at(heads, 2 * WIDTH)))
            offsets = [b.fmul(least, e.floats(e.bytes_as_words(e.at(scales_at, WIDTH * (n_parts + k))))) for k in range(n_parts)]
    groups: dict[int, Any] = {}

    def weights(j: int) -> Any:
        g, part = j // 4, j // 16 if fmt.by_16 else 0
        if g not in groups:
            groups.clear()
            groups[g] = code(g)
        number = b.and_(b.lshr(groups[g], e.words(8 * (j % 4))), e.words(255)) if j % 4 < 3 else b.lshr(groups[g], e.words(24))
        if offsets is not None:
            return e.fma(scales[part], e.floats(number), offsets[part])
        return b.fmul(scales[part], e.floats(b.sub(number, e.words(fmt.zero))))

    return weights


def _float32(e: Emitter, fmt: WeightFormat, n_rows: int, args: Sequence[Any]) -> None:
    w0, n_panels, panel_bytes, n_blocks, super_at, codes_at, x0, x_step, _, _, bias0, y0, y_step = args
    b = e.b
    xs = [x0]
    for _ in range(n_rows - 1):
        xs.append(b.add(xs[-1], x_step))

    def panels(first: Any, count: int) -> None:
        ws = [b.add(w0, b.mul(b.add(first, LONG(k)), panel_bytes)) for k in range(count)]
        shifts = [b.mul(b.add(first, LONG(k)), LONG(4 * WIDTH)) for k in range(count)]
        starts = [e.load(b.add(bias0, shift), FLOATS, 4) for shift in shifts]
        with e.loop(n_blocks, starts * n_rows) as (i, carried, ends):
            totals = [carried[r * count : (r + 1) * count] for r in range(n_rows)]
            x_shift = b.mul(i, LONG(4 * DEPTH))
            x_at = [b.add(x, x_shift) for x in xs]
            of = [_weights(e, fmt, w, super_at, codes_at, i) for w in ws]
            for j in range(DEPTH):
                weights = [one(j) for one in of]
                for r in range(n_rows):
                    x = e.spread(e.load(e.at(x_at[r], 4 * j), FLOAT, 4))
                    totals[r] = [e.fma(x, weight, total) for weight, total in zip(weights, totals[r], strict=True)]
            ends += [total for row in totals for total in row]
        for r in range(n_rows):
            y = b.add(y0, b.mul(LONG(r), y_step))
            for k, shift in enumerate(shifts):
                e.store(ends[r * count + k], b.add(y, shift))

    _in_tiles(e, n_panels, max(1, min(4, e.target.chains // n_rows)), panels)


def _unpack(e: Emitter, fmt: WeightFormat, _rows: int, args: Sequence[Any]) -> None:
    w, n_blocks, super_at, codes_at, y0 = args[:5]
    with e.loop(n_blocks, []) as (i, _, _):
        weights = _weights(e, fmt, w, super_at, codes_at, i)
        y = e.b.add(y0, e.b.mul(i, LONG(4 * DEPTH * WIDTH)))
        for j in range(DEPTH):
            e.store(weights(j), e.at(y, 4 * WIDTH * j))


LEAST = 1e-30
"""Activations that are all smaller than this count as zeros."""
_ROUND = 12582912.0
"""1.5 · 2^23: a number of at most 22 bits that is added to it loses its fraction, to the nearest, halves to the even one."""


def _quantise(e: Emitter, _fmt: None, _rows: int, args: Sequence[Any]) -> None:
    x0, n_blocks, codes0, records0 = args[:4]
    b = e.b
    with e.loop(n_blocks, []) as (i, _, _):
        at = b.add(x0, b.mul(i, LONG(4 * DEPTH)))
        xs = [e.load(e.at(at, 64 * k), FLOATS, 4) for k in range(2)]
        sizes = [e.call("llvm.fabs.v16f32", FLOATS, x) for x in xs]
        most = b.select(b.fcmp_ordered(">", *sizes), *sizes)
        for width in (8, 4, 2, 1):
            undefined = ir.Constant(most.type, ir.Undefined)
            halves = [
                b.shuffle_vector(most, undefined, ir.Constant(ir.VectorType(WORD, width), list(range(k, k + width)))) for k in (0, width)
            ]
            most = b.select(b.fcmp_ordered(">", *halves), *halves)
        top = b.extract_element(most, WORD(0))
        some = b.fcmp_ordered(">", top, FLOAT(LEAST))
        inverse = e.spread(b.select(some, b.fdiv(FLOAT(127.0), top), FLOAT(0.0)))
        scale = b.fdiv(top, FLOAT(127.0))
        sums = []
        for k, x in enumerate(xs):
            moved = b.fadd(b.fmul(x, inverse), ir.Constant(FLOATS, [_ROUND] * WIDTH))
            codes = b.sub(b.bitcast(moved, WORDS), e.words(0x4B400000))
            e.store(b.trunc(codes, ir.VectorType(BYTE, WIDTH)), e.at(b.add(codes0, b.mul(i, LONG(DEPTH))), WIDTH * k), 1)
            sums.append(e.call("llvm.vector.reduce.add.v16i32", WORD, codes))
        whole = b.add(*sums)
        record = b.add(records0, b.mul(i, LONG(RECORD)))
        for k, value in enumerate((scale, whole, sums[0], b.fmul(scale, b.sitofp(whole, FLOAT)))):
            e.store(value, e.at(record, 4 * k))


def exp(e: Emitter, x: Any) -> Any:
    """As `sampling.numeric.exp`, 16 at a time, with the same bits."""
    b = e.b

    def constant(value: Any) -> Any:
        return ir.Constant(FLOATS, [float(value)] * WIDTH)

    x = b.select(b.fcmp_ordered("<", x, constant(numeric.LOW)), constant(numeric.LOW), x)
    x = b.select(b.fcmp_ordered(">", x, constant(numeric.HIGH)), constant(numeric.HIGH), x)
    n = e.call("llvm.floor.v16f32", FLOATS, e.fma(x, constant(numeric.LOG2E), constant(0.5)))
    minus = b.fneg(n)
    r = e.fma(minus, constant(numeric.LN2_LO), e.fma(minus, constant(numeric.LN2_HI), x))
    y = constant(numeric.C7)
    for c in (numeric.C6, numeric.C5, numeric.C4, numeric.C3, numeric.C2):
        y = e.fma(y, r, constant(c))
    y = e.fma(y, b.fmul(r, r), b.fadd(r, constant(1.0)))
    power = b.shl(b.add(b.fptosi(n, WORDS), e.words(127)), e.words(23))
    return b.fmul(y, b.bitcast(power, FLOATS))


def _silu(e: Emitter, _fmt: None, _rows: int, args: Sequence[Any]) -> None:
    gate0, up0, n_blocks, y0 = args[:4]
    b = e.b
    with e.loop(b.mul(n_blocks, LONG(2)), []) as (i, _, _):
        shift = b.mul(i, LONG(4 * WIDTH))
        gate, up = (e.load(b.add(start, shift), FLOATS, 4) for start in (gate0, up0))
        one = ir.Constant(FLOATS, [1.0] * WIDTH)
        share = b.fdiv(gate, b.fadd(one, exp(e, b.fneg(gate))))
        e.store(b.fmul(share, up), b.add(y0, shift))


_DIGEST: list[str] = []


def _source_digest() -> str:
    if not _DIGEST:
        sources = (Path(__file__), Path(formats.__file__))
        _DIGEST.append(hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest())
    return _DIGEST[0]


def _read(path: Path | None) -> bytes | None:
    """Code that was kept, if it is whole."""
    try:
        kept = path.read_bytes() if path else b""
    except OSError:
        return None
    digest, code = kept[:32], kept[32:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(path: Path | None, code: bytes) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{threading.get_native_id()}")
        partial.write_bytes(hashlib.sha256(code).digest() + code)
        partial.replace(path)
        for old in sorted(path.parent.glob("*.o"), key=lambda p: p.stat().st_mtime)[:-KEPT]:
            old.unlink()
    except OSError:  # it will be compiled again
        pass
