"""Compile kernels ahead of time for a device that need not be present, and report what ptxas makes of them.

A kernel with the types of its arguments goes in; registers, spills, shared memory and code come out. Not under Triton's interpreter.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of shared memory of a block, by capability


@dataclass(frozen=True)
class CompiledKernel:
    """The result of compiling one kernel."""

    name: str
    ptx: str
    ttgir: str
    n_regs: int
    """Registers of a thread."""
    n_spills: int
    """Bytes of a thread's stack and local memory: not 0 if registers were spilled or an array was indexed."""
    shared: int
    """Bytes of shared memory, static and dynamic."""
    num_warps: int

    def count(self, pattern: str) -> int:
        """Count the matches of a regular expression in the PTX, e.g. "wgmma.mma_async", "mma.sync", "fma.rn.f32", "cp.async"."""
        return len(re.findall(pattern, self.ptx))

    @property
    def mma(self) -> Counter[str]:
        """Matrix instructions of the PTX by name (shape and types included)."""
        return Counter(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)[\w.]+", self.ptx))

    def summarize(self) -> str:
        mma = ", ".join(f"{n} {name}" for name, n in self.mma.items()) or "no mma"
        return f"{self.name}: {self.n_regs} registers, {self.n_spills} B spilled, {self.shared} B shared, {mma}"


def compile_kernel(
    fn: Any,
    signature: dict[str, Any],
    constexprs: dict[str, Any] | None = None,
    *,
    capability: int = 90,
    num_warps: int = 4,
    num_stages: int = 3,
    enable_fp_fusion: bool = False,
    launch_pdl: bool = False,
) -> CompiledKernel:
    """Compile a kernel. `signature`: the type of every argument but the constexprs: "*bf16", "*fp32", "*i32", "i32", "i64", "fp32".

    ":16" after a type says that the value is a multiple of 16, as the launcher finds by itself; pointers always are,
    unless they end in ":1". An argument that is None is a constexpr. Types of a tuple are a tuple of the same kind.
    """
    import triton.compiler
    from triton.backends.compiler import GPUTarget

    constexprs = dict(constexprs or {})
    missing = [name for name in fn.arg_names if name not in signature and name not in constexprs]
    assert not missing, f"no type or value for {missing}"
    types, attrs = dict[str, Any](), dict[tuple[int, ...], list[list[Any]]]()

    def read_type(given: Any, *path: int) -> Any:
        if isinstance(given, tuple):
            parts = [read_type(each, *path, i) for i, each in enumerate(given)]
            return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
        type_, _, divisor = given.partition(":")
        if divisor == "16" or (type_.startswith("*") and not divisor):
            attrs[path] = [["tt.divisibility", 16]]
        return type_

    for i, name in enumerate(fn.arg_names):
        types[name] = "constexpr" if name in constexprs else read_type(signature[name], i)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion, "launch_pdl": launch_pdl}
    kernel = triton.compiler.compile(
        triton.compiler.ASTSource(fn, types, constexprs, attrs), target=GPUTarget("cuda", capability, 32), options=options
    )
    regs, spills, static = _read_usage(kernel.asm["cubin"])
    return CompiledKernel(
        fn.__name__,
        kernel.asm["ptx"],
        kernel.asm["ttgir"],
        regs,
        spills,
        kernel.metadata.shared + static,
        num_warps,
    )


def check_limits(kernel: CompiledKernel, capability: int, most_spilled: int = 0) -> None:
    """Raise AssertionError if more bytes of a thread's registers were spilled or a block does not fit the device."""
    assert kernel.n_spills <= most_spilled, kernel.summarize()
    assert kernel.shared <= SHARED_LIMIT[capability], kernel.summarize()
    assert kernel.n_regs * 32 * kernel.num_warps <= 65536, kernel.summarize()


def _run_tool(name: str, cubin: bytes, *options: str) -> str:
    """Return the output of a program of the CUDA toolkit that comes with Triton."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def _read_usage(cubin: bytes) -> tuple[int, int, int]:
    """Return registers, bytes of stack and local memory, bytes of static shared memory."""
    text = _run_tool("cuobjdump", cubin, "--dump-resource-usage")
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"], found["SHARED"]
