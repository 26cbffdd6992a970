"""Compute what the layers of some families need and most do not: LayerNorm, gated attention, rotary embeddings other than rotated halves.

A pass (`llama_pass`) calls these functions by their addresses, so that they are compiled for models that need them alone. Every row is
computed alone and in a fixed order. The module knows rows, norms and angles, nothing of batches or matrices.
"""

from __future__ import annotations

import numpy as np

from ngramspec.backends.cpu.formats import WIDTH
from ngramspec.backends.cpu.llama_layers import CENTRED_HEADS, EPS, GATED, INTERLEAVED, LATE_NORMS, N_ROTATED, Q
from ngramspec.backends.cpu.matmul import PANELS
from ngramspec.backends.cpu.norms import norm_heads, norm_row
from ngramspec.datastore.code_cache import njit
from ngramspec.sampling.numeric import compute_sigmoid, fma

_F = np.float32


@njit(cache=True, nogil=True)
def layer_norm_row(x, weight, eps, out):
    """Compute out [H] = (x - mean(x)) / sqrt(var(x) + eps) · weight, plus what follows in `weight` after H numbers: a bias [H]."""
    n = x.shape[0]
    lanes, whole = np.zeros(16, np.float32), n & ~15
    for j in range(0, whole, 16):
        for i in range(16):
            lanes[i] += x[j + i]
    total = _F(0)
    for i in range(16):
        total += lanes[i]
    for j in range(whole, n):
        total += x[j]
    mean = total / _F(n)
    for j in range(n):
        out[j] = x[j] - mean
    norm_row(out[:n], weight, eps, out[:n])
    if weight.shape[0] > n:
        for j in range(n):
            out[j] += weight[n + j]


@njit(cache=True, nogil=True)
def rotate_heads(x, head_dim, cos, sin, n_rotated, interleaved):
    """Rotate the first numbers of every head of x [n · D] in place, in pairs side by side or in halves, by cos and sin [n_rotated / 2]."""
    half = n_rotated // 2
    first, second, step = (0, 1, 2) if interleaved else (0, half, 1)
    for at in range(0, x.shape[0], head_dim):
        for i in range(half):
            a, b = at + first + step * i, at + second + step * i
            y, z = x[a], x[b]
            x[a] = fma(y, cos[i], -z * sin[i])
            x[b] = fma(z, cos[i], y * sin[i])


@njit(cache=True, nogil=True, error_model="numpy")
def _take_gates(x, n_heads, head_dim, gates):
    """Take the gates [heads · D] out of x [heads · 2 · D], where they lie behind each head's query, and close the queries up."""
    for h in range(n_heads):
        for d in range(head_dim):
            gates[h * head_dim + d] = compute_sigmoid(x[(2 * h + 1) * head_dim + d])
        for d in range(head_dim):
            x[h * head_dim + d] = x[2 * h * head_dim + d]


@njit(cache=True, nogil=True)
def gate_row(r, layer, shared):
    """Multiply what row r's heads have attended to by their gates; nothing to do in recurrent layers."""
    if shared.model.kinds.mixers[layer] >= 0:
        return
    row, gates = shared.model.work.mixed[r], shared.model.work.gates[r]
    for j in range(gates.shape[0]):
        row[j] *= gates[j]


@njit(cache=True, nogil=True)
def _centre_heads(x, head_dim, weight, eps):
    """Norm heads x [n · D] in place, without their mean, each by its own part of weight [at least n · D]."""
    for at in range(0, x.shape[0], head_dim):
        layer_norm_row(x[at : at + head_dim], weight[at : at + head_dim], eps, x[at : at + head_dim])


@njit(cache=True, nogil=True)
def turn_heads(r, layer, shared):
    """Norm and rotate queries and keys of row r in place, in the form and order that the model's options say."""
    model, weights = shared.model, shared.model.weights
    head_norms, rotary, form, numbers, cos, sin = (
        weights.head_norms, weights.rotary, weights.form, weights.numbers, weights.cos, weights.sin,
    )  # fmt: skip
    row, n_heads, head_dim = model.work.qkv[r], model.work.q.shape[1], model.work.q.shape[2]
    at, which = shared.current.positions[r], rotary[layer]
    if form[GATED]:
        _take_gates(row, n_heads, head_dim, model.work.gates[r])
    for i in range(2):
        first = i * weights.matrices[7 * layer + Q, PANELS] * WIDTH
        heads = row[first : first + (model.pool[0].shape[2] if i else n_heads) * head_dim]
        if form[CENTRED_HEADS]:
            _centre_heads(heads, head_dim, head_norms[2 * layer + i], numbers[EPS])
        elif head_norms.shape[0] and not form[LATE_NORMS]:
            norm_heads(heads, head_norms[2 * layer + i], numbers[EPS])
        if which >= 0:
            rotate_heads(heads, head_dim, cos[which, at], sin[which, at], form[N_ROTATED], form[INTERLEAVED])
        if head_norms.shape[0] and form[LATE_NORMS]:
            norm_heads(heads, head_norms[2 * layer + i], numbers[EPS])
