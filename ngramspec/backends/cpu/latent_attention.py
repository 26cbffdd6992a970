"""Compute layers with latent attention (MLA: DeepSeek-V2 and later, GLM-4.7-Flash, Mistral Small 4), in the absorbed form.

A token's keys and values of all heads are made of one latent row [rank] by matrices. Instead of making them, each head's query is
multiplied by the head's matrix of keys, and what it has attended to by its matrix of values. So all heads have one key in common, the
normed latent row and the numbers [turned] that a rotary embedding has turned, and the latent row is also the value. Prompts and single rows
are computed in the same way, since another order of products would have other bits.

The module knows rows, heads and weights, nothing of requests; `llama_pass` has the parts before and after.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ngramspec.backends.cpu.attention import run_attention_part
from ngramspec.backends.cpu.codegen.simd import to_kv_dtype
from ngramspec.backends.cpu.formats import DEPTH, WIDTH
from ngramspec.backends.cpu.llama_layers import INTERLEAVED, SCALE, SOFTCAP, LatentOptions, LayerWeights, stack_norms
from ngramspec.backends.cpu.llama_pass import ATTEND, PIECES, QUANTISE, run_input_products, run_product_part
from ngramspec.backends.cpu.llama_variants import rotate_heads
from ngramspec.backends.cpu.matmul import (
    CACHED,
    MATRIX,
    PANEL_BYTES,
    PANELS,
    SHARES,
    locate_rows,
    make_code_buffers,
    multiply,
    quantise_row,
)
from ngramspec.backends.cpu.norms import norm_row
from ngramspec.backends.cpu.threads import take_next_piece, take_piece, wait_for_pieces
from ngramspec.datastore.code_cache import njit

RANK, PLAIN, TURNED, VALUE_DIM, QUERY_RANK = range(5)  # indices of the layers' options
QUERIES, KEYS = range(2)  # indices of the matrices that are not among a layer's seven


def describe_latent(layers: Sequence[LayerWeights], options: LatentOptions | None) -> tuple[np.ndarray, ...]:
    """Return what passes read of layers with latent attention: options [5] int64, fields of their matrices [L, 2, MATRIX], norms of the row
    that queries are made of and of latent rows [2 · L, longest], and the norms' eps [1]. Other models have 0 layers.
    """
    found = [layer.latent for layer in layers if layer.latent]
    fields = np.zeros((len(found), 2, MATRIX), np.int64)
    for of_layer, each in zip(fields, found, strict=True):
        of_layer[KEYS] = each.keys.fields
        if each.queries is not None:
            of_layer[QUERIES] = each.queries.fields
    norms = stack_norms([(each.norm[:0] if each.query_norm is None else each.query_norm, each.norm) for each in found], 0)
    numbers = np.array(options[:5] if options else (0,) * 5, np.int64)
    return numbers, fields, norms, np.array([options.eps if options else 0], np.float32)


def make_head_buffers(options: LatentOptions | None, n_heads: int, n_rows: int) -> tuple[np.ndarray, ...]:
    """Make buffers for the heads of T = `n_rows` rows: queries [T, heads · (plain + turned)], codes and activation scales
    (`matmul.make_code_buffers`) of what is multiplied by a head's matrix, and what heads have attended to [T, heads, rank].
    """
    t, widest = (n_rows, max(options.plain, options.rank)) if options else (0, 0)
    per_head, rank = (options.plain + options.turned, options.rank) if options else (0, 0)
    queries = np.zeros((t, -(-n_heads * per_head // WIDTH) * WIDTH), np.float32)
    return queries, *make_code_buffers(t, n_heads, widest), np.zeros((t, n_heads, rank), np.float32)


@njit(cache=True, nogil=True)
def _write_latent(x, options, norm, eps, rotary, place):
    """Normalise a latent row, turn the numbers behind it, x [rank + turned], in place, and write them.

    `rotary`: cos, sin and whether pairs lie side by side; `place`: keys and values of a block, and the offset in it.
    """
    rank, turned, (cos, sin, interleaved), (keys, values, offset) = options[RANK], options[TURNED], rotary, place
    norm_row(x[:rank], norm[:rank], eps, x[:rank])
    rotate_heads(x[rank : rank + turned], turned, cos, sin, turned, interleaved)
    for d in range(rank + turned):
        keys[0, d, offset] = to_kv_dtype(keys, x[d])
    for d in range(rank):
        values[0, offset, d] = to_kv_dtype(values, x[d])


@njit(cache=True, nogil=True)
def _turn_queries(x, options, scale, rotary, quantise, codes, act_scales, q):
    """Scale one row of queries x [heads · (plain + turned)] in place, turn the ends of its heads into the ends of q [heads, rank + turned],
    and quantise the rest of each head to codes [heads, 2, widest].
    """
    rank, plain, turned, (cos, sin, interleaved) = options[RANK], options[PLAIN], options[TURNED], rotary
    width = plain + turned
    for h in range(q.shape[0]):
        head = x[h * width : (h + 1) * width]
        if scale != np.float32(1):
            for d in range(width):
                head[d] *= scale
        rotate_heads(head[plain:], turned, cos, sin, turned, interleaved)
        for d in range(turned):
            q[h, rank + d] = head[plain + d]
        quantise_row(quantise, head[:plain], codes[h, :, :plain], act_scales[h, :, : plain // DEPTH])


@njit(cache=True, nogil=True)
def _run_head_products(state, part, n_threads, m, n_heads, tables, n_rows, heads, y):
    """Run one part of a pass that multiplies each head's row by the head's own matrix, one of those that lie one after the other in m.

    `heads`: inputs of the first head (`matmul.locate_rows`), and bytes from head to head of x, codes and activation scales; y: address,
    bytes from head to head and from row to row.
    """
    (x, x_step, codes, codes_step, codes_shift, act_scales, scales_step, scales_shift), (x_head, codes_head, scales_head) = heads
    y_at, y_head, y_step = y
    n_panels = m[PANELS] // n_heads
    step = max(1, min(m[PANELS] // (SHARES * n_threads), CACHED // m[PANEL_BYTES], n_panels))
    per_head = (n_panels + step - 1) // step
    total = n_heads * per_head
    piece = take_piece(state, part)
    while piece < total:
        h, first = piece // per_head, piece % per_head * step
        panel = h * n_panels
        inputs = (
            np.int64(x) + h * x_head, x_step, np.int64(codes) + h * codes_head, codes_step, codes_shift,
            np.int64(act_scales) + h * scales_head, scales_step, scales_shift,
        )  # fmt: skip
        to = y_at + h * y_head - panel * 4 * WIDTH
        multiply(m, tables, panel + first, panel + min(n_panels, first + step), n_rows, inputs, to, y_step)
        piece = take_next_piece(state, part)
    wait_for_pieces(state, part, total)


@njit(cache=True, nogil=True)
def _locate_heads(x, x_head, codes, act_scales):
    """Return where the heads of rows lie, as `_run_head_products` takes it: x [T, ..] with heads x_head numbers apart, codes and scales."""
    inputs = (
        x.ctypes.data, x.strides[0], codes.ctypes.data, codes.strides[0], codes.strides[2], act_scales.ctypes.data, act_scales.strides[0],
        act_scales.strides[2],
    )  # fmt: skip
    return inputs, (4 * x_head, codes.strides[1], act_scales.strides[1])


@njit(cache=True, nogil=True)
def run_latent(part, layer, shared):
    """Run a layer's parts from `part` on: from the normed rows to what its last matrix multiplies."""
    model, p = shared.model, shared.current
    state, n_rows, threads = p.state, p.input_ids.shape[0], p.tokens.shape[0]
    weights, work = model.weights, model.work
    matrices, tables, windows, rotary, form = weights.matrices, weights.tables, weights.windows, weights.rotary, weights.form
    numbers, functions, cos, sin, scales = weights.numbers, weights.functions, weights.cos, weights.sin, weights.query_scales
    (options, fields, norms, all_eps), (made, head_codes, head_scales, latents) = model.latent
    codes, act_scales, inputs, q, mixed = work.codes, work.act_scales, work.qkv, work.q, work.mixed
    i_keys = model.kinds.attending[layer]
    keys, values, m, more = model.pool[0][i_keys], model.pool[1][i_keys], matrices[7 * layer : 7 * layer + 3], fields[i_keys]
    n_heads, query_rank, value_dim, rank, plain = q.shape[1], options[QUERY_RANK], options[VALUE_DIM], options[RANK], options[PLAIN]
    quantise, interleaved, eps, which = functions[QUANTISE], form[INTERLEAVED], all_eps[0], rotary[layer]
    codes_query, scales_query = codes[:, :, :query_rank], act_scales[:, :, : query_rank // DEPTH]
    queries = made if query_rank else inputs
    columns, no_sinks = run_input_products(part, p, m[:2], tables, work), np.empty(0, np.float32)
    pieces = min(n_rows, PIECES)
    for step in range(1 if query_rank else 2, 3):  # before and after a second matrix of queries, or both at once
        i = take_piece(state, part + 1)
        while i < pieces:
            for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
                at = p.positions[r]
                turn = cos[which, at], sin[which, at], interleaved
                if step == 1 or not query_rank:
                    row = inputs[r, columns[1] : columns[1] + rank + options[TURNED]]
                    block = p.blocks[r]
                    _write_latent(row, options, norms[2 * i_keys + 1], eps, turn, (keys[block], values[block], p.offsets[r]))
                if step == 1:
                    row = inputs[r, :query_rank]
                    norm_row(row, norms[2 * i_keys, :query_rank], eps, row)
                    quantise_row(quantise, row, codes_query[r], scales_query[r])
                else:
                    scale = scales[at] if scales.shape[0] else np.float32(1)
                    _turn_queries(queries[r], options, scale, turn, quantise, head_codes[r], head_scales[r], q[r])
            i = take_next_piece(state, part + 1)
        wait_for_pieces(state, part + 1, pieces)
        part += 1
        if step == 1:
            rows = locate_rows(inputs, codes_query, scales_query)
            run_product_part(state, part + 1, threads, more[QUERIES : QUERIES + 1], columns, tables, n_rows, rows, made)
            part += 1
    heads = _locate_heads(queries, plain + options[TURNED], head_codes, head_scales)
    _run_head_products(state, part + 1, threads, more[KEYS], n_heads, tables, n_rows, heads, (q.ctypes.data, q.strides[1], q.strides[0]))
    rows, of_layer = (p.items, p.tables, p.positions, p.bases, p.paths), (numbers[SCALE], windows[layer], numbers[SOFTCAP], no_sinks)
    run_attention_part(state, part + 2, threads, functions[ATTEND], q, (keys, values), latents, rows, of_layer)
    if quantise:
        i = take_piece(state, part + 3)
        while i < pieces:
            for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
                for h in range(n_heads):
                    quantise_row(quantise, latents[r, h], head_codes[r, h, :, :rank], head_scales[r, h, :, : rank // DEPTH])
            i = take_next_piece(state, part + 3)
        wait_for_pieces(state, part + 3, pieces)
    heads = _locate_heads(latents, rank, head_codes, head_scales)
    _run_head_products(state, part + 4, threads, m[2], n_heads, tables, n_rows, heads, (mixed.ctypes.data, 4 * value_dim, mixed.strides[0]))
