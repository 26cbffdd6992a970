"""EAGLE: one decoder layer that runs ahead on the level of hidden states, and drafts with the model's own language-model head.

After Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024): from the state at position t and the token
at t + 1 the layer predicts the state at t + 1, which the head turns into the token at t + 2; for the next step the prediction stands in for
the state. The tree grows as in "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024): the most likely nodes
of a level are continued, and the most likely of all are the draft. Keys and values are kept for states that the model itself computed;
those of drafts are dropped.

Reads the published format of EAGLE-1 and -2: a folder with config.json (a Llama's, with one layer) and model.safetensors or
pytorch_model.bin. EAGLE-3 reads states of three layers, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from ngramspec.errors import UnsupportedModelError
from ngramspec.papers.heads import check_shapes, read_checkpoint
from ngramspec.speculative.drafter import NOTHING, Candidates

# Prefixes of tensor names that only EAGLE-3 has.
EAGLE_3 = ("d2t", "t2d", "midlayer.", "lm_head.", "norm.")


class _EagleState:
    """A sequence: its tokens, the model's states that it was given, and the layer's keys and values for them."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.first = 0
        """Position of the first state that it was given; earlier ones came from the prefix cache."""
        self.n = 0
        """States that the layer has read."""
        self.kv = torch.empty(2, 0, 0, 0)  # [2, room, kv_heads, head_dim]: keys and values of positions first, first + 1, …
        self.waiting: list[torch.Tensor] = []  # [H] each: states that it has not read, since it takes the token that follows
        self.predicted: torch.Tensor | None = None  # [H], from the last state that it has read


class _EagleRows(NamedTuple):
    """Rows of one sequence in a pass of the layer."""

    text: _EagleState
    tokens: torch.Tensor  # [m] int64
    states: torch.Tensor  # [m, H], each of the position before its token's
    positions: torch.Tensor  # [m] int64, of the states
    seen: torch.Tensor  # [m, n] bool: which of the sequence's first n keys, the last m of which are the rows' own


class _Layer(nn.Module):
    """Modules by the names that their tensors have in a checkpoint; the rotary embedding has none."""

    def __init__(self, config: LlamaConfig, rotary: LlamaRotaryEmbedding, bias: bool, qkv_bias: bool) -> None:
        super().__init__()
        self.rotary = rotary
        hidden, n_heads = config.hidden_size, config.num_attention_heads
        self.kv_heads = kv_heads = config.num_key_value_heads or n_heads
        self.head_dim = head_dim = config.head_dim or hidden // n_heads
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=bias)
        layer = nn.Module()
        layer.self_attn = nn.Module()
        layer.self_attn.q_proj = nn.Linear(hidden, n_heads * head_dim, bias=qkv_bias)
        layer.self_attn.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=qkv_bias)
        layer.self_attn.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=qkv_bias)
        layer.self_attn.o_proj = nn.Linear(n_heads * head_dim, hidden, bias=False)
        layer.mlp = LlamaMLP(config)
        layer.post_attention_layernorm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList([layer])

    def forward(self, rows: list[_EagleRows]) -> list[torch.Tensor]:
        """The predicted states [m, H] of each sequence's rows, whose keys and values go where its text has room for them."""
        layer: Any = self.layers[0]
        attn = layer.self_attn
        x = self.fc(torch.cat([self.embed_tokens(torch.cat([r.tokens for r in rows])), torch.cat([r.states for r in rows])], -1))
        q, k, v = (product(x).view(len(x), -1, self.head_dim) for product in (attn.q_proj, attn.k_proj, attn.v_proj))
        cos, sin = self.rotary(x, torch.cat([r.positions for r in rows])[None])
        q, k = apply_rotary_pos_emb(q, k, cos[0], sin[0])
        sizes = [len(r.tokens) for r in rows]
        mixed = []
        for r, own_q, own_k, own_v in zip(rows, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
            m, n = r.seen.shape
            r.text.kv[0, n - m : n], r.text.kv[1, n - m : n] = own_k, own_v
            keys, values = r.text.kv[:, None, :n].transpose(2, 3)
            out = F.scaled_dot_product_attention(own_q.transpose(0, 1)[None], keys, values, attn_mask=r.seen, enable_gqa=True)
            mixed.append(out[0].transpose(0, 1).flatten(1))
        x = x + attn.o_proj(torch.cat(mixed))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return list(x.split(sizes))


class Eagle:
    """Drafts with the layer in the folder `path`: `depth` levels, `top` nodes of each continued, the most likely `nodes` of all drafted.

    The defaults are EAGLE-2's for models of 7B.
    """

    name = "eagle"

    def __init__(self, path: str | Path, nodes: int = 60, depth: int = 6, top: int = 10) -> None:
        """Raises ModelNotFoundError, UnsupportedModelError, and ValueError for sizes out of range."""
        if min(nodes, depth, top) < 1:
            raise ValueError(f"EAGLE takes nodes, depth and top from 1, got {nodes}, {depth}, {top}")
        self.nodes, self.depth, self.top = nodes, depth, top
        self.where = str(path)
        config, tensors = read_checkpoint(path, ("model.safetensors", "pytorch_model.bin"))
        if foreign := sorted(name for name in tensors if name.startswith(EAGLE_3)):
            raise UnsupportedModelError(
                f"{path} is of EAGLE-3, which reads states of three layers ({foreign[0]!r}); EAGLE-1 and -2 are read"
            )
        try:
            self.config = LlamaConfig.from_dict(config)
            rotary = LlamaRotaryEmbedding(self.config)
            with torch.device("meta"):
                layer = _Layer(self.config, rotary, "fc.bias" in tensors, "layers.0.self_attn.q_proj.bias" in tensors)
        except Exception as e:  # whatever transformers has to say to it
            raise UnsupportedModelError(f"{path}: config.json is not a Llama's: {e}") from e
        if self.config.num_hidden_layers != 1:
            raise UnsupportedModelError(f"{path}: EAGLE has one layer, config.json says num_hidden_layers={self.config.num_hidden_layers}")
        check_shapes(self.where, tensors, {name: tensor.shape for name, tensor in layer.state_dict().items()})
        layer.load_state_dict(tensors, assign=True)
        self.layer = layer.eval()
        self._texts: dict[int, _EagleState] = {}

    def bind(self, runner: Any) -> None:
        """Raises UnsupportedModelError where the layer is not of this model's sizes."""
        self._lm_head = runner.model.get_output_embeddings()
        for what, mine, wanted in (
            ("hidden_size", self.config.hidden_size, self._lm_head.in_features),
            ("vocab_size", self.config.vocab_size, runner.vocab_size),
        ):
            if mine != wanted:
                raise UnsupportedModelError(f"{self.where}: {what} must be the model's {wanted}, is {mine}")

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        self._texts[seq] = _EagleState(tokens.tolist())

    @torch.inference_mode()
    def on_hidden_states(self, seq: int, first: int, states: np.ndarray) -> None:
        """Read new states; those of a prompt chunk by chunk."""
        text = self._texts[seq]
        if text.n == 0 and not text.waiting:
            text.first = first
        text.waiting += torch.from_numpy(states)
        self._read([text])

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        self._texts[seq].tokens += accepted.tolist()

    def end(self, seq: int) -> None:
        self._texts.pop(seq, None)

    @torch.inference_mode()
    def propose(self, seqs: Sequence[int], budget: int) -> list[Candidates]:
        texts = {seq: self._texts[seq] for seq in seqs}
        self._read(list(texts.values()))
        ready = {seq: text for seq, text in texts.items() if text.predicted is not None}
        if not ready or budget < 1:
            return [NOTHING] * len(seqs)
        trees = dict(zip(ready, self._draft(list(ready.values()), min(budget, self.nodes)), strict=True))
        return [trees.get(seq, NOTHING) for seq in seqs]

    def _read(self, texts: list[_EagleState]) -> None:
        """Have the layer read the states after which a token is known."""
        rows = []
        for text in texts:
            position = text.first + text.n
            m = min(len(text.waiting), len(text.tokens) - 1 - position)
            if m > 0:
                n = text.n + m
                self._make_room(text, n)
                seen = torch.ones(m, n, dtype=torch.bool).tril(text.n)
                tokens = torch.tensor(text.tokens[position + 1 : position + 1 + m])
                rows.append(_EagleRows(text, tokens, torch.stack(text.waiting[:m]), torch.arange(position, position + m), seen))
        if rows:
            for r, predicted in zip(rows, self.layer(rows), strict=True):
                r.text.predicted = predicted[-1]
                r.text.n += len(predicted)
                del r.text.waiting[: len(predicted)]

    def _draft(self, texts: list[_EagleState], nodes: int) -> list[Candidates]:
        B, k = len(texts), self.top
        states = torch.stack([text.predicted for text in texts if text.predicted is not None])[:, None]  # [B, 1, H]
        above = torch.zeros(B, 1)  # log-probabilities of the paths that are continued
        at = torch.full((B, 1), -1)  # their nodes
        seen = torch.empty(B, 1, 0, dtype=torch.bool)  # [B, k, n]: which rows of this draft each sees
        tokens, parents, scores = torch.empty(B, 0, dtype=torch.int64), torch.empty(B, 0, dtype=torch.int64), torch.empty(B, 0)
        for text in texts:
            self._make_room(text, text.n + k * (self.depth - 1))
        for level in range(self.depth):
            logits = self._lm_head(states.flatten(0, 1))
            likely, children = logits.topk(k)
            chances = likely - logits.logsumexp(-1, keepdim=True)
            level_scores = (above[:, :, None] + chances.view(B, -1, k)).flatten(1)
            children, n_nodes = children.view(B, -1), tokens.shape[1]
            tokens, scores = torch.cat([tokens, children], 1), torch.cat([scores, level_scores], 1)
            parents = torch.cat([parents, at.repeat_interleave(k, 1)], 1)
            if level == self.depth - 1:
                break
            above, best = level_scores.topk(k)
            at, row = n_nodes + best, best // k
            own = torch.eye(k, dtype=torch.bool).expand(B, -1, -1)
            seen = torch.cat([seen.gather(1, row[:, :, None].expand(-1, -1, seen.shape[2])), own], 2)
            chosen, before = children.gather(1, best), states.gather(1, row[:, :, None].expand(-1, -1, states.shape[2]))
            rows = []
            for b, text in enumerate(texts):
                position = torch.full((k,), len(text.tokens) - 1 + level)
                rows.append(
                    _EagleRows(text, chosen[b], before[b], position, torch.cat([torch.ones(k, text.n, dtype=torch.bool), seen[b]], 1))
                )
            states = torch.stack(self.layer(rows))
        kept = scores.argsort(dim=1, descending=True, stable=True)[:, :nodes]  # a parent is as likely as its child, and stands before it
        return [_select_nodes(*(x[b].numpy() for x in (tokens, parents, scores, kept))) for b in range(B)]

    def _make_room(self, text: _EagleState, n: int) -> None:
        if text.kv.shape[1] < n:
            kv = torch.empty(2, 2 * n, self.layer.kv_heads, self.layer.head_dim)
            if text.n:
                kv[:, : text.n] = text.kv[:, : text.n]
            text.kv = kv


def _select_nodes(tokens: np.ndarray, parents: np.ndarray, scores: np.ndarray, kept: np.ndarray) -> Candidates:
    """Return the kept nodes [m] of all [n]."""
    new = np.full(len(tokens) + 1, -1, np.int32)  # the last: the root's
    new[kept] = np.arange(len(kept))
    return Candidates(tokens[kept].astype(np.int32), new[parents[kept]], np.exp(scores[kept]))
