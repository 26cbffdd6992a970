"""Run a pass of a model of one layer and 32 numbers, so that what real models need of compiled code is compiled or loaded.

The types of a pass's arguments are the same for every model, but for the type of keys and values. Of a model's file nothing is read but
the formats of its weights. Knows no request.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np

from ngramspec.backends.cpu import packing
from ngramspec.backends.cpu.arena import Arena
from ngramspec.backends.cpu.codegen.kernels import Kernels
from ngramspec.backends.cpu.codegen.targets import Target
from ngramspec.backends.cpu.formats import QUANTISED, PlainFormat, QuantFormat, get_format
from ngramspec.backends.cpu.iq_blocks import KINDS_OF_TABLES
from ngramspec.backends.cpu.kv_pool import KVPool
from ngramspec.backends.cpu.llama_forward import LlamaDecoder, NativeLlamaForward
from ngramspec.backends.cpu.llama_layers import GELU, PLAIN_GELU, SILU, SQUARED_RELU, LayerWeights, ModelOptions, OutsideWeights
from ngramspec.backends.cpu.llama_runner import CpuOptions, make_pool
from ngramspec.backends.cpu.matmul import CpuProduct, MatmulContext, Matrix, choose_codes, unpack_rows
from ngramspec.backends.cpu.row_loops import activate_rows, norm_rows
from ngramspec.models.gguf import read
from ngramspec.models.tensor_source import KINDS
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import ROWS_PER_ITEM, Span, pack

_SIZE = 32  # of hidden states, heads and vocabulary: one quant block


def compile_packing() -> None:
    """Compile the functions that pack weights, or load them from disk."""
    Arena().reserve_pages(_SIZE)
    for kind, row_bytes in (("Q8_0", 34), ("F32", 4 * _SIZE), ("F16", 2 * _SIZE)):
        packing.pack(kind, (1, _SIZE), partial(_make_rows, row_bytes), Arena())


def _make_rows(n_bytes: int, first: int, end: int) -> np.ndarray:
    return np.zeros((end - first, n_bytes), np.uint8)


def compile_kernels(gguf: str, int8: bool, folder: Path) -> None:
    """Compile the products of the formats that a GGUF file has matrices in, and keep them in `folder`. `int8`: of 8-bit activations.

    Those of float32 are left out: most files that have any multiply none, or have routers only.
    """
    kernels = Kernels(folder=folder)
    kinds = {tensor.kind for tensor in read(Path(gguf)).tensors.values() if len(tensor.shape) > 1}
    for kind in sorted(kinds & {*QUANTISED, "F16", "BF16"}):
        fmt = get_format(kind)
        kernels.get_row_functions(fmt, choose_codes(fmt, int8) > 0)
        kernels.get_row_functions(fmt, int8=False, few=int8)


def compile_all_kernels(target: Target, folder: Path) -> None:
    """Compile the products of all formats for a target, and what most models compute between products, and keep them in `folder`."""
    kernels = Kernels(target, folder)
    for fmt in (*QUANTISED.values(), *PlainFormat):
        if isinstance(fmt, QuantFormat):
            kernels.get_row_functions(fmt, int8=True)
        for few in (False, True):
            kernels.get_row_functions(fmt, int8=False, few=few)
        kernels.get_unpack(fmt)
    for kind, other in combinations_with_replacement(QUANTISED.values(), 2):
        kernels.get_quantise((kind, other))
    for name in (SILU, GELU, PLAIN_GELU, SQUARED_RELU):
        kernels.get_activation(name)


def compile_modules(folder: Path) -> None:
    """Compile what modules over packed weights call, or load it from disk: the first start compares with them."""
    context = MatmulContext(int8=False, folder=folder, soon_over=True)
    matrix = make_tiny_matrix(context)
    rows = CpuProduct(context, [matrix]).multiply(np.zeros((1, _SIZE), np.float32), 1)
    unpack_rows(context.kernels, matrix.weight, np.zeros(1, np.int64))
    norm_rows(rows, np.ones(_SIZE, np.float32), np.float32(1e-5), rows)
    activate_rows(rows, _SIZE // 2, False, np.empty((1, _SIZE // 2), np.float32))


def make_tiny_matrix(context: MatmulContext) -> Matrix:
    """Make a matrix of one quant block each way, of zeros."""
    return context.register_matrix(packing.pack("F32", (_SIZE, _SIZE), partial(_make_rows, 4 * _SIZE), context.arena))


def run_tiny_pass(kv_dtype: str, folder: Path) -> LlamaDecoder:
    """Run a pass and return what ran it. `kv_dtype`: "float16" or "float32"; `folder` caches kernels."""
    forward, pool = make_tiny_pass(kv_dtype, folder)
    forward.decoder.run(pack([Span(0, np.zeros(3, np.int32), 0)], pool), pool, 1)
    return forward.decoder


def keep_tiny_paths(kv_dtype: str, folder: Path) -> None:
    """Compile, or load from disk, what moves the keys and values of accepted drafts."""
    forward, _ = make_tiny_pass(kv_dtype, folder)
    slots = np.zeros(1, np.int64)
    forward.keep_paths(slots, slots + 2, slots + 1, slots + 3)


def compile_other_models(kv_dtype: str, folder: Path) -> None:
    """Compile what passes of some models call besides, and what unpacks formats that are tables of codes."""
    run_tiny_pass(kv_dtype, folder).compile_all_parts()
    for kind in KINDS_OF_TABLES:
        n, n_bytes = KINDS[kind]
        packing.pack(kind, (1, n), partial(_make_rows, n_bytes), Arena())


def make_tiny_pass(kv_dtype: str, folder: Path) -> tuple[NativeLlamaForward, KVPool]:
    """Make what a pass needs, attention's code among it, and native steps."""
    context = MatmulContext(int8=False, folder=folder, soon_over=True)

    def make_angles(_first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        return np.ones((1, n, _SIZE), np.float32), np.zeros((1, n, _SIZE), np.float32)

    matrix, norm = make_tiny_matrix(context), np.ones(_SIZE, np.float32)
    decoder = LlamaDecoder(
        context, [LayerWeights((matrix,) * 7, (norm, norm), None)], OutsideWeights(matrix, norm, matrix),
        options=ModelOptions(n_heads=1, head_dim=_SIZE, eps=1e-5, scale=1.0), angles=make_angles,
        query_scales=lambda _first, _n: np.empty(0, np.float32),
    )  # fmt: skip
    pool = make_pool([(1, _SIZE)], kv_dtype, CpuOptions(max_len=2 * BLOCK, max_seqs=1, max_rows=2, kv_bytes=1 << 20))
    pool.reserve(0, 4)
    forward = NativeLlamaForward(decoder, pool, ROWS_PER_ITEM)
    forward.reserve(1, 1)
    return forward, pool
