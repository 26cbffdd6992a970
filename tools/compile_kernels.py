"""Compile every variant of the CUDA kernels that a model's passes need, and list spills. No device is needed.

    python -m tools.compile_kernels [--models Llama-3.1-8B,SmolLM2-135M] [--dtypes bfloat16] [--blocks none,Q4_0] [--capabilities 80,90]

A model's shape goes in. Its passes are run on tensors without memory, with what would launch a kernel in place of it, so that the variants
are those of the real launches; weights are in blocks of a format of GGML's, or not. Exit code 1 where one does not
compile, is larger than the device's limits, or spills (more than some bytes, at head sizes above 128).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from ngramspec.backends.cuda import (
    expert_kernels,
    gated_delta_kernels,
    gpu_sampler,
    kv_move,
    layers,
    logits_processor,
    overlap,
    packed_experts,
    paged_attention,
    quantised,
    rope_kv,
    row_invariant_linear,
)
from ngramspec.backends.cuda.attention_schedule import AttentionSchedule
from ngramspec.backends.cuda.device import DeviceLimits
from ngramspec.backends.cuda.expert_kernels import PairProduct
from ngramspec.backends.cuda.gated_delta_kernels import DeltaShape
from ngramspec.backends.cuda.gpu_kv_pool import CudaPool
from ngramspec.backends.cuda.gpu_recurrent_pool import CudaRecurrentPool
from ngramspec.backends.cuda.graph_inputs import Bucket, GraphInputs
from ngramspec.backends.cuda.model import AttentionLaunch, CudaDecoder
from ngramspec.backends.cuda.packed import CudaPackedEmbedding
from ngramspec.backends.cuda.packed_experts import PackedExpertWeight, PackedPairProduct
from ngramspec.backends.cuda.quantised import FORMATS, UNIT, CudaPackedWeight, CudaQuantisedProduct
from ngramspec.models.random_weights import empty_model
from ngramspec.models.shapes import SHAPES, read_shape
from ngramspec.outputs import KEPT
from tools.aot import SHARED_LIMIT, CompiledKernel, check_limits, compile_kernel

MOST_SPILLED = 256  # Bytes that a thread of attention may spill at head sizes above 128.
PROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148}
ROWS = (1, 16, 17, 64, 128, 300, 2048)
LAUNCHED = {
    paged_attention: ("_attend",),
    kv_move: ("_move",),
    gated_delta_kernels: ("_convolve_rows", "_advance_states", "_gate_heads", "_keep_inputs"),
    packed_experts: ("_multiply_packed_pairs",),
    expert_kernels: ("_choose", "_sort_pairs", "_multiply_pairs", "_activate_clamped", "_sum_experts"),
    layers: ("_embed", "_compute_norm", "_add_norm", "_gated_activation", "_gate_attention"),
    row_invariant_linear: ("_multiply", "_add_up"),
    quantised: ("_multiply_quantised", "_dequantise"),
    rope_kv: ("_rope_kv", "_write_kv"),
    logits_processor: ("_adjust_logits",),
    gpu_sampler: ("_find_best", "_sum_chunk", "_finish", "_walk"),
}
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that it is compiled for."""

    fn: Any
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    def compile(self, capability: int) -> CompiledKernel:
        return compile_kernel(self.fn, dict(self.signature), dict(self.constants), capability=capability, **dict(self.options))

    def __str__(self) -> str:
        constants = ", ".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.fn.__name__}({constants}; {', '.join(f'{name}={value}' for name, value in self.options)})"


class Launches:
    """A substitute for a kernel that notes what it would be compiled for."""

    def __init__(self, kernel: Any, found: dict[Variant, None]) -> None:
        self._kernel, self._found = kernel, found

    def __getitem__(self, grid: object) -> Any:
        return self._note

    def _note(self, *args: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        given = dict(zip(self._kernel.arg_names, args, strict=False)) | named
        signature, constants = dict[str, Any](), dict[str, Any]()
        for param in self._kernel.params:
            value = given[param.name]
            if param.is_constexpr or value is None or (type(value) is int and value == 1 and not param.do_not_specialize):
                constants[param.name] = value
            elif isinstance(value, tuple):  # a named one of tensors
                signature[param.name] = type(value)(*(f"*{TYPES[each.dtype]}" for each in value))
            elif isinstance(value, torch.Tensor):
                signature[param.name] = f"*{TYPES[value.dtype]}{':1' if param.do_not_specialize_on_alignment else ''}"
            elif isinstance(value, int):
                aligned = value % 16 == 0 and not (param.do_not_specialize or param.do_not_specialize_on_alignment)
                signature[param.name] = f"{'i32' if abs(value) < 2**31 else 'i64'}{':16' if aligned else ''}"
            else:
                signature[param.name] = "fp32"
        self._found[Variant(self._kernel, *(tuple(each.items()) for each in (signature, constants, options)))] = None


@contextmanager
def note_kernels(capability: int) -> Iterator[dict[Variant, None]]:
    """Note kernels instead of launching them, as for a device of this capability."""
    found: dict[Variant, None] = {}
    limits = DeviceLimits(PROCESSORS[capability], SHARED_LIMIT[capability], capability // 10, overlaps=capability >= 90)
    with ExitStack() as stack:
        for module, names in LAUNCHED.items():
            for name in names:
                stack.enter_context(patch.object(module, name, Launches(getattr(module, name), found)))
        for module in (expert_kernels, packed_experts, overlap, paged_attention, row_invariant_linear):
            stack.enter_context(patch.object(module, "get_limits", lambda device: limits))
        yield found


def empty_packed(blocks: str, n_out: int, n_in: int) -> CudaPackedWeight:
    """Make a weight without memory; in Q5_0 if its rows are not whole super-blocks, as llama.cpp quantises it."""
    fmt, meta = FORMATS[blocks if n_in % (FORMATS[blocks].columns or 1) == 0 else "Q5_0"], torch.device("meta")
    units = -(-n_in // UNIT)
    codes = torch.empty(units, n_out, UNIT if fmt.bits == 8 else UNIT // 2, dtype=torch.uint8, device=meta)
    words = torch.empty(units, fmt.n_words, n_out, dtype=torch.int32, device=meta)
    supers = torch.empty(n_in // fmt.columns, n_out, dtype=torch.int32, device=meta) if fmt.columns else None
    return CudaPackedWeight(fmt, n_out, n_in, n_out, codes, words, supers)


def make_pool(shapes: list[tuple[int, int]], max_len: int, dtype: torch.dtype, delta: DeltaShape | None) -> CudaPool:
    """Make a pool without memory; `delta`: the shape of recurrent layers, if there are any."""
    sizes, meta = (shapes, 64, 4, max_len), torch.device("meta")
    if delta is None:
        return CudaPool(*sizes, dtype=dtype, device=meta)
    return CudaRecurrentPool(*sizes, dtype=dtype, device=meta, shape=delta, n_snapshots=1)


def list_variants(
    config: dict[str, Any], dtype: torch.dtype, capability: int, rows: Sequence[int] = ROWS, blocks: str = "none"
) -> list[Variant]:
    """Return what passes of a Llama-style model launch. `blocks`: a format of its weights, one of FORMATS, or "none"."""
    meta, depth, max_len = torch.device("meta"), 16, 8192
    with note_kernels(capability) as found, torch.inference_mode():
        model = empty_model(config, dtype).to(meta)
        text: Any = model.config.get_text_config()
        n_sms = PROCESSORS[capability]

        def make_product(weight: Any, bias: torch.Tensor | None) -> row_invariant_linear.CudaProduct:
            if blocks == "none":
                return row_invariant_linear.CudaProduct(weight, bias, n_sms)
            return CudaQuantisedProduct([empty_packed(blocks, *weight.shape)], bias, dtype, n_sms)

        def make_pairs(weight: Any, bias: torch.Tensor | None) -> PairProduct:
            if blocks == "none":
                return PairProduct(weight, bias, n_sms)
            e, n, k = weight.shape
            return PackedPairProduct(PackedExpertWeight(empty_packed(blocks, e * n, k), e, dtype), dtype, n_sms)

        stack = CudaDecoder(model, make_product, make_pairs, max_len)
        if blocks != "none":
            stack.embedding = CudaPackedEmbedding(empty_packed(blocks, *stack.embedding.weight.shape), dtype)
        shape = int(text.num_key_value_heads), stack.head_dim
        pool = stack.pool = make_pool([shape] * len(stack.layers), max_len, dtype, stack.delta_shape)
        per_item = paged_attention.rows_per_item(stack.n_heads, *shape, dtype.itemsize)
        space = paged_attention.AttentionWorkspace.allocate(1, per_item, stack.n_heads, *shape, meta)
        changed = logits_processor.PenaltyEntries(meta)
        for n in rows:
            inputs = GraphInputs(Bucket(n, max(1, n // 2)), depth, pool, AttentionSchedule(n_sms, 1), changed)
            logits = torch.empty(n, stack.head.n_out, device=meta)  # type: ignore[attr-defined]
            stack(inputs.ids, inputs.rows, None, AttentionLaunch(per_item, space), logits)
            tokens, values = (torch.empty(n, KEPT, dtype=kind, device=meta) for kind in (torch.int32, torch.float32))
            logits_processor.adjust_logits(logits, None, changed.entries, inputs.device)
            work = gpu_sampler.SamplerWorkspace(n, logits.shape[1], meta, k=KEPT)
            scores = torch.empty(n, device=meta), torch.empty(n, dtype=torch.float64, device=meta)
            sampled = gpu_sampler.sample(logits, inputs.sampling, torch.empty_like(inputs.ids), work, (tokens, values), scores)
            d = inputs.device
            counts, paths = gpu_sampler.walk(sampled, inputs.ids, d["parents"], d["roots"], d["ends"], depth)
            for memory in pool.memory:
                kv_move.commit(memory, pool.device_tables, d["sequences"], d["starts"], paths, counts)
    return list(found)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="compile_kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help=f"shapes: {', '.join(SHAPES)}")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--blocks", default=f"none,{','.join(FORMATS)}", help="formats of weights; none: they are of the dtype")
    parser.add_argument("--capabilities", default="80,89,90,100")
    args = parser.parse_args(argv)
    done: dict[tuple[int, Variant], str] = {}
    failed = 0
    for capability in map(int, args.capabilities.split(",")):
        for model in args.models.split(","):
            config = read_shape(model)
            for dtype, blocks in product(args.dtypes.split(","), args.blocks.split(",")):
                for variant in list_variants(config, getattr(torch, dtype), capability, blocks=blocks):
                    if (capability, variant) in done:
                        continue
                    problem = done[capability, variant] = compile_variant(variant, capability)
                    failed += bool(problem)
                    print(f"sm_{capability} {model} {dtype} {blocks}: {problem or 'ok'}: {variant}", flush=True)
    print(f"{len(done)} variants, {failed} failed")
    if failed:
        sys.exit(1)


def compile_variant(variant: Variant, capability: int) -> str:
    """Compile a variant and return what is wrong with it; empty if nothing."""
    try:
        kernel = variant.compile(capability)
        check_limits(kernel, capability, MOST_SPILLED if dict(variant.constants).get("D", 0) > 128 else 0)
    except AssertionError as e:
        return f"{e}"
    except Exception as e:  # whatever the compiler says
        return f"{type(e).__name__}: {e}"
    return ""


if __name__ == "__main__":
    main()
