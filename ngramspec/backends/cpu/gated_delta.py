"""Compute layers with Gated DeltaNet, a recurrence in place of attention (Qwen3.5's linear attention), over trees of rows.

A head's state S [K, V] after a token is decay · S + k ⊗ beta · (v - decay · kᵀS), where q, k and v come from a convolution over the token
and the three before it. A pass begins with the state after the last known row of the pass before: it replays the draft rows that were
accepted, from their logged inputs, computes the known rows, stores the state, and walks the draft tree depth first on copies. Every row is
one step of the same operations in the same order, so a prompt in chunks, a chain, a tree and plain decoding have the same bits.

A piece of work is one head of keys with its heads of values. Columns of a state do not depend on each other, so a piece takes COLUMNS of
them, which the first cache holds, through all rows. The module knows rows and states, nothing of requests; `recurrent_pool` has the states.
"""

from __future__ import annotations

import numpy as np

from ngramspec.backends.cpu.codegen.simd import COLUMNS, advance_state
from ngramspec.backends.cpu.formats import DEPTH, WIDTH
from ngramspec.backends.cpu.llama_layers import EPS
from ngramspec.backends.cpu.llama_pass import run_product_part
from ngramspec.backends.cpu.matmul import PANELS, locate_rows
from ngramspec.backends.cpu.norms import compute_norm_scale
from ngramspec.backends.cpu.threads import finish_piece, take_piece, wait_for_pieces
from ngramspec.datastore.code_cache import njit
from ngramspec.outputs import BLOCK
from ngramspec.sampling.numeric import compute_sigmoid, exp, fma

_F = np.float32
_ONE, _TWO, _HEAD_EPS = _F(1), _F(2), _F(1e-6)
TAPS = 4  # Tokens that a convolution sees, its own among them.
MOST_NODES = 64  # Most nodes of a sequence's draft tree.
N_KEY_HEADS, N_VALUE_HEADS, KEY_DIM, VALUE_DIM, TILED = range(5)  # indices of the layers' options


@njit(cache=True, nogil=True, error_model="numpy")
def _compute_log1p(t):
    """Return log(1 + t), float32, for t from 0 to 1, by the series of 2 · atanh(t / (2 + t))."""
    s = t / (_TWO + t)
    z = s * s
    y = _F(1 / 17)
    for denominator in (15, 13, 11, 9, 7, 5, 3):
        y = fma(y, z, _ONE / _F(denominator))
    return _TWO * fma(s * z, y, s)


@njit(cache=True, nogil=True, error_model="numpy")
def _compute_softplus(x):
    return max(x, _F(0)) + _compute_log1p(exp(-abs(x)))


@njit(cache=True, nogil=True, error_model="numpy")
def _compute_silu(x):
    return x / (_ONE + exp(-x))


@njit(cache=True, nogil=True, error_model="numpy")
def _normalise(x, factor):
    """Divide x [n] by its length, in place, and multiply it by a factor."""
    n = _F(x.shape[0])
    scale = compute_norm_scale(x, _HEAD_EPS / n) * (factor / np.sqrt(n))
    for j in range(x.shape[0]):
        x[j] *= scale


@njit(cache=True, nogil=True)
def order_depth_first(parents, root, end, order, depths):
    """Write the nodes of a draft tree, rows root + 1 to end - 1, to `order` [n] depth first, and their depths, from 1 on, to `depths` [n].

    Return the largest depth.
    """
    n, at, deepest = end - root - 1, 0, 0
    stack, first, following = np.empty(n + 1, np.int64), np.full(n + 1, -1, np.int64), np.full(n + 1, -1, np.int64)
    depth = np.zeros(n + 1, np.int64)
    for node in range(n, 0, -1):  # node 0 is the root
        parent = parents[root + node] - root
        following[node] = first[parent]
        first[parent] = node
    for node in range(1, n + 1):
        depth[node] = depth[parents[root + node] - root] + 1
        deepest = max(deepest, depth[node])
    height, node = 0, first[0] if n else np.int64(-1)
    while node >= 0:
        order[at], depths[at] = root + node, depth[node]
        at += 1
        if following[node] >= 0:
            stack[height] = following[node]
            height += 1
        if first[node] >= 0:
            node = first[node]
        elif height:
            height -= 1
            node = stack[height]
        else:
            node = np.int64(-1)
    return deepest


@njit(cache=True, nogil=True)
def gather_inputs(source, head, options, n_groups, to):
    """Copy what a head of keys and its heads of values see of all channels [C] to [2 · K + groups · V]."""
    n_keys, n_dim, n_values = options[N_KEY_HEADS], options[KEY_DIM], options[VALUE_DIM]
    to[:n_dim] = source[head * n_dim : (head + 1) * n_dim]
    to[n_dim : 2 * n_dim] = source[(n_keys + head) * n_dim : (n_keys + head + 1) * n_dim]
    for g in range(n_groups):
        at, first = 2 * n_dim + g * n_values, 2 * n_keys * n_dim + _get_value_head(head, g, options, n_groups) * n_values
        to[at : at + n_values] = source[first : first + n_values]


@njit(cache=True, nogil=True)
def _get_value_head(head, g, options, n_groups):
    """Return the g-th head of values of a head of keys: they lie side by side, or, in GGUF files, one round after the other."""
    return head + g * options[N_KEY_HEADS] if options[TILED] else head * n_groups + g


@njit(cache=True, nogil=True)
def _mix_rows(head, i_layer, rows, weights, states, slot, options, eps, out):
    """Compute one head of keys and its heads of values for all rows of one sequence, to out [T, V heads · V].

    `rows`: inputs [T, columns] of the pass, columns of the gates z, b and a in them, positions, parents, and the sequence's first row, the
    row of its last known token, and its last row + 1. `weights`: convolutions, decays with their biases, norms. `states`: see
    `recurrent_pool.RecurrentPool.states`.
    """
    inputs, (z_at, b_at, a_at), positions, parents, (first, root, end) = rows
    conv, rates, norm = weights
    at, state, tails, log, log_rates, _, kept_state, kept_tails = states
    n_keys, n_heads, n_dim, n_values = options[N_KEY_HEADS], options[N_VALUE_HEADS], options[KEY_DIM], options[VALUE_DIM]
    n_groups = n_heads // n_keys
    width = 2 * n_dim + n_groups * n_values
    start, n_known, n_nodes = np.int64(positions[first]), root + 1 - first, end - root - 1
    n_replayed = start - at[slot, i_layer] if start > 0 else np.int64(0)
    n_certain = n_replayed + n_known
    n = n_certain + n_nodes
    order, depths = np.empty(n_nodes, np.int64), np.empty(n_nodes, np.int64)
    deepest = order_depth_first(parents, root, end, order, depths)
    boundary = (start + n_known) // BLOCK * BLOCK  # where the prefix cache keeps the state, if a prompt's rows reach it
    n_to_boundary = n_replayed + boundary - start if n_known > 1 and boundary > start else np.int64(-1)
    n_ring = TAPS + deepest  # inputs of the deepest path, and those that its convolutions see
    ring, taps = np.empty((n_ring, width), np.float32), conv[i_layer, head]
    for t in range(TAPS - 1):
        if start > 0:
            ring[t] = tails[slot, i_layer, head, t]
        else:
            ring[t, :] = _F(0)
    keys, queries = np.empty((n, n_dim), np.float32), np.empty((n, n_dim), np.float32)
    values = np.zeros((n_groups, n, state.shape[3] * COLUMNS), np.float32)
    steps = np.empty((n_groups, n, 2), np.float32)  # decay and beta
    mixed = np.empty(width, np.float32)
    for s in range(n):
        here = TAPS - 1 + (s if s < n_certain else n_certain + depths[s - n_certain] - 1)
        x = ring[here % n_ring]
        row = np.int64(-1)
        if s < n_replayed:
            x[:] = log[slot, i_layer, s, head]
        else:
            row = first + s - n_replayed if s < n_certain else order[s - n_certain]
            gather_inputs(inputs[row], head, options, n_groups, x)
        for j in range(width):
            mixed[j] = taps[0, j] * ring[(here - 3) % n_ring, j]
        for t in range(1, TAPS):
            earlier = ring[(here - TAPS + 1 + t) % n_ring]
            for j in range(width):
                mixed[j] = fma(taps[t, j], earlier[j], mixed[j])
        for j in range(width):
            mixed[j] = _compute_silu(mixed[j])
        for j in range(n_dim):
            queries[s, j], keys[s, j] = mixed[j], mixed[n_dim + j]
        _normalise(queries[s], _ONE / np.sqrt(_F(n_dim)))
        _normalise(keys[s], _ONE)
        for g in range(n_groups):
            value_head = _get_value_head(head, g, options, n_groups)
            for j in range(n_values):
                values[g, s, j] = mixed[2 * n_dim + g * n_values + j]
            if row < 0:
                steps[g, s, 0], steps[g, s, 1] = log_rates[slot, i_layer, s, value_head, 0], log_rates[slot, i_layer, s, value_head, 1]
            else:
                a = inputs[row, a_at + value_head] + rates[i_layer, 1, value_head]
                steps[g, s, 0] = exp(rates[i_layer, 0, value_head] * _compute_softplus(a))
                steps[g, s, 1] = compute_sigmoid(inputs[row, b_at + value_head])
        if s == n_to_boundary - 1:
            for t in range(TAPS - 1):
                kept_tails[slot, i_layer, head, t] = ring[(here - TAPS + 2 + t) % n_ring]
        if s == n_certain - 1:  # everything of before has been read
            for t in range(TAPS - 1):
                tails[slot, i_layer, head, t] = ring[(here - TAPS + 2 + t) % n_ring]
    work, n_blocks = np.empty((deepest + 1, n_dim, COLUMNS), np.float32), state.shape[3]
    attended = np.empty((n, n_blocks * COLUMNS), np.float32)
    for g in range(n_groups):
        value_head = _get_value_head(head, g, options, n_groups)
        for block in range(n_blocks):
            known = state[slot, i_layer, value_head, block]
            if start == 0:
                known[:, :] = _F(0)
            for s in range(n):
                depth = depths[s - n_certain] if s >= n_certain else np.int64(0)
                before = work[depth - 1].ctypes.data if depth > 1 else known.ctypes.data
                after = work[depth].ctypes.data if depth else known.ctypes.data
                value, read = values[g, s, block * COLUMNS :].ctypes.data, attended[s, block * COLUMNS :].ctypes.data
                vectors = keys[s].ctypes.data, queries[s].ctypes.data, value, read
                advance_state((before, after), vectors, n_dim, (steps[g, s, 0], steps[g, s, 1]))
                if s == n_to_boundary - 1:
                    kept_state[slot, i_layer, value_head, block] = known
        for s in range(n_replayed, n):
            row = first + s - n_replayed if s < n_certain else order[s - n_certain]
            x, gate = attended[s, :n_values], z_at + value_head * n_values
            scale, to = compute_norm_scale(x, eps), value_head * n_values
            for j in range(n_values):
                out[row, to + j] = norm[i_layer, j] * (x[j] * scale) * _compute_silu(inputs[row, gate + j])
        for s in range(n_certain, n):
            node = order[s - n_certain] - root - 1
            log_rates[slot, i_layer, node, value_head, 0], log_rates[slot, i_layer, node, value_head, 1] = steps[g, s, 0], steps[g, s, 1]
    for s in range(n_certain, n):
        row = order[s - n_certain]
        gather_inputs(inputs[row], head, options, n_groups, log[slot, i_layer, row - root - 1, head])


@njit(cache=True, nogil=True)
def _find_slots(p):
    """Return the slot [B] int64 of every sequence of a pass."""
    slots, item = np.empty(p.roots.shape[0], np.int64), 0
    for b in range(slots.shape[0]):
        while p.items[item, 1] <= p.roots[b]:
            item += 1
        slots[b] = p.owners[item]
    return slots


@njit(cache=True, nogil=True)
def run_recurrent(part, layer, shared):
    """Run the parts of a layer's recurrence, from `part` on: from the normed rows to the heads' outputs."""
    model, p = shared.model, shared.current
    state, n_rows, n_threads = p.state, p.input_ids.shape[0], p.tokens.shape[0]
    matrices, tables, numbers = model.weights[0], model.weights[1], model.weights[4]
    which, _, _, options, more, conv, rates, norms, states = model.recurrent
    normed, codes, act_scales, qkv, mixed = model.work[2], model.work[3], model.work[4], model.work[5], model.work[7]
    i_layer = which[layer]
    of_layer, columns = np.empty((4, matrices.shape[1]), np.int64), np.zeros(4, np.int64)
    for i in range(4):
        for j in range(matrices.shape[1]):
            of_layer[i, j] = matrices[7 * layer + i, j] if i < 3 else more[i_layer, j]
        if i:
            columns[i] = columns[i - 1] + of_layer[i - 1, PANELS] * WIDTH
    wide = locate_rows(normed, codes[:, :, : normed.shape[1]], act_scales[:, :, : normed.shape[1] // DEPTH])
    run_product_part(state, part, n_threads, of_layer, columns, tables, n_rows, wide, qkv)
    n_keys, n_spans, slots = options[N_KEY_HEADS], p.roots.shape[0], _find_slots(p)
    while True:
        head = take_piece(state, part + 1, n_keys)
        if head >= n_keys:
            break
        first = np.int64(0)
        for b in range(n_spans):
            span = first, np.int64(p.roots[b]), np.int64(p.ends[b])
            rows = qkv, (columns[1], columns[2], columns[3]), p.positions, p.parents, span
            _mix_rows(head, i_layer, rows, (conv, rates, norms), states, slots[b], options, numbers[EPS], mixed)
            first = np.int64(p.ends[b])
        finish_piece(state, part + 1)
    wait_for_pieces(state, part + 1, n_keys)
    first, at, kept_at = np.int64(0), states[0], states[5]
    for b in range(n_spans):  # every thread writes the same
        start, end = np.int64(p.positions[first]), np.int64(p.positions[p.roots[b]]) + 1
        at[slots[b], i_layer] = end
        if end - start > 1 and end // BLOCK * BLOCK > start:
            kept_at[slots[b], i_layer] = end // BLOCK * BLOCK
        first = np.int64(p.ends[b])
