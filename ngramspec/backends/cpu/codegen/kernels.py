"""Generate the matrix product kernels for this processor: some rows times the packed panels of a weight (`formats`).

`Kernels` returns the address of a function per weight format, precision and number of rows. `README.md` explains panels, register tiles and
how the code reaches numba. The bits of an output depend neither on the other rows and panels nor on the instructions that the processor
has. The module knows memory addresses alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numpy as np
from llvmlite import binding, ir
from numba.core import config as numba_config

from ngramspec.backends.cpu import formats
from ngramspec.backends.cpu.codegen.arm_features import detect_arm_features
from ngramspec.backends.cpu.formats import DEPTH, LINE, SUPER, WIDTH, PlainFormat, QuantFormat, WeightFormat
from ngramspec.sampling import numeric

BYTE, HALF, WORD, LONG, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
BYTES, FLOATS, WORDS = ir.VectorType(BYTE, LINE), ir.VectorType(FLOAT, WIDTH), ir.VectorType(WORD, WIDTH)
ZEROS, NOUGHTS = ir.Constant(FLOATS, [0.0] * WIDTH), ir.Constant(WORDS, [0] * WIDTH)

INT8_ROWS = (1, 2, 3, 4, 5, 6, 8, 12)  # Row counts with a kernel of their own; other counts are made up of these.
FLOAT_ROWS = (1, 2, 3, 4, 6, 8, 12)
FEW_ROWS = (1, 4)  # Row counts compiled for a few passes only, of either precision: they take a seventh of the time to compile.
GROUPS = DEPTH // 4  # Groups of four inputs in a quant block.
SUPER_SHIFT = SUPER.bit_length() - 1  # n >> SUPER_SHIFT: super-blocks of n blocks
# Bytes of the activation scales of a block of 32 activations: float32 scale, int32 sum of the codes, int32 sum of the first 16 codes,
# float32 scale · sum.
ACT_SCALE_BYTES = 16
# Those of a super-block of 256 take the room of its blocks: a float32 scale, the int16 sums of the codes of its 8 blocks, of its 16 halves.
BLOCK_SUMS_AT, HALF_SUMS_AT = 16, 32
MOST_IN_TWO = 3  # Most rows that are multiplied by two panels at a time, so that a few rows have enough sums under way.
AT_ONCE = 2  # Rows whose sums are under way at a time with AVX-512 VNNI: their registers are free again before the next rows need some.
KEPT = 300  # Compiled modules kept in the folder, latest first; one version needs some tens.
# Arguments of a kernel, all int64. Addresses: weights (0), activations (6), activation scales (8, int8 only), biases (10), results (11).
# Numbers: panels (1), blocks (3). Bytes: of a panel (2), in a panel before the super-blocks' scales (4) and the codes (5), between two
# rows of activations (7), of activation scales (9) and of results (12).
N_ARGUMENTS = 13


class Target(NamedTuple):
    """Instruction set that code is generated for. All give the same bits."""

    name: str
    dot: str
    """How codes are multiplied: "vnni512", "vnni256", "maddubs", "usdot", "neon" or "plain"."""
    cpu: str
    features: str
    halves: bool
    """Whether there are instructions that convert between float16 and float32."""
    chains: int
    """Accumulators of 16 outputs that fit into registers besides the weights."""


def get_host_target() -> Target:
    """Return the best instruction set that this processor has."""
    return list_targets()[0]


def list_targets() -> list[Target]:
    """Return all instruction sets that this processor can run, best first; the last one is plain arithmetic."""
    try:
        has = dict(binding.get_host_cpu_features())
    except RuntimeError:  # a processor that does not tell
        has = {}
    has |= detect_arm_features()  # LLVM does not report them
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
    if has.get("dotprod") and has.get("i8mm"):
        found.append(Target("NEON i8mm", "usdot", cpu, flags, True, 6))
    if has.get("dotprod"):
        found.append(Target("NEON", "neon", cpu, flags, True, 6))
    plain_cpu = "x86-64" if binding.get_default_triple().startswith(("x86_64", "amd64")) else "generic"
    found.append(Target("generic", "plain", plain_cpu, "", False, 6))
    return found


class CompiledModules:
    """Machine code compiled for a target, cached in a folder for the next start (None: not cached)."""

    def __init__(self, target: Target, folder: Path | None = None) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        self.target, self._folder = target, folder
        self._machine = self._new_machine()
        self._engines: list[Any] = []  # they own the code

    def compile(self, name: str, source: Callable[[], str]) -> Callable[[str], int]:
        """Return a function from names to addresses for the module that `source` writes; `name` identifies it within this version."""
        key = hashlib.sha256(f"{name} {self.target} {llvmlite.__version__} {_compute_source_digest()}".encode()).hexdigest()[:24]
        path = self._folder / f"{key}.o" if self._folder else None
        kept = _read_object(path)
        if kept is None:
            module = binding.parse_assembly(source())
            module.verify()
            tuning = binding.create_pipeline_tuning_options(speed_level=2)
            passes = binding.create_pass_builder(self._machine, tuning)
            passes.getModulePassManager().run(module, passes)
            kept = self._machine.emit_object(module)
            _write_object(path, kept)
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
    """Addresses of kernels by format, precision and number of rows, compiled on first use. Safe to call from several threads."""

    def __init__(self, target: Target | None = None, folder: Path | None = None) -> None:
        self.target = target or get_host_target()
        self._code = CompiledModules(self.target, folder)
        self._found: dict[tuple[WeightFormat, bool, bool], dict[int, int]] = {}
        self._others: dict[str, int] = {}
        self._lock = threading.Lock()

    def get_row_functions(self, fmt: WeightFormat, int8: bool, *, few: bool = False) -> dict[int, int]:
        """Return the kernels by number of rows: INT8_ROWS or FLOAT_ROWS, or with `few` only FEW_ROWS."""
        assert not int8 or isinstance(fmt, QuantFormat), fmt
        with self._lock:
            if (fmt, int8, few) not in self._found:
                counts = FEW_ROWS if few else INT8_ROWS if int8 else FLOAT_ROWS
                write = emit_int8 if int8 else emit_float32
                address = self._code.compile(f"{fmt} {int8} {counts}", lambda: build_module(self.target, fmt, counts, write))
                self._found[fmt, int8, few] = {rows: address(f"rows_{rows}") for rows in counts}
            return self._found[fmt, int8, few]

    def get_quantise(self, formats: Iterable[WeightFormat]) -> int:
        """Return a function that quantises activations for products with weights of these formats; 0 if no format has blocks.

        It takes (address of a row [K] float32, its number of blocks, addresses of its codes [K] int8 and activation scales by blocks, the
        same by super-blocks) and writes those that are needed.
        """
        kinds = {fmt.by_super for fmt in formats if isinstance(fmt, QuantFormat)}
        if not kinds:
            return 0
        names = {False: "blocks", True: "super-blocks"}
        write = partial(emit_quantise, blocks=False in kinds, supers=True in kinds)
        return self._get_function(f"quantise {' '.join(names[kind] for kind in sorted(kinds))}", None, write)

    def get_activation(self, name: str) -> int:
        """Return a function of (addresses of gate and up, number of blocks of 32, address of the result, float32).

        The result is gate · sigmoid(gate) · up for "silu", gelu(gate) · up for "gelu" (`sampling.numeric.compute_gelu`). What lies at the
        address of up has no meaning for "plain gelu", gelu(gate), and "squared relu", max(gate, 0)².
        """
        return self._get_function(name, None, partial(emit_activation, name=name))

    def get_gated_activation(self, activation: str | tuple[float, float]) -> int:
        """Return a function as `get_activation` does for "silu" or "gelu"; for (alpha, limit) that of gpt-oss, of gate and up clamped to
        the limit: gate · sigmoid(alpha · gate) · (up + 1).
        """
        if isinstance(activation, str):
            return self.get_activation(activation)
        alpha, limit = activation
        return self._get_function(f"swiglu {alpha!r} {limit!r}", None, partial(emit_clamped_swiglu, alpha=alpha, limit=limit))

    def get_unpack(self, fmt: WeightFormat) -> int:
        """Return a function of (address of a panel, blocks, super_at, codes_at, address of the result float32 [K, 16])."""
        return self._get_function(f"{fmt} unpack", fmt, emit_unpack)

    def _get_function(self, name: str, fmt: WeightFormat | None, write: Callable[..., None]) -> int:
        with self._lock:
            if name not in self._others:
                self._others[name] = self._code.compile(name, lambda: build_module(self.target, fmt, (1,), write))("rows_1")
            return self._others[name]


def build_module(target: Target, fmt: WeightFormat | None, counts: Sequence[int], write: Callable[..., None]) -> str:
    module = ir.Module("ngramspec")
    module.triple = binding.get_default_triple()
    for rows in counts:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [LONG] * N_ARGUMENTS), f"rows_{rows}")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        write(Emitter(builder, target), fmt, rows, function.args)
        builder.ret_void()
    return str(module)


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

    def offset(self, address: Any, distance: Any) -> Any:
        return self.b.add(address, LONG(distance) if isinstance(distance, int) else distance)

    def call(self, name: str, kind: Any, *args: Any) -> Any:
        module = self.b.module
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, [a.type for a in args]), name)
        return self.b.call(function, args)

    def spread(self, scalar: Any, n: int = WIDTH) -> Any:
        """Emit a vector that repeats this scalar."""
        kind = ir.VectorType(scalar.type, n)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, WORD(0))
        return self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(WORD, n), [0] * n))

    def splat_words(self, number: int) -> Any:
        return ir.Constant(WORDS, [number] * WIDTH)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("llvm.fma.v16f32", FLOATS, a, b, c)

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
            planes.append((bits, [self.load(self.offset(at, LINE * v), WORDS, LINE) for v in range(bits)]))
            at = self.offset(at, LINE * bits)

        def group(g: int) -> Any:
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

        return group

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
        result = ir.Constant(BYTES, [table[0]] * LINE)
        for code in range(1, 16):
            here = self.b.icmp_unsigned("==", codes, ir.Constant(BYTES, [code] * LINE))
            result = self.b.select(here, ir.Constant(BYTES, [table[code]] * LINE), result)
        return self.b.bitcast(result, WORDS)

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

    def emit_products(self, codes: Sequence[Callable[[int], Any]], x_at: Sequence[Any], bits: int, n_parts: int) -> list[list[list[Any]]]:
        """Emit the integer dot products of a quant block: sums [panels][rows][parts] of 16 int32 each.

        `codes` has one function per panel, from a group to unsigned codes of `bits` bits; `x_at` holds the addresses of the rows' int8
        codes. With two parts, each half of the block has a sum of its own.
        """
        if self.target.dot == "maddubs":
            return self._emit_pair_products(codes, x_at, bits, n_parts)
        sums = [[[NOUGHTS] * n_parts for _ in x_at] for _ in codes]
        for g in range(GROUPS):
            vectors, part = [code(g) for code in codes], g * n_parts // GROUPS
            for r, address in enumerate(x_at):
                four = self.load(self.offset(address, 4 * g), WORD, 4)
                for k, vector in enumerate(vectors):
                    sums[k][r][part] = self.emit_dot(sums[k][r][part], vector, four, bits)
        return sums

    def _emit_pair_products(
        self, codes: Sequence[Callable[[int], Any]], x_at: Sequence[Any], bits: int, n_parts: int
    ) -> list[list[list[Any]]]:
        """Emit `emit_products` with instructions that multiply pairs of bytes into 16-bit sums.

        Sums stay in 16 bits as long as they cannot overflow. Codes of 8 bits are split into halves, since a pair of their products would
        overflow.
        """
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
                    for half, part in enumerate(self._split_halves(code(g), halves))
                    for n, piece in enumerate(self.split(self.b.bitcast(part, BYTES), 32))
                ]
                for r in rows:
                    x = self.b.bitcast(self.spread(self.load(self.offset(x_at[r], 4 * g), WORD, 4), 8), ir.VectorType(BYTE, 32))
                    for k, half, n, piece in pieces:
                        two, key = self.call("llvm.x86.avx2.pmadd.ub.sw", pairs, piece, x), (r, k, half, n)
                        fresh[key] = self.b.add(fresh[key], two) if key in fresh else two
                fresh = dict(zip(fresh, self.pin_registers(list(fresh.values())), strict=True))
                if (g + 1) % period == 0:
                    part = g * n_parts // GROUPS
                    for r, k, half in sorted({key[:3] for key in fresh}):
                        worth = ir.Constant(pairs, [1 << halves[half][0]] * 16)
                        four = [self.call("llvm.x86.avx2.pmadd.wd", wide, fresh.pop((r, k, half, n)), worth) for n in range(2)]
                        sums[k][r][part] = self.b.add(sums[k][r][part], self.join(four))
        return sums

    def pin_registers(self, values: list[Any]) -> list[Any]:
        """Pin these values to registers at this point, so that the compiler moves no sum across it; return them."""
        n = len(values)
        kind = ir.FunctionType(ir.LiteralStructType([value.type for value in values]), [value.type for value in values])
        constraints = ",".join(["=x"] * n + [str(k) for k in range(n)])
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
            name, n = ("avx512.pmaddw.d.512", 16) if self.target.chains > 6 else ("avx2.pmadd.wd", 8)
            pairs, x = ir.VectorType(HALF, 2 * n), self.b.bitcast(self.spread(two, n), ir.VectorType(HALF, 2 * n))
            parts = [
                self.b.add(t, self.call(f"llvm.x86.{name}", ir.VectorType(WORD, n), self.b.bitcast(w, pairs), x))
                for t, w in zip(self.split(total, n), self.split(integers, n), strict=True)
            ]
            return self.join(parts)
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

    def words(number: int) -> Any:
        return ir.Constant(kind, [number] * n if n else number)

    wide = b.zext(bits, kind)
    size = b.bitcast(b.shl(b.and_(wide, words(0x7FFF)), words(13)), floats)
    scaled = b.fmul(size, ir.Constant(floats, [2.0**112] * n if n else 2.0**112))
    return b.bitcast(b.or_(b.bitcast(scaled, kind), b.shl(b.and_(wide, words(0x8000)), words(16))), floats)


def emit_int8(e: Emitter, fmt: QuantFormat, n_rows: int, args: Sequence[Any]) -> None:
    b, n_panels, n_blocks, x0, x_step, q0, q_step = e.b, args[1], args[3], args[6], args[7], args[8], args[9]
    xs, qs = [x0], [q0]
    for _ in range(n_rows - 1):
        xs.append(e.b.add(xs[-1], x_step))
        qs.append(e.b.add(qs[-1], q_step))

    def tile(first: Any, count: int) -> None:
        panels = [_Panel(e, fmt, e.b.add(first, LONG(k)), args) for k in range(count)]
        ahead = e.b.mul(args[2], LONG(count))  # the next panels come into the cache, bit by bit, while these are multiplied
        n_turns, emit = (b.lshr(n_blocks, LONG(SUPER_SHIFT)), _emit_int8_super) if fmt.by_super else (n_blocks, _emit_int8_block)
        with e.loop(n_turns, [panel.bias for panel in panels for _ in range(n_rows)]) as (i, carried, ends):
            totals = [carried[k * n_rows : (k + 1) * n_rows] for k in range(count)]
            ends += emit(e, fmt, panels, totals, i, xs, qs, ahead)
        for k, panel in enumerate(panels):
            y = panel.y
            for total in ends[k * n_rows : (k + 1) * n_rows]:
                e.store(total, y)
                y = e.b.add(y, args[12])

    _emit_tiles(e, n_panels, 2 if 1 < n_rows <= min(MOST_IN_TWO, e.target.chains // 4) else 1, tile)


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


class _Panel:
    """Addresses of one panel."""

    def __init__(self, e: Emitter, fmt: QuantFormat, p: Any, args: Sequence[Any]) -> None:
        b = e.b
        w0, _, panel_bytes, _, super_at, codes_at, _, _, _, _, bias0, y0, _ = args
        self.scales = b.add(w0, b.mul(p, panel_bytes))
        self.supers, self.codes = b.add(self.scales, super_at), b.add(self.scales, codes_at)
        shift = b.mul(p, LONG(4 * WIDTH))
        self.bias, self.y = e.load(b.add(bias0, shift), FLOATS, 4), b.add(y0, shift)


def _emit_block_products(e: Emitter, fmt: QuantFormat, panels: list[_Panel], i: Any, xs: list[Any], ahead: Any) -> list[list[list[Any]]]:
    """Emit the dot products of block i with codes from which no zero has been taken but what `_find_zero` leaves out.

    Returns sums [panels][rows][parts].
    """
    b = e.b
    codes = []
    for panel in panels:
        here = b.add(panel.codes, b.mul(i, LONG(fmt.code_bytes)))
        step = fmt.code_bytes + fmt.scale_bytes + fmt.super_bytes // SUPER  # the share that a block has in a panel
        cursor = b.add(b.add(panel.scales, ahead), b.mul(i, LONG(step)))
        for line in range(0, step, LINE):
            e.prefetch(e.offset(cursor, line))
        codes.append(cache(e.make_code_reader(fmt, here)))
    x_at = [b.add(x, b.mul(i, LONG(DEPTH))) for x in xs]
    at_once = AT_ONCE if e.target.dot == "vnni512" else len(xs)
    sums: list[list[list[Any]]] = [[] for _ in panels]
    for r in range(0, len(xs), at_once):
        for k, more in enumerate(e.emit_products(codes, x_at[r : r + at_once], fmt.bits, fmt.n_parts)):
            sums[k] += more
    return sums


def _find_zero(e: Emitter, fmt: QuantFormat) -> int:
    """Return the zero that codes still contain in dot products: signed ones of codes of 8 bits have taken 128 off."""
    return fmt.zero - 128 if e.target.dot == "neon" and fmt.bits == 8 else fmt.zero


def _emit_int8_block(
    e: Emitter, fmt: QuantFormat, panels: list[_Panel], totals: list[list[Any]], i: Any, xs: list[Any], qs: list[Any], ahead: Any
) -> list[Any]:
    """Emit the totals [panels][rows] plus block i's products, as one flat list."""
    b, zero = e.b, _find_zero(e, fmt)
    q_at = [b.add(q, b.mul(i, LONG(ACT_SCALE_BYTES))) for q in qs]
    sums = _emit_block_products(e, fmt, panels, i, xs, ahead)
    ends = []
    for k, panel in enumerate(panels):
        scales_at = b.add(panel.scales, b.mul(i, LONG(fmt.scale_bytes)))
        scale = e.load_scales(fmt, scales_at)
        offset = e.load_halves(e.offset(scales_at, 2 * WIDTH)) if fmt.offsets else None
        for r in range(len(xs)):
            x_scale, (whole,) = e.spread(e.load(q_at[r], FLOAT, 4)), sums[k][r]
            if zero:
                whole = b.sub(whole, b.mul(e.spread(e.load(e.offset(q_at[r], 4), WORD, 4)), e.splat_words(zero % 2**32)))
            end = e.fma(e.to_floats(whole), b.fmul(scale, x_scale), totals[k][r])
            if offset is not None:
                end = e.fma(offset, e.spread(e.load(e.offset(q_at[r], 12), FLOAT, 4)), end)
            ends.append(end)
    return ends


def _emit_int8_super(
    e: Emitter, fmt: QuantFormat, panels: list[_Panel], totals: list[list[Any]], s: Any, xs: list[Any], qs: list[Any], ahead: Any
) -> list[Any]:
    """Emit the totals [panels][rows] plus super-block s's products, as one flat list.

    Sums of a scale's 16 or 32 codes are integers, their sum over the super-block one chain of float32.
    """
    b, n_rows, n_parts, zero = e.b, len(xs), fmt.n_parts, _find_zero(e, fmt)
    q_at = [b.add(q, b.mul(s, LONG(SUPER * ACT_SCALE_BYTES))) for q in qs]
    sums_at = [e.offset(q, HALF_SUMS_AT if fmt.by_16 else BLOCK_SUMS_AT) for q in q_at]
    first = b.shl(s, LONG(SUPER_SHIFT))
    with e.loop(LONG(SUPER), [ZEROS] * (n_rows * len(panels))) as (j, carried, products):
        i = b.add(first, j)
        sums = _emit_block_products(e, fmt, panels, i, xs, ahead)
        for k, panel in enumerate(panels):
            scales = [e.to_floats(_load_integer(e, fmt, panel.scales, i, n)) for n in range(n_parts)]
            for r in range(n_rows):
                total = carried[k * n_rows + r]
                for n, (part, scale) in enumerate(zip(sums[k][r], scales, strict=True)):
                    if zero != fmt.zero:  # put back what was taken off the codes: sums are rounded from here on
                        at = b.add(sums_at[r], b.mul(b.add(b.mul(j, LONG(n_parts)), LONG(n)), LONG(2)))
                        of_codes = b.mul(b.sext(e.load(at, HALF, 2), WORD), WORD(fmt.zero - zero))
                        part = b.add(part, e.spread(of_codes))
                    total = e.fma(e.to_floats(part), scale, total)
                products.append(total)
    ends = []
    for k, panel in enumerate(panels):
        heads = b.add(panel.supers, b.mul(s, LONG(fmt.super_bytes)))
        scale = e.load_halves(heads)
        offset = b.fneg(e.load_halves(e.offset(heads, 2 * WIDTH))) if fmt.offsets else None
        of_sums = [NOUGHTS] * n_rows  # the sums of the codes of x, each times its integer offset, or the scale that the zero has
        if offset is not None or fmt.zero:
            for pair in range(SUPER * n_parts // 2):
                at = [divmod(2 * pair + n, n_parts) for n in range(2)]
                shift = n_parts if fmt.offsets else 0
                integers = [_load_integer(e, fmt, panel.scales, b.add(first, LONG(block)), shift + n) for block, n in at]
                both = b.or_(b.and_(integers[0], e.splat_words(0xFFFF)), b.shl(integers[1], e.splat_words(16)))
                of_sums = [e.emit_pair_dot(of_sums[r], both, e.load(e.offset(sums_at[r], 4 * pair), WORD, 4)) for r in range(n_rows)]
        for r in range(n_rows):
            x_scale, whole = e.spread(e.load(q_at[r], FLOAT, 4)), products[k * n_rows + r]
            if fmt.zero:
                whole = e.fma(e.to_floats(of_sums[r]), ir.Constant(FLOATS, [-float(fmt.zero)] * WIDTH), whole)
            end = e.fma(whole, b.fmul(scale, x_scale), totals[k][r])
            if offset is not None:
                end = e.fma(e.to_floats(of_sums[r]), b.fmul(offset, x_scale), end)
            ends.append(end)
    return ends


def _load_integer(e: Emitter, fmt: QuantFormat, scales: Any, i: Any, n: int) -> Any:
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

        def plain(j: int) -> Any:
            at = e.offset(here, step * j)
            if fmt is PlainFormat.F32:
                return e.load(at, FLOATS, 64)
            if fmt is PlainFormat.F16:
                return e.load_halves(at)
            return b.bitcast(b.shl(b.zext(e.load(at, e_halves, 32), WORDS), e.splat_words(16)), FLOATS)

        return plain
    scales_at = b.add(w, b.mul(i, LONG(fmt.scale_bytes)))
    code = e.make_code_reader(fmt, b.add(b.add(w, codes_at), b.mul(i, LONG(fmt.code_bytes))))
    n_parts = fmt.n_parts
    if fmt.half_scales:
        scales = [e.load_scales(fmt, scales_at)]
        offsets = [e.load_halves(e.offset(scales_at, 2 * WIDTH))] if fmt.offsets else None
    else:
        heads = b.add(b.add(w, super_at), b.mul(b.lshr(i, LONG(SUPER_SHIFT)), LONG(fmt.super_bytes)))
        scale = e.load_halves(heads)
        scales = [b.fmul(scale, e.to_floats(_load_integer(e, fmt, w, i, n))) for n in range(n_parts)]
        offsets = None
        if fmt.offsets:
            least = b.fneg(e.load_halves(e.offset(heads, 2 * WIDTH)))
            offsets = [b.fmul(least, e.to_floats(_load_integer(e, fmt, w, i, n_parts + n))) for n in range(n_parts)]
    groups: dict[int, Any] = {}

    def weights(j: int) -> Any:
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

    return weights


def emit_float32(e: Emitter, fmt: WeightFormat, n_rows: int, args: Sequence[Any]) -> None:
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
            of = [_make_weight_reader(e, fmt, w, super_at, codes_at, i) for w in ws]
            for j in range(DEPTH):
                weights = [one(j) for one in of]
                for r in range(n_rows):
                    x = e.spread(e.load(e.offset(x_at[r], 4 * j), FLOAT, 4))
                    totals[r] = [e.fma(x, weight, total) for weight, total in zip(weights, totals[r], strict=True)]
            ends += [total for row in totals for total in row]
        for r in range(n_rows):
            y = b.add(y0, b.mul(LONG(r), y_step))
            for k, shift in enumerate(shifts):
                e.store(ends[r * count + k], b.add(y, shift))

    _emit_tiles(e, n_panels, max(1, min(4, e.target.chains // n_rows)), panels)


def emit_unpack(e: Emitter, fmt: WeightFormat, _rows: int, args: Sequence[Any]) -> None:
    w, n_blocks, super_at, codes_at, y0 = args[:5]
    with e.loop(n_blocks, []) as (i, _, _):
        weights = _make_weight_reader(e, fmt, w, super_at, codes_at, i)
        y = e.b.add(y0, e.b.mul(i, LONG(4 * DEPTH * WIDTH)))
        for j in range(DEPTH):
            e.store(weights(j), e.offset(y, 4 * WIDTH * j))


LEAST = 1e-30  # A block whose activations are all smaller than this is quantised to zeros.
# 1.5 · 2^23: adding it to a number of at most 22 bits rounds that to the nearest integer, ties to even.
_ROUND = 12582912.0


def emit_quantise(e: Emitter, _fmt: None, _rows: int, args: Sequence[Any], *, blocks: bool, supers: bool) -> None:
    """Emit `Kernels.get_quantise`."""
    x0, n_blocks, codes0, act_scales0, super_codes0, super_scales0 = args[:6]
    b = e.b
    if blocks:
        with e.loop(n_blocks, []) as (i, _, _):
            record = b.add(act_scales0, b.mul(i, LONG(ACT_SCALE_BYTES)))
            scale, (first, second) = _emit_quantise_vectors(e, x0, codes0, b.mul(i, LONG(DEPTH)), DEPTH // WIDTH)
            whole = b.add(first, second)
            for k, value in enumerate((scale, whole, first, b.fmul(scale, b.sitofp(whole, FLOAT)))):
                e.store(value, e.offset(record, 4 * k))
    if supers:
        n_supers = b.lshr(n_blocks, LONG(SUPER_SHIFT))  # none in a row of other weights
        with b.if_then(b.icmp_signed(">", n_supers, LONG(0))), e.loop(n_supers, []) as (s, _, _):
            record = b.add(super_scales0, b.mul(s, LONG(SUPER * ACT_SCALE_BYTES)))
            scale, sums = _emit_quantise_vectors(e, x0, super_codes0, b.mul(s, LONG(SUPER * DEPTH)), SUPER * DEPTH // WIDTH)
            e.store(scale, record)
            for k, value in enumerate(sums):
                e.store(b.trunc(value, HALF), e.offset(record, HALF_SUMS_AT + 2 * k), 2)
                if k % 2:
                    e.store(b.trunc(b.add(sums[k - 1], value), HALF), e.offset(record, BLOCK_SUMS_AT + k - 1), 2)


def _emit_quantise_vectors(e: Emitter, x0: Any, codes0: Any, first: Any, n: int) -> tuple[Any, list[Any]]:
    """Quantise n vectors of 16 activations, from activation `first` on, by one scale; return that and each vector's sum of codes."""
    b = e.b
    at = b.add(x0, b.mul(first, LONG(4)))
    xs = [e.load(e.offset(at, 4 * WIDTH * k), FLOATS, 4) for k in range(n)]
    most = e.call("llvm.fabs.v16f32", FLOATS, xs[0])
    for x in xs[1:]:
        size = e.call("llvm.fabs.v16f32", FLOATS, x)
        most = b.select(b.fcmp_ordered(">", most, size), most, size)
    for width in (8, 4, 2, 1):
        undefined = ir.Constant(most.type, ir.Undefined)
        halves = [b.shuffle_vector(most, undefined, ir.Constant(ir.VectorType(WORD, width), list(range(k, k + width)))) for k in (0, width)]
        most = b.select(b.fcmp_ordered(">", *halves), *halves)
    top = b.extract_element(most, WORD(0))
    some = b.fcmp_ordered(">", top, FLOAT(LEAST))
    inverse = e.spread(b.select(some, b.fdiv(FLOAT(127.0), top), FLOAT(0.0)))
    sums = []
    for k, x in enumerate(xs):
        moved = b.fadd(b.fmul(x, inverse), ir.Constant(FLOATS, [_ROUND] * WIDTH))
        codes = b.sub(b.bitcast(moved, WORDS), e.splat_words(0x4B400000))
        e.store(b.trunc(codes, ir.VectorType(BYTE, WIDTH)), e.offset(b.add(codes0, first), WIDTH * k), 1)
        sums.append(e.call("llvm.vector.reduce.add.v16i32", WORD, codes))
    return b.fdiv(top, FLOAT(127.0)), sums


def emit_exp(e: Emitter, x: Any) -> Any:
    """Emit `sampling.numeric.emit_exp` for 16 numbers at a time, with the same bits."""
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
    power = b.shl(b.add(b.fptosi(n, WORDS), e.splat_words(127)), e.splat_words(23))
    return b.fmul(y, b.bitcast(power, FLOATS))


def emit_activation(e: Emitter, _fmt: None, _rows: int, args: Sequence[Any], *, name: str) -> None:
    gate0, up0, n_blocks, y0 = args[:4]
    b = e.b
    zero, one, slope, cube = (ir.Constant(FLOATS, [float(x)] * WIDTH) for x in (0.0, 1.0, numeric.GELU_SLOPE, numeric.GELU_CUBE))
    with e.loop(b.mul(n_blocks, LONG(2)), []) as (i, _, _):
        shift = b.mul(i, LONG(4 * WIDTH))
        gate = e.load(b.add(gate0, shift), FLOATS, 4)
        if name == "squared relu":  # the product keeps what is not a number
            y = b.fmul(b.select(b.fcmp_ordered(">", gate, zero), gate, zero), gate)
        else:
            argument = gate if name == "silu" else b.fmul(gate, e.fma(cube, b.fmul(gate, gate), slope))
            y = b.fdiv(gate, b.fadd(one, emit_exp(e, b.fneg(argument))))
        if name in ("silu", "gelu"):  # the others are not gated
            y = b.fmul(y, e.load(b.add(up0, shift), FLOATS, 4))
        e.store(y, b.add(y0, shift))


def emit_clamped_swiglu(e: Emitter, _fmt: None, _rows: int, args: Sequence[Any], *, alpha: float, limit: float) -> None:
    gate0, up0, n_blocks, y0 = args[:4]
    b = e.b
    one, high, low, slope = (ir.Constant(FLOATS, [float(np.float32(x))] * WIDTH) for x in (1.0, limit, -limit, alpha))

    def bound(x: Any, by: Any, order: str) -> Any:
        return b.select(b.fcmp_ordered(order, x, by), by, x)  # keeps what is not a number

    with e.loop(b.mul(n_blocks, LONG(2)), []) as (i, _, _):
        shift = b.mul(i, LONG(4 * WIDTH))
        gate, up = (e.load(b.add(start, shift), FLOATS, 4) for start in (gate0, up0))
        gate, up = bound(gate, high, ">"), bound(bound(up, high, ">"), low, "<")
        share = b.fdiv(gate, b.fadd(one, emit_exp(e, b.fneg(b.fmul(gate, slope)))))
        e.store(b.fmul(share, b.fadd(up, one)), b.add(y0, shift))


_DIGEST: list[str] = []


def _compute_source_digest() -> str:
    if not _DIGEST:
        sources = (Path(__file__), Path(formats.__file__))
        _DIGEST.append(hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest())
    return _DIGEST[0]


def _read_object(path: Path | None) -> bytes | None:
    """Return cached machine code if it is intact."""
    try:
        kept = path.read_bytes() if path else b""
    except OSError:
        return None
    digest, code = kept[:32], kept[32:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write_object(path: Path | None, code: bytes) -> None:
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
