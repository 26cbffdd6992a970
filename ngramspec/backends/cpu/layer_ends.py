"""Compute what layers of some families have after their MLP (Gemma 4): experts beside it, an input per token and layer, a factor.

A layer with experts computes them of what its MLP sees, and adds both, each normed. A token has inputs to every layer: numbers of a table,
plus a projection of its embedding. A layer multiplies its own by a gate, and adds a projection of that. A pass (`llama_pass`) calls
`run_layer_end` by its address; every row is computed alone and in a fixed order.
"""

from __future__ import annotations

import numpy as np

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu.codegen.intrinsics import call_kernel
from ngramspec.backends.cpu.formats import DEPTH, WIDTH
from ngramspec.backends.cpu.llama_layers import EMBEDDING_SCALE, EPS
from ngramspec.backends.cpu.llama_pass import (
    ACTIVATE,
    ACTIVATE_EXPERTS,
    PIECES,
    QUANTISE,
    UNPACK,
    UNPACK_INPUTS,
    add_row,
    embed_token,
    run_product_part,
)
from ngramspec.backends.cpu.matmul import BLOCKS, PANELS, locate_rows, quantise_row
from ngramspec.backends.cpu.norms import compute_norm_scale, norm_row
from ngramspec.backends.cpu.threads import take_next_piece, take_piece, wait_for_pieces
from ngramspec.datastore.code_cache import njit

# Norms of a layer's end: of the projected input, and those of `llama_layers.ExpertNorms`.
OF_INPUT, ROUTER, BEFORE, AFTER, AFTER_MLP = range(5)
NORMS = 5
# Numbers of a layer: its factor, then those of its experts. In the line after the last layer's: factors of tokens' inputs, then their norm.
FACTOR, EXPERT_FACTORS = 0, 1
TABLE_FACTOR, PROJECTION_FACTOR, SUM_FACTOR, INPUT_NORM = range(4)


@njit(cache=True, nogil=True)
def _finish_row(x, delta, factor):
    """Multiply a row x [H] that is complete by the layer's factor, and leave nothing that is added to it later."""
    for j in range(x.shape[0]):
        x[j] *= factor
        delta[j] = np.float32(0)


@njit(cache=True, nogil=True)
def _make_inputs(part, shared):
    """Make the inputs [T, L · P] of all rows to all layers, in three parts."""
    model, p = shared.model, shared.current
    state, ids, n_threads = p.state, p.input_ids, p.tokens.shape[0]
    of_model, tables, numbers, functions = model.weights.matrices, model.weights.tables, model.weights.numbers, model.weights.functions
    inputs, matrices, of_layers = model.work.layer_inputs, model.varied.matrices, model.varied.factors
    n_layers, n_inputs = of_layers.shape[0] - 1, (inputs.shape[1] - DEPTH) // (of_layers.shape[0] - 1)
    factors, norm = of_layers[n_layers, :INPUT_NORM], of_layers[n_layers, INPUT_NORM : INPUT_NORM + n_inputs]
    normed, codes, act_scales = model.work.normed, model.work.codes, model.work.act_scales
    hidden, n_rows, n_wide = model.work.x.shape[1], ids.shape[0], normed.shape[1]
    embedding, projection, table = of_model[of_model.shape[0] - 2], matrices[2 * n_layers : 2 * n_layers + 1], matrices[2 * n_layers + 1]
    pieces = min(n_rows, PIECES)
    i = take_piece(state, part)
    while i < pieces:
        panel = np.empty((embedding[BLOCKS] * DEPTH, WIDTH), np.float32)
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            embed_token(functions[UNPACK], embedding, ids[r], numbers[EMBEDDING_SCALE], panel, normed[r, :hidden])
            quantise_row(functions[QUANTISE], normed[r], codes[r, :, :n_wide], act_scales[r, :, : n_wide // DEPTH])
        i = take_next_piece(state, part)
    wait_for_pieces(state, part, pieces)
    wide = locate_rows(normed, codes[:, :, :n_wide], act_scales[:, :, : n_wide // DEPTH])
    one = np.zeros(1, np.int64)
    run_product_part(state, part + 1, n_threads, projection, one, tables, n_rows, wide, inputs)
    i = take_piece(state, part + 2)
    while i < pieces:
        of_token, panel = np.empty(n_layers * n_inputs, np.float32), np.empty((table[BLOCKS] * DEPTH, WIDTH), np.float32)
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            embed_token(functions[UNPACK_INPUTS], table, ids[r], factors[TABLE_FACTOR], panel, of_token)
            for layer in range(n_layers):
                some, added = inputs[r, layer * n_inputs : (layer + 1) * n_inputs], of_token[layer * n_inputs : (layer + 1) * n_inputs]
                for j in range(n_inputs):
                    some[j] *= factors[PROJECTION_FACTOR]
                norm_row(some, norm, numbers[EPS], some)
                for j in range(n_inputs):
                    some[j] = (some[j] + added[j]) * factors[SUM_FACTOR]
        i = take_next_piece(state, part + 2)
    wait_for_pieces(state, part + 2, pieces)


@njit(cache=True, nogil=True)
def _run_experts(part, layer, shared):
    """Run the experts beside an MLP and finish the rows, in eight parts."""
    model, p = shared.model, shared.current
    state, n_rows, n_threads = p.state, p.input_ids.shape[0], p.tokens.shape[0]
    weights, work = model.weights, model.work
    tables, post_norms, experts = weights.tables, weights.post_norms, weights.experts
    numbers, functions = weights.numbers, weights.functions
    all_norms, of_layers = model.varied.norms, model.varied.factors
    x, delta, normed, codes, act_scales, summed = work.x, work.delta, work.normed, work.codes, work.act_scales, work.qkv
    pairs = work.pairs
    norms, eps, hidden = all_norms[layer], numbers[EPS], x.shape[1]
    m, options, scale, correction = experts[0][layer], experts[1][layer], experts[2][layer], experts[3][layer]
    ids, codes, act_scales = pairs.ids[layer], codes[:, :, : normed.shape[1]], act_scales[:, :, : normed.shape[1] // DEPTH]
    inputs, pieces = locate_rows(normed, codes, act_scales), min(n_rows, PIECES)
    i = take_piece(state, part)
    while i < pieces:
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            norm_row(x[r], norms[ROUTER], eps, normed[r, :hidden])
            quantise_row(functions[QUANTISE], normed[r], codes[r], act_scales[r])
        i = take_next_piece(state, part)
    wait_for_pieces(state, part, pieces)
    run_product_part(state, part + 1, n_threads, m[moe.ROUTER :], np.zeros(1, np.int64), tables, n_rows, inputs, pairs.logits)
    i = take_piece(state, part + 2)
    while i < pieces:
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            moe.choose_experts(pairs.logits[r], correction, options, scale, ids[r], pairs.weights[r])
            for k in range(options[moe.TOP_K]):
                pairs.weights[r, k] *= of_layers[layer, EXPERT_FACTORS + ids[r, k]]
            norm_row(x[r], norms[BEFORE], eps, normed[r, :hidden])
            quantise_row(functions[QUANTISE], normed[r], codes[r], act_scales[r])
        i = take_next_piece(state, part + 2)
    wait_for_pieces(state, part + 2, pieces)
    code, rows = (tables, (functions[QUANTISE], functions[ACTIVATE_EXPERTS])), (n_rows, inputs, (normed, codes, act_scales))
    choice = moe.allocate_choice(n_rows, pairs, options)
    moe.run_chosen(state, part + 3, n_threads, (m, options, ids), code, rows, choice, pairs, summed[:, : delta.shape[1]])
    i = take_piece(state, part + 7)
    while i < pieces:
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            of_mlp, of_experts = delta[r, :hidden], summed[r, :hidden]
            mlp_scale, scale_of_sum = compute_norm_scale(of_mlp, eps), compute_norm_scale(of_experts, eps)
            for j in range(hidden):
                of_mlp[j] = norms[AFTER_MLP, j] * (of_mlp[j] * mlp_scale) + norms[AFTER, j] * (of_experts[j] * scale_of_sum)
            add_row(x[r], delta[r], post_norms, 2 * layer + 1, numbers, x[r])
            _finish_row(x[r], delta[r], of_layers[layer, FACTOR])
        i = take_next_piece(state, part + 7)
    wait_for_pieces(state, part + 7, pieces)


@njit(cache=True, nogil=True)
def run_layer_end(part, layer, shared):
    """Run the parts of a layer's end, from `part` on: from the MLP's output to rows that nothing has to be added to."""
    model, p = shared.model, shared.current
    state, n_rows, n_threads = p.state, p.input_ids.shape[0], p.tokens.shape[0]
    weights, work, varied = model.weights, model.work, model.varied
    tables, post_norms, experts = weights.tables, weights.post_norms, weights.experts
    numbers, functions = weights.numbers, weights.functions
    inputs, matrices, norms, of_layers = work.layer_inputs, varied.matrices, varied.norms, varied.factors
    if experts[1].shape[0] > 0 and experts[1][layer, moe.N_EXPERTS] > 0:
        _run_experts(part, layer, shared)
        return
    x, delta, normed, codes, act_scales = work.x, work.delta, work.normed, work.codes, work.act_scales
    both, middle, middle_codes, middle_act_scales = work.both, work.middle, work.middle_codes, work.middle_act_scales
    gate, projection = matrices[2 * layer : 2 * layer + 1], matrices[2 * layer + 1 : 2 * layer + 2]
    hidden, n_wide, has_input = x.shape[1], normed.shape[1], gate[0, PANELS] > 0
    n_inputs = (inputs.shape[1] - DEPTH) // (of_layers.shape[0] - 1)
    if has_input and layer == p.first:
        _make_inputs(part + 5, shared)
    pieces = min(n_rows, PIECES)
    i = take_piece(state, part)
    while i < pieces:
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            add_row(x[r], delta[r], post_norms, 2 * layer + 1, numbers, x[r])
            if has_input:
                for j in range(hidden):
                    normed[r, j] = x[r, j]
                quantise_row(functions[QUANTISE], normed[r], codes[r, :, :n_wide], act_scales[r, :, : n_wide // DEPTH])
            else:
                _finish_row(x[r], delta[r], of_layers[layer, FACTOR])
        i = take_next_piece(state, part)
    wait_for_pieces(state, part, pieces)
    if not has_input:
        return
    one, n_blocks = np.zeros(1, np.int64), projection[0, BLOCKS]
    wide = locate_rows(normed, codes[:, :, :n_wide], act_scales[:, :, : n_wide // DEPTH])
    run_product_part(state, part + 1, n_threads, gate, one, tables, n_rows, wide, both)
    i = take_piece(state, part + 2)
    while i < pieces:
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            gates, mine, out = both[r, 0], inputs[r, layer * n_inputs :], middle[r, : n_blocks * DEPTH]
            call_kernel(functions[ACTIVATE], (gates.ctypes.data, mine.ctypes.data, n_blocks, out.ctypes.data, 0, 0, 0, 0, 0, 0, 0, 0, 0))
            for j in range(n_inputs, n_blocks * DEPTH):
                out[j] = np.float32(0)
            quantise_row(functions[QUANTISE], out, middle_codes[r, :, : n_blocks * DEPTH], middle_act_scales[r, :, :n_blocks])
        i = take_next_piece(state, part + 2)
    wait_for_pieces(state, part + 2, pieces)
    run_product_part(
        state, part + 3, n_threads, projection, one, tables, n_rows, locate_rows(middle, middle_codes, middle_act_scales), delta
    )
    i = take_piece(state, part + 4)
    while i < pieces:
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            scale, norm = compute_norm_scale(delta[r, :hidden], numbers[EPS]), norms[layer, OF_INPUT]
            for j in range(hidden):
                x[r, j] += norm[j] * (delta[r, j] * scale)
            _finish_row(x[r], delta[r], of_layers[layer, FACTOR])
        i = take_next_piece(state, part + 4)
    wait_for_pieces(state, part + 4, pieces)
