"""Run batches on a CUDA device: a pass is one graph, and its results are the sampled tokens.

Small passes (decoding, with or without drafts) are captured per bucket of rows and groups, from the embedding to the sampled tokens and the
move of the accepted path's KV. Large ones (prompts) are launched kernel by kernel, with the same kernels and the same bits. `forward`
returns after the launch: reading the output waits. The module does not know what a request or a drafter is.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ngramspec.backends.base import Runner, RunnerOptions, check_supported, has_recurrent_layers, is_out_of_memory, make_chain_tree
from ngramspec.backends.cuda import gpu_sampler, kv_move
from ngramspec.backends.cuda.attention_schedule import AttentionSchedule
from ngramspec.backends.cuda.cuda_output import CudaOutput, PassResults, PassTimer
from ngramspec.backends.cuda.device import free_bytes, get_limits, peak_bytes, translate_memory_errors
from ngramspec.backends.cuda.expected_logits import ExpectedLogits, compute_expected_logits, measure_difference
from ngramspec.backends.cuda.expert_kernels import PairProduct, find_dependence
from ngramspec.backends.cuda.expert_layer import holds_experts
from ngramspec.backends.cuda.gated_delta_kernels import MOST_NODES, DeltaShape
from ngramspec.backends.cuda.gated_delta_layer import RECURRENT_LAYERS
from ngramspec.backends.cuda.gpu_kv_pool import CudaPool
from ngramspec.backends.cuda.gpu_recurrent_pool import CudaRecurrentPool, count_sequences, pass_bytes, sequence_bytes, snapshot_bytes
from ngramspec.backends.cuda.graph_inputs import Bucket, GraphInputs
from ngramspec.backends.cuda.graphs import ITEMS, ROWS, Graphs, decode_buckets, make_recorder
from ngramspec.backends.cuda.logits_processor import PenaltyEntries, adjust_logits
from ngramspec.backends.cuda.model import CudaDecoder, ModulesDecoder, PassDecoder, VendorProduct, Weight
from ngramspec.backends.cuda.packed_experts import PackedExpertWeight, PackedPairProduct
from ngramspec.backends.cuda.paged_attention import AttentionLaunch, AttentionWorkspace, count_columns, rows_per_item
from ngramspec.backends.cuda.quantised import CudaQuantFormat, CudaQuantisedProduct
from ngramspec.backends.cuda.row_invariant_linear import CudaProduct, KernelPolicy, LinearProduct, find_violation
from ngramspec.errors import OutOfMemoryError, UnsupportedModelError
from ngramspec.models.long_rope import fix_angles
from ngramspec.outputs import BLOCK, KEPT, DraftTree
from ngramspec.sampling.batch import SCORED_ROWS, Batch, Span, pack
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling_params import SamplingParams

log = logging.getLogger(__name__)

# Row counts at which products with the first weight of each shape are compared, bitwise; further weights of a shape use FEW_ROWS.
CHECKED_ROWS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 200, 256, 257, 511, 768, 2048)
FEW_ROWS = (1, 5, 17)

LONG_TEXT = 6000  # Tokens of the self-test's long text: it has splits of 128, 256 and 1,024 keys, and some programs take several.

# Upper bound in bytes of the attention workspace: the states that programs sharing one item's keys keep for merging.
SPACE = 512 << 20

MARGIN = 256 << 20  # Bytes left free beyond what passes were measured to take: for libraries, and for pieces too small to use.

PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, kw_only=True)
class CudaOptions(RunnerOptions):
    """What a runner on a CUDA device is made for."""

    max_depth: int
    """Level of the deepest draft node."""
    memory_utilization: float = 0.9
    """Share of the device's memory that may be used, if `kv_bytes` is None."""
    exact: bool = True
    """False: use the vendor's linear products."""
    graphs: bool = True


class CudaRunner(Runner):
    pool: CudaPool
    asynchronous = True
    _delta_shape: DeltaShape | None = None
    _n_snapshots = 0
    cost_rows: tuple[int, ...] = (*ROWS, 257, 512)
    """Larger passes are not captured: the host launches every kernel."""

    @translate_memory_errors()
    def __init__(self, model: PreTrainedModel, options: CudaOptions) -> None:
        """Bind a loaded model to the device. Raises UnsupportedModelError, OutOfMemoryError, MissingPackageError."""
        self.model, self.max_rows, self.max_depth = model.eval(), options.max_rows, options.max_depth
        self._device, self._dtype = model.device, model.dtype
        self.precision = self.kv_dtype = self.dtype
        self._exact = options.exact
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self.limits = get_limits(self._device)
        self.timer = PassTimer(self._device)
        check_supported(model, RECURRENT_LAYERS)
        fix_angles(model, options.longest or options.max_len)
        if len({p.device for p in model.parameters()}) > 1:
            raise UnsupportedModelError(f"{type(model).__name__} is spread over several devices; it has to fit on one")
        expected = compute_expected_logits(model)
        self.adopt(model)
        n_heads, (n_kv_heads, head_dim) = (
            int(model.config.get_text_config().num_attention_heads),
            max(self.shapes, key=lambda shape: shape[1]),
        )
        self.rows_per_item = rows_per_item(n_heads, n_kv_heads, head_dim, model.dtype.itemsize)
        self.policies: dict[tuple[int, int], KernelPolicy] = {}
        self._checked: set[tuple[tuple[int, int], tuple[CudaQuantFormat, ...]]] = set()  # shapes and formats whose products were compared
        self._checked_experts: set[object] = set()  # shapes [E, N, K] and formats
        self.has_experts = any(holds_experts(module) for module in model.modules())
        self._refused: set[tuple[int, int]] = set()  # shapes of weights for which our products do not run
        options.progress("checking exactness (the first start compiles its kernels)")
        with torch.inference_mode():
            bound = self._bind(options.max_len)
            options.progress("making room for keys and values")
            max_seqs = self._fit_states(bound, options)
            n_trial = None if options.kv_bytes is not None else -(-self.max_rows // BLOCK) + max_seqs  # for the largest pass
            self.pool = self._make_pool(options, max_seqs, options.kv_bytes, n_trial)
            self._make_spaces(n_heads)
            self._graphs = Graphs(self._make_inputs, self._run_captured_pass, None)
            self._compare(bound, expected, options.max_len)
            if options.kv_bytes is None:
                taken = self._largest_passes()
                del self.pool, self._decoder.pool, self._graphs
                free = free_bytes(self._device, options.memory_utilization) - taken - MARGIN
                self.pool = self._decoder.pool = self._make_pool(options, max_seqs, free, None)
            self._graphs = Graphs(self._make_inputs, self._run_captured_pass, make_recorder(self._device) if options.graphs else None)
            self._graphs.capture(decode_buckets(max_seqs, self.max_rows, self.rows_per_item), options.progress)
        self.prove()

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def dtype(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    # ------------------------------------------------------------------ binding

    def _make_pool(self, options: CudaOptions, max_seqs: int, kv_bytes: int | None, n_blocks: int | None) -> CudaPool:
        """Build a pool of `kv_bytes`, or of `n_blocks`, but no larger than all sequences can use."""
        block_bytes, shape = CudaPool.block_bytes(self.shapes, self._dtype), self._delta_shape
        if kv_bytes is not None and shape is not None:
            kv_bytes -= max_seqs * sequence_bytes(shape, self._dtype) + self._n_snapshots * snapshot_bytes(shape, self._dtype)
        max_len = options.max_len
        most = min(max_seqs * -(-max_len // BLOCK), options.max_blocks or sys.maxsize)
        if kv_bytes is not None:
            n_blocks = kv_bytes // block_bytes
            if min(n_blocks, most) * BLOCK < min(max_len, 2 * BLOCK):
                raise OutOfMemoryError(
                    f"{max(kv_bytes, 0) >> 20} MiB for keys and values hold {max(n_blocks, 0) * BLOCK} tokens; one block of {BLOCK} takes "
                    f"{block_bytes} bytes. A smaller model, fewer rows in a pass, or a higher memory utilization may fit"
                )
        sizes = self.shapes, min(n_blocks or 0, most), max_seqs, max_len
        if shape is None:
            return CudaPool(*sizes, dtype=self._dtype, device=self._device)
        return CudaRecurrentPool(*sizes, dtype=self._dtype, device=self._device, shape=shape, n_snapshots=self._n_snapshots)

    def _fit_states(self, bound: CudaDecoder | None, options: CudaOptions) -> int:
        """Return how many sequences run at a time: fewer than `max_seqs` if states of recurrent layers do not fit in half of the memory."""
        self._delta_shape = shape = bound.delta_shape if bound else None
        self.is_recurrent = shape is not None
        if shape is None:
            return options.max_seqs
        self.max_nodes = MOST_NODES
        self.cost_rows = tuple(n for n in self.cost_rows if n <= MOST_NODES)
        n_bytes = free_bytes(self._device, options.memory_utilization) - MARGIN if options.kv_bytes is None else options.kv_bytes
        n_seqs, self._n_snapshots = count_sequences(shape, self._dtype, n_bytes, options.max_seqs)
        if n_seqs < options.max_seqs:
            log.info(
                "%d sequences at a time: states of recurrent layers take %d MiB each", n_seqs, sequence_bytes(shape, self._dtype) >> 20
            )
        return n_seqs

    def _largest_passes(self) -> int:
        """Return the bytes that passes take besides weights and KV: those of the largest pass plus those that captured graphs keep."""
        scored = SCORED_ROWS + len(self.pool.n_blocks_of)
        n_bytes = self._pass_bytes(self.max_rows, scored) + self._pass_bytes(min(ROWS[-1], self.max_rows), ROWS[-1])
        if self._delta_shape is not None:  # these passes replay nothing and draft nothing
            n_bytes += pass_bytes(self._delta_shape, ROWS[-1], min(len(self.pool.n_blocks_of), ITEMS[-1]))
        return n_bytes

    def _pass_bytes(self, n_rows: int, n_logits: int) -> int:
        """Return the peak bytes of a pass with `n_rows` rows of prompts and logits of up to `n_logits` of them."""
        slots, spans = list[int](), list[Span]()
        try:
            while n_rows > 0 and len(slots) < len(self.pool.n_blocks_of):
                n = min(n_rows, self.pool.max_blocks * BLOCK)
                slots.append(self.reserve_free_slot(n))
                spans.append(Span(slots[-1], np.zeros(n, np.int32), 0, logits=min(n, n_logits)))
                n_rows, n_logits = n_rows - n, n_logits - spans[-1].logits
            return peak_bytes(self._device, lambda: self.forward(pack(spans, self.pool, self.rows_per_item)).wait())
        finally:
            for slot in slots:
                self.pool.release(slot)

    def _make_product(self, weight: Weight, bias: torch.Tensor | None) -> LinearProduct:
        if isinstance(weight, torch.Tensor):
            product = CudaProduct(weight, bias, self.limits.n_processors)
        else:
            product = CudaQuantisedProduct(weight, bias, self._dtype, self.limits.n_processors)
        formats = () if isinstance(weight, torch.Tensor) else tuple(part.format for part in weight)
        shape = (product.n_out, product.n_in)
        if not self._exact:
            self.policies.setdefault(shape, KernelPolicy("the vendor's own choice", False))
            return VendorProduct(weight, bias)
        known = self.policies.get(shape)
        if known is None or known.bitwise:
            again = (shape, formats) in self._checked
            self._checked.add((shape, formats))
            try:
                most = max(min(self.max_rows, SPACE // (8 * product.splits * shape[0])), 1)  # sums and their total, in float32
                found = find_violation(product, [n for n in (FEW_ROWS if again else CHECKED_ROWS) if n <= most])
                self.policies[shape] = KernelPolicy(f"fixed tiles, {product.splits} pieces" + (f": {found}" if found else ""), not found)
            except Exception as e:
                if is_out_of_memory(e):
                    raise
                log.warning("products with weights of %s are the vendor's; ours do not run here: %s: %s", shape, type(e).__name__, e)
                self.policies[shape] = KernelPolicy("the vendor's own choice: ours do not run", False)
                self._refused.add(shape)
        return VendorProduct(weight, bias) if shape in self._refused else product

    def _multiply_experts(self, weight: torch.Tensor | PackedExpertWeight, bias: torch.Tensor | None) -> PairProduct:
        """Make and prove the product of a layer's experts, weights [E, N, K]. Raises UnsupportedModelError if it does not run."""
        n_sms = self.limits.n_processors
        product = PairProduct(weight, bias, n_sms) if isinstance(weight, torch.Tensor) else PackedPairProduct(weight, self._dtype, n_sms)
        shape, kind = (product.n_experts * product.n_out, product.n_in), (product.shape, product.format)
        again = kind in self._checked_experts
        self._checked_experts.add(kind)
        try:
            found = find_dependence(product, thoroughly=not again) if self._exact else None
        except Exception as e:
            if is_out_of_memory(e):
                raise
            log.warning("experts with weights of %s are the model's own; ours do not run here: %s: %s", shape, type(e).__name__, e)
            self.policies[shape] = KernelPolicy("the model's own experts: ours do not run", False)
            raise UnsupportedModelError(f"experts with weights of {shape}: {e}") from e
        known = self.policies.get(shape)
        if known is None or known.bitwise:
            self.policies[shape] = KernelPolicy(f"{product.n_experts} experts, fixed tiles" + (f": {found}" if found else ""), not found)
        return product

    def _bind(self, max_len: int) -> CudaDecoder | None:
        """Build the decoder from our own kernels; None if the model's layers are of another kind.

        Raises UnsupportedModelError if such layers would have to keep states.
        """
        try:
            return CudaDecoder(self.model, self._make_product, self._multiply_experts, max_len)
        except UnsupportedModelError as e:
            if has_recurrent_layers(self.model):
                raise
            log.debug("its own modules: %s", e)
            return None

    def _compare(self, stack: CudaDecoder | None, expected: ExpectedLogits, max_len: int) -> None:
        """Take the first decoder that runs and reproduces transformers' own logits.

        The candidates are our own decoder, then the model's own modules with our attention and products. Raises UnsupportedModelError if
        neither agrees.
        """
        error = float("nan")
        candidates = [stack] if stack and self.is_recurrent else [stack, None] if stack else [None]
        for decoder in candidates:
            self._decoder: PassDecoder = decoder or ModulesDecoder(self.model, self._make_product, self._multiply_experts)
            self._decoder.pool = self.pool
            try:
                error = self._measure_error(expected)
            except Exception as e:
                if decoder is candidates[-1] or is_out_of_memory(e):
                    raise
                log.warning(
                    "%s: our layers do not run here, its own modules compute: %s: %s", type(self.model).__name__, type(e).__name__, e
                )
                continue
            if error < expected.tolerance:
                log.info("%s: computed by %s", type(self.model).__name__, type(self._decoder).__name__)
                return
        raise self.make_mismatch_error(error)

    def _measure_error(self, expected: ExpectedLogits) -> float:
        """Return how far our logits are from those that are expected."""
        tokens = expected.tokens
        slot = self.reserve_free_slot(len(tokens))
        try:
            self.run([Span(slot, tokens[:-1], 0, logits=0)])
            logits = self.run([Span(slot, tokens[-1:], len(tokens) - 1)])[0]
        finally:
            self.pool.release(slot)
        return measure_difference(logits, expected.logits)

    def self_test(self) -> bool:
        """Test, besides the base class's checks, a long text in large pieces beside another and in small pieces alone, an accepted tree,
        and graphs.

        The test goes on after a violation: `violations` names them all.
        """
        real = self._device.type == "cuda"  # an interpreter takes its time
        n = min(LONG_TEXT if real else 40, (self.pool.max_blocks - 1) * BLOCK, self.pool.n_positions // 3)
        tests = {
            "attention or small operations: a chain and a tree against token by token": super().self_test,
            f"attention, a text of {n} tokens in large and in small pieces": lambda: self._test_pieces(n),
            "the walk, the move of keys and values, or the replay of an accepted tree": self._test_accepted,
        }
        self.violations += [what for what, holds in tests.items() if not holds()]
        samplers = {
            "alone": None,
            "greedily": self._make_sampler(temperature=0),
            "sampled": self._make_sampler(temperature=0.8, top_k=20, top_p=0.9),
        }
        for bucket in self._graphs.captured:
            self.violations += [f"the graph of {bucket}, {how}" for how, each in samplers.items() if not self._test_graph(bucket, each)]
        return not self.violations

    def _run_pass(self, spans: list[Span]) -> tuple[torch.Tensor, list[int]]:
        """Return logits [N, V] on the device, and the token sampled after each."""
        batch = pack(spans, self.pool, self.rows_per_item)
        output = self.forward(batch)
        logits = output.device_logits(0, len(batch.logits_rows)).clone()
        for b, (span, match) in enumerate(zip(spans, output.get_matches(), strict=True)):
            end = span.start + len(span.tokens)
            output.commit([] if match is None else [(b, end, end + match[1])])
        return logits, [] if output.sampled is None else output.sampled.tolist()

    def _make_sampler(self, **params: Any) -> Sampler:
        none = np.empty(0, np.int32)
        return Sampler(SamplingParams(**params), index=0, seed=7, prompt=none, vocab_size=self.vocab_size, stop_ids=frozenset())

    def _test_pieces(self, n: int) -> bool:
        if n < 2:
            return True
        tokens = np.random.default_rng(1).integers(0, self.vocab_size, n).astype(np.int32)
        slots = [self.reserve_free_slot(n)]
        try:
            if len(self.pool.n_blocks_of) > 1:
                slots.append(self.reserve_free_slot(n))
            logits = []
            for beside, most in ((tokens[::-1].copy(), max(self.max_rows // len(slots), 1)), (None, 48)):
                for first in range(0, n - 1, most):
                    here = slice(first, min(first + most, n - 1))
                    mates = [] if beside is None else [Span(slot, beside[here], first, logits=0) for slot in slots[1:]]
                    self.run([*mates, Span(slots[0], tokens[here], first, logits=0)])
                logits.append(self.run([Span(slots[0], tokens[-1:], n - 1)]))
            return torch.equal(*logits)
        finally:
            for slot in slots:
                self.pool.release(slot)

    def _test_accepted(self) -> bool:
        """Test a tree whose right nodes come last among siblings: the pass moves their keys and values, and the next token sees them."""
        depth, prompt, sampler = min(3, self.max_depth), np.arange(5, dtype=np.int32) % self.vocab_size, self._make_sampler(temperature=0)
        slot = self.reserve_free_slot(len(prompt) + 2 * depth)

        def step(token: int, i: int, tree: DraftTree | None = None) -> tuple[torch.Tensor, list[int]]:
            return self._run_pass(
                [Span(slot, np.array([token], np.int32), len(prompt) - 1 + i, tree, sampler=sampler, n_prompt=len(prompt))]
            )

        try:
            self.run([Span(slot, prompt[:-1], 0, logits=0)])
            tokens, rows = [int(prompt[-1])], []
            for i in range(depth + 1):
                logits, sampled = step(tokens[-1], i)
                if sampled[0] < 0:
                    return False
                rows.append(logits[0])
                tokens.append(sampled[0])
            nodes = np.array([t for token in tokens[1 : depth + 1] for t in ((token + 1) % self.vocab_size, token)], np.int32)
            parents = np.repeat(np.arange(-1, 2 * depth - 1, 2, dtype=np.int32), 2)
            self.run([Span(slot, prompt[:-1], 0, logits=0)])  # states of recurrent layers do not go back
            logits, _ = step(tokens[0], 0, DraftTree(nodes, parents, np.ones(len(nodes), np.float32), np.zeros(len(nodes), np.uint8)))
            after, _ = step(tokens[depth], depth)
            return torch.equal(logits[::2], torch.stack(rows)) and torch.equal(after[0], rows[depth])
        finally:
            self.pool.release(slot)

    def _test_graph(self, bucket: Bucket, sampler: Sampler | None) -> bool:
        """Compare the graph's results for a batch that fills it with the same pass launched kernel by kernel."""

        def fits_bucket(n_seqs: int) -> bool:
            n = -(-bucket.rows // n_seqs)
            return n_seqs * -(-n // self.rows_per_item) <= bucket.items and n_seqs * self.pool.count_blocks(n) <= self.pool.n_available

        n_seqs = next((n for n in range(min(bucket.items, len(self.pool.n_blocks_of)), 0, -1) if fits_bucket(n)), 0)
        slots, spans = list[int](), list[Span]()
        try:
            for i in range(n_seqs):
                tokens = np.arange(i, i + (bucket.rows + i) // n_seqs, dtype=np.int32) % self.vocab_size
                slots.append(self.reserve_free_slot(len(tokens)))
                n = max(1, len(tokens) - self.max_nodes)
                spans.append(Span(slots[-1], tokens[:n], 0, make_chain_tree(len(tokens) - n), sampler=sampler, n_prompt=n))
            results = []
            for each in (bucket, None) if spans else ():
                with self._graphs.force_bucket(each):
                    results.append(self._run_pass(spans))
            return not results or (torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1])
        finally:
            for slot in slots:
                self.pool.release(slot)

    # ------------------------------------------------------------------ passes

    @torch.inference_mode()
    def forward(self, batch: Batch) -> CudaOutput:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread: Triton launches on the current one
        self.timer.start()
        try:
            output = self._launch(batch)
        except Exception as e:
            self.pool.note_pass(batch, failed=True)
            if is_out_of_memory(e):
                torch.cuda.empty_cache()  # what is left of the pass may be in pieces
            raise
        self.timer.end()
        self.pool.note_pass(batch)
        return output

    def _launch(self, batch: Batch) -> CudaOutput:
        n, n_items = len(batch.input_ids), len(batch.items)
        self.pool.send_tables()
        bucket = self._graphs.find(n, n_items)
        if bucket is not None:
            inputs = self._graphs.get_inputs(bucket)
            inputs.fill(batch)
            inputs.send()
            self._graphs.replay(bucket)
            inputs.results.send()
            rows = None if len(batch.logits_rows) == n else batch.logits_rows
            return CudaOutput(self.timer, self.pool, batch, self._logits, rows, inputs.results, inputs.picked)
        inputs = self._allocate_inputs(Bucket(n, n_items))
        inputs.fill(batch)
        inputs.send()
        if inputs.rows.recurrent is not None:
            inputs.rows.recurrent.n_copies = inputs.n_copies
        n_wanted = len(batch.logits_rows)
        wanted = inputs.device["wanted"][:n_wanted]
        logits = torch.empty(n_wanted, self.vocab_size, dtype=torch.float32, device=self._device)
        self._decoder(inputs.ids, inputs.rows, wanted, self._plan, logits)
        if not n_wanted:
            return CudaOutput(self.timer, self.pool, batch, logits, None, None, inputs.picked)
        results = PassResults(n_wanted, self._device)
        self._finish(inputs, logits, wanted, results)
        results.send()
        return CudaOutput(self.timer, self.pool, batch, logits, None, results, inputs.picked)

    def _allocate_inputs(self, bucket: Bucket) -> GraphInputs:
        return GraphInputs(bucket, self.max_depth, self.pool, self._sharing, self._adjusting)

    def _make_inputs(self, bucket: Bucket) -> GraphInputs:
        inputs = self._allocate_inputs(bucket)
        inputs.send()  # a pass without rows, for the capture
        inputs.results = PassResults(bucket.rows, self._device)
        return inputs

    def _run_captured_pass(self, inputs: GraphInputs) -> None:
        """Run the pass that is captured: with the logits of all rows."""
        logits = self._logits[: inputs.bucket.rows]
        self._decoder(inputs.ids, inputs.rows, None, self._plan, logits)
        self._finish(inputs, logits, None, inputs.results)

    def _finish(self, inputs: GraphInputs, logits: torch.Tensor, wanted: torch.Tensor | None, results: PassResults) -> None:
        """Process the logits of the rows `wanted` [N], or of all, sample from them, follow every tree and keep the accepted paths' KV."""
        likeliest = results.device_tokens, results.device_values
        adjust_logits(logits, wanted, self._adjusting.entries, inputs.device)
        how = inputs.sampling if wanted is None else inputs.sampling.select_rows(wanted)
        scores = results.device_chosen, results.device_norms
        gpu_sampler.sample(logits, how, results.device_sampled, self._sampling_space(len(logits)), likeliest, scores)
        sampled = results.device_sampled
        if wanted is not None:
            sampled = torch.full_like(inputs.ids, -1).index_copy_(0, wanted, sampled)
        d = inputs.device
        counts, paths = gpu_sampler.walk(sampled, inputs.ids, d["parents"], d["roots"], d["ends"], self.max_depth)
        slots = paths + (d["starts"] - d["roots"] - 1)[:, None]
        for memory in self.pool.memory:
            kv_move.commit(memory, self.pool.device_tables, d["sequences"], d["starts"], slots, counts)

    def _sampling_space(self, n_rows: int) -> gpu_sampler.SamplerWorkspace:
        if n_rows <= ROWS[-1]:
            return self._small_sampling_space
        return gpu_sampler.SamplerWorkspace(n_rows, self.vocab_size, self._device, k=KEPT)

    def _make_spaces(self, n_heads: int) -> None:
        """Allocate what attention and sampling keep between launches."""
        self._adjusting = PenaltyEntries(self._device)

        def place_bytes(shape: tuple[int, int]) -> int:
            return 4 * shape[0] * count_columns(self.rows_per_item, n_heads, shape[0]) * (shape[1] + 2)

        n_programs = max(1, PROGRAMS_PER_PROCESSOR * self.limits.n_processors // min(n for n, _ in self.shapes))
        largest = max(self.shapes, key=place_bytes)
        n_items = max(self.max_rows, ROWS[-1]) // self.rows_per_item + max(len(self.pool.n_blocks_of), ITEMS[-1])
        self._sharing = AttentionSchedule.build(n_programs, n_items, self.pool.max_blocks * BLOCK, SPACE // place_bytes(largest))
        self._plan = AttentionLaunch(
            self.rows_per_item, AttentionWorkspace.allocate(self._sharing.n_places, self.rows_per_item, n_heads, *largest, self._device)
        )
        self._small_sampling_space = gpu_sampler.SamplerWorkspace(ROWS[-1], self.vocab_size, self._device, k=KEPT)
        self._logits = torch.empty(ROWS[-1], self.vocab_size, dtype=torch.float32, device=self._device)
