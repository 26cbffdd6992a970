"""Compute layers with Gated DeltaNet, a recurrence in place of attention (Qwen3.5's linear attention), over trees of rows.

A head's state S [K, V] after a token is decay · S + k ⊗ beta · (v - decay · kᵀS), where q, k and v come from a convolution over the token
and the three before it. `recurrent_rows` says in which order rows are computed.

A piece of work is one head of keys with its heads of values. Columns of a state do not depend on each other, so a piece takes COLUMNS of
them, which the first cache holds, through all rows. The module knows rows and states, nothing of requests; `recurrent_pool` has the states.
"""

from __future__ import annotations

import numpy as np

from ngramspec.backends.cpu.codegen.simd import COLUMNS, advance_state
from ngramspec.backends.cpu.llama_layers import EPS
from ngramspec.backends.cpu.llama_pass import run_input_products
from ngramspec.backends.cpu.norms import compute_norm_scale
from ngramspec.backends.cpu.recurrent_rows import convolve_rows, copy_numbers, find_slots, note_positions, plan_rows
from ngramspec.backends.cpu.threads import take_next_piece, take_piece, wait_for_pieces
from ngramspec.datastore.code_cache import njit
from ngramspec.sampling.numeric import compute_sigmoid, compute_silu, compute_softplus, exp

_F = np.float32
_ONE, _HEAD_EPS = _F(1), _F(1e-6)
TAPS = 4  # Tokens that a convolution sees, its own among them.
N_KEY_HEADS, N_VALUE_HEADS, KEY_DIM, VALUE_DIM, TILED = range(5)  # indices of the layers' options


@njit(cache=True, nogil=True, error_model="numpy")
def _normalise(x, factor):
    """Divide x [n] by its length, in place, and multiply it by a factor."""
    n = _F(x.shape[0])
    scale = compute_norm_scale(x, _HEAD_EPS / n) * (factor / np.sqrt(n))
    for j in range(x.shape[0]):
        x[j] *= scale


@njit(cache=True, nogil=True)
def gather_inputs(source, head, options, n_groups, to):
    """Copy what a head of keys and its heads of values see of all channels [C] to [2 · K + groups · V]."""
    n_keys, n_dim, n_values = options[N_KEY_HEADS], options[KEY_DIM], options[VALUE_DIM]
    copy_numbers(to[:n_dim], source[head * n_dim :])
    copy_numbers(to[n_dim : 2 * n_dim], source[(n_keys + head) * n_dim :])
    for g in range(n_groups):
        at, first = 2 * n_dim + g * n_values, 2 * n_keys * n_dim + _get_value_head(head, g, options, n_groups) * n_values
        copy_numbers(to[at : at + n_values], source[first:])


@njit(cache=True, nogil=True)
def _get_value_head(head, g, options, n_groups):
    """Return the g-th head of values of a head of keys: they lie side by side, or, in GGUF files, one round after the other."""
    return head + g * options[N_KEY_HEADS] if options[TILED] else head * n_groups + g


@njit(cache=True, nogil=True)
def _mix_rows(head, i_layer, rows, weights, states, slot, options, eps, out):
    """Compute one head of keys and its heads of values for all rows of one sequence, to out [T, V heads · V].

    `rows`: the pass, inputs [T, columns] of its rows, columns of the gates z, b and a in them, and the sequence's span of rows. `weights`:
    convolutions, decays with their biases, norms. `states`: see `recurrent_pool.RecurrentPool.states`.
    """
    p, inputs, (z_at, b_at, a_at), span = rows
    conv, rates, norm = weights
    at, state, _, _, log_rates, _, kept_state, _ = states
    n_keys, n_heads, n_dim, n_values = options[N_KEY_HEADS], options[N_VALUE_HEADS], options[KEY_DIM], options[VALUE_DIM]
    n_groups = n_heads // n_keys
    width, (first, root, end) = 2 * n_dim + n_groups * n_values, span
    gathered = np.empty((end - first, width), np.float32)
    for r in range(first, end):
        gather_inputs(inputs[r], head, options, n_groups, gathered[r - first])
    plan = plan_rows(p, span, at[slot, i_layer])
    start, (n_replayed, n_certain, n_to_boundary), deepest, order, depths = plan
    n = order.shape[0]
    mixed = np.empty((n, width), np.float32)
    convolve_rows(head, i_layer, gathered, plan, span, conv[i_layer, head], states, slot, mixed)
    values = np.zeros((n_groups, n, state.shape[3] * COLUMNS), np.float32)
    steps = np.empty((n_groups, n, 2), np.float32)  # decay and beta
    for s in range(n):
        x, row = mixed[s], order[s]
        for j in range(width):
            x[j] = compute_silu(x[j])
        _normalise(x[:n_dim], _ONE / np.sqrt(_F(n_dim)))
        _normalise(x[n_dim : 2 * n_dim], _ONE)
        for g in range(n_groups):
            value_head = _get_value_head(head, g, options, n_groups)
            for j in range(n_values):
                values[g, s, j] = x[2 * n_dim + g * n_values + j]
            if row < 0:
                steps[g, s, 0], steps[g, s, 1] = log_rates[slot, i_layer, s, value_head, 0], log_rates[slot, i_layer, s, value_head, 1]
            else:
                a = inputs[row, a_at + value_head] + rates[i_layer, 1, value_head]
                steps[g, s, 0] = exp(rates[i_layer, 0, value_head] * compute_softplus(a))
                steps[g, s, 1] = compute_sigmoid(inputs[row, b_at + value_head])
    work, n_blocks = np.empty((deepest + 1, n_dim, COLUMNS), np.float32), state.shape[3]
    attended = np.empty((n, n_blocks * COLUMNS), np.float32)
    for g in range(n_groups):
        value_head = _get_value_head(head, g, options, n_groups)
        for block in range(n_blocks):
            known = state[slot, i_layer, value_head, block]
            if start == 0:
                known[:, :] = _F(0)
            for s in range(n):
                depth = depths[s]
                before = work[depth - 1].ctypes.data if depth > 1 else known.ctypes.data
                after = work[depth].ctypes.data if depth else known.ctypes.data
                value, read = values[g, s, block * COLUMNS :].ctypes.data, attended[s, block * COLUMNS :].ctypes.data
                vectors = mixed[s, n_dim:].ctypes.data, mixed[s].ctypes.data, value, read
                advance_state((before, after), vectors, n_dim, (steps[g, s, 0], steps[g, s, 1]))
                if s == n_to_boundary - 1:
                    for j in range(n_dim):
                        copy_numbers(kept_state[slot, i_layer, value_head, block, j], known[j])
        for s in range(n_replayed, n):
            x, gate = attended[s, :n_values], z_at + value_head * n_values
            scale, to = compute_norm_scale(x, eps), value_head * n_values
            for j in range(n_values):
                out[order[s], to + j] = norm[i_layer, j] * (x[j] * scale) * compute_silu(inputs[order[s], gate + j])
        for s in range(n_certain, n):
            node = order[s] - root - 1
            log_rates[slot, i_layer, node, value_head, 0], log_rates[slot, i_layer, node, value_head, 1] = steps[g, s, 0], steps[g, s, 1]


@njit(cache=True, nogil=True)
def run_recurrent(part, layer, shared):
    """Run the parts of a layer's recurrence, from `part` on: from the normed rows to the heads' outputs."""
    model, p = shared.model, shared.current
    matrices, tables, eps = model.weights.matrices, model.weights.tables, model.weights.numbers[EPS]
    (options, more, conv, rates, norms, states), work, state = model.recurrent, model.work, p.state
    i_layer, of_layer = model.kinds.mixers[layer], np.empty((4, matrices.shape[1]), np.int64)
    for i in range(4):
        for j in range(matrices.shape[1]):
            of_layer[i, j] = matrices[7 * layer + i, j] if i < 3 else more[i_layer, j]
    columns = run_input_products(part, p, of_layer, tables, work)
    n_keys, slots = options[N_KEY_HEADS], find_slots(p)
    head = take_piece(state, part + 1)
    while head < n_keys:
        first = np.int64(0)
        for b in range(slots.shape[0]):
            rows = p, work.qkv, (columns[1], columns[2], columns[3]), (first, np.int64(p.roots[b]), np.int64(p.ends[b]))
            _mix_rows(head, i_layer, rows, (conv, rates, norms), states, slots[b], options, eps, work.mixed)
            first = np.int64(p.ends[b])
        head = take_next_piece(state, part + 1)
    wait_for_pieces(state, part + 1, n_keys)
    note_positions(p, i_layer, slots, states)
