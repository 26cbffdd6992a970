"""Run a Llama-style decoder whose weight map is known: only its weights' files are read, and neither torch nor transformers is imported.

The module also holds what every CPU runner has: the output in the host's memory, the pool, the precision. It computes batches and returns
logits; it does not know what a request, a draft or a stop is.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numba
import numpy as np

from ngramspec.backends.base import Kept, Runner, RunnerOptions
from ngramspec.backends.cpu.arena import Arena
from ngramspec.backends.cpu.formats import QuantFormat
from ngramspec.backends.cpu.kv_pool import KVPool
from ngramspec.backends.cpu.llama_forward import ForwardOutput, LlamaDecoder, NativeLlamaForward
from ngramspec.backends.cpu.matmul import MatmulContext, Matrix
from ngramspec.backends.cpu.packing import packed_bytes
from ngramspec.backends.cpu.prediction_head import PackedHead, make_head_map
from ngramspec.backends.cpu.recurrent_pool import RecurrentPool, StateShape
from ngramspec.backends.cpu.recurrent_rows import MOST_NODES
from ngramspec.backends.cpu.weight_map import WeightMap
from ngramspec.backends.cpu.weight_map_build import build_decoder
from ngramspec.errors import OutOfMemoryError, UnsupportedModelError
from ngramspec.models.tensor_source import KINDS, TensorSource
from ngramspec.outputs import BLOCK, KEPT, TokenLogprob
from ngramspec.sampling.batch import Batch, Span, pack
from ngramspec.sampling.verify import Match, match_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
SNAPSHOTS = 1024  # Most snapshots of recurrent states that the prefix cache keeps.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # workqueue takes 100 µs to start a second thread, omp 2


@dataclass(frozen=True, kw_only=True)
class CpuOptions(RunnerOptions):
    """What a runner on the CPU is made for."""

    kv_bytes: int
    precision: str = "auto"
    """How products are computed: "int8" for 8-bit activations with weights in quant blocks, "float32", or "auto" for the first if there
    are such weights."""
    kv_dtype: str = "auto"
    """How keys and values are kept: "float32", "float16", or "auto" for float16 with int8."""
    plain: bool = False
    """Whether weights are packed as float32, which a start that only reads a file never does."""
    code: Path | None = None
    """Folder that caches compiled code."""
    wait_for_code: Callable[[], object] = lambda: None
    """Called before the first pass."""
    with_head: bool = False
    """Use the model's own head that predicts further tokens, if it has one."""
    arena: Arena = field(default_factory=Arena)
    """The memory in which a `LlamaRunner` packs weights."""


class HostOutput:
    """Logits rows on the host, and what was computed along with them."""

    def __init__(self, computed: ForwardOutput, pool: KVPool, batch: Batch, ms: float) -> None:
        self._computed, self._pool, self._batch, self._ms = computed, pool, batch, ms

    def wait(self) -> float:
        return self._ms

    def get_matches(self) -> list[Match | None]:
        return match_batch(self._batch, self._computed.greedy, self._computed.logits)

    def get_logits(self, first: int, end: int) -> np.ndarray:
        return self._computed.logits[first:end]

    def get_topk(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray] | None:
        known = self._computed
        return (known.tokens[first:end], known.values[first:end]) if known.tokens.shape[1] == KEPT else None

    def get_logprobs(self, rows: np.ndarray, n: int) -> list[TokenLogprob]:
        raise NotImplementedError("their sequences are walked by themselves")

    def get_hidden_states(self, rows: np.ndarray) -> np.ndarray:
        assert self._computed.states is not None, "states were not kept"
        return self._computed.states[rows]

    def commit(self, kept: Sequence[Kept]) -> None:
        self._pool.commit_all([(self._batch.spans[b].slot, start, path) for b, start, path in kept])


class PackedPolicy:
    """Decides in which forms the weights of one shape are multiplied."""

    bitwise = True

    def __init__(self) -> None:
        self.forms: set[str] = set()

    def __str__(self) -> str:
        return " or ".join(sorted(self.forms))


def is_quantised(source: TensorSource) -> bool:
    """Return whether any matrix is in quant blocks."""
    return any(KINDS[stored.kind][0] > 1 for stored in source.values())


def count_packed_bytes(source: TensorSource, plain: bool) -> int:
    """Return the bytes of the weights once packed, tied ones counted once. `plain`: as float32."""
    total = 0
    # one parameter has as many objects as names where it is in memory, or quantised while it is read
    what = {id(getattr(stored, "tensor", getattr(stored, "stored", stored))): stored for stored in source.values()}
    for stored in what.values():
        if len(stored.shape) == 1 or plain:
            total += 4 * stored.n_rows * stored.shape[-1]
        else:
            total += math.prod(stored.shape[:-2]) * packed_bytes(stored.kind, *stored.shape[-2:])
    return total


def resolve_precision(precision: str, kv_dtype: str, quantised: bool) -> tuple[str, str]:
    """Resolve "auto" to a precision and a type of keys and values. Raises UnsupportedModelError."""
    if precision == "int8" and not quantised:
        raise UnsupportedModelError(
            "precision 'int8' is for weights in blocks of codes, which this model has not; accepted: 'float32', or quantize='q8_0'"
        )
    precision = precision if precision != "auto" else "int8" if quantised else "float32"
    return precision, kv_dtype if kv_dtype != "auto" else "float16" if precision == "int8" else "float32"


def make_pool(
    shapes: list[tuple[int, int]], kv_dtype: str, options: CpuOptions, state_shape: StateShape | None = None, value_dim: int = 0
) -> KVPool:
    """Make the largest pool that `kv_bytes` allow and the sequences need. Raises OutOfMemoryError if not even one text fits.

    `value_dim`: see `KVPool`; such a model has no recurrent layers.

    States of recurrent layers take up to half of `kv_bytes`: for every sequence its own and one that becomes a snapshot, and up to
    SNAPSHOTS snapshots. Where these do not fit, fewer sequences run at a time.
    """
    dtype: type[np.generic] = np.uint16 if kv_dtype == "float16" else np.float32
    max_len, max_seqs, kv_bytes, n_snapshots = options.max_len, options.max_seqs, options.kv_bytes, 0
    if state_shape is not None:
        size = state_shape.state_bytes
        n_snapshots = max(1, min(SNAPSHOTS, kv_bytes // (8 * size)))
        if (most := (kv_bytes // 2 // size - n_snapshots) // 2) < max_seqs:
            if most < 1:
                raise OutOfMemoryError(f"kv_memory of {kv_bytes >> 20} MiB is too small for states of {size >> 20} MiB per sequence")
            log.info("%d sequences at a time: states of recurrent layers take %d MiB for each", most, 2 * size >> 20)
            max_seqs = most
        kv_bytes -= size * (2 * max_seqs + n_snapshots)
    block_bytes = KVPool.block_bytes(shapes, dtype, value_dim)
    n_blocks = min(kv_bytes // block_bytes, max_seqs * -(-max_len // BLOCK), options.max_blocks or sys.maxsize)
    if n_blocks * BLOCK < min(max_len, 2 * BLOCK):
        raise OutOfMemoryError(f"kv_memory of {kv_bytes} bytes holds {n_blocks * BLOCK} tokens; one block of {BLOCK} takes {block_bytes}")
    if state_shape is not None:
        return RecurrentPool(shapes, n_blocks, max_seqs, max_len, dtype, state_shape, n_snapshots)
    return KVPool(shapes, n_blocks, max_seqs, max_len, dtype, value_dim)


def collect_policies(matrices: Iterable[Matrix]) -> dict[tuple[int, int], PackedPolicy]:
    policies: dict[tuple[int, int], PackedPolicy] = {}
    for m in matrices:
        fmt = m.weight.format
        form = f"blocks of {sum(fmt.planes)} bits" if isinstance(fmt, QuantFormat) else fmt.value
        policies.setdefault((m.weight.n_out, m.weight.n_in), PackedPolicy()).forms.add(form)
    return policies


class LlamaRunner(Runner):
    pool: KVPool
    arena: Arena
    decoder: LlamaDecoder | None
    weight_map: WeightMap | None
    """What the model is made of, if it is computed in one call."""
    n_layers: int
    device, dtype = "cpu", "float32"
    _n_best = 1
    _native: NativeLlamaForward | None = None

    def __init__(
        self, weight_map: WeightMap, options: CpuOptions, source: TensorSource, make_model: Callable[[], PreTrainedModel] | None = None
    ) -> None:
        """Build a decoder that an earlier start compared with transformers, by this version on this machine.

        `make_model`: returns transformers' model, without weights.

        Raises OutOfMemoryError, UnsupportedModelError, ModelNotFoundError if a file has changed.
        """
        self.max_rows, self._keeps_hidden_states, self._make_model = options.max_rows, False, make_model
        self.precision, self.kv_dtype = resolve_precision(options.precision, options.kv_dtype, is_quantised(source))
        self.weight_map, self.shapes, self.n_layers = weight_map, weight_map.kv_shapes(), len(weight_map.layers)
        options.progress("packing weights")
        try:
            context = MatmulContext(self.precision == "int8", folder=options.code, arena=options.arena)
            self.arena, self.decoder = context.arena, build_decoder(weight_map, source, context)
        except MemoryError as e:
            raise OutOfMemoryError(f"memory ran out while weights were packed: {e}") from e
        self.vocab_size = self.decoder.vocab_size
        self.policies = collect_policies(self.decoder.matrices)
        self.has_experts = weight_map.has_experts
        self.pool = make_pool(self.shapes, self.kv_dtype, options, weight_map.state_shape, weight_map.value_dim)
        self.note_states()
        options.wait_for_code()
        self.prove()
        if options.with_head:
            self.add_head(source, options.max_len)

    def add_head(self, source: TensorSource, max_len: int) -> None:
        """Build the model's own head that predicts further tokens, if there is one that fits. Raises OutOfMemoryError."""
        head_map = make_head_map(self.weight_map, source) if self.weight_map is not None else None
        if head_map is None or self.decoder is None:
            return
        try:
            self.head = PackedHead(head_map, source, self.decoder, len(self.pool.n_blocks_of), max_len, self.kv_dtype)
        except MemoryError as e:
            raise OutOfMemoryError(f"memory ran out while the weights of the head were packed: {e}") from e

    @property
    def model(self) -> PreTrainedModel:  # type: ignore[override]
        """transformers' own model, without weights."""
        if self._make_model is None:
            raise UnsupportedModelError("this runner has no model of transformers")
        return self._make_model()

    def note_states(self) -> None:
        """Set what the contract says of recurrent layers."""
        self.is_recurrent = isinstance(self.pool, RecurrentPool)
        if self.is_recurrent:
            self.max_nodes = MOST_NODES
            self.cost_rows = tuple(n for n in self.cost_rows if n <= MOST_NODES)

    def forward(self, batch: Batch) -> HostOutput:
        try:
            return self._run_layers(batch, 0, self.n_layers)
        except BaseException:
            self.pool.forget_copies()
            raise

    def _run_layers(self, batch: Batch, first: int, n_layers: int) -> HostOutput:
        """Run a pass through some layers, between embedding and head."""
        started = time.perf_counter()
        assert self.decoder is not None
        self.pool.check_positions(batch.spans)
        computed = self.decoder.run(
            batch, self.pool, numba.get_num_threads(), first=first, n_layers=n_layers, states=self._keeps_hidden_states, n_best=self._n_best
        )
        return HostOutput(computed, self.pool, batch, (time.perf_counter() - started) * 1e3)

    def self_test(self) -> bool:
        """Test one layer of each kind and the head instead of the whole model, so that every start has time for it."""
        assert self.decoder is not None
        kinds: dict[object, int] = {}
        for i, layer in enumerate(self.decoder.layers):
            matrices = (*layer.matrices, *layer.beside, *(layer.experts.matrices if layer.experts else ()))
            parts = tuple((m.weight.format, m.weight.n_out, m.weight.n_in) for m in matrices)
            heads = layer.heads and (layer.heads[:3], layer.heads.owner < 0)
            kinds.setdefault((parts, layer.window, layer.rotary, layer.keeps_state, heads), i)
        return all(self.rows_are_independent(partial(self._compute_states, i), 4) for i in kinds.values()) and self._head_is_independent()

    def _compute_states(self, layer: int, spans: list[Span]) -> np.ndarray:
        """Run a pass through one layer, or from the first layer on whose keys are used up to it, and return its hidden states [T, H]."""
        assert self.decoder is not None
        batch, first = pack([replace(span, logits=0) for span in spans], self.pool, self.rows_per_item), layer
        while owners := [
            each.heads.owner for each in self.decoder.layers[first : layer + 1] if each.heads and 0 <= each.heads.owner < first
        ]:
            first = min(owners)
        states = self.decoder.run(batch, self.pool, numba.get_num_threads(), first=first, n_layers=layer + 1 - first, states=True).states
        assert states is not None
        return states

    def _head_is_independent(self) -> bool:
        tokens = np.arange(9, dtype=np.int32)
        slot = self.reserve_free_slot(len(tokens))
        try:
            logits = []
            for n in (9, 4, 1):
                batch = pack([Span(slot, tokens[:n], 0, logits=n)], self.pool, self.rows_per_item)
                logits.append(self._run_layers(batch, 0, 1).get_logits(0, n).copy())
            return all(np.array_equal(logits[0][: len(some)], some) for some in logits)
        finally:
            self.pool.release(slot)

    def describe_model(self) -> str:
        return super().describe_model() if self.weight_map is None else json.dumps(self.weight_map.to_json())

    def native_forward(self) -> NativeLlamaForward | None:
        if self.decoder is None or self._keeps_hidden_states:
            return None
        if self._native is None or self._native.decoder is not self.decoder:
            self._native = NativeLlamaForward(self.decoder, self.pool, self.rows_per_item)
        self._native.n_threads, self._native.n_best = numba.get_num_threads(), self._n_best
        return self._native

    def early_exit(self, n_layers: int) -> Callable[[Batch], HostOutput]:
        if self.is_recurrent:
            raise UnsupportedModelError("drafts from the first layers are not made where layers keep a state, which they would advance")
        if not 1 <= n_layers <= self.n_layers:
            raise ValueError(f"draft layers must be 1 to {self.n_layers}, the model's own, got {n_layers}")
        return lambda batch: self._run_layers(batch, 0, n_layers)

    def enlarge_page(self) -> bool:
        return self.arena.enlarge_page()

    def keep_hidden_states(self, wanted: bool) -> None:
        self._keeps_hidden_states = wanted

    def keep_candidates(self, wanted: bool) -> None:
        self._n_best = KEPT if wanted else 1
