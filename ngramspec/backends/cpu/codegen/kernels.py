"""Compile the kernels for this processor: matrix products of some rows and packed panels, and what comes between products.

`Kernels` returns the address of a function per weight format, precision and number of rows. `README.md` explains panels, register tiles and
how the code reaches numba. The bits of an output depend neither on the other rows and panels nor on the instructions that the processor
has. The module knows memory addresses alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding, ir

from ngramspec.backends.cpu import formats
from ngramspec.backends.cpu.codegen import activations, emitter, products, tiles
from ngramspec.backends.cpu.codegen.activations import emit_activation, emit_clamped_swiglu, emit_quantise
from ngramspec.backends.cpu.codegen.emitter import LONG, Emitter
from ngramspec.backends.cpu.codegen.products import emit_float32, emit_int8, emit_unpack
from ngramspec.backends.cpu.codegen.targets import Target, get_host_target
from ngramspec.backends.cpu.codegen.tiles import emit_int8_tiles, list_tile_rows
from ngramspec.backends.cpu.formats import LINE, QuantFormat, WeightFormat
from ngramspec.datastore import bundled_code
from ngramspec.datastore.partial_files import write_whole

INT8_ROWS = (1, 2, 3, 4, 5, 6, 8, 12)  # Row counts with a kernel of their own, besides those of tiles; other counts are made up of these.
FLOAT_ROWS = (1, 2, 3, 4, 6, 8, 12)
FEW_ROWS = (1, 4)  # Row counts compiled for a few passes only, of either precision: they take a seventh of the time to compile.
KEPT = 300  # Compiled modules kept in the folder, latest first; one version needs some tens.
# Arguments of a kernel, all int64. Addresses: weights (0), activations (6), activation scales (8, int8 only), biases (10), results (11).
# Numbers: panels (1), blocks (3). Bytes: of a panel (2), in a panel before the super-blocks' scales (4) and the codes (5), between two
# rows of activations (7), of activation scales (9) and of results (12).
N_ARGUMENTS = 13


class CompiledModules:
    """Machine code compiled for a target, cached in a folder for the next start or bundled with the package (None: always compiled)."""

    def __init__(self, target: Target, folder: Path | None = None) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        binding.initialize_native_asmparser()
        self.target, self._folder = target, folder
        self._machine = self._new_machine()
        self._engines: list[Any] = []  # they own the code

    def compile(self, name: str, source: Callable[[], str]) -> Callable[[str], int]:
        """Return a function from names to addresses for the module that `source` writes; `name` identifies it within this version."""
        path = self._folder / _name_object(name, self.target) if self._folder else None
        kept = _read_object(path) or self._read_bundled(name)
        if kept is None:
            module = binding.parse_assembly(source())
            module.verify()
            passes = binding.create_new_module_pass_manager()  # all that `speed_level=2` does takes eight times as long for the same speed
            passes.add_instruction_combine_pass()
            passes.add_new_gvn_pass()
            passes.run(module, binding.create_pass_builder(self._machine, binding.create_pipeline_tuning_options(speed_level=2)))
            kept = self._machine.emit_object(module)
            _write_object(path, kept)
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), self._new_machine())
        engine.add_object_file(binding.ObjectFileRef.from_data(kept))
        engine.finalize_object()
        self._engines.append(engine)
        return engine.get_function_address

    def _read_bundled(self, name: str) -> bytes | None:
        if self._folder is None or (bundle := bundled_code.find_bundle()) is None:
            return None
        folder, level = bundle
        return _read_object(folder / _name_object(name, self.target.cover_level(level)))

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
        """Return the kernels by number of rows: those of `list_row_counts`, or with `few` only FEW_ROWS."""
        with self._lock:
            if (fmt, int8, few) not in self._found:
                counts = FEW_ROWS if few else self.list_row_counts(fmt, int8)
                write = emit_float32 if not int8 else emit_int8_tiles if self.target.tiles else emit_int8
                address = self._code.compile(f"{fmt} {int8} {counts}", lambda: build_module(self.target, fmt, counts, write))
                self._found[fmt, int8, few] = {rows: address(f"rows_{rows}") for rows in counts}
            return self._found[fmt, int8, few]

    def list_row_counts(self, fmt: WeightFormat, int8: bool) -> tuple[int, ...]:
        """List the row counts that have a kernel of their own, in ascending order."""
        if not int8:
            return FLOAT_ROWS
        assert isinstance(fmt, QuantFormat), fmt
        return tuple(sorted({*INT8_ROWS, *list_tile_rows(fmt)})) if self.target.tiles else INT8_ROWS

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

    def get_activation(self, name: str, gate_factor: float = 1.0, factor: float = 1.0) -> int:
        """Return a function of (addresses of gate and up, number of blocks of 32, address of the result, float32).

        The result is gate · sigmoid(gate) · up for "silu", gelu(gate) · up for "gelu" (`sampling.numeric.compute_gelu`). What lies at the
        address of up has no meaning for "plain gelu", gelu(gate), and "squared relu", max(gate, 0)². `gate_factor` multiplies gate before,
        `factor` the result.
        """
        factors = None if gate_factor == factor == 1 else (gate_factor, factor)
        return self._get_function(f"{name} {factors}" if factors else name, None, partial(emit_activation, name=name, factors=factors))

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
        function.attributes.add("nounwind")  # llvmlite leaves `alignstack` out where it is the only attribute
        function.attributes.alignstack = LINE  # see "llvmlite's traps"
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        write(Emitter(builder, target), fmt, rows, function.args)
        builder.ret_void()
    return str(module)


_DIGEST: list[str] = []


def _compute_source_digest() -> str:
    if not _DIGEST:
        sources = [Path(str(module.__file__)) for module in (activations, emitter, products, tiles, formats)] + [Path(__file__)]
        _DIGEST.append(hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest())
    return _DIGEST[0]


def _name_object(name: str, target: Target) -> str:
    key = f"{name} {target} {llvmlite.__version__} {_compute_source_digest()}"
    return f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.o"


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
        write_whole(path, hashlib.sha256(code).digest() + code)
        for old in sorted(path.parent.glob("*.o"), key=lambda p: p.stat().st_mtime)[:-KEPT]:
            old.unlink()
    except OSError:  # it will be compiled again
        pass
