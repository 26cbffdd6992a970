"""Which drafts help where, and how do other tools compare? Every drafter alone and all together, by category: REPORT.md with pictures.

    python -m benchmarks.report --model M [--data DIR] [--minutes 55] [--out DIR] [--state F.jsonl] [--fresh]
        [--categories chat,edits] [--temperatures 0,0.8] [--drafter lookahead] [--against hf,vllm-suffix] [--package P]

Each category is measured at each temperature with all contenders in turns, on as many prompts as its share of the time allows. What is
measured is kept in the state file, by all of its settings and the code's digest, and is not measured again; `--fresh` forgets it. Progress
goes to standard error, a table and a last line of JSON to standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common, decode
from benchmarks.common import ResultLog, print_progress
from benchmarks.peers import NAMES, Peer, open_peer
from benchmarks.report import figures, measure
from benchmarks.report.categories import CATEGORIES, package_version, read_category, read_repository
from benchmarks.report.text import write_report
from ngramspec import Engine, SamplingParams

ROOT = Path(__file__).parents[2]
# The drafter `layers` is this part of the model's layers.
LAYERS_SHARE = 3


def main(argv: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    args = parse(argv)
    with Engine(args.model, progress=print_progress, max_seqs=measure.MAX_SEQS, **common.get_engine_options(args)) as engine:
        document = run(engine, args, started)
    write(document, args.out)
    names = ("contender", "temperature", "prompts", "tokens_per_pass", "rows_per_pass", "speedup")
    common.print_table(["", *(name.replace("_", " ") for name in names[1:])], [[r.get(name) for name in names] for r in document["pooled"]])
    common.print_document(document)


def run(engine: Engine, args: argparse.Namespace, started: float) -> dict[str, Any]:
    """Return the document: what is known, and what is measured now."""
    common.finish_start(engine)
    settings = {
        "model": args.model,
        "dtype": engine.props()["dtype"],
        "precision": engine.props()["precision"],
        "device": common.get_device_name(args.device),
        "threads": engine.threads,
        **{name: getattr(args, name) for name in ("max_tokens", "max_prompt", "prompts", "minutes", "seed")},
        "package": package_version(args.package),
        "code": common.digest_code(args.device),
    }
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ngramspec-report-")))
        longest = min(args.max_prompt, engine.max_model_len - args.max_tokens)
        categories = [
            read_repository(args.package, engine.tokenizer, scratch / "store", args.prompts, longest)
            if name == "repository"
            else read_category(name, args.data, engine.tokenizer, args.prompts, longest)
            for name in args.categories
        ]
        n_layers = engine.runner.model.config.get_text_config().num_hidden_layers
        drafters = args.drafter or ["recycling", "lookahead", f"layers:{max(1, n_layers // LAYERS_SHARE)}", "counts:2", "counts:3"]
        bench = stack.enter_context(contextlib.closing(measure.Bench(engine, settings, drafters, make_peers(engine, args, stack))))
        state = ResultLog(args.state, fresh=args.fresh)
        cells = measure.measure(bench, state, categories, args.temperatures, started)
        followed = measure.follow_texts(bench, state, categories, args.temperatures)
        replayed, missing = measure.replay_peers(cells, categories, scratch)
    return {
        "benchmark": "report",
        "model": args.model,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "categories": [category.name for category in categories],
        "rows": figures.rows_of(cells),
        "pooled": figures.pool_rows(cells),
        "against_best": figures.against_best(cells),
        "followed": followed,
        "against_best_followed": figures.against_best_followed(followed),
        "against_peers": figures.against_peers(cells),
        "fastest_peers": figures.fastest_peers(cells, engine.props()["precision"]),
        "rejection": figures.rejection_rows(cells),
        "reliability": figures.sum_reliability(cells),
        "loads": read_loads(args.loads, args.model),
        "frontier": figures.select_frontier(cells),
        "replayed": replayed,
        "absent": bench.absent | missing,
        "settings": settings | {"temperatures": args.temperatures},
        "exactness": engine.exactness,
        **common.describe_machine(args.device, engine.threads),
    }


def read_loads(path: Path, model: str) -> dict[str, Any] | None:
    """Return what `benchmarks.loads` has measured of this model; None: nothing."""
    document = json.loads(path.read_text(encoding="utf-8").splitlines()[-1]) if path.is_file() else {}
    return document if document.get("model") == model else None


def make_peers(engine: Engine, args: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Callable[[], Peer]]:
    if not args.against:
        return {}
    task = decode.make_peer_task(args, engine, SamplingParams(max_tokens=args.max_tokens), args.max_prompt, stack)
    return {name: partial(open_peer, name, task, args.vllm_python, args.llama_python) for name in args.against}


def write(document: dict[str, Any], out: Path) -> None:
    """REPORT.md, and its pictures where matplotlib is installed. What it says is in the document."""
    from benchmarks.report import plots

    (out / "plots").mkdir(parents=True, exist_ok=True)
    plots.draw(out / "plots", document)
    (out / "REPORT.md").write_text(write_report(document), encoding="utf-8")
    print_progress(f"wrote {out / 'REPORT.md'}")


def commit() -> str:
    """Return the last commit of the package, with a + where files differ from it; "unknown" outside a repository."""

    def run_git(*command: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = run_git("status", "--porcelain", "ngramspec", "datastore")
        return run_git("log", "-1", "--format=%h", "--", "ngramspec", "datastore") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.make_parser("report", __doc__)
    common.add_model_options(parser)
    data = ROOT.parent / "shared" / "data"
    add = parser.add_argument
    add("--data", type=Path, default=data, metavar="DIR", help="spec_bench.jsonl, humaneval.jsonl and others; default ../shared/data")
    add("--minutes", type=common.parse_number, default=55.0, metavar="M", help="for all of it; the least is one prompt for each category")
    add("--prompts", type=common.parse_positive, default=12, metavar="N", help="at most N for each category")
    add("--max-tokens", type=common.parse_positive, default=64, metavar="K")
    add("--max-prompt", type=common.parse_positive, default=768, metavar="K", help="longer prompts are left out")
    known = common.make_name_parser(CATEGORIES)
    add("--categories", type=known, default=list(CATEGORIES), metavar="C,...", help=",".join(CATEGORIES))
    add("--temperatures", type=common.parse_floats, default=[0.0, 0.8], metavar="T,...", help="other tools run at 0")
    add(
        "--drafter",
        action="append",
        metavar="NAME[:ARG]",
        help="as ngramspec complete has it; default: all without weights",
    )
    decode.add_peer_options(parser, NAMES)
    add("--package", default="networkx", metavar="P", help="installed; its files are the repository")
    add("--seed", type=int, default=0, metavar="S")
    found = ROOT / "benchmarks" / "results" / "loads-smollm2-cpu.json"
    add("--loads", type=Path, default=found, metavar="F.json", help="what benchmarks.loads has printed, for the report to show")
    add("--out", type=Path, default=ROOT / "benchmarks", metavar="DIR")
    state = ROOT / "benchmarks" / ".report" / "cells.jsonl"
    add("--state", type=Path, default=state, metavar="F.jsonl", help="what is measured is kept here")
    add("--fresh", action="store_true", help="forget what is kept")
    args = parser.parse_args(argv)
    wanted = {file for name in args.categories for file in CATEGORIES[name]["files"]}
    if missing := sorted(file for file in wanted if not (args.data / file).is_file()):
        parser.error(f"--data: {args.data} lacks {', '.join(missing)}; other categories can be chosen with --categories")
    args.temperatures = sorted(set(args.temperatures))
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


if __name__ == "__main__":
    common.run_command(main)
