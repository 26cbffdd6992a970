"""What does a pass with T rows cost?

    python -m benchmarks.step --model M | --random-weights CONFIG [--device cpu|cuda:N] [--dtype D] [--context 512]
        [--rows 1,2,3,4,6,8,12,16,32 | 1-64,128] [--repeat N] [--linears exact|unpacked|vendor] [--precision auto|int8|float32]
        [--prompt-tokens 512] [--without-transformers] [--against llama [--llama-python PATH] [--llama-gguf F]]

One sequence with `context` tokens in its cache and T rows after them, logits for every row: our pass, transformers' own forward with its
cache, and the time that torch takes to sum as many bytes as the weights have (of a GGUF file as they are there); also a whole prompt.
Against llama.cpp: the same row counts after as many tokens, with logits of the last row alone, in a process of its own.

The contenders take turns, each with all row counts after a pass that does not count; those that wait use no core. Medians. `kinks`: the
time of a row count over the straight line between the nearest counts of at most half and at least twice as many rows. Progress goes to
standard error, a table and a last line of JSON to standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from transformers import DynamicCache

from benchmarks import common
from benchmarks.our_engine import describe_engine, find_gguf_files, run_text
from benchmarks.peers import Peer, add_llama_options, open_llama_passes
from ngramspec import Engine
from ngramspec.backends.base import Runner
from ngramspec.models.loader import load_model

ROWS = [1, 2, 3, 4, 6, 8, 12, 16, 32]
# On a GPU an engine would take what is free, but transformers' model and its cache have to stand beside it.
KV_BYTES = 2 << 30
FLOOR_BYTES = 1 << 30  # read at most to see how fast memory is, and far more than any cache holds
LLAMA_REST_S = 0.02  # llama.cpp's threads go on spinning for some milliseconds

Turn = Callable[[], dict[str, float]]  # measures everything of one contender once: milliseconds by name


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with contextlib.ExitStack() as stack:
        llama = None
        if args.against:
            gguf, max_len = next(iter(find_gguf_files(args.model)), None), max(args.context + max(args.rows), args.prompt_tokens)
            llama = stack.enter_context(contextlib.closing(open_llama_passes(args, gguf, max_len, LLAMA_REST_S)))
        document = measure(args, llama)
    print_figures(document)
    common.print_document(document)


def measure(args: argparse.Namespace, llama: Peer | None) -> dict[str, Any]:
    """Return the JSON document."""
    on_cpu = args.device == "cpu"
    options: dict[str, Any] = {} if on_cpu else {"kv_memory": KV_BYTES}
    engine = Engine(args.model, linears=args.linears, progress=common.print_progress, **common.get_engine_options(args), **options)
    common.finish_start(engine)
    if on_cpu:
        engine.close()  # passes run in this thread: a second one's OpenMP team would make each yield the cores to the other
    else:
        torch.cuda.set_device(args.device)
    torch.set_num_threads(engine.threads)
    if args.context + max(args.rows) > engine.max_model_len:
        raise SystemExit(f"--context {args.context} and {max(args.rows)} rows do not fit the model's {engine.max_model_len} tokens")
    prompt = args.prompt_tokens if engine.max_model_len >= args.prompt_tokens else None
    turns: dict[str, Turn] = {"ours": partial(take_our_turn, engine.runner, args.rows, args.context, prompt)}
    n_bytes = count_file_bytes(find_gguf_files(args.model))
    if args.transformers:
        stock = load_model(args.model, device=args.device, dtype=getattr(torch, args.dtype)).model
        turns["stock"] = partial(take_stock_turn, stock, make_stock_cache(stock, args.context), args.rows, args.device)
        n_bytes = n_bytes or count_weight_bytes(stock)
    if n_bytes is not None:
        turns["floor"] = partial(take_floor_turn, n_bytes, torch.ones(min(n_bytes, FLOOR_BYTES) // 4, device=args.device), args.device)
    if llama is not None:
        turns["llama"] = partial(take_llama_turn, llama, args.rows, args.context, args.prompt_tokens)
    medians = find_medians(common.run_in_turns(turns, args.repeat))
    engine.close()
    document = {
        "model": args.model,
        **make_figures(medians, args.rows, args.prompt_tokens, n_bytes),
        "settings": {name: getattr(args, name) for name in ("context", "prompt_tokens", "repeat", "linears", "precision", "against")},
        **describe_engine(engine),
        **common.describe_machine(args.device, engine.threads),
    }
    if llama is not None:
        document["versions"]["llama"] = llama.version
    return document


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.make_parser("step", __doc__)
    common.add_model_options(parser)
    common.add_linears_option(parser)
    parser.add_argument("--context", type=common.parse_positive, default=512, metavar="N", help="tokens in the cache")
    parser.add_argument("--rows", type=common.parse_counts, default=ROWS, metavar="N,N-N,...", help="row counts; 1 is always among them")
    parser.add_argument("--repeat", type=common.parse_positive, default=15, metavar="N", help="passes of each kind")
    parser.add_argument("--prompt-tokens", type=common.parse_positive, default=512, metavar="N", help="length of the whole prompt")
    text = "leave out transformers' own pass and its copy of the weights in --dtype, for which memory may not suffice"
    parser.add_argument("--without-transformers", dest="transformers", action="store_false", help=text)
    add_llama_options(parser)
    args = parser.parse_args(argv)
    if args.against and args.device != "cpu":
        parser.error(f"--against llama: on the CPU only, not on {args.device}")
    args.rows = sorted({1, *args.rows})
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


# ---------------------------------------------------------------------------- turns


def take_our_turn(runner: Runner, rows: list[int], context: int, n_prompt: int | None) -> dict[str, float]:
    runner.time_pass(1, context)
    found = {} if n_prompt is None else {"prefill": time_prefill(runner, n_prompt)}
    runner.time_pass(1, context)  # the first pass after a long one finds other things in the processor's caches
    return found | {str(n): runner.time_pass(n, context) for n in rows}


def time_prefill(runner: Runner, n_tokens: int) -> float:
    """Return the milliseconds of a prompt without any cache, in passes of as many rows as the engine's."""
    ids = [11] * n_tokens
    return common.time_ms(lambda: deque(run_text(runner, ids, n_tokens - 1), 0), runner.device)


def take_stock_turn(model: Any, cache: DynamicCache, rows: list[int], device: str) -> dict[str, float]:
    time_stock(model, cache, 1, device)
    return {str(n): time_stock(model, cache, n, device) for n in rows}


def take_llama_turn(peer: Peer, rows: list[int], context: int, n_prompt: int) -> dict[str, float]:
    answer = peer.ask(rows=rows, context=context, prefill=n_prompt)
    return answer["rows"] | {"prefill": answer["prefill"]}


def take_floor_turn(n_bytes: int, buffer: torch.Tensor, device: str) -> dict[str, float]:
    return {"read": common.time_ms(buffer.sum, device) * n_bytes / (buffer.numel() * buffer.element_size())}


@torch.inference_mode()
def make_stock_cache(model: Any, context: int) -> DynamicCache:
    """Return transformers' cache with `context` tokens, computed in pieces."""
    cache = DynamicCache(config=model.config)
    for piece in torch.full((1, context), 7, device=model.device).split(512, dim=1):
        model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


@torch.inference_mode()
def time_stock(model: Any, cache: DynamicCache, rows: int, device: str) -> float:
    """Return the milliseconds of transformers' own pass; the cache is as before afterwards."""
    ids = torch.full((1, rows), 11, device=device)
    elapsed = common.time_ms(lambda: model(input_ids=ids, past_key_values=cache, use_cache=True), device)
    cache.crop(-rows)
    return elapsed


# ---------------------------------------------------------------------------- figures


def count_weight_bytes(model: Any) -> int:
    """Return the bytes of weights that a pass reads: all, but for an embedding table that is not the output layer as well."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if table is head else total - table.numel() * table.element_size()


def count_file_bytes(files: list[Path]) -> int | None:
    """Return the same of GGUF files, in their own blocks; None if there are none."""
    sizes = {tensor.name: int(tensor.n_bytes) for path in files for tensor in GGUFReader(path).tensors}
    if "output.weight" in sizes:
        sizes.pop("token_embd.weight")
    return sum(sizes.values()) or None


def find_medians(rounds: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return medians by contender and name."""
    return {who: {name: round(statistics.median(turn[name] for turn in turns), 3) for name in turns[0]} for who, turns in rounds.items()}


def make_figures(medians: dict[str, dict[str, float]], rows: list[int], n_prompt: int, n_bytes: int | None) -> dict[str, Any]:
    """Return the figures of the document, from medians of milliseconds by contender and row count (or "prefill", "read")."""
    ours = {str(n): medians["ours"][str(n)] for n in rows}
    bends = find_kinks({int(n): ms for n, ms in ours.items()})
    found: dict[str, Any] = {
        "rows": ours,
        "ratio": {n: round(ms / ours["1"], 3) for n, ms in ours.items()},
        "kinks": bends,
        "max_kink": max(bends.values(), default=None),
        f"prefill_{n_prompt}_ms": medians["ours"].get("prefill"),
        "weight_bytes": n_bytes,
    }
    if stock := medians.get("stock"):
        found |= {"stock_rows": stock, "stock_ratio": {n: round(ms / stock["1"], 3) for n, ms in stock.items()}}
    if "floor" in medians and n_bytes is not None:
        floor = medians["floor"]["read"]
        found |= {
            "floor_ms": floor,
            "floor_share": {n: round(floor / ms, 3) for n, ms in ours.items()},
            "floor_gb_s": round(n_bytes / max(floor, 1e-3) / 1e6, 2),
        }
    if llama := medians.get("llama"):
        found |= {
            "llama_rows": {n: llama[n] for n in ours},
            "llama_ratio": {n: round(ms / llama[n], 3) for n, ms in ours.items()},
            f"llama_prefill_{n_prompt}_ms": llama["prefill"],
        }
    return found


def find_kinks(ms: dict[int, float]) -> dict[str, float]:
    """Return each row count's time over the straight line between the nearest counts of at most half and at least twice as many."""
    found = {}
    for n in sorted(ms):
        below, above = [m for m in ms if 2 * m <= n], [m for m in ms if m >= 2 * n]
        if below and above:
            a, b = max(below), min(above)
            found[str(n)] = round(ms[n] / (ms[a] + (ms[b] - ms[a]) * (n - a) / (b - a)), 3)
    return found


def print_figures(document: dict[str, Any]) -> None:
    columns = {
        "ms": "rows",
        "ratio": "ratio",
        "kink": "kinks",
        "floor/ms": "floor_share",
        "transformers ms": "stock_rows",
        "ratio of these": "stock_ratio",
        "llama.cpp ms": "llama_rows",
        "ours/llama.cpp": "llama_ratio",
    }
    shown = {title: document[name] for title, name in columns.items() if name in document}
    common.print_table(["rows", *shown], [[n, *(column.get(n) for column in shown.values())] for n in document["rows"]])
    n_prompt = document["settings"]["prompt_tokens"]
    if (prefill := document[f"prefill_{n_prompt}_ms"]) is not None:
        theirs = f", llama.cpp {document[f'llama_prefill_{n_prompt}_ms']:.0f} ms" if "llama_rows" in document else ""
        print(f"a prompt of {n_prompt} tokens: {prefill:.0f} ms{theirs}")
    if "floor_ms" in document:
        print(f"torch sums as many bytes as the weights have ({document['weight_bytes'] / 1e6:.0f} MB): {document['floor_ms']:.2f} ms")
    print(f"exactness: {document['exactness']}")


if __name__ == "__main__":
    main()
