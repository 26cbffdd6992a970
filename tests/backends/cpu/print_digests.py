"""Print SHA-256 digests of what the CPU target computes, as one JSON document, to compare one processor's bits with another's.

    python tests/backends/cpu/print_digests.py MODEL PART...

MODEL is a GGUF file, a part one of `PARTS`. For "text", NGRAMSPEC_CACHE holds a start record of the file: the first process makes it, with
torch; a later one on another processor takes that, and needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys

import numpy as np
from weights import EVERY, codes_and_act_scales, multiply, random_weight, run

from ngramspec import Engine, SamplingParams
from ngramspec.backends.cpu.codegen.kernels import FEW_ROWS, Kernels
from ngramspec.backends.cpu.codegen.targets import list_targets
from ngramspec.backends.cpu.formats import QUANTISED
from ngramspec.datastore.cache_dir import cache_dir
from ngramspec.models import start_cache

PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n"
N_OUT, N_IN = 80, 512


def digest_arrays(*arrays: np.ndarray) -> str:
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()[:16]


def make_rows(n: int, k: int) -> np.ndarray:
    """Return [n, k] float32 with some outliers."""
    rng = np.random.default_rng(1)
    return (rng.normal(0, 1, (n, k)) * np.where(rng.random((n, k)) < 0.01, 40, 1)).astype(np.float32)


def digest_quantisation(kernels: Kernels) -> dict[str, str]:
    """Digest codes and activation scales by blocks and by super-blocks."""
    return {kind: digest_arrays(*codes_and_act_scales(kernels, make_rows(9, N_IN), QUANTISED[kind])) for kind in ("Q4_0", "Q4_K")}


def digest_silu(kernels: Kernels) -> dict[str, str]:
    """Digest silu(gate) · up and gelu(gate) · up."""
    gate, up = make_rows(2, 4096) * np.float32(3)
    y = np.empty((2, len(gate)), np.float32)
    for function, out in zip((kernels.get_activation("silu"), kernels.get_activation("gelu")), y, strict=True):
        run(function, gate.ctypes.data, up.ctypes.data, len(gate) // 32, out.ctypes.data)
    return {"silu": digest_arrays(y[0]), "gelu": digest_arrays(y[1])}


def digest_products(kernels: Kernels) -> dict[str, str]:
    """Digest products of one row and of four with weights of every format in both precisions."""
    found, x, bias = {}, make_rows(max(FEW_ROWS), N_IN), make_rows(1, N_OUT)[0]
    for kind in EVERY:
        weight = random_weight(kind, N_OUT, N_IN)
        for int8 in (True, False) if kind in QUANTISED else (False,):
            functions = kernels.get_row_functions(weight.format, int8, few=True)
            rows, scales = codes_and_act_scales(kernels, x, QUANTISED[kind]) if int8 else (x, None)
            made = [multiply(functions[n], weight, rows[:n], scales[:n] if scales is not None else None, bias) for n in FEW_ROWS]
            found[f"{kind} {'int8' if int8 else 'float32'}"] = digest_arrays(*made)
    return found


def digest_text(_: Kernels) -> dict[str, str]:
    """Digest a greedy text, with speculation and without, on one thread and on two."""
    start_cache._describe_processor = lambda: ["any"]  # another processor's start record will do
    found = {}
    for threads in (1, 2):
        for speculation in (True, False):
            with Engine(sys.argv[1], threads=threads, speculation=speculation, similar=False) as engine:
                done = engine.complete(PROMPT, SamplingParams(max_tokens=64, ignore_eos=True))
            assert engine.exactness == "bitwise", engine.exactness
            found[f"threads {threads}, speculation {speculation}"] = digest_arrays(np.array(done.token_ids))
    return found


PARTS = {"quantisation": digest_quantisation, "silu": digest_silu, "products": digest_products, "text": digest_text}


def main() -> None:
    digests = {}
    for target in list_targets():
        kernels = Kernels(target, cache_dir() / "code")
        for part in sys.argv[2:]:
            if part != "text" or target == list_targets()[0]:
                digests[f"{target.name}: {part}"] = PARTS[part](kernels)
    print(json.dumps({"machine": platform.machine(), "digests": digests}))


if __name__ == "__main__":
    main()
