"""Compute layers with Mamba-2 in place of attention (Granite 4, Nemotron-H, Bamba) or beside it (Falcon-H1) over trees of rows.

A head's state S [N, P] after a token is decay · S + B ⊗ dt · x, and its output is Cᵀ S + D · x, where x, B and C come from a convolution
over the token and the few before it, and dt and decay from the token alone. `recurrent_rows` says in which order rows are computed. The
outputs of all heads are gated and normed together (`norm_gated_row`).

A piece of work is some heads that have B and C in common; these are convolved again in each piece. Columns of a state do not depend on each
other, so COLUMNS of them, which the first cache holds, are taken through all rows. The module knows rows and states, nothing of requests;
`recurrent_pool` has the states.
"""

from __future__ import annotations

import numpy as np

from ngramspec.backends.cpu.codegen.simd import COLUMNS, add_to_state
from ngramspec.backends.cpu.formats import DEPTH
from ngramspec.backends.cpu.llama_layers import ATTENTION_SCALE, BESIDE_SCALE, EPS
from ngramspec.backends.cpu.llama_pass import PIECES, QUANTISE, run_input_products, run_product_part
from ngramspec.backends.cpu.matmul import locate_rows, quantise_row
from ngramspec.backends.cpu.norms import compute_norm_scale
from ngramspec.backends.cpu.recurrent_rows import convolve_rows, copy_numbers, find_slots, note_positions, plan_rows
from ngramspec.backends.cpu.threads import take_next_piece, take_piece, wait_for_pieces
from ngramspec.datastore.code_cache import njit
from ngramspec.sampling.numeric import compute_silu, compute_softplus, exp, fma

_F = np.float32
N_HEADS, HEAD_DIM, N_GROUPS, STATE_SIZE, PIECE_HEADS, NORMED = range(6)  # indices of the layers' options
DECAY, STEP_BIAS, SKIP, LEAST_STEP, MOST_STEP, STEP_FACTOR, GATE_FACTOR = range(7)  # indices of a layer's rates [7, heads]


@njit(cache=True, nogil=True)
def gather_channels(source, piece, options, to):
    """Copy what the heads of a piece see of all channels [C] to [heads · P + 2 · N]: x of every head, B, C."""
    n_x, n_state, n_inner = options[PIECE_HEADS] * options[HEAD_DIM], options[STATE_SIZE], options[N_HEADS] * options[HEAD_DIM]
    group = piece * options[PIECE_HEADS] // (options[N_HEADS] // options[N_GROUPS])
    copy_numbers(to[:n_x], source[piece * n_x :])
    for i in range(2):
        first, at = n_inner + (i * options[N_GROUPS] + group) * n_state, n_x + i * n_state
        copy_numbers(to[at : at + n_state], source[first:])


@njit(cache=True, nogil=True)
def _mix_rows(piece, i_layer, rows, weights, states, slot, options, out):
    """Compute the heads of one piece for all rows of one sequence, to out [T, heads · P].

    `rows`: the pass, inputs [T, columns] of its rows, columns of x and dt in them, and the sequence's span of rows. `weights`: convolutions
    with their biases, rates. `states`: see `recurrent_pool.RecurrentPool.states`.
    """
    p, inputs, (x_at, step_at), (first, root, end) = rows
    conv, rates = weights
    at, state, tails, _, log_rates, _, kept_state, _ = states
    n_heads, n_dim, n_state = options[PIECE_HEADS], options[HEAD_DIM], options[STATE_SIZE]
    n_x, n_taps, bias = n_heads * n_dim, tails.shape[3] + 1, conv[i_layer, piece, tails.shape[3] + 1]
    width = n_x + 2 * n_state
    gathered = np.empty((end - first, width), np.float32)
    for r in range(first, end):
        gather_channels(inputs[r, x_at:], piece, options, gathered[r - first])
    plan = plan_rows(p, rows[3], at[slot, i_layer])
    start, (n_replayed, n_certain, n_to_boundary), deepest, order, depths = plan
    n, n_blocks = order.shape[0], state.shape[3]
    mixed = np.empty((n, width), np.float32)
    convolve_rows(piece, i_layer, gathered, plan, rows[3], conv[i_layer, piece, :n_taps], states, slot, mixed)
    for s in range(n):
        for j in range(width):
            mixed[s, j] = compute_silu(mixed[s, j] + bias[j])
    added, read = np.zeros((n, n_blocks * COLUMNS), np.float32), np.empty((n, n_blocks * COLUMNS), np.float32)
    work, decays = np.empty((deepest + 1, n_state, COLUMNS), np.float32), np.empty(n, np.float32)
    for h in range(n_heads):
        head = piece * n_heads + h
        for s in range(n):
            row = order[s]
            if row < 0:
                decays[s], step = log_rates[slot, i_layer, s, head, 0], log_rates[slot, i_layer, s, head, 1]
            else:
                step = inputs[row, step_at + head] * rates[i_layer, STEP_FACTOR, head] + rates[i_layer, STEP_BIAS, head]
                step = compute_softplus(step)
                step = min(max(step, rates[i_layer, LEAST_STEP, head]), rates[i_layer, MOST_STEP, head])
                decays[s] = exp(step * rates[i_layer, DECAY, head])
            for j in range(n_dim):
                added[s, j] = step * mixed[s, h * n_dim + j]
            if s >= n_certain:
                node = row - root - 1
                log_rates[slot, i_layer, node, head, 0], log_rates[slot, i_layer, node, head, 1] = decays[s], step
        for block in range(n_blocks):
            known = state[slot, i_layer, head, block]
            if start == 0:
                known[:, :] = _F(0)
            for s in range(n):
                depth = depths[s]
                before = work[depth - 1].ctypes.data if depth > 1 else known.ctypes.data
                after = work[depth].ctypes.data if depth else known.ctypes.data
                b, c = mixed[s, n_x:].ctypes.data, mixed[s, n_x + n_state :].ctypes.data
                vectors = b, c, added[s, block * COLUMNS :].ctypes.data, read[s, block * COLUMNS :].ctypes.data
                add_to_state((before, after), vectors, n_state, decays[s])
                if s == n_to_boundary - 1:
                    for j in range(known.shape[0]):
                        copy_numbers(kept_state[slot, i_layer, head, block, j], known[j])
        skip = rates[i_layer, SKIP, head]
        for s in range(n_replayed, n):
            for j in range(n_dim):
                out[order[s], head * n_dim + j] = fma(skip, mixed[s, h * n_dim + j], read[s, j])


@njit(cache=True, nogil=True)
def run_mamba2(part, layer, shared):
    """Run the parts of a layer's recurrence in place of attention, from `part` on: from the normed rows to the heads' outputs."""
    _run_heads(part, layer, shared.model.weights.matrices[7 * layer : 7 * layer + 3], shared)


@njit(cache=True, nogil=True)
def run_mamba2_beside(part, layer, shared):
    """Run the parts of a recurrence beside attention, from `part` on: what it makes is added to the hidden states.

    Attention comes afterwards. It gets the normed rows' codes, which lay where those of the heads' outputs lie meanwhile.
    """
    model, p = shared.model, shared.current
    weights, work, state, n_rows, i_layer = model.weights, model.work, p.state, p.input_ids.shape[0], model.kinds.mixers[layer]
    matrices, quantise, pieces = model.recurrent.matrices[4 * i_layer : 4 * i_layer + 4], weights.functions[QUANTISE], min(n_rows, PIECES)
    x, normed, mixed, beside, scale = work.x, work.normed, work.mixed, work.beside, weights.numbers[BESIDE_SCALE]
    codes, act_scales = work.codes[:, :, : mixed.shape[1]], work.act_scales[:, :, : mixed.shape[1] // DEPTH]
    codes_wide, act_scales_wide = work.codes[:, :, : normed.shape[1]], work.act_scales[:, :, : normed.shape[1] // DEPTH]
    _run_heads(part, layer, matrices[:3], shared)
    i = take_piece(state, part + 2)
    while i < pieces:
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            norm_gated_row(r, layer, shared)
            quantise_row(quantise, mixed[r], codes[r], act_scales[r])
        i = take_next_piece(state, part + 2)
    wait_for_pieces(state, part + 2, pieces)
    rows, first = locate_rows(mixed, codes, act_scales), np.zeros(1, np.int64)
    run_product_part(state, part + 3, p.tokens.shape[0], matrices[3:], first, weights.tables, n_rows, rows, beside)
    i = take_piece(state, part + 4)
    while i < pieces:
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            for j in range(x.shape[1]):
                x[r, j] += scale * beside[r, j]
            quantise_row(quantise, normed[r], codes_wide[r], act_scales_wide[r])
        i = take_next_piece(state, part + 4)
    wait_for_pieces(state, part + 4, pieces)


@njit(cache=True, nogil=True)
def _run_heads(part, layer, matrices, shared):
    """Run two parts of a layer's recurrence: from the normed rows to the heads' outputs.

    `matrices`: those of z, of the convolution's input and of dt.
    """
    model, p = shared.model, shared.current
    (options, _, conv, rates, _, states), work, state = model.recurrent, model.work, p.state
    i_layer, n_pieces, slots = model.kinds.mixers[layer], conv.shape[1], find_slots(p)
    columns = run_input_products(part, p, matrices, model.weights.tables, work)
    piece = take_piece(state, part + 1)
    while piece < n_pieces:
        first = np.int64(0)
        for b in range(slots.shape[0]):
            rows = p, work.qkv, (columns[1], columns[2]), (first, np.int64(p.roots[b]), np.int64(p.ends[b]))
            _mix_rows(piece, i_layer, rows, (conv, rates), states, slots[b], options, work.mixed)
            first = np.int64(p.ends[b])
        piece = take_next_piece(state, part + 1)
    wait_for_pieces(state, part + 1, n_pieces)
    note_positions(p, i_layer, slots, states)


@njit(cache=True, nogil=True, error_model="numpy")
def norm_gated_row(r, layer, shared):
    """Multiply the heads' outputs of row r by silu(z), and norm them in groups; nothing to do in layers with attention."""
    model = shared.model
    which, options, norms = model.kinds.mixers, model.recurrent.options, model.recurrent.norms
    if which[layer] < 0:
        return
    z, row, norm, eps = model.work.qkv[r], model.work.mixed[r], norms[which[layer]], model.weights.numbers[EPS]
    factor = model.recurrent.rates[which[layer], GATE_FACTOR, 0]
    n = options[N_HEADS] * options[HEAD_DIM] // options[N_GROUPS]
    for first in range(0, n * options[N_GROUPS], n):
        x = row[first : first + n]
        for j in range(n):
            x[j] *= compute_silu(factor * z[first + j])
        if options[NORMED]:
            scale = compute_norm_scale(x, eps)
            for j in range(n):
                x[j] = norm[first + j] * (x[j] * scale)


@njit(cache=True, nogil=True)
def scale_attention_row(r, _layer, shared):
    """Multiply what row r's heads have attended to by the factor of attention beside Mamba-2."""
    row, q, factor = shared.model.work.mixed[r], shared.model.work.q, shared.model.weights.numbers[ATTENTION_SCALE]
    for j in range(q.shape[1] * q.shape[2]):
        row[j] *= factor
