"""Compute a digest of a compiled function's code and of all code and constants that end up in its machine code.

numba compiles callees and global constants into their callers, but its cache looks at the source file of the caller alone. After an
update that changes only a callee's file, machine code of the old callee would run. Knows functions as numba finds them: by the names in
their bytecode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

_analysed: dict[FunctionType, tuple[bytes, tuple[FunctionType, ...]]] = {}


def compute_code_digest(function: Callable[..., Any]) -> bytes:
    """Return a digest that changes with the function, with any function that it reaches, and with the constants they read.

    Functions are followed if numba compiled them (dispatchers and intrinsics), and plain ones of the same top-level package, which
    intrinsics call while they generate code. Other libraries are told apart by their versions, elsewhere.
    """
    assert isinstance(function, FunctionType)
    reached, todo = {function}, [function]
    while todo:
        new = {each for each in _analyse_function(todo.pop())[1] if each not in reached}
        reached |= new
        todo += new
    return hashlib.sha256(b"".join(sorted(_analyse_function(each)[0] for each in reached))).digest()


def _analyse_function(function: FunctionType) -> tuple[bytes, tuple[FunctionType, ...]]:
    """Return a digest of one function and its constants, and the functions that it names."""
    if (known := _analysed.get(function)) is None:
        codes = list(_walk_code(function.__code__))
        names = sorted({name for code in codes for name in code.co_names})
        values = [function.__globals__[name] for name in names if name in function.__globals__]
        values += [getattr(value, name) for value in values if isinstance(value, ModuleType) for name in names if hasattr(value, name)]
        values += [cell.cell_contents for cell in function.__closure__ or ()]
        parts = [str(function.__module__), function.__qualname__]
        for code in codes:
            parts += [code.co_code.hex(), repr((code.co_names, code.co_varnames)), *map(_describe, code.co_consts)]
        callees = []
        for value in values:
            if (callee := _find_function(value, function)) is not None:
                callees.append(callee)
            parts.append(_describe(value))
        known = _analysed[function] = hashlib.sha256("\n".join(parts).encode()).digest(), tuple(callees)
    return known


def _walk_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _walk_code(constant)


def _find_function(value: Any, caller: FunctionType) -> FunctionType | None:
    """Return the Python function behind a dispatcher, an intrinsic or a function of the caller's package; None for anything else."""
    compiled = getattr(value, "py_func", None) or getattr(value, "_defn", None)
    if isinstance(compiled, FunctionType):
        return compiled
    if isinstance(value, FunctionType) and str(value.__module__).partition(".")[0] == str(caller.__module__).partition(".")[0]:
        return value
    return None


def _describe(value: Any) -> str:
    """Return a text that is the same in every process: of constants their values, of what may change or has an address the type alone."""
    if isinstance(value, tuple):
        return f"tuple({', '.join(map(_describe, value))})"
    if isinstance(value, (frozenset, set)):
        return f"set({', '.join(sorted(map(_describe, value)))})"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {value.tobytes().hex()}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic, np.dtype)):
        return f"{type(value).__name__} {value!r}"
    if hasattr(value, "targetoptions"):
        return f"dispatcher {sorted(map(repr, value.targetoptions.items()))}"
    return type(value).__qualname__
