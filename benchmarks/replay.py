"""How good are the drafters, without a model? Recorded outputs are followed as the walk would follow them.

    python -m benchmarks.replay --traces F.jsonl [F2...] [--tokenizer M] [--limit N] [--max-out K] [--peers] [--drafters a,b]
    python -m benchmarks.replay --vllm-proposer --traces F.jsonl [F2...] [--requests N,N] [--depth K] [--slope S] [--mirrors]

A trace is a prompt and the tokens that a model then wrote. At every pass a drafter sees the prompt and the output so far; the longest
drafted path that the output follows is accepted, and the one token more that a pass always yields.

    tokens_per_pass   1.00 is no help
    rows_per_pass     drafted tokens that a pass carries beside the root
    us_per_pass       microseconds of drafting and updating, prompt included, one sequence at a time
    speed_flat, _steep   tokens_per_pass / (1 + s * rows_per_pass), s = 0.005 (a large GPU) and 0.04 (two CPU cores)

Ours run once for each cost; every set starts from the shipped weights. With `--vllm-proposer` the traces go through the object that vLLM
asks for drafts: see `benchmarks/vllm_replay.py`. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common, vllm_replay
from benchmarks.common import SLOPES, print_progress, print_table
from benchmarks.recordings import read_traces
from benchmarks.replayed import (
    FIGURES,
    MAX_ROWS,
    Arctic,
    Chain,
    FirstMatch,
    Replayed,
    ReplayedProposer,
    Rest,
    make_proposer,
    replay,
    write_rest_index,
)
from ngramspec.datastore import Datastore
from ngramspec.models.loader import load_tokenizer
from ngramspec.speculative.proposer import warmup
from ngramspec.speculative.syntax import SyntaxTable, open_syntax

REST_ROWS = (4, 8, 16, 24, 32, 48, 64)
MAX_OUT = 512  # tokens of an output that are followed, if nothing else is said


def make_drafters(
    stops: tuple[int, ...],
    predicted: bool = False,
    stores: Sequence[Datastore] = (),
    vocab_size: int = 0,
    syntax: SyntaxTable | None = None,
) -> dict[str, Callable[[], Replayed]]:
    """Return what makes our drafters, each for both costs, and the tables alone."""
    variants: dict[str, dict[str, Any]] = {}
    if predicted:
        variants |= {"+prediction": {"predicted": True}, "+both": {"answers": True, "predicted": True}}
    if stores:
        variants |= {"+datastore": {"stores": stores}, "+lookup": {"stores": stores, "similar": False}}
    variants |= {"": {}, "+answers": {"answers": True}, "+recycled": {"answers": True, "vocab_size": vocab_size}}

    variants |= {"-syntax": {"syntax": None}, "+answers-syntax": {"answers": True, "syntax": None}}

    def make_replayed(slope: float, predicted: bool = False, **options: Any) -> Replayed:
        drafts = make_proposer(**{"syntax": syntax, **options})
        return ReplayedProposer(drafts, 1.0 + slope * np.arange(-1.0, MAX_ROWS + 1), stops, predicted=predicted)

    ours = {f"ngramspec{name}-{cost}": partial(make_replayed, SLOPES[cost], **more) for name, more in variants.items() for cost in SLOPES}
    return {**ours, "ngram-chain": Chain}


def make_peers(stores: Sequence[Datastore], folder: Path) -> tuple[dict[str, Callable[[], Replayed]], dict[str, str]]:
    """Return what makes the peers that can run here, and for those that cannot, why. `folder` holds what they keep on disk."""
    found: dict[str, Callable[[], Replayed]] = {"pld-hf": partial(FirstMatch, 3, 1, 10), "ngram-vllm": partial(FirstMatch, 4, 2, 7)}
    wide: dict[str, Any] = {"factor": 4.0, "rows": 32, "depth": 64}
    kinds: dict[str, dict[str, Any]] = {"": {"tree": False}, "-tree": {"tree": True}, "-tree-f4": {"tree": True, **wide}}
    arctic = {
        f"arctic{kind}{'+cache' * cache}": partial(Arctic, cache=cache, **more) for cache in (False, True) for kind, more in kinds.items()
    }
    rest: dict[str, Callable[[], Replayed]] = {}
    if stores:
        index = write_rest_index(stores, folder) if importlib.util.find_spec("draftretriever") else folder
        rest = {f"rest-{rows}": partial(Rest, index, rows) for rows in REST_ROWS}
    absent: dict[str, str] = {}
    for package, some in (("arctic_inference", arctic), ("draftretriever", rest)):
        if importlib.util.find_spec(package) is None:
            absent |= dict.fromkeys(some, f"{package} is not installed (make peers)")
        else:
            found |= some
    return found, absent


def find_means(sets: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    return {name: {key: round(statistics.mean(s[name][key] for s in sets), 4) for key in FIGURES} for name in sets[0]}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.make_parser("replay", __doc__)
    parser.add_argument("--traces", nargs="+", type=common.parse_file, required=True, metavar="F.jsonl", help="recorded outputs")
    parser.add_argument("--tokenizer", default="smollm2", help="folder, hub name, GGUF file or smollm2")
    parser.add_argument("--limit", type=common.parse_positive, metavar="N", help="traces per file (all)")
    text = f"tokens of an output that are followed ({MAX_OUT}, with --vllm-proposer {vllm_replay.MAX_OUT})"
    parser.add_argument("--max-out", type=common.parse_positive, metavar="K", help=text)
    parser.add_argument("--peers", action="store_true", help="also prompt lookup, vLLM's n-gram rule and arctic-inference")
    parser.add_argument("--drafters", help="only these, separated by commas")
    parser.add_argument("--datastore", action="append", default=[], metavar="STORE", help="also with this datastore; REST gets its text")
    text = "also with a predicted output: the text that the request asks to edit, its first fenced block"
    parser.add_argument("--prediction-from", choices=["reference-minus-edit"], help=text)
    vllm_replay.add_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    tokenizer = load_tokenizer(args.tokenizer)
    common.print_document(vllm_replay.measure(args, tokenizer) if args.vllm_proposer else measure(args, tokenizer))


def measure(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Print a table for each file and return the JSON document. Raises SystemExit for a drafter that there is not."""
    eos, max_out = getattr(tokenizer, "eos_token_id", None), args.max_out or MAX_OUT
    stops = (int(eos),) if isinstance(eos, int) else ()
    warmup()
    predicted = args.prediction_from is not None
    stores = [Datastore.open(path) for path in args.datastore]
    syntax = open_syntax(getattr(tokenizer, "backend_tokenizer", None), len(tokenizer))
    chosen, absent = make_drafters(stops, predicted, stores, len(tokenizer), syntax), dict[str, str]()
    sets: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if args.peers:
            others, absent = make_peers(stores, Path(scratch))
            chosen |= others
        if args.drafters:
            names = [name.strip() for name in args.drafters.split(",")]
            if unknown := [name for name in names if name not in chosen and name not in absent]:
                raise SystemExit(f"no drafter named {', '.join(unknown)}; there are {', '.join(chosen)} (peers with --peers)")
            chosen = {name: chosen[name] for name in names if name in chosen}
        print(f"Replaying recorded outputs through {', '.join(chosen)}.", flush=True)
        for name, why in absent.items():
            print(f"absent: {name}: {why}", flush=True)
        for path in args.traces:
            traces = read_traces(path, tokenizer, args.limit, max_out, predicted)
            results = sets[path.stem] = {}
            for name, make in chosen.items():
                print_progress(f"{path.stem}: {name}")
                results[name] = replay(make(), traces)
            print(f"\n{path.stem}: {len(traces)} traces, {sum(len(t.output) for t in traces)} tokens")
            print_table(["drafter", *FIGURES], [[name, *(r[key] for key in FIGURES)] for name, r in results.items()])
    settings = {"tokenizer": args.tokenizer, "limit": args.limit, "max_out": max_out, "slopes": SLOPES, "max_rows": MAX_ROWS}
    settings |= {"stops": stops, "prediction_from": args.prediction_from, "datastore": [Path(path).name for path in args.datastore]}
    document = {"benchmark": "replay", "traces": list(map(str, args.traces)), "settings": settings, **common.describe_machine("cpu", 1)}
    document |= {"drafters": find_means(list(sets.values())), "absent": absent}
    return document | {"sets": sets} if len(sets) > 1 else document


if __name__ == "__main__":
    common.run_command(main)
