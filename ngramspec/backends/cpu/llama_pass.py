"""Compute a pass of a Llama-style decoder, from embedding to logits, in one compiled call (`compute`) whose threads stay awake (`threads`).

A pass is divided into parts, one after the other, and a part into pieces, which the threads of a team share. Every row is computed alone
and in a fixed order; which thread computes what changes no result. The module knows arrays, addresses of packed weights and the fields of
`Batch`, grouped as `pass_structs` says; `llama_forward` fills them in.
"""

from __future__ import annotations

import numpy as np

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu.attention import rope_kv_row, run_attention_part
from ngramspec.backends.cpu.codegen.intrinsics import call_kernel
from ngramspec.backends.cpu.formats import DEPTH, SUPER, WIDTH
from ngramspec.backends.cpu.llama_layers import (
    BESIDE,
    DOWN,
    EMBEDDING_SCALE,
    EPS,
    GATE,
    LOGIT_SCALE,
    LOGIT_SOFTCAP,
    OUT,
    PARALLEL,
    RESIDUAL_SCALE,
    SCALE,
    SOFTCAP,
    UP,
    K,
    Q,
)
from ngramspec.backends.cpu.matmul import (
    BLOCKS,
    CODES_AT,
    PANEL_BYTES,
    PANELS,
    SUPER_AT,
    count_panels_per_piece,
    locate_rows,
    multiply,
    quantise_row,
)
from ngramspec.backends.cpu.norms import compute_norm_scale, norm_heads, norm_row
from ngramspec.backends.cpu.threads import (
    close_pass,
    leave_pass,
    open_pass,
    take_next_piece,
    take_piece,
    take_seat,
    wait_for_pass,
    wait_for_pieces,
)
from ngramspec.datastore.code_cache import njit
from ngramspec.datastore.compiled_calls import call_compiled
from ngramspec.sampling.numeric import soft_cap
from ngramspec.sampling.topk import EMPTY, finish_row, insert, scan_logits

_F = np.float32
# Indices of a model's functions, which are addresses; 0 for one that it does not need, or HEADS and NORM that the pass computes itself.
# MIXER computes layers without keys and values of one size for every head (recurrent ones, latent attention), and Mamba-2 beside attention.
QUANTISE, ACTIVATE, UNPACK, ACTIVATE_EXPERTS, EXPERTS, HEADS, NORM, MIXER, GATE_ROW, ATTEND, LAYER_END, UNPACK_INPUTS = range(12)
FUNCTIONS = 12
PARTS = 22  # Most parts of one layer's pass.
PIECES = 64  # Most pieces that row-wise work is divided into.


@njit(cache=True, nogil=True)
def add_row(x, delta, post_norms, i, numbers, out):
    """Compute out [H] = x + delta · residual scale, where delta is normed by post-norm `i` if there are any."""
    factor = numbers[RESIDUAL_SCALE]
    if post_norms.shape[0]:
        scale = compute_norm_scale(delta[: x.shape[0]], numbers[EPS])
        for j in range(x.shape[0]):
            out[j] = x[j] + factor * (post_norms[i, j] * (delta[j] * scale))
    else:
        for j in range(x.shape[0]):
            out[j] = x[j] + factor * delta[j]


@njit(cache=True, nogil=True)
def _norm_row(functions, x, weight, eps, out):
    """Compute the norm of x [H] that the model has."""
    if functions[NORM]:
        call_compiled(functions[NORM], (x, weight, eps, out))
    else:
        norm_row(x, weight, eps, out)


@njit(cache=True, nogil=True)
def _norm_and_quantise_row(x, norms, i, eps, normed, functions, codes, act_scales):
    """Write x [H], normed by norm `i` if there are any, to `normed` and, quantised, to `codes` and `act_scales`.

    If `i` is negative, what lies in `normed` already is quantised.
    """
    if i >= 0 and norms.shape[0]:
        _norm_row(functions, x, norms[i], eps, normed[: x.shape[0]])
    elif i >= 0:
        for j in range(x.shape[0]):
            normed[j] = x[j]
    quantise_row(functions[QUANTISE], normed, codes, act_scales)


@njit(cache=True, nogil=True)
def run_product_part(state, part, n_threads, matrices, columns, tables, n_rows, inputs, y):
    """Run one part of a pass: y [T, ..] = x times some matrices, the i-th one's outputs from columns[i] on.

    `inputs`: x as `matmul.locate_rows` returns it.
    """
    total = 0
    for i in range(matrices.shape[0]):
        step = count_panels_per_piece(matrices[i, PANELS], matrices[i, PANEL_BYTES], n_threads, n_rows)
        total += (matrices[i, PANELS] + step - 1) // step
    piece = take_piece(state, part)
    while piece < total:
        j = piece
        for i in range(matrices.shape[0]):
            m = matrices[i]
            step = count_panels_per_piece(m[PANELS], m[PANEL_BYTES], n_threads, n_rows)
            n_pieces = (m[PANELS] + step - 1) // step
            if j < n_pieces:
                multiply(m, tables, j * step, min(m[PANELS], (j + 1) * step), n_rows, inputs, y.ctypes.data + 4 * columns[i], y.strides[0])
                break
            j -= n_pieces
        piece = take_next_piece(state, part)
    wait_for_pieces(state, part, total)


@njit(cache=True, nogil=True)
def run_input_products(part, p, matrices, tables, work):
    """Run the part of a layer that multiplies its normed rows by its first matrices, to `work.qkv`.

    Return the column [n] of `qkv` where each matrix's outputs begin.
    """
    columns, width = np.zeros(matrices.shape[0], np.int64), work.normed.shape[1]
    for i in range(1, matrices.shape[0]):
        columns[i] = columns[i - 1] + matrices[i - 1, PANELS] * WIDTH
    inputs = locate_rows(work.normed, work.codes[:, :, :width], work.act_scales[:, :, : width // DEPTH])
    run_product_part(p.state, part, p.tokens.shape[0], matrices, columns, tables, p.input_ids.shape[0], inputs, work.qkv)
    return columns


@njit(cache=True, nogil=True)
def _run_mlp_part(state, part, n_threads, matrices, tables, functions, n_rows, inputs, buffers):
    """Compute activation(gate) · up of all rows, and its codes. A piece is some super-blocks of 256 of the products' outputs.

    `matrices`: gate and up, or one that is not gated; `functions`: addresses of quantise and the activation; `buffers`: the outputs of gate
    and up, the result, its codes and their activation scales.
    """
    gate, (quantise, activate), (both, middle, out_codes, out_act_scales) = matrices[0], functions, buffers
    n_matrices = matrices.shape[0]
    n_blocks = (gate[PANELS] * WIDTH + DEPTH - 1) // DEPTH  # of this layer, which may be narrower than others
    step = max(1, count_panels_per_piece(gate[PANELS], gate[PANEL_BYTES], n_threads, n_rows) // (2 * SUPER)) * SUPER
    total = (n_blocks + step - 1) // step
    piece = take_piece(state, part)
    while piece < total:
        first, end = piece * step, min(n_blocks, (piece + 1) * step)
        for i in range(n_matrices):
            m, y = matrices[i], both.ctypes.data + i * both.strides[1]
            multiply(m, tables, 2 * first, min(m[PANELS], 2 * end), n_rows, inputs, y, both.strides[0])
        a, b = first * DEPTH, end * DEPTH
        for r in range(n_rows):
            row = middle[r, a:b]
            gate_at, up_at = both[r, 0, a:b].ctypes.data, both[r, n_matrices - 1, a:b].ctypes.data
            call_kernel(activate, (gate_at, up_at, end - first, row.ctypes.data, 0, 0, 0, 0, 0, 0, 0, 0, 0))
            quantise_row(quantise, row, out_codes[r, :, a:b], out_act_scales[r, :, first:end])
        piece = take_next_piece(state, part)
    wait_for_pieces(state, part, total)


@njit(cache=True, nogil=True)
def run_experts(part, layer, shared):
    """Run the parts of a layer's mixture of experts, from `part` on. Their sum is added to what the layer's shared expert has made."""
    model, p = shared.model, shared.current
    state, n_rows, n_threads = p.state, p.input_ids.shape[0], p.tokens.shape[0]
    tables, functions, experts = model.weights.tables, model.weights.functions, model.weights.experts
    work = model.work
    out, normed, codes, act_scales, pairs = work.delta, work.normed, work.codes, work.act_scales, work.pairs
    m, options, scale, correction = experts[0][layer], experts[1][layer], experts[2][layer], experts[3][layer]
    ids, codes, act_scales = pairs.ids[layer], codes[:, :, : normed.shape[1]], act_scales[:, :, : normed.shape[1] // DEPTH]
    inputs = locate_rows(normed, codes, act_scales)
    run_product_part(state, part, n_threads, m[moe.ROUTER :], np.zeros(1, np.int64), tables, n_rows, inputs, pairs.logits)
    pieces = min(n_rows, PIECES)
    i = take_piece(state, part + 1)
    while i < pieces:
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            moe.choose_experts(pairs.logits[r], correction, options, scale, ids[r], pairs.weights[r])
        i = take_next_piece(state, part + 1)
    wait_for_pieces(state, part + 1, pieces)
    code, rows = (tables, (functions[QUANTISE], functions[ACTIVATE_EXPERTS])), (n_rows, inputs, (normed, codes, act_scales))
    moe.run_chosen(state, part + 2, n_threads, (m, options, ids), code, rows, moe.allocate_choice(n_rows, pairs, options), pairs, out)


@njit(cache=True, nogil=True)
def embed_token(function, m, token, scale, panel, x):
    """Write row `token` of a matrix [.., K], times `scale`, to x [at most K]; `function` unpacks its panel to `panel` [K, WIDTH]."""
    p, lane = token // WIDTH, token % WIDTH
    at = m[0] + p * m[PANEL_BYTES]
    call_kernel(function, (at, m[BLOCKS], m[SUPER_AT], m[CODES_AT], panel.ctypes.data, 0, 0, 0, 0, 0, 0, 0, 0))
    for k in range(x.shape[0]):
        x[k] = scale * panel[k, lane]


@njit(cache=True, nogil=True)
def _run_head_part(state, part, threads, m, tables, numbers, n_rows, inputs, results):
    """Compute the logits of all rows and the top-k tokens of the pieces that this thread took, while they are in its cache.

    `threads`: this one's number, and how many there are.
    """
    thread, n_threads = threads
    scale, softcap = numbers[LOGIT_SCALE], numbers[LOGIT_SOFTCAP]
    logits, _, vocab_size, tokens, values, fine, _ = results
    step = count_panels_per_piece(m[PANELS], m[PANEL_BYTES], n_threads, n_rows)
    total = (m[PANELS] + step - 1) // step
    piece = take_piece(state, part)
    while piece < total:
        first, end = piece * step, min(m[PANELS], (piece + 1) * step)
        multiply(m, tables, first, end, n_rows, inputs, logits.ctypes.data, logits.strides[0])
        a, b = first * WIDTH, min(end * WIDTH, vocab_size)
        for r in range(n_rows):
            if scale != _F(1):
                for j in range(a, b):
                    logits[r, j] *= scale
            if softcap > _F(0):
                for j in range(a, b):
                    logits[r, j] = soft_cap(logits[r, j], softcap)
            fine[thread, r] &= scan_logits(logits[r, a:b], a, tokens[thread, r], values[thread, r])
        piece = take_next_piece(state, part)
    wait_for_pieces(state, part, total)


@njit(cache=True, nogil=True)
def _merge_top_k(tokens, values, fine, greedy):
    """Merge all threads' top-k tokens into the first one's arrays."""
    for r in range(greedy.shape[0]):
        for t in range(1, tokens.shape[0]):
            fine[0, r] &= fine[t, r]
            for j in range(tokens.shape[2]):
                insert(tokens[t, r, j], values[t, r, j], tokens[0, r], values[0, r])
        greedy[r] = finish_row(fine[0, r], tokens[0, r], values[0, r])


@njit(cache=True, nogil=True)
def compute(leads, address, shared, team):
    """Run the pass in `shared` if the thread leads; else take part in passes until the team is stopped.

    `address`: of `run_thread`. Called directly, it would be a part of this function, and be optimised once more.
    """
    number = np.int64(0)
    if leads:
        p = shared.current
        p.tokens[:], p.values[:], p.fine[:] = EMPTY, -np.inf, True
        n_seats = p.tokens.shape[0] - 1
        open_pass(team, n_seats)
    while True:
        seat = np.int64(0)
        if not leads:
            number = wait_for_pass(team, number)
            if number < 0:
                break
            seat = take_seat(team)
        if leads or seat:
            call_compiled(address, (seat, shared))
        if leads:
            close_pass(team, n_seats)
            _merge_top_k(p.tokens, p.values, p.fine, p.greedy)
            break
        if seat:
            leave_pass(team)


@njit(cache=True, nogil=True)
def _embed_rows(part, shared):
    """Run the part that sets the hidden states to the tokens' embeddings."""
    weights, x, p = shared.model.weights, shared.model.work.x, shared.current
    state, ids, n_rows, unpack = p.state, p.input_ids, p.input_ids.shape[0], weights.functions[UNPACK]
    table, scale, pieces = weights.matrices[weights.matrices.shape[0] - 2], weights.numbers[EMBEDDING_SCALE], min(n_rows, PIECES)
    i = take_piece(state, part)
    while i < pieces:
        panel = np.empty((table[BLOCKS] * DEPTH, WIDTH), np.float32)
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            embed_token(unpack, table, ids[r], scale, panel, x[r])
        i = take_next_piece(state, part)
    wait_for_pieces(state, part, pieces)


@njit(cache=True, nogil=True)
def _run_last_parts(part, thread, shared):
    """Run the last norm of the rows whose logits or states are wanted, then the head."""
    weights, work, p = shared.model.weights, shared.model.work, shared.current
    state, n_threads, wanted, states, last = p.state, p.tokens.shape[0], p.wanted, p.states, p.last
    x, delta, normed, functions, numbers = work.x, work.delta, work.normed, weights.functions, weights.numbers
    codes, act_scales = work.codes[:, :, : normed.shape[1]], work.act_scales[:, :, : normed.shape[1] // DEPTH]
    hidden, n_wanted, total = x.shape[1], wanted.shape[0], wanted.shape[0] + states.shape[0]
    i = take_piece(state, part)
    while i < total:
        row = np.empty(hidden, np.float32)
        r = wanted[i] if i < n_wanted else i - n_wanted
        add_row(x[r], delta[r], weights.post_norms, 2 * last - 1, numbers, row)
        _norm_row(functions, row, weights.last_norm, numbers[EPS], normed[i, :hidden] if i < n_wanted else states[r])
        if i < n_wanted:
            quantise_row(functions[QUANTISE], normed[i], codes[i], act_scales[i])
        i = take_next_piece(state, part)
    wait_for_pieces(state, part, total)
    if n_wanted:
        head, results = (
            weights.matrices[weights.matrices.shape[0] - 1],
            (p.logits, states, p.vocab_size, p.tokens, p.values, p.fine, p.greedy),
        )
        inputs = locate_rows(normed, codes, act_scales)
        _run_head_part(state, part + 1, (thread, n_threads), head, weights.tables, numbers, n_wanted, inputs, results)


@njit(cache=True, nogil=True, forceinline=True)
def _run_norm_part(state, part, n_rows, i_post, i_norm, norms, buffers, numbers, functions):
    """Add to the hidden states what the layer before, or attention, has made of them, and norm the result.

    `i_post`: post-norm of what is added, or a negative number if nothing is; `i_norm`: see `_norm_and_quantise_row`. `norms`: norms and
    post-norms; `buffers`: hidden states, what is added to them, normed states, their codes and activation scales.
    """
    pieces, (x, delta, normed, codes, act_scales) = min(n_rows, PIECES), buffers
    i = take_piece(state, part)
    while i < pieces:
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            if i_post >= 0:
                add_row(x[r], delta[r], norms[1], i_post, numbers, x[r])
            _norm_and_quantise_row(x[r], norms[0], i_norm, numbers[EPS], normed[r], functions, codes[r], act_scales[r])
        i = take_next_piece(state, part)
    wait_for_pieces(state, part, pieces)


@njit(cache=True, nogil=True)
def run_thread(thread, shared):
    """Run one thread's share of the pass that is open; no reference to its arrays is left afterwards."""
    model, p = shared.model, shared.current
    state, threads, first, last = p.state, p.tokens.shape[0], p.first, p.last
    positions, blocks, offsets = p.positions, p.blocks, p.offsets
    attended = p.items, p.tables, positions, p.bases, p.paths
    (
        matrices, tables, norms, head_norms, post_norms, _, windows, rotary, form, numbers, functions, cos, sin, scales, experts, sinks,
    ) = model.weights  # fmt: skip
    all_keys, all_values = model.pool
    mixers, attending = model.kinds
    x, delta, normed, codes, act_scales, _, _, _, qkv, q, mixed, heads, both, middle, middle_codes, middle_act_scales, _ = model.work
    n_rows, n_kv, n_heads, head_dim = p.input_ids.shape[0], all_keys.shape[2], q.shape[1], q.shape[2]
    eps, quantise, activate = numbers[EPS], functions[QUANTISE], functions[ACTIVATE]
    pieces = min(n_rows, PIECES)
    codes_wide, codes_mixed = codes[:, :, : normed.shape[1]], codes[:, :, : mixed.shape[1]]
    act_scales_wide, act_scales_mixed = act_scales[:, :, : normed.shape[1] // DEPTH], act_scales[:, :, : mixed.shape[1] // DEPTH]
    wide_rows = locate_rows(normed, codes_wide, act_scales_wide)
    mixed_rows = locate_rows(mixed, codes_mixed, act_scales_mixed)
    middle_rows = locate_rows(middle, middle_codes, middle_act_scales)
    norm_weights, residual = (norms, post_norms), (x, delta, normed, codes_wide, act_scales_wide)
    mlp_buffers = both, middle, middle_codes, middle_act_scales
    part = 0
    if p.embed:
        _embed_rows(part, shared)
        part += 1
    one, three = np.zeros(1, np.int64), np.zeros(3, np.int64)
    no_sinks = np.empty(0, np.float32)
    not_turned, no_sin = np.ones(head_dim, np.float32), np.zeros(head_dim, np.float32)
    for layer in range(first, last):
        m = matrices[7 * layer : 7 * layer + 7]
        three[1] = m[Q, PANELS] * WIDTH
        three[2] = three[1] + m[K, PANELS] * WIDTH
        i_post = 2 * layer - 1 if layer > first else np.int64(-1)
        _run_norm_part(state, part, n_rows, i_post, 2 * layer, norm_weights, residual, numbers, functions)
        mixes = m[OUT, PANELS] > 0
        if mixers[layer] >= 0:  # beside attention in the parts of experts, which such a model does not have
            call_compiled(functions[MIXER], (part + 14 if form[BESIDE] else part + 1, layer, shared))
        if mixes and (mixers[layer] < 0 or form[BESIDE]):
            keys, values = all_keys[attending[layer]], all_values[attending[layer]]
            run_product_part(state, part + 1, threads, m[:3], three, tables, n_rows, wide_rows, qkv)
            i = take_piece(state, part + 2)
            while i < pieces:
                for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
                    if functions[HEADS]:
                        call_compiled(functions[HEADS], (r, layer, shared))
                    elif head_norms.shape[0]:
                        norm_heads(qkv[r, : n_heads * head_dim], head_norms[2 * layer], eps)
                        norm_heads(qkv[r, three[1] : three[1] + n_kv * head_dim], head_norms[2 * layer + 1], eps)
                    at = positions[r]
                    which = rotary[layer] if functions[HEADS] == 0 else np.int64(-1)
                    row_cos, row_sin = (cos[which, at], sin[which, at]) if which >= 0 else (not_turned, no_sin)
                    rope_kv_row(qkv[r], row_cos, row_sin, q[r], keys[blocks[r]], values[blocks[r]], offsets[r], three[1], three[2])
                    if scales.shape[0]:
                        for h in range(n_heads):
                            for d in range(head_dim):
                                q[r, h, d] *= scales[at]
                i = take_next_piece(state, part + 2)
            wait_for_pieces(state, part + 2, pieces)
            of_layer = numbers[SCALE], windows[layer], numbers[SOFTCAP], sinks[layer] if sinks.shape[0] else no_sinks
            run_attention_part(state, part + 3, threads, functions[ATTEND], q, (keys, values), heads, attended, of_layer)
        gates = functions[GATE_ROW] != 0
        if mixes and (quantise or gates):
            i = take_piece(state, part + 9)
            while i < pieces:
                for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
                    if gates:
                        call_compiled(functions[GATE_ROW], (r, layer, shared))
                    quantise_row(quantise, mixed[r], codes_mixed[r], act_scales_mixed[r])
                i = take_next_piece(state, part + 9)
            wait_for_pieces(state, part + 9, pieces)
        if mixes:
            run_product_part(state, part + 10, threads, m[OUT : OUT + 1], one, tables, n_rows, mixed_rows, delta)
        has_experts, has_mlp = experts[1].shape[0] > 0 and experts[1][layer, moe.N_EXPERTS] > 0, m[DOWN, PANELS] > 0
        if mixes and (has_experts or has_mlp):
            i_norm = np.int64(-1) if form[PARALLEL] else 2 * layer + 1
            _run_norm_part(state, part + 11, n_rows, 2 * layer, i_norm, norm_weights, residual, numbers, functions)
        if has_mlp:
            first_matrix = GATE if m[GATE, PANELS] else UP
            _run_mlp_part(state, part + 12, threads, m[first_matrix : UP + 1], tables, (quantise, activate), n_rows, wide_rows, mlp_buffers)
            run_product_part(state, part + 13, threads, m[DOWN : DOWN + 1], one, tables, n_rows, middle_rows, delta)
        if functions[LAYER_END]:
            call_compiled(functions[LAYER_END], (part + 14, layer, shared))
        elif has_experts:
            call_compiled(functions[EXPERTS], (part + 14, layer, shared))
        part += PARTS
    _run_last_parts(part, thread, shared)
