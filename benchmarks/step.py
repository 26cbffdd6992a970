"""What does a pass with T rows cost?

    python -m benchmarks.step --model M | --random-weights CONFIG [--device cpu|cuda:N] [--dtype D] [--context 512]
        [--rows 1,2,3,4,6,8,12,16,32] [--repeat N] [--linears exact|unpacked|vendor]

One sequence with `context` tokens in its cache and T rows behind them, logits for every row: our pass, transformers' own forward with its
cache, and the time to read the weights once, which no pass can beat; measured in turns, medians. Progress goes to standard error, a
table and a last line of JSON to standard output.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks import common
from ngramspec import Engine
from ngramspec.model.loading import load_model

ROWS = [1, 2, 3, 4, 6, 8, 12, 16, 32]
KV_BYTES = 2 << 30
"""On a GPU, where an engine would take what is free: so much, as transformers' model and its cache have to stand beside it."""


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    on_cpu = args.device == "cpu"
    options: dict[str, Any] = {} if on_cpu else {"kv_memory": KV_BYTES}
    engine = Engine(
        args.model,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        linears=args.linears,
        progress=common.say,
        **options,
    )
    if on_cpu:
        engine.close()  # passes run in this thread: a second one's OpenMP team would make each yield the cores to the other
    else:
        torch.cuda.set_device(args.device)
    torch.set_num_threads(engine.threads)
    if args.context + max(args.rows) > engine.max_model_len:
        raise SystemExit(f"--context {args.context} and {max(args.rows)} rows do not fit the model's {engine.max_model_len} tokens")
    stock = load_model(args.model, device=args.device, dtype=getattr(torch, args.dtype)).model
    cache = stock_cache(stock, args.context)
    n_bytes = weight_bytes(stock)
    buffer = torch.ones(n_bytes // 4, device=args.device)
    measures: dict[str, Callable[[], float]] = {"floor": lambda: common.timed(buffer.sum, args.device)}
    for rows in args.rows:
        measures[f"ours {rows}"] = partial(engine.runner.time_pass, rows, args.context)
        measures[f"stock {rows}"] = partial(time_stock, stock, cache, rows, args.device)
    medians = common.interleaved_medians(measures, args.repeat)
    engine.close()
    document = {
        "model": args.model,
        **figures(medians, args.rows, n_bytes),
        "settings": {"context": args.context, "repeat": args.repeat, "linears": args.linears},
        "exactness": engine.exactness,
        "dtype": engine.props()["dtype"],
        **common.environment(args.device, engine.threads),
    }
    show(document)
    common.print_document(document)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.new_parser("step", __doc__)
    common.model_options(parser)
    common.linears_option(parser)
    parser.add_argument("--context", type=common.positive, default=512, metavar="N", help="tokens in the cache")
    parser.add_argument("--rows", type=common.counts, default=ROWS, metavar="N,N,...", help="row counts; 1 is always among them")
    parser.add_argument("--repeat", type=common.positive, default=15, metavar="N", help="passes of each kind")
    args = parser.parse_args(argv)
    args.rows = sorted({1, *args.rows})
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


@torch.inference_mode()
def stock_cache(model: Any, context: int) -> DynamicCache:
    """transformers' cache with `context` tokens, computed in pieces."""
    cache = DynamicCache(config=model.config)
    for piece in torch.full((1, context), 7, device=model.device).split(512, dim=1):
        model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


@torch.inference_mode()
def time_stock(model: Any, cache: DynamicCache, rows: int, device: str) -> float:
    """Milliseconds of transformers' own pass; the cache is as before afterwards."""
    ids = torch.full((1, rows), 11, device=device)
    elapsed = common.timed(lambda: model(input_ids=ids, past_key_values=cache, use_cache=True), device)
    cache.crop(-rows)
    return elapsed


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a pass reads: all, but for an embedding table that is not the output layer as well."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if table is head else total - table.numel() * table.element_size()


def figures(medians: dict[str, float], rows: list[int], n_bytes: int) -> dict[str, Any]:
    """The contract's part of the JSON document, from milliseconds by "ours T", "stock T" and "floor"."""
    ours = {str(n): round(medians[f"ours {n}"], 3) for n in rows}
    stock = {str(n): round(medians[f"stock {n}"], 3) for n in rows}
    return {
        "rows": ours,
        "ratio": {n: round(ms / ours["1"], 3) for n, ms in ours.items()},
        "stock_rows": stock,
        "stock_ratio": {n: round(ms / stock["1"], 3) for n, ms in stock.items()},
        "floor_ms": round(medians["floor"], 3),
        "floor_share": {n: round(medians["floor"] / ms, 3) for n, ms in ours.items()},
        "weight_bytes": n_bytes,
        "floor_gb_s": round(n_bytes / medians["floor"] / 1e6, 2),
    }


def show(document: dict[str, Any]) -> None:
    names = ("rows", "ratio", "floor_share", "stock_rows", "stock_ratio")
    common.print_table(
        ["rows", "ms", "ratio", "floor/ms", "transformers ms", "ratio"],
        [[n, *(document[name][n] for name in names)] for n in document["rows"]],
    )
    megabytes, exactness = document["weight_bytes"] / 1e6, document["exactness"]
    print(f"reading the weights once ({megabytes:.0f} MB): {document['floor_ms']:.2f} ms; exactness: {exactness}")


if __name__ == "__main__":
    main()
