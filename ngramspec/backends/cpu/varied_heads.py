"""Compute attention in layers whose heads differ in size by layer, and that may use the keys and values of an earlier layer (Gemma 4).

Queries and keys are normed and rotated, values are normed without weights. A pass (`llama_pass`) calls these functions by their addresses,
so that they are compiled for models that need them alone. The module knows arrays and rows; `llama_layers.LayerHeads` says what differs.
"""

from __future__ import annotations

import numpy as np

from ngramspec.backends.cpu.attention import run_attention_part
from ngramspec.backends.cpu.codegen.simd import to_kv_dtype
from ngramspec.backends.cpu.llama_layers import EPS, SCALE, SOFTCAP
from ngramspec.backends.cpu.llama_pass import ATTEND, PIECES, run_input_products
from ngramspec.backends.cpu.norms import compute_norm_scale, norm_row
from ngramspec.backends.cpu.threads import take_next_piece, take_piece, wait_for_pieces
from ngramspec.datastore.code_cache import njit
from ngramspec.outputs import BLOCK
from ngramspec.sampling.numeric import fma

# Fields of a layer's heads. KEYS_AT: numbers per block of the pool that the keys of earlier layers take; so many do all keys after the
# last layer.
N_KV, HEAD_DIM, N_PROJECTIONS, N_PAIRS, KEYS_AT = range(5)
HEAD_FIELDS = 5


@njit(cache=True, nogil=True)
def _norm_and_turn(x, weight, eps, n_pairs, cos, sin):
    """Replace a head x [D] by its norm, and rotate the first numbers of its first half with those of its second half."""
    norm_row(x, weight[: x.shape[0]], eps, x)
    half = x.shape[0] // 2
    for i in range(n_pairs):
        y, z = x[i], x[i + half]
        x[i] = fma(y, cos[i], -z * sin[i])
        x[i + half] = fma(z, cos[i], y * sin[i])


@njit(cache=True, nogil=True)
def _view_heads(buffer, n_rows, n_dim):
    """Return the first numbers of a buffer of queries [T, H, most numbers of a head] as [n_rows, H, n_dim]."""
    n_heads = buffer.shape[1]
    return buffer.reshape(-1)[: n_rows * n_heads * n_dim].reshape(n_rows, n_heads, n_dim)


@njit(cache=True, nogil=True)
def run_varied_attention(part, layer, shared):
    """Run the parts of a layer's attention, from `part` on: from the normed rows to what its heads attend to, in place of the queries."""
    model, p = shared.model, shared.current
    state, n_rows, n_threads, positions = p.state, p.input_ids.shape[0], p.tokens.shape[0], p.positions
    weights, work = model.weights, model.work
    matrices, tables, head_norms, windows, rotary = weights.matrices, weights.tables, weights.head_norms, weights.windows, weights.rotary
    numbers, functions, cos, sin = weights.numbers, weights.functions, weights.cos, weights.sin
    fields = model.varied.heads
    n_kv, n_dim, n_projections, n_pairs = fields[layer, N_KV], fields[layer, HEAD_DIM], fields[layer, N_PROJECTIONS], fields[layer, N_PAIRS]
    all_keys, all_values = model.pool
    n_blocks = all_keys.size // fields[fields.shape[0] - 1, KEYS_AT]
    first, n = n_blocks * fields[layer, KEYS_AT], n_blocks * n_kv * n_dim * BLOCK
    keys = all_keys.reshape(-1)[first : first + n].reshape(n_blocks, n_kv, n_dim, BLOCK)
    values = all_values.reshape(-1)[first : first + n].reshape(n_blocks, n_kv, BLOCK, n_dim)
    q = _view_heads(work.q, n_rows, n_dim)
    n_heads, eps, qkv, no_sinks = q.shape[1], numbers[EPS], work.qkv, np.empty(0, np.float32)
    columns = run_input_products(part, p, matrices[7 * layer : 7 * layer + n_projections], tables, work)
    k_at, v_at = columns[min(n_projections - 1, 1)], columns[n_projections - 1]  # those of queries if an earlier layer has made both
    pieces = min(n_rows, PIECES)
    i = take_piece(state, part + 1)
    while i < pieces:
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            row, row_cos, row_sin = qkv[r], cos[rotary[layer], positions[r]], sin[rotary[layer], positions[r]]
            for h in range(n_heads):
                _norm_and_turn(row[h * n_dim : (h + 1) * n_dim], head_norms[2 * layer], eps, n_pairs, row_cos, row_sin)
                for d in range(n_dim):
                    q[r, h, d] = row[h * n_dim + d]
            block, offset = p.blocks[r], p.offsets[r]
            for h in range(n_kv if n_projections > 1 else np.int64(0)):
                key, value = row[k_at + h * n_dim : k_at + (h + 1) * n_dim], row[v_at + h * n_dim : v_at + (h + 1) * n_dim]
                scale = compute_norm_scale(value, eps)
                for d in range(n_dim):
                    values[block, h, offset, d] = to_kv_dtype(values, value[d] * scale)
                _norm_and_turn(key, head_norms[2 * layer + 1], eps, n_pairs, row_cos, row_sin)
                for d in range(n_dim):
                    keys[block, h, d, offset] = to_kv_dtype(keys, key[d])
        i = take_next_piece(state, part + 1)
    wait_for_pieces(state, part + 1, pieces)
    rows, of_layer = (p.items, p.tables, positions, p.bases, p.paths), (numbers[SCALE], windows[layer], numbers[SOFTCAP], no_sinks)
    run_attention_part(state, part + 2, n_threads, functions[ATTEND], q, (keys, values), q, rows, of_layer)


@njit(cache=True, nogil=True)
def copy_heads_row(r, layer, shared):
    """Copy what the heads of row r have attended to from the place of the queries to that of their outputs."""
    work, heads = shared.model.work, shared.model.varied.heads
    row, attended = work.mixed[r], _view_heads(work.q, r + 1, heads[layer, HEAD_DIM])
    n_heads, n_dim = attended.shape[1], attended.shape[2]
    for h in range(n_heads):
        for d in range(n_dim):
            row[h * n_dim + d] = attended[r, h, d]
