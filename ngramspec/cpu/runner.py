"""The runner on the CPU: transformers' modules with packed linear layers, fused small operations and paged attention, in float32.

It replaces modules of a loaded model, computes batches on the host's cores and returns logits. It does not know what a request, a draft or
a stop is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numba
import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ngramspec.batch.errors import OutOfMemoryError, UnsupportedModelError
from ngramspec.batch.pack import Batch
from ngramspec.batch.types import BLOCK
from ngramspec.cpu import attention, fused
from ngramspec.cpu.linear import PackedLinear, Shared, SharedPart
from ngramspec.cpu.matmul import PackedPolicy, Product
from ngramspec.cpu.pool import KVPool
from ngramspec.model.hf_modules import bias_of, joined, weight_of
from ngramspec.model.runner import Runner, check_supported

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers that see the same input and become one."""

numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # workqueue takes 100 µs to start a second thread, omp 2

TOLERANCE = 2e-3
"""Largest difference from transformers' own logits, over their size, that counts as rounding."""


class HostOutput:
    """Logits rows [N, V] float32 on the host."""

    sampled = None

    def __init__(self, rows: np.ndarray, pool: KVPool, batch: Batch, states: torch.Tensor | None, ms: float) -> None:
        self._rows, self._pool, self._batch, self._states, self._ms = rows, pool, batch, states, ms

    def wait(self) -> float:
        return self._ms

    def logits(self, first: int, end: int) -> np.ndarray:
        return self._rows[first:end]

    def candidates(self, first: int, end: int) -> None:
        return None

    def states(self, rows: np.ndarray) -> np.ndarray:
        assert self._states is not None, "states were not kept"
        return self._states[torch.from_numpy(rows)].numpy()

    def commit(self, b: int, start: int, path: np.ndarray) -> None:
        self._pool.commit(self._batch.spans[b].slot, start, path)


class CpuRunner(Runner):
    pool: KVPool
    device, dtype = "cpu", "float32"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_len: int,
        max_seqs: int,
        max_rows: int,
        kv_bytes: int,
        max_blocks: int | None = None,
        packed: bool = True,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`kv_bytes`: memory for the pool, which has no more than `max_blocks`; not `packed`: weights as float32.

        Raises UnsupportedModelError, OutOfMemoryError.
        """
        self.model = model.eval()
        self.max_rows, self._packed = max_rows, packed
        self._states: torch.Tensor | None = None  # of the last pass, where they are kept
        self._hook: RemovableHandle | None = None
        self.policies: dict[tuple[int, int], PackedPolicy] = {}
        check_supported(model)
        if {p.dtype for p in model.parameters()} != {torch.float32}:
            found = sorted(str(p.dtype) for p in model.parameters())[0]
            raise UnsupportedModelError(f"{type(model).__name__}: weights must be float32 on the CPU, got {found}")
        tokens, expected = self.adopt(model)
        progress("packing weights")
        with torch.inference_mode():
            self._pack_linears()
            fused.replace_small_operations(model)
        block_bytes = KVPool.block_bytes(self.shapes)
        n_blocks = min(kv_bytes // block_bytes, max_seqs * -(-max_len // BLOCK), max_blocks or sys.maxsize)
        if n_blocks * BLOCK < min(max_len, 2 * BLOCK):
            raise OutOfMemoryError(
                f"kv_memory of {kv_bytes} bytes holds {n_blocks * BLOCK} tokens; one block of {BLOCK} takes {block_bytes}"
            )
        self.pool = KVPool(self.shapes, n_blocks, max_seqs, max_len)
        progress("checking exactness (the first start compiles its kernels)")
        self._fuse_layers(expected, tokens)
        self.prove()

    # ------------------------------------------------------------------ binding

    def _matmul(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        product = Product(weight, bias, packed=self._packed)
        self.policies.setdefault((product.n_out, product.n_in), PackedPolicy()).formats.add(product.format)
        return product

    def _pack_linears(self) -> None:
        """Every linear layer becomes a packed one; the original weights are let go as they are replaced."""
        for parent in list(self.model.modules()):
            children = dict(parent.named_children())
            for group in GROUPS:
                layers = [children.get(name) for name in group]
                if all(type(layer) is nn.Linear for layer in layers) and len({layer.in_features for layer in layers}) == 1:  # type: ignore[union-attr]
                    self._share(parent, group, layers)  # type: ignore[arg-type]
            for name, child in parent.named_children():
                if (weight := weight_of(child)) is not None:
                    setattr(parent, name, PackedLinear(self._matmul(weight, bias_of(child))))

    def _share(self, parent: nn.Module, names: tuple[str, ...], layers: list[nn.Linear]) -> None:
        shared = Shared(self._matmul(*joined(layers)), [layer.out_features for layer in layers])
        for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
            setattr(parent, name, SharedPart(shared, i, layer.in_features))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> HostOutput:
        started = time.perf_counter()
        inputs = {
            "input_ids": torch.from_numpy(batch.input_ids)[None],
            "position_ids": torch.from_numpy(batch.positions.astype(np.int64))[None],
            "use_cache": False,
            "ngramspec": attention.Pass(self.pool, batch),
        }
        if len(batch.logits_rows):
            logits = self.model(**inputs, logits_to_keep=torch.from_numpy(batch.logits_rows)).logits[0].numpy()
        else:
            self.model.base_model(**inputs)
            logits = np.empty((0, self.vocab_size), np.float32)
        return HostOutput(logits, self.pool, batch, self._states, (time.perf_counter() - started) * 1e3)

    def early_exit(self, n_layers: int) -> Callable[[Batch], HostOutput]:
        base = self.model.base_model
        whole = getattr(base, "layers", None)
        if not isinstance(whole, nn.ModuleList):
            raise UnsupportedModelError(f"{type(self.model).__name__}: its first layers cannot be had by themselves")
        if not 1 <= n_layers <= len(self.shapes):
            raise ValueError(f"draft layers must be 1 to {len(self.shapes)}, the model's own, got {n_layers}")
        stack = whole[0]
        first = nn.ModuleList([stack.first(n_layers)] if isinstance(stack, fused.Stack) else whole[:n_layers])

        def forward(batch: Batch) -> HostOutput:
            base.layers = first
            try:
                return self.forward(batch)
            finally:
                base.layers = whole

        return forward

    def keep_states(self, wanted: bool) -> None:
        def remember(_module: nn.Module, _args: tuple[object, ...], output: BaseModelOutputWithPast) -> None:
            assert output.last_hidden_state is not None
            self._states = output.last_hidden_state[0]

        if self._hook is not None:
            self._hook.remove()
        self._states, self._hook = None, self.model.base_model.register_forward_hook(remember) if wanted else None

    def _fuse_layers(self, expected: torch.Tensor, tokens: np.ndarray) -> None:
        """Check our pass against transformers' own logits [V]: all layers as one `Stack` where they fit and agree, else one by one.

        Raises UnsupportedModelError where the model's result is another.
        """
        base = self.model.base_model
        layers = getattr(base, "layers", None)
        if isinstance(layers, nn.ModuleList) and fused.Stack.fits(layers):
            base.layers = nn.ModuleList([fused.Stack(layers)])
            if self.logits_error(expected, tokens) < TOLERANCE:
                return
            base.layers = layers
        error = self.logits_error(expected, tokens)
        if not error < TOLERANCE:
            raise self.mismatch(error)
