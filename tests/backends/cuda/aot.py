"""Kernels compiled ahead of time (`tools.aot`), in a process of its own without the interpreter.

def compiled() -> None:                       # in test_x.py
    kernel = compile_kernel(_kernel, {"x": "*bf16", "n": "i32:16"}, {"BLOCK": 64}, capability=90)
    assert kernel.n_spills == 0

def test_compiles() -> None:
    run_aot(__file__, "compiled")
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

from tools.aot import SHARED_LIMIT, CompiledKernel, check_limits, compile_kernel

__all__ = ["SHARED_LIMIT", "CompiledKernel", "check_limits", "compile_kernel", "run_aot"]

ROOT = Path(__file__).parents[3]


def run_aot(file: str, function: str, timeout_s: float = 200) -> str:
    """Runs a function of a test file in a process without the interpreter; returns what it printed, raises what it raised."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = [str(ROOT), str(Path(__file__).parent), str(ROOT / "tests"), env.get("PYTHONPATH", "")]  # the packages that the tests import
    env["PYTHONPATH"] = os.pathsep.join(filter(None, found))
    command = [sys.executable, __file__, str(Path(file).resolve()), function]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


if __name__ == "__main__":
    runpy.run_path(sys.argv[1])[sys.argv[2]]()
