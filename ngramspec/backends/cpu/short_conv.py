"""Compute layers with a gated short convolution in place of attention (LFM2) over trees of rows.

Of a row's numbers B, C and x [H] a layer makes C · conv(B · x); the convolution sees the token and the few before it, so that a sequence's
state is the last products B · x. `recurrent_rows` says in which order rows are computed.

A piece of work is a group of channels. The module knows rows and states, nothing of requests; `recurrent_pool` has the states.
"""

from __future__ import annotations

import numpy as np

from ngramspec.backends.cpu.llama_pass import run_input_products
from ngramspec.backends.cpu.recurrent_rows import convolve_rows, find_slots, note_positions, plan_rows
from ngramspec.backends.cpu.threads import take_next_piece, take_piece, wait_for_pieces
from ngramspec.datastore.code_cache import njit


@njit(cache=True, nogil=True)
def _mix_rows(group, i_layer, rows, conv, states, slot, out):
    """Compute one group of channels for all rows of one sequence, to out [T, H].

    `rows`: the pass, inputs [T, columns] of its rows, columns of C and x in them, and the sequence's span of rows.
    """
    p, inputs, (c_at, x_at), span = rows
    taps, (first, _, end) = conv[i_layer, group], span
    width = taps.shape[1]
    a = group * width
    products = np.empty((end - first, width), np.float32)
    for r in range(first, end):
        for j in range(width):
            products[r - first, j] = inputs[r, a + j] * inputs[r, x_at + a + j]
    plan = plan_rows(p, span, states[0][slot, i_layer])
    order = plan[3]
    mixed = np.empty((order.shape[0], width), np.float32)
    convolve_rows(group, i_layer, products, plan, span, taps, states, slot, mixed)
    for s in range(plan[1][0], order.shape[0]):
        row = order[s]
        for j in range(width):
            out[row, a + j] = inputs[row, c_at + a + j] * mixed[s, j]


@njit(cache=True, nogil=True)
def run_short_conv(part, layer, shared):
    """Run the parts of a layer's convolution, from `part` on: from the normed rows to what its last matrix multiplies."""
    model, p = shared.model, shared.current
    conv, states, work, state = model.recurrent.conv, model.recurrent.states, model.work, p.state
    i_layer, n_groups, slots = model.kinds.mixers[layer], conv.shape[1], find_slots(p)
    columns = run_input_products(part, p, model.weights.matrices[7 * layer : 7 * layer + 3], model.weights.tables, work)
    group = take_piece(state, part + 1)
    while group < n_groups:
        first = np.int64(0)
        for b in range(slots.shape[0]):
            rows = p, work.qkv, (columns[1], columns[2]), (first, np.int64(p.roots[b]), np.int64(p.ends[b]))
            _mix_rows(group, i_layer, rows, conv, states, slots[b], work.mixed)
            first = np.int64(p.ends[b])
        group = take_next_piece(state, part + 1)
    wait_for_pieces(state, part + 1, n_groups)
    note_positions(p, i_layer, slots, states)
