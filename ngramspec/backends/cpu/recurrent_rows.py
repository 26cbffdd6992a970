"""Take the convolution of a recurrent layer through the rows of a sequence: replayed ones, known ones, and the draft tree depth first.

A pass begins with the state after the last known row of the pass before: it replays the draft rows that were accepted, from their logged
inputs, computes the known rows, stores the state, and walks the draft tree depth first on copies. Every row is one step of the same
operations in the same order, so a prompt in chunks, a chain, a tree and plain decoding have the same bits.

A convolution's channels are divided into groups, each of which is a piece of work. What is made of its inputs and outputs differs by kind
of layer (`gated_delta`, `short_conv`, `mamba2`). The module knows rows and states, nothing of requests; `recurrent_pool` has the states.
"""

from __future__ import annotations

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.outputs import BLOCK
from ngramspec.sampling.numeric import fma

MOST_NODES = 64  # Most nodes of a sequence's draft tree.


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
def find_slots(p):
    """Return the slot [B] int64 of every sequence of a pass."""
    slots, item = np.empty(p.roots.shape[0], np.int64), 0
    for b in range(slots.shape[0]):
        while p.items[item, 1] <= p.roots[b]:
            item += 1
        slots[b] = p.owners[item]
    return slots


@njit(cache=True, nogil=True)
def plan_rows(p, span, at):
    """Plan in which order the rows of one sequence are computed, where its state is the one after position at - 1.

    `span`: the sequence's first row, the row of its last known token, and its last row + 1.

    Return the position of the first row; the number of replayed rows, that of replayed and known rows, and that of rows after which the
    state is copied, at most 0 if no block becomes full; the largest depth in the draft tree; rows [n] in order, -1 for replayed ones;
    depths [n] in the tree, 0 for other rows.
    """
    first, root, end = span
    start, n_known, n_nodes = np.int64(p.positions[first]), root + 1 - first, end - root - 1
    n_replayed = start - at if start > 0 else np.int64(0)
    n_certain = n_replayed + n_known
    order, depths = np.full(n_certain + n_nodes, -1, np.int64), np.zeros(n_certain + n_nodes, np.int64)
    for i in range(n_known):
        order[n_replayed + i] = first + i
    deepest = order_depth_first(p.parents, root, end, order[n_certain:], depths[n_certain:])
    boundary = (start + n_known) // BLOCK * BLOCK
    return start, (n_replayed, n_certain, n_replayed + boundary - start), deepest, order, depths


@njit(cache=True, nogil=True)
def copy_numbers(to, numbers):
    """Copy numbers [n] to `to` [n]. Assigning one array to another takes numba seconds to compile, for the text of an error."""
    for j in range(to.shape[0]):
        to[j] = numbers[j]


@njit(cache=True, nogil=True)
def convolve_rows(group, i_layer, inputs, plan, span, taps, states, slot, out):
    """Convolve the inputs of a group of channels to out [n, W], and keep what the next pass continues from.

    `inputs` [T, W]: of the sequence's rows, in their order in the pass; `plan`: as `plan_rows` returns it; `taps` [K, W]: factors of the
    earliest token's input to the token's own.
    """
    _, _, tails, log, _, _, _, kept_tails = states
    start, (n_replayed, n_certain, n_to_boundary), deepest, order, depths = plan
    first, root = span[0], span[1]
    n_taps, width = taps.shape
    n_tail = n_taps - 1
    n_ring = n_taps + deepest  # inputs of the deepest path, and those that its convolutions see
    ring = np.empty((n_ring, width), np.float32)
    for t in range(n_tail):
        if start > 0:
            copy_numbers(ring[t], tails[slot, i_layer, group, t])
        else:
            ring[t, :] = np.float32(0)
    for s in range(order.shape[0]):
        here = n_tail + (s if s < n_certain else n_certain + depths[s] - 1)
        if s < n_replayed:
            copy_numbers(ring[here % n_ring], log[slot, i_layer, s, group])
        else:
            copy_numbers(ring[here % n_ring], inputs[order[s] - first])
        mixed, earliest = out[s], ring[(here - n_tail) % n_ring]
        for j in range(width):
            mixed[j] = taps[0, j] * earliest[j]
        for t in range(1, n_taps):
            earlier = ring[(here - n_tail + t) % n_ring]
            for j in range(width):
                mixed[j] = fma(taps[t, j], earlier[j], mixed[j])
        if s == n_to_boundary - 1:
            for t in range(n_tail):
                copy_numbers(kept_tails[slot, i_layer, group, t], ring[(here - n_tail + 1 + t) % n_ring])
        if s == n_certain - 1:  # everything of before has been read
            for t in range(n_tail):
                copy_numbers(tails[slot, i_layer, group, t], ring[(here - n_tail + 1 + t) % n_ring])
    for s in range(n_certain, order.shape[0]):
        copy_numbers(log[slot, i_layer, order[s] - root - 1, group], inputs[order[s] - first])


@njit(cache=True, nogil=True)
def note_positions(p, i_layer, slots, states):
    """Write down where a layer's states are after the pass. Every thread may: later ones find that nothing is left to write."""
    first, at, kept_at = np.int64(0), states[0], states[5]
    for b in range(slots.shape[0]):
        start, end = np.int64(p.positions[first]), np.int64(p.positions[p.roots[b]]) + 1
        before = at[slots[b], i_layer] if start > 0 else np.int64(0)
        if end // BLOCK * BLOCK > before:
            kept_at[slots[b], i_layer] = end // BLOCK * BLOCK
        at[slots[b], i_layer] = end
        first = np.int64(p.ends[b])
