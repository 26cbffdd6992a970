"""Run a model's own head that predicts further tokens (`models.head_parameters`) on the CPU, over keys and values of its own.

The head's layer is a decoder of one layer (`llama_forward`) that begins with given hidden states and shares the threads, embedding and
projection of the model's. Of keys and values each sequence has a ring: attention sees the latest WINDOW rows that the head has read, which
need not be neighbours in the text. Nothing of the model's own state is touched, and no output of the model depends on the head.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import numba
import numpy as np

from ngramspec.backends.base import HeadRows, Predicted
from ngramspec.backends.cpu.formats import WIDTH
from ngramspec.backends.cpu.kv_pool import KVPool
from ngramspec.backends.cpu.llama_forward import LlamaDecoder
from ngramspec.backends.cpu.matmul import CpuProduct, unpack_rows
from ngramspec.backends.cpu.packing import pack as pack_weight
from ngramspec.backends.cpu.weight_map import LayerWeightMap, WeightMap, layer_from_json
from ngramspec.backends.cpu.weight_map_build import build_decoder
from ngramspec.backends.cpu.weight_map_check import check_weight_map
from ngramspec.models.head_parameters import EMBEDDING_NORM, FC, HEAD_LAYER, HIDDEN_NORM, NORM
from ngramspec.models.tensor_source import TensorSource
from ngramspec.outputs import BLOCK, KEPT
from ngramspec.sampling.batch import Span, pack

log = logging.getLogger(__name__)

WINDOW = 512  # Latest rows that attention sees.
MOST_ROWS = 128  # Of one sequence in a pass, drafts included.
# Tokens that the head chooses among: the first ones, which byte-pair encoding has merged first, since they are the most frequent. With
# all 248,320 of Qwen3.5's a step takes 4.5 times as long (benchmarks/NOTES.md).
VOCABULARY = 1 << 15
FEW_ROWS = 16
RING = -(-(WINDOW + MOST_ROWS) // BLOCK) + 1  # Blocks of a sequence's keys and values.


def make_head_map(weight_map: WeightMap, source: TensorSource) -> WeightMap | None:
    """Return the map of the head's layer, norm and the model's embedding and projection; None if there is no head that fits the model."""
    like = next((layer for layer in weight_map.layers if layer.attends and layer.norms is not None), None)
    if FC not in source or like is None or like.norms is None:
        return None
    layer = _rename_parameters(like, f"{like.norms[0].rsplit('.', 2)[0]}.", HEAD_LAYER)
    found = replace(
        weight_map,
        layers=[replace(layer, window=WINDOW)],
        norm=NORM,
        options=weight_map.options._replace(recurrent=None, short_conv=None, mamba=None),
        query_scale=None,
    )
    hidden = source[weight_map.embedding].shape[1]
    try:
        check_weight_map(found, source)
        for name, shape in ((FC, (hidden, 2 * hidden)), (EMBEDDING_NORM, (hidden,)), (HIDDEN_NORM, (hidden,))):
            if source[name].shape != shape:
                raise ValueError(f"{name} is {list(source[name].shape)}, and {list(shape)} is wanted")
    except (KeyError, ValueError) as error:
        log.warning("the model's head for further tokens is left out: %s", error)
        return None
    return found


def _rename_parameters(layer: LayerWeightMap, old: str, new: str) -> LayerWeightMap:
    return layer_from_json(json.loads(json.dumps(asdict(layer)).replace(f'"{old}', f'"{new}')))


class _RingPool(KVPool):
    """Keys and values of the latest rows: a sequence's blocks are used again and again."""

    def __init__(self, shape: tuple[int, int], max_seqs: int, max_len: int, dtype: type[np.generic]) -> None:
        """Allocate the rings. Raises OutOfMemoryError."""
        super().__init__([shape], max_seqs * RING, max_seqs, max_len, dtype)
        self.tables[:] = np.arange(max_seqs)[:, None] * RING + np.arange(self.tables.shape[1]) % RING


class PackedHead:
    """A head of the model that `decoder` runs; see `backends.base.PredictionHead`."""

    def __init__(
        self, head_map: WeightMap, source: TensorSource, decoder: LlamaDecoder, max_seqs: int, max_len: int, kv_dtype: str
    ) -> None:
        """Pack the head's weights. Raises OutOfMemoryError, MemoryError, ModelNotFoundError if a file has changed."""
        context, (embedding, whole) = decoder.context, decoder.matrices[-2:]
        self.most_rows, self.hidden = MOST_ROWS, decoder.hidden
        self.vocab_size = VOCABULARY if decoder.vocab_size > 2 * VOCABULARY else decoder.vocab_size
        # where both are one matrix, the layer's decoder has the cut one: it embeds nothing
        known = {(head_map.embedding, None): embedding, head_map.head: context.select_rows(whole, 0, self.vocab_size)}
        self._decoder = build_decoder(head_map, source, context, known=known)
        self._decoder.join_threads(decoder)
        dtype: type[np.generic] = np.uint16 if kv_dtype == "float16" else np.float32
        self._pool = _RingPool(head_map.kv_shapes()[0], max_seqs, max_len + MOST_ROWS, dtype)
        self._embedding, self._kernels = embedding.weight, context.kernels
        self._embedding_scale, self._eps = np.float32(head_map.options.embedding_scale), np.float32(head_map.options.eps)
        stored, offset = source[FC], np.float32(head_map.norm_offset)
        self._fc = CpuProduct(context, [context.register_matrix(pack_weight(stored.kind, stored.shape, stored.read_rows, context.arena))])
        self._norms = [source[name].float32() + offset for name in (EMBEDDING_NORM, HIDDEN_NORM)]

        self.step_ms = min(self._time_step() for _ in range(3))

    def _time_step(self) -> float:
        started = time.perf_counter()
        self.predict([HeadRows(0, 0, np.zeros(1, np.int32), np.zeros((1, self.hidden), np.float32))])
        return (time.perf_counter() - started) * 1e3

    def predict(self, rows: Sequence[HeadRows]) -> Predicted:
        """Run the head over some rows of each sequence, up to `most_rows`."""
        batch = pack([Span(each.slot, each.tokens, each.first) for each in rows], self._pool)
        given = np.concatenate([each.states for each in rows]) if len(rows) > 1 else rows[0].states
        embedded = self._embedding_scale * unpack_rows(self._kernels, self._embedding, batch.input_ids)
        both = np.concatenate([self._normalise(x, norm) for x, norm in zip((embedded, given), self._norms, strict=True)], axis=1)
        threads = numba.get_num_threads()
        x = self._project_inputs(both, threads)
        computed = self._decoder.run(batch, self._pool, threads, x=x, states=True, n_best=min(KEPT, self.vocab_size))
        assert computed.states is not None
        best = computed.logits.max(axis=1, keepdims=True)
        sums = np.exp(computed.logits - best).sum(axis=1, keepdims=True)
        return Predicted(computed.tokens, np.exp(computed.values - best) / sums, computed.states[batch.logits_rows])

    def _project_inputs(self, both: np.ndarray, threads: int) -> np.ndarray:
        """Multiply [T, 2 · H] by `fc`, [T, H]: few rows with one thread, since the pass's own are still awake on the other cores."""
        numba.set_num_threads(threads if len(both) > FEW_ROWS else 1)
        try:
            return self._fc.multiply(both, numba.get_num_threads())[:, : self.hidden]
        finally:
            numba.set_num_threads(threads)

    def _normalise(self, x: np.ndarray, norm: np.ndarray) -> np.ndarray:
        return x * (norm / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + self._eps))


assert VOCABULARY % WIDTH == 0
