"""Kernels compiled ahead of time (`tools.aot`), in a process of its own without the interpreter.

def compiled() -> None:                       # in test_x.py; test_compile_kernels runs all of that name in one process
    kernel = compile_kernel(_kernel, {"x": "*bf16", "n": "i32:16"}, {"BLOCK": 64}, capability=90)
    assert kernel.n_spills == 0
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

from tools.aot import SHARED_LIMIT, CompiledKernel, check_limits, compile_kernel

__all__ = ["SHARED_LIMIT", "CompiledKernel", "check_limits", "compile_kernel", "find_failures"]

ROOT = Path(__file__).parents[3]


def find_failures(files: list[Path], timeout_s: float = 280) -> dict[str, str]:
    """Run `compiled` of test files in a process without the interpreter; return what each raised, "" for nothing, by the file's name."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = [str(ROOT), str(Path(__file__).parent), str(ROOT / "tests"), env.get("PYTHONPATH", "")]  # the packages that the tests import
    env["PYTHONPATH"] = os.pathsep.join(filter(None, found))
    done = subprocess.run(
        [sys.executable, __file__, *map(str, files)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _run(file: str) -> str:
    try:
        runpy.run_path(file)["compiled"]()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    print(json.dumps({Path(file).stem: _run(file) for file in sys.argv[1:]}))
