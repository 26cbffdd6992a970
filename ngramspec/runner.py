"""The runner: a transformers model with our attention, pool and linear layers; one pass over any mix of rows.

The only room that knows transformers' modules. It binds a loaded model (refusing what it cannot carry), proves
its exactness on this machine, measures what a pass costs, and answers `forward(Batch) -> logits`. It knows
nothing of requests, drafting or sampling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numba
import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ngramspec import attention, fused
from ngramspec.errors import OutOfMemoryError, UnsupportedModelError
from ngramspec.kv import KVPool
from ngramspec.linear import PackedLinear, Policy, Product, Shared, SharedPart, choose_policy
from ngramspec.pack import Span, pack
from ngramspec.types import BLOCK, Batch, DraftTree

log = logging.getLogger(__name__)

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that see the same input and become one product."""

numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # workqueue takes 100 µs to start a second thread, omp 2

COST_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Row counts at which the cost of a pass is measured."""

TOLERANCE = 2e-3
"""Largest difference from transformers' own logits, over their size, that counts as rounding."""

AttentionInterface.register("ngramspec", attention.forward)


class Runner:
    """A bound model with its pool. Single-threaded: one caller at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_len: int,
        max_seqs: int,
        max_rows: int,
        kv_bytes: int,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`kv_bytes`: memory for the pool. Raises UnsupportedModelError, OutOfMemoryError."""
        self.model = model.eval()
        self.max_rows = max_rows
        self.policies: dict[tuple[int, int], Policy] = {}
        config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        check_supported(model)
        probe = torch.arange(24) * 7919 % min(self.vocab_size, config.vocab_size)
        with torch.inference_mode():
            expected = model(input_ids=probe[None], use_cache=False).logits[0]
        progress("packing weights")
        model.config._attn_implementation = "ngramspec"
        config._attn_implementation = "ngramspec"
        self.shapes = kv_shapes(model)
        with torch.inference_mode():
            self._pack_linears()
            fused.replace_small_operations(model)
        block_bytes = KVPool.block_bytes(self.shapes)
        n_blocks = min(kv_bytes // block_bytes, max_seqs * -(-max_len // BLOCK))
        if n_blocks * BLOCK < min(max_len, 2 * BLOCK):
            raise OutOfMemoryError(
                f"kv_memory of {kv_bytes} bytes holds {n_blocks * BLOCK} tokens; one block of {BLOCK} takes {block_bytes}"
            )
        self.pool = KVPool(self.shapes, n_blocks, max_seqs, max_len)
        progress("checking exactness (the first start compiles its kernels)")
        self._fuse_layers(expected, probe.numpy().astype(np.int32))
        self.exactness = "bitwise" if self._self_test() else "numerical"
        if self.exactness == "numerical":
            log.warning(
                "exactness: numerical (rows depend on their number: %s)",
                ", ".join(f"{s}: {p}" for s, p in self.policies.items() if not p.bitwise) or "attention",
            )

    # ------------------------------------------------------------------ binding

    def _policy(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Policy:
        shape = (weight.shape[0], weight.shape[1])
        if shape not in self.policies:
            self.policies[shape] = choose_policy(weight, bias)
        return self.policies[shape]

    def _product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        weight = weight.detach()
        return Product(weight, None if bias is None else bias.detach(), self._policy(weight, bias))

    def _pack_linears(self) -> None:
        """Every linear layer becomes a packed one; the original weights are let go as they are replaced."""
        for parent in list(self.model.modules()):
            children = dict(parent.named_children())
            for group in GROUPS:
                layers = [children.get(name) for name in group]
                if all(type(layer) is nn.Linear for layer in layers) and len({layer.in_features for layer in layers}) == 1:  # type: ignore[union-attr]
                    self._share(parent, group, layers)  # type: ignore[arg-type]
            for name, child in parent.named_children():
                if type(child) is nn.Linear:
                    setattr(parent, name, PackedLinear(self._product(child.weight, child.bias)))
                elif type(child) is Conv1D:
                    setattr(parent, name, PackedLinear(self._product(child.weight.T.contiguous(), child.bias)))

    def _share(self, parent: nn.Module, names: tuple[str, ...], layers: list[nn.Linear]) -> None:
        biases = [layer.bias for layer in layers]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([torch.zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers])
        shared = Shared(self._product(torch.cat([layer.weight for layer in layers]), bias), [layer.out_features for layer in layers])
        for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
            setattr(parent, name, SharedPart(shared, i, layer.in_features))

    # ------------------------------------------------------------------ passes

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """One pass over the rows [T]; logits [len(logits_rows), vocab] float32. Writes the rows' KV to their slots."""
        inputs = {
            "input_ids": torch.from_numpy(batch.input_ids)[None],
            "position_ids": torch.from_numpy(batch.positions.astype(np.int64))[None],
            "use_cache": False,
            "ngramspec": attention.Pass(self.pool, batch),
        }
        if len(batch.logits_rows) == 0:
            self.model.base_model(**inputs)
            return torch.empty(0, self.vocab_size)
        return self.model(**inputs, logits_to_keep=torch.from_numpy(batch.logits_rows)).logits[0]

    def run(self, spans: list[Span]) -> torch.Tensor:
        return self.forward(pack(spans, self.pool))

    # ------------------------------------------------------------------ proofs and measurements

    def _slot_for_tests(self, n_slots: int) -> int:
        slot = int(np.flatnonzero(self.pool.held == 0)[0])
        if not self.pool.reserve(slot, n_slots):
            raise OutOfMemoryError(f"the KV pool of {self.pool.n_blocks * BLOCK} tokens is too small for {n_slots} tokens")
        return slot

    def _fuse_layers(self, expected: torch.Tensor, tokens: np.ndarray) -> None:
        """Check our pass against transformers' own logits [n, V]: all layers as one `Stack` where they fit and agree, else one by one.

        Raises UnsupportedModelError where the model's result is another.
        """
        base = self.model.base_model
        layers = getattr(base, "layers", None)
        if isinstance(layers, nn.ModuleList) and fused.Stack.fits(layers):
            base.layers = nn.ModuleList([fused.Stack(layers)])
            if self._error(expected, tokens) < TOLERANCE:
                return
            base.layers = layers
        error = self._error(expected, tokens)
        if not error < TOLERANCE:
            raise UnsupportedModelError(f"{type(self.model).__name__}: logits differ from transformers' own by {error:.2g} of their size")

    def _error(self, expected: torch.Tensor, tokens: np.ndarray) -> float:
        """Largest difference of the logits, over their size."""
        slot = self._slot_for_tests(len(tokens))
        try:
            got = self.run([Span(slot, tokens[:-1], 0, logits=0), Span(slot, tokens[-1:], len(tokens) - 1)])[0]
        finally:
            self.pool.release(slot)
        return float((got - expected[-1]).abs().max() / expected[-1].abs().max().clamp(min=1e-6))

    def _self_test(self) -> bool:
        """A prompt in chunks, a chain and a tree against the same tokens one by one: bitwise equal logits?"""
        if not all(policy.bitwise for policy in self.policies.values()):
            return False
        rng = np.random.default_rng(0)
        n = min(40, self.pool.max_blocks * BLOCK - 12)
        tokens = rng.integers(0, self.vocab_size, n + 8).astype(np.int32)
        parents = np.array([-1, -1, 0, 1, 3, 2, 4, 6], np.int32)
        tree = DraftTree(tokens[n:], parents, np.ones(8, np.float32), np.zeros(8, np.uint8))
        slot = self._slot_for_tests(n + 8)
        try:
            self.run([Span(slot, tokens[: n // 2], 0, logits=0)])
            whole = self.run([Span(slot, tokens[n // 2 : n], n // 2, tree)])
            for i in range(n):
                last = self.run([Span(slot, tokens[i : i + 1], i)])
            same = torch.equal(last[0], whole[0])
            for leaf in range(8):
                path = [leaf]
                while parents[path[0]] >= 0:
                    path.insert(0, int(parents[path[0]]))
                for depth, node in enumerate(path):
                    last = self.run([Span(slot, tree.tokens[node : node + 1], n + depth)])
                same = same and torch.equal(last[0], whole[1 + leaf])
            return same
        finally:
            self.pool.release(slot)

    def time_pass(self, rows: int, context: int) -> float:
        """Milliseconds of one pass that carries `rows` rows of one sequence (a root and a chain) behind `context` tokens."""
        slot = self._slot_for_tests(context + rows)
        try:
            spans = [Span(slot, np.full(1, 7, np.int32), context - 1, _chain(rows - 1))]
            start = time.perf_counter()
            self.run(spans)
            return (time.perf_counter() - start) * 1e3
        finally:
            self.pool.release(slot)

    def measure(self, counts: list[int], rounds: int = 4) -> list[float]:
        """Milliseconds of passes with these row counts: the least of interleaved rounds, since what disturbs a pass only adds to it."""
        context = min(256, (self.pool.max_blocks * BLOCK - counts[-1]) // 2)
        times = np.array([[self.time_pass(rows, max(context, 1)) for rows in counts] for _ in range(rounds)])
        return times.min(axis=0).tolist()


def _chain(n: int) -> DraftTree:
    return DraftTree(np.full(n, 11, np.int32), np.arange(-1, n - 1, dtype=np.int32), np.ones(n, np.float32), np.zeros(n, np.uint8))


@torch.inference_mode()
def kv_shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Per layer (n_kv_heads, head_dim), as the layers hand them to their attention function. Raises UnsupportedModelError."""
    probe = attention.Shapes()
    one = torch.zeros(1, 1, dtype=torch.int64)
    model.base_model(input_ids=one, position_ids=one, use_cache=False, ngramspec=probe)
    if sorted(probe.seen) != list(range(len(probe.seen))) or not probe.seen:
        raise UnsupportedModelError(
            f"{type(model).__name__}: attention in layers {sorted(probe.seen)}; every layer from 0 on must have one"
        )
    for _, head_dim in probe.seen.values():
        if head_dim % 8:
            raise UnsupportedModelError(f"{type(model).__name__}: head size {head_dim} is not a multiple of 8")
    return [probe.seen[layer] for layer in sorted(probe.seen)]


def check_supported(model: PreTrainedModel) -> None:
    """Refuse, with the reason, what a pass over packed rows cannot compute. Raises UnsupportedModelError."""
    name = type(model).__name__
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders are supported")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-model head")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(f"{name} does not let its attention function be replaced (_supports_attention_backend is not set)")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {rope.get("rope_type")} | {v.get("rope_type") for v in rope.values() if isinstance(v, dict)}
    for kind in kinds & {"dynamic", "longrope"}:
        raise UnsupportedModelError(
            f"{name} uses {kind!r} rotary embeddings, whose angles depend on the whole batch, so that rows would not be independent"
        )
    if {p.dtype for p in model.parameters()} != {torch.float32}:
        raise UnsupportedModelError(
            f"{name}: weights must be float32 on the CPU, got {sorted(str(p.dtype) for p in model.parameters())[0]}"
        )
