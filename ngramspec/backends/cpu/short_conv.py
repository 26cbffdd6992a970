"""Compute layers with a gated short convolution in place of attention (LFM2) over trees of rows.

Of a row's numbers B, C and x [H] a layer makes C · conv(B · x); the convolution sees the token and the few before it, so that a sequence's
state is the last products B · x. `recurrent_rows` says in which order rows are computed.

A piece of work is a group of channels. The module knows rows and states, nothing of requests; `recurrent_pool` has the states.
"""

from __future__ import annotations

import numpy as np

from ngramspec.backends.cpu.formats import DEPTH, WIDTH
from ngramspec.backends.cpu.llama_pass import run_product_part
from ngramspec.backends.cpu.matmul import PANELS, locate_rows
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
    state, n_rows, n_threads = p.state, p.input_ids.shape[0], p.tokens.shape[0]
    m, tables = model.weights.matrices[7 * layer : 7 * layer + 3], model.weights.tables
    conv, states, work = model.recurrent.conv, model.recurrent.states, model.work
    normed, codes, act_scales, inputs, mixed = work.normed, work.codes, work.act_scales, work.qkv, work.mixed
    i_layer, n_groups, columns = model.kinds.mixers[layer], conv.shape[1], np.zeros(3, np.int64)
    for i in range(2):
        columns[i + 1] = columns[i] + m[i, PANELS] * WIDTH
    wide = locate_rows(normed, codes[:, :, : normed.shape[1]], act_scales[:, :, : normed.shape[1] // DEPTH])
    run_product_part(state, part, n_threads, m, columns, tables, n_rows, wide, inputs)
    slots = find_slots(p)
    group = take_piece(state, part + 1)
    while group < n_groups:
        first = np.int64(0)
        for b in range(slots.shape[0]):
            rows = p, inputs, (columns[1], columns[2]), (first, np.int64(p.roots[b]), np.int64(p.ends[b]))
            _mix_rows(group, i_layer, rows, conv, states, slots[b], mixed)
            first = np.int64(p.ends[b])
        group = take_next_piece(state, part + 1)
    wait_for_pieces(state, part + 1, n_groups)
    note_positions(p, i_layer, slots, states)
