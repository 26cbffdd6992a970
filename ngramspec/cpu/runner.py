"""The runner on the CPU: a model whose weights stay in the blocks they came in, computed a pass in one call where it is of the Llama kind
(`stack`), else by transformers' modules over packed weights (`binding`) and paged attention.

It binds an opened model, computes batches on the host's cores and returns logits. It does not know what a request, a draft or a stop is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ngramspec.batch.errors import OutOfMemoryError, UnsupportedModelError
from ngramspec.batch.pack import Batch, Span, pack
from ngramspec.batch.types import BLOCK
from ngramspec.cpu import attention, fused
from ngramspec.cpu.binding import Binder, is_quantised
from ngramspec.cpu.formats import Blocks
from ngramspec.cpu.linear import PackedEmbedding, PackedLinear, SharedPart
from ngramspec.cpu.matmul import Matrix, Products
from ngramspec.cpu.pool import KVPool
from ngramspec.cpu.stack import LayerWeights, Stack
from ngramspec.model import attention as model_attention
from ngramspec.model.reference import kinds_of_layers, reference
from ngramspec.model.runner import Runner, check_supported, kv_shapes
from ngramspec.model.stored import Source, params_source

numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # workqueue takes 100 µs to start a second thread, omp 2

TOLERANCE, CODED = 2e-3, 0.1
"""Largest difference from transformers' own logits, over their size, that counts as rounding; and with activations of 8 bits."""


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


class PackedPolicy:
    """In which form the weights of one shape are multiplied."""

    bitwise = True

    def __init__(self) -> None:
        self.forms: set[str] = set()

    def __str__(self) -> str:
        return " or ".join(sorted(self.forms))


class CpuRunner(Runner):
    pool: KVPool
    device, dtype = "cpu", "float32"

    def __init__(
        self,
        model: PreTrainedModel,
        source: Source | None = None,
        *,
        max_len: int,
        max_seqs: int,
        max_rows: int,
        kv_bytes: int,
        max_blocks: int | None = None,
        precision: str = "auto",
        kv_dtype: str = "auto",
        plain: bool = False,
        trusted: bool = False,
        code: Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`source`: of the weights of a model on the "meta" device; None: it has them. `kv_bytes`: memory for the pool, which has no more
        than `max_blocks`. `precision`: "int8" for activations of 8 bits where weights are in blocks, "float32", or "auto" for the first
        where there are such weights. `kv_dtype`: "float32", "float16", or "auto" for float16 with int8. `plain`: weights as float32. `trusted`:
        this very model was checked against transformers, and its exactness proved, by this version on this machine. `code`: a folder that
        keeps compiled code.

        Raises UnsupportedModelError, OutOfMemoryError, ModelNotFoundError where a file has changed.
        """
        self.model = model.eval()
        self.max_rows = max_rows
        self._states: torch.Tensor | None = None  # of the last pass, where they are kept
        self._keep_states = False
        self._hook: RemovableHandle | None = None
        check_supported(model)
        in_memory = not any(p.is_meta for p in model.parameters())
        source = source or params_source(model)
        if in_memory and {p.dtype for p in model.parameters()} != {torch.float32}:
            found = sorted(str(p.dtype) for p in model.parameters())[0]
            raise UnsupportedModelError(f"{type(model).__name__}: weights must be float32 on the CPU, got {found}")
        self.precision = precision if precision != "auto" else "int8" if is_quantised(source) and not plain else "float32"
        if self.precision == "int8" and (plain or not is_quantised(source)):
            raise UnsupportedModelError(
                "precision 'int8' is for weights in blocks of codes, which this model has not; accepted: 'float32', or quantize='q8_0'"
            )
        self.kv_dtype = kv_dtype if kv_dtype != "auto" else "float16" if self.precision == "int8" else "float32"
        self._products = Products(self.precision == "int8", folder=code)
        self.stack: Stack | None = None
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        tokens = torch.arange(24) * 7919 % min(self.vocab_size, model.config.get_text_config().vocab_size)
        expected = self._expected(tokens) if in_memory else None
        with torch.inference_mode():
            try:
                Binder(model, source, self._products, plain, progress).bind()
            except MemoryError as e:
                raise OutOfMemoryError(f"memory ran out while weights were packed: {e}") from e
            fused.replace_small_operations(model)
            model.config._attn_implementation = model.config.get_text_config()._attn_implementation = model_attention.NAME
            self.shapes = kv_shapes(model, torch.device("cpu"))
        self.policies = self._policies()
        self.pool = self._new_pool(kv_bytes, max_seqs, max_len, max_blocks)
        with torch.inference_mode():
            self.stack = self._stack()
            if not trusted:
                progress("checking against transformers, and exactness (the first start compiles its kernels)")
                self._check(source, expected, tokens.numpy().astype(np.int32))
        if trusted:
            self.exactness = "bitwise"
        else:
            self.prove()

    # ------------------------------------------------------------------ binding

    @torch.inference_mode()
    def _expected(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens[None], use_cache=False).logits[0, -1].float()

    def _policies(self) -> dict[tuple[int, int], PackedPolicy]:
        policies: dict[tuple[int, int], PackedPolicy] = {}
        for module in self.model.modules():
            for m in (
                module.product.matrices if isinstance(module, PackedLinear) else [module.matrix] if isinstance(module, SharedPart) else []
            ):
                form = (
                    f"blocks of {'+'.join(map(str, m.weight.format.planes))} bits"
                    if isinstance(m.weight.format, Blocks)
                    else m.weight.format.value
                )
                policies.setdefault((m.weight.n_out, m.weight.n_in), PackedPolicy()).forms.add(form)
        return policies

    def _new_pool(self, kv_bytes: int, max_seqs: int, max_len: int, max_blocks: int | None) -> KVPool:
        dtype: type[np.generic] = np.uint16 if self.kv_dtype == "float16" else np.float32
        block_bytes = KVPool.block_bytes(self.shapes, dtype)
        n_blocks = min(kv_bytes // block_bytes, max_seqs * -(-max_len // BLOCK), max_blocks or sys.maxsize)
        if n_blocks * BLOCK < min(max_len, 2 * BLOCK):
            raise OutOfMemoryError(
                f"kv_memory of {kv_bytes} bytes holds {n_blocks * BLOCK} tokens; one block of {BLOCK} takes {block_bytes}"
            )
        return KVPool(self.shapes, n_blocks, max_seqs, max_len, dtype)

    def _stack(self) -> Stack | None:
        """The model as one, where its modules are of the Llama kind; `_check` decides whether it computes the same."""
        base: Any = self.model.base_model
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        rotary, norm = getattr(base, "rotary_emb", None), getattr(base, "norm", None)
        found = [_layer(layer) for layer in getattr(base, "layers", None) or ()]
        if not (
            found and all(found) and len(set(self.shapes)) == 1 and isinstance(rotary, nn.Module) and isinstance(norm, fused.RMSNorm)
            and isinstance(head, PackedLinear) and isinstance(embedding, PackedEmbedding)
        ):  # fmt: skip
            return None
        first: Any = base.layers[0].self_attn
        norms = [n for layer in base.layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]
        head_dim, hidden = self.shapes[0][1], len(norm.weight)
        n_heads = first.q_proj.out_features // head_dim
        angles = _angles(rotary, hidden)
        if angles(0, 1)[0].shape[1] != head_dim or {float(n.eps) for n in norms} != {float(norm.eps)}:
            return None
        if len({float(layer.self_attn.scaling) for layer in base.layers}) != 1:
            return None
        return Stack(
            self._products, [layer for layer in found if layer], embedding=embedding.matrix, head=head.product.matrices[0],
            norm=norm.weight, eps=float(norm.eps), scale=float(first.scaling), n_heads=n_heads, head_dim=head_dim, angles=angles,
        )  # fmt: skip

    # ------------------------------------------------------------------ checks

    def _check(self, source: Source, expected: torch.Tensor | None, tokens: np.ndarray) -> None:
        """Compare with transformers: the whole model if that had its weights, else one layer of each kind, with embedding and head.

        A stack that computes something else gives way to modules. Raises UnsupportedModelError where these do as well.
        """
        if expected is not None:

            def error() -> float:
                return self.logits_error(expected, tokens)
        else:
            kinds = kinds_of_layers(self.model)
            references = {i: reference(self.model, source, i) for i in kinds.values()}

            def error() -> float:
                return max(self._layer_error(small, i) for i, small in references.items())

        tolerance = CODED if self.precision == "int8" else TOLERANCE
        if self.stack is not None:
            if error() < tolerance:
                return
            self.stack = None
        found = error()
        if not found < tolerance:
            raise self.mismatch(found)

    def _layer_error(self, small: PreTrainedModel, layer: int) -> float:
        """Largest difference of a model of one layer from ours with that layer alone, over its size."""
        words = small.config.get_text_config().vocab_size
        ids = np.arange(24, dtype=np.int32) * 31 % words
        expected = small(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0].float().numpy()
        slot = self.slot_for_tests(len(ids))
        try:
            batch = pack([Span(slot, ids, 0, logits=len(ids))], self.pool, self.rows_per_item)
            got = self._layers(batch, layer, 1).logits(0, len(ids))[:, :words]
        finally:
            self.pool.release(slot)
        return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-6))

    # ------------------------------------------------------------------ passes

    def forward(self, batch: Batch) -> HostOutput:
        return self._layers(batch, 0, len(self.shapes))

    @torch.inference_mode()
    def _layers(self, batch: Batch, first: int, n_layers: int) -> HostOutput:
        """A pass through some layers, between embedding and head."""
        started = time.perf_counter()
        if self.stack is not None:
            logits, states = self.stack.run(
                batch, self.pool, numba.get_num_threads(), first=first, n_layers=n_layers, states=self._keep_states
            )
            kept = None if states is None else torch.from_numpy(states)
            return HostOutput(logits, self.pool, batch, kept, (time.perf_counter() - started) * 1e3)
        base: Any = self.model.base_model
        whole: Any = getattr(base, "layers", None)
        if (first, n_layers) != (0, len(self.shapes)):
            base.layers = nn.ModuleList(whole[first : first + n_layers])
        inputs = {
            "input_ids": torch.from_numpy(batch.input_ids)[None],
            "position_ids": torch.from_numpy(batch.positions.astype(np.int64))[None],
            "use_cache": False,
            "ngramspec": attention.Pass(self.pool, batch),
        }
        try:
            if len(batch.logits_rows):
                logits = self.model(**inputs, logits_to_keep=torch.from_numpy(batch.logits_rows)).logits[0].numpy()
            else:
                base(**inputs)
                logits = np.empty((0, self.vocab_size), np.float32)
        finally:
            if whole is not None:
                base.layers = whole
        return HostOutput(logits, self.pool, batch, self._states, (time.perf_counter() - started) * 1e3)

    def early_exit(self, n_layers: int) -> Callable[[Batch], HostOutput]:
        if not isinstance(getattr(self.model.base_model, "layers", None), nn.ModuleList):
            raise UnsupportedModelError(f"{type(self.model).__name__}: its first layers cannot be had by themselves")
        if not 1 <= n_layers <= len(self.shapes):
            raise ValueError(f"draft layers must be 1 to {len(self.shapes)}, the model's own, got {n_layers}")
        return lambda batch: self._layers(batch, 0, n_layers)

    def keep_states(self, wanted: bool) -> None:
        def remember(_module: nn.Module, _args: tuple[object, ...], output: BaseModelOutputWithPast) -> None:
            assert output.last_hidden_state is not None
            self._states = output.last_hidden_state[0]

        if self._hook is not None:
            self._hook.remove()
        self._keep_states = wanted
        self._states, self._hook = None, self.model.base_model.register_forward_hook(remember) if wanted else None


def _angles(rotary: nn.Module, hidden: int) -> Callable[[int, int], tuple[np.ndarray, np.ndarray]]:
    @torch.inference_mode()
    def angles(first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        cos, sin = rotary(torch.zeros(1, 1, hidden), torch.arange(first, first + n)[None])
        return cos[0].float().contiguous().numpy(), sin[0].float().contiguous().numpy()

    return angles


def _layer(layer: nn.Module) -> LayerWeights | None:
    """The parts of a layer of the Llama kind; None for another."""
    children = dict(layer.named_children())
    attn: Any = children.get("self_attn")
    mlp = children.get("mlp")
    norms: Any = (children.get("input_layernorm"), children.get("post_attention_layernorm"))
    if len(children) != 4 or not isinstance(mlp, fused.GatedMLP) or not all(isinstance(norm, fused.RMSNorm) for norm in norms):
        return None
    parts = dict(attn.named_children()) if attn is not None else {}
    heads: list[Any] = [parts.pop(name, None) for name in ("q_norm", "k_norm")]
    q: Any
    o: Any
    q, k, v, o = (parts.pop(name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    if parts or not all(isinstance(p, SharedPart) for p in (q, k, v)) or not isinstance(o, PackedLinear):
        return None
    if any(heads) and not all(isinstance(norm, fused.RMSNorm) and len(norm.weight) == attn.head_dim for norm in heads):
        return None
    if not isinstance(getattr(attn, "scaling", None), float) or not hasattr(attn, "head_dim"):
        return None
    window = attn.sliding_window if hasattr(attn, "sliding_window") else getattr(attn.config, "sliding_window", None)  # as it is handed on
    if any(True for _ in layer.parameters()):
        return None
    gate, up = mlp.shared.product.matrices
    matrices: tuple[Matrix, ...] = (*q.shared.product.matrices, o.product.matrices[0], gate, up, mlp.down.product.matrices[0])
    head_norms = tuple(norm.weight for norm in heads) if all(heads) else None
    return LayerWeights(matrices, tuple(norm.weight for norm in norms), head_norms, window or 0)  # type: ignore[arg-type]
