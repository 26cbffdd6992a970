"""Run a model on the CPU with weights in packed panels: Llama-style decoders in one compiled call per pass (`llama_forward`), others
through transformers' modules over packed weights (`module_patch`) and paged attention.

The runner binds an opened model, computes batches on the host's cores and returns logits. It does not know what a request, a draft or a
stop is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ngramspec.backends.base import CPU_RECURRENT_MODULES, Runner, check_supported, has_recurrent_layers, is_out_of_memory, kv_shapes
from ngramspec.backends.cpu import attention, fused_ops
from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu.llama_forward import ForwardOutput, LlamaDecoder
from ngramspec.backends.cpu.llama_runner import (
    CpuOptions,
    HostOutput,
    LlamaRunner,
    collect_policies,
    is_quantised,
    make_pool,
    resolve_precision,
)
from ngramspec.backends.cpu.matmul import MatmulContext
from ngramspec.backends.cpu.module_patch import ModulePatcher
from ngramspec.backends.cpu.weight_map_build import build_decoder
from ngramspec.backends.cpu.weight_map_reader import read_weight_map
from ngramspec.errors import OutOfMemoryError, UnsupportedModelError
from ngramspec.models import latent_weights
from ngramspec.models import masks as model_attention
from ngramspec.models.gated_heads import add_gates
from ngramspec.models.long_rope import fix_angles
from ngramspec.models.parameters import ParamsSource
from ngramspec.models.reference import (
    FAILURES,
    TEXT,
    CheckText,
    Reference,
    Trace,
    find_key_layers,
    find_sure_rows,
    kinds_of_layers,
    layers_of,
    measure_difference,
    prepend_mates,
    select_rows,
    set_attention,
    set_own_attention,
    texts_to_compare,
    trace,
)
from ngramspec.models.tensor_source import TensorSource
from ngramspec.sampling.batch import Batch, Span, pack
from ngramspec.sampling.topk import rank_rows

# Largest difference from transformers, relative to the size of its output, that counts as rounding. HALVES: with 16-bit keys and values,
# some of which are rounded to another neighbour than transformers' own.
TOLERANCE, HALVES = 2e-3, 5e-3
MATES = 3  # Rows of another sequence placed before the compared ones, so that a row's place in the pass differs from its position.


class CpuRunner(LlamaRunner):
    def __init__(self, model: PreTrainedModel, options: CpuOptions, source: TensorSource | None = None) -> None:
        """Bind a model and compare it with transformers.

        `source`: weights of a model on the "meta" device; None: the model has them.

        Raises UnsupportedModelError, OutOfMemoryError, ModelNotFoundError if a file has changed.
        """
        self._bound = model.eval()
        self.max_rows = options.max_rows
        self._states: np.ndarray | None = None  # of the last pass, where they are kept
        self._keeps_hidden_states = False
        self._hook: RemovableHandle | None = None
        check_supported(model, recurrent=CPU_RECURRENT_MODULES, latent=True)
        latent_weights.check_sizes(model)
        suitable_lengths = fix_angles(model, options.longest or options.max_len)
        in_memory = not any(p.is_meta for p in model.parameters())
        source = add_gates(latent_weights.add_heads(source or ParamsSource(model), model), model)
        if in_memory and {p.dtype for p in model.parameters()} != {torch.float32}:
            found = sorted(str(p.dtype) for p in model.parameters())[0]
            raise UnsupportedModelError(f"{type(model).__name__}: weights must be float32 on the CPU, got {found}")
        self.precision, self.kv_dtype = resolve_precision(options.precision, options.kv_dtype, is_quantised(source) and not options.plain)
        in_memory = in_memory and not is_quantised(source)  # else its weights are not those that will be multiplied
        self._context = MatmulContext(self.precision == "int8", folder=options.code)
        self.arena = self._context.arena
        self.decoder, self.weight_map = None, None
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        kinds, texts = kinds_of_layers(model), texts_to_compare(model, options.max_len)
        expected = [self._trace_reference(text, kinds) for text in texts] if in_memory else []
        binder = ModulePatcher(model, source, self._context, options.plain, options.progress)
        with torch.inference_mode():
            try:
                binder.bind()
            except MemoryError as e:
                raise OutOfMemoryError(f"memory ran out while weights were packed: {e}") from e
            # With activations of 8 bits, rounding would hide what is wrong, or look like it.
            self._context.switch(False, soon_over=self.precision == "int8")
            if not in_memory:
                expected = [self._trace_reference(texts[0], kinds)]
            fused_ops.replace_small_operations(model)
            set_attention(model, model_attention.NAME)
            attentions = [attention for _, attention in latent_weights.list_latent_attention(model)]
            self.shapes = [(1, each.kv_lora_rank + each.qk_rope_head_dim) for each in attentions] or kv_shapes(model, torch.device("cpu"))
            self.weight_map = read_weight_map(model, source, self.shapes)
        if self.weight_map is not None:
            self.weight_map = replace(self.weight_map, suitable_lengths=suitable_lengths)
        if self.weight_map is None and has_recurrent_layers(model):
            raise UnsupportedModelError(
                f"{type(model).__name__}: its recurrent layers have the form of neither Qwen3.5, LFM2, Granite 4, Nemotron-H nor Falcon-H1"
            )
        if self.weight_map is None and attentions:
            raise UnsupportedModelError(f"{type(model).__name__}: its layers with latent attention have another form than DeepSeek's")
        self.policies, self.unproven = collect_policies(binder.matrices.values()), binder.unproven
        self.has_experts = bool(binder.experts)
        state_shape = self.weight_map.state_shape if self.weight_map else None
        value_dim = self.weight_map.value_dim if self.weight_map else 0
        self._kv_layers = find_key_layers(model)
        self.n_layers = len(self._kv_layers)
        if not has_recurrent_layers(model):
            self.shapes = [shape for i, shape in enumerate(self.shapes) if self._kv_layers.index(self._kv_layers[i]) == i]
        self.pool = make_pool(self.shapes, self.kv_dtype, options, state_shape, value_dim)
        self.note_states()
        options.progress("checking against transformers, and exactness (the first start compiles its kernels)")
        with torch.inference_mode():
            self._build_decoder(source, binder)
            if not in_memory:
                small = Reference(model, source, self.kv_dtype)
                for layer in kinds:
                    expected += zip(texts, small.trace(layer, texts, n_outputs=expected[0][1].n_outputs), strict=True)
            options.wait_for_code()
            self._check(expected, source)
            self._context.switch(self.precision == "int8")
            self._build_decoder(source, binder)
        self.prove()
        if options.with_head:
            self.add_head(source, options.max_len)

    @property
    def model(self) -> PreTrainedModel:  # type: ignore[override]
        return self._bound

    # ------------------------------------------------------------------ binding

    def _trace_reference(self, text: CheckText, kinds: list[int]) -> tuple[CheckText, Trace]:
        """Trace what transformers' modules compute of a text: all layers near position 0, elsewhere one of each kind.

        Raises UnsupportedModelError if they cannot.
        """
        whole = text.start == 0 and len(text.ids) <= TEXT
        set_own_attention(self.model, self.kv_dtype)
        layers = range(len(layers_of(self.model))) if whole else kinds
        try:
            return text, trace(self.model, torch.from_numpy(text.ids).long(), text.positions, layers)
        except FAILURES as error:
            if is_out_of_memory(error):
                raise
            raise UnsupportedModelError(f"{type(self.model).__name__}: transformers' own model cannot compute it: {error}") from error

    def _build_decoder(self, source: TensorSource, binder: ModulePatcher) -> None:
        if self.weight_map is not None:
            self.decoder = build_decoder(
                self.weight_map, source, self._context, lambda weight, _: binder.matrices[weight.removesuffix(".weight")],
                lambda experts: binder.experts[experts.weights.gate_up[0]],
            )  # fmt: skip

    # ------------------------------------------------------------------ checks

    def _check(self, expected: list[tuple[CheckText, Trace]], source: TensorSource) -> None:
        """Compare with what transformers computed of these texts; a decoder that computes something else gives way to modules.

        Raises UnsupportedModelError if these differ as well.
        """
        tolerance = HALVES if self.kv_dtype == "float16" else TOLERANCE
        if self.decoder is not None:
            decoder_alone = self.decoder.options.latent is not None
            error = max(self._decoder_error(self.decoder, text, wanted, source) for text, wanted in expected)
            if error < tolerance:
                return
            if self.is_recurrent or decoder_alone:  # modules would have to keep states, or keys and values of all heads
                raise self.make_mismatch_error(error)
            self.decoder, self.weight_map = None, None
        for text, wanted in expected:
            found = self._modules_error(text, wanted)
            if not found < tolerance:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__}: logits differ from transformers' own by {found:.2g} of their size, at positions "
                    f"{text.start} to {text.start + len(text.ids) - 1} in layers {', '.join(map(str, wanted.layers))}"
                )

    def self_test(self) -> bool:
        return Runner.self_test(self)

    def _decoder_error(self, decoder: LlamaDecoder, text: CheckText, wanted: Trace, source: TensorSource) -> float:
        """Return the difference of the decoder's layers, each given the input that transformers' layer was given.

        Rows for which two experts' logits are so close that rounding may decide between them are left out.
        """
        slot, n = self.reserve_free_slot(len(text.ids)), len(text.ids)
        got = Trace(wanted.layers)
        try:
            decoder.begin_at(text.start)
            for layer in wanted.layers:
                given = None if layer == wanted.layers[0] else wanted.inputs[str(layer)].numpy()  # the first begins with the embedding
                n_logits = n if layer == wanted.layers[-1] else 0  # the head may be as large as five layers
                batch = pack([Span(slot, text.ids, 0, logits=n_logits)], self.pool, self.rows_per_item)
                output, logits = decoder.run_layer(layer, batch, self.pool, numba.get_num_threads(), given)
                got.outputs[str(layer)] = torch.from_numpy(output)
            got.logits = torch.from_numpy(logits[:, : wanted.logits.shape[1]].copy())
        finally:
            decoder.begin_at(0)
            self.pool.release(slot)
        whole = {name: output for name, output in wanted.outputs.items() if "." not in name}
        sure = {layer: rows for layer in wanted.layers if (rows := self._find_sure_rows(layer, wanted, source)) is not None}
        return measure_difference(Trace(wanted.layers, wanted.inputs, whole, wanted.logits), got, sure)

    def _find_sure_rows(self, layer: int, wanted: Trace, source: TensorSource) -> torch.Tensor | None:
        """Return the rows [n] bool whose experts rounding does not change in this layer; None for a layer without experts."""
        assert self.weight_map is not None
        experts = self.weight_map.layers[layer].experts
        if experts is None:
            return None
        name, bias = experts.router
        part = name.split(f".{layer}.", 1)[1].split(".")[0]  # of the layer: what holds router and experts
        beside = (end := self.weight_map.layers[layer].end) is not None and end.experts
        seen = wanted.inputs[f"{layer}.pre_feedforward_layernorm" if beside else f"{layer}.{part}"]
        if beside:
            seen = torch.nn.functional.rms_norm(seen, seen.shape[-1:]) * torch.from_numpy(source[beside[0]].float32())
        logits = seen @ torch.from_numpy(source[name].float32()).T
        logits = logits + torch.from_numpy(source[bias].float32()) if bias else logits
        if experts.correction is not None:
            scores = logits.sigmoid() if experts.scoring == moe.SIGMOID else logits.softmax(-1)
            logits = scores + torch.from_numpy(source[experts.correction].float32())
        if (groups := experts.groups).n_groups == 1:
            return find_sure_rows(logits, experts.top_k)
        scores = logits if experts.correction is not None else logits.softmax(-1)
        of_groups = scores.view(len(scores), groups.n_groups, -1)
        sums = of_groups.topk(1 + groups.pairs, dim=-1).values.sum(-1)
        chosen = sums.topk(groups.top_groups, dim=-1).indices
        within = of_groups.gather(1, chosen[..., None].expand(-1, -1, of_groups.shape[-1])).flatten(1)
        return find_sure_rows(within, experts.top_k, (sums, groups.top_groups))

    def _modules_error(self, text: CheckText, wanted: Trace) -> float:
        """Return the difference of the modules' layers and their parts, each given the input that transformers' was given."""
        n, mates = len(text.ids), min(MATES, len(text.ids)) if (self.pool.n_blocks_of == 0).sum() > 1 else 0
        slots, spans = list[int](), list[Span]()
        try:
            for ids in (text.ids[:mates], text.ids):
                if len(ids):
                    slots.append(self.reserve_free_slot(len(ids)))
                    spans.append(Span(slots[-1], ids, 0, logits=len(ids)))
            batch = pack(spans, self.pool, self.rows_per_item)
            got = trace(
                self.model, torch.from_numpy(batch.input_ids).long(), torch.from_numpy(batch.positions.astype(np.int64)) + text.start,
                wanted.layers, replayed=prepend_mates(wanted, mates), n_outputs=wanted.n_outputs,
                ngramspec=attention.CpuAttentionPass(self.pool, batch, self._kv_layers),
            )  # fmt: skip
        finally:
            for slot in slots:
                self.pool.release(slot)
        got = select_rows(got, slice(mates, mates + n))
        got.logits = got.logits[:, : wanted.logits.shape[1]]
        return measure_difference(wanted, got)

    # ------------------------------------------------------------------ passes

    @torch.inference_mode()
    def _run_layers(self, batch: Batch, first: int, n_layers: int) -> HostOutput:
        if self.decoder is not None:
            return super()._run_layers(batch, first, n_layers)
        started = time.perf_counter()
        base: Any = self.model.base_model
        whole: Any = getattr(base, "layers", None)
        if (first, n_layers) != (0, self.n_layers):
            base.layers = nn.ModuleList(whole[first : first + n_layers])
        inputs = {
            "input_ids": torch.from_numpy(batch.input_ids)[None],
            "position_ids": torch.from_numpy(batch.positions.astype(np.int64))[None],
            "use_cache": False,
            "ngramspec": attention.CpuAttentionPass(self.pool, batch, self._kv_layers),
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
        computed = ForwardOutput(logits, self._states, *rank_rows(logits, self._n_best))
        return HostOutput(computed, self.pool, batch, (time.perf_counter() - started) * 1e3)

    def early_exit(self, n_layers: int) -> Callable[[Batch], HostOutput]:
        if not isinstance(getattr(self.model.base_model, "layers", None), nn.ModuleList):
            raise UnsupportedModelError(f"{type(self.model).__name__}: its first layers cannot be had by themselves")
        return super().early_exit(n_layers)

    def keep_hidden_states(self, wanted: bool) -> None:
        def remember(_module: nn.Module, _args: tuple[object, ...], output: BaseModelOutputWithPast) -> None:
            assert output.last_hidden_state is not None
            self._states = output.last_hidden_state[0].numpy()

        super().keep_hidden_states(wanted)
        if self._hook is not None:
            self._hook.remove()
        self._states, self._hook = None, self.model.base_model.register_forward_hook(remember) if wanted else None
