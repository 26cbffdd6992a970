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
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.decode import LOCAL_VLLM, gguf_file, peer_names, weights_folder
from benchmarks.peers import NAMES, Peer, Task, open_peer
from benchmarks.report_data import CATEGORIES, Category, package_version, read_category, repository
from benchmarks.report_figures import (
    against_best,
    against_best_followed,
    against_peers,
    fastest_peers,
    frontier,
    pooled,
    rejection_rows,
    rows_of,
)
from benchmarks.report_follow import followed
from benchmarks.report_measure import MAX_SEQS, Bench, Plan, State, measure, replayed, say
from benchmarks.report_text import PEERS, write_report
from ngramspec import Engine, SamplingParams

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "shared" / "data"
LAYERS_SHARE = 3
"""The drafter `layers` is this part of the model's layers."""


def main(argv: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    args = parse(argv)
    with Engine(args.model, device=args.device, dtype=args.dtype, threads=args.threads, max_seqs=MAX_SEQS, progress=say) as engine:
        document = run(engine, args, started)
    write(document, args.out)
    rows = [
        [r["contender"], r["temperature"], r["prompts"], r.get("tokens_per_pass"), r.get("rows_per_pass"), r["speedup"]]
        for r in document["pooled"]
    ]
    common.print_table(["", "temperature", "prompts", "tokens per pass", "rows per pass", "speedup"], rows)
    common.print_document(document)


def run(engine: Engine, args: argparse.Namespace, started: float) -> dict[str, Any]:
    """The document: what is known, and what is measured now."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ngramspec-report-")))
        categories = [read(name, args, engine, scratch) for name in args.categories]
        plan = Plan(
            model=args.model,
            dtype=engine.props()["dtype"],
            device=common.device_name(args.device),
            threads=engine.threads,
            max_tokens=args.max_tokens,
            max_prompt=args.max_prompt,
            prompts=args.prompts,
            minutes=args.minutes,
            seed=args.seed,
            package=package_version(args.package),
        )
        drafters = args.drafter or default_drafters(engine)
        bench = stack.enter_context(contextlib.closing(Bench(engine, plan, drafters, peers(engine, args, stack))))
        state = State(args.state, fresh=args.fresh)
        cells = measure(bench, state, categories, args.temperatures, started)
        more = followed(bench, state, categories, args.temperatures)
        others, missing = replayed(cells, categories, scratch)
    rows = rows_of(cells)
    return {
        "benchmark": "report",
        "model": args.model,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "categories": [category.name for category in categories],
        "rows": rows,
        "pooled": pooled(cells),
        "against_best": against_best(cells),
        "followed": more,
        "against_best_followed": against_best_followed(more),
        "against_peers": against_peers(cells),
        "fastest_peers": fastest_peers(rows),
        "rejection": rejection_rows(cells),
        "frontier": frontier(cells),
        "replayed": others,
        "absent": bench.absent | missing,
        "settings": {name: getattr(plan, name) for name in plan.__slots__} | {"temperatures": args.temperatures},
        "exactness": engine.exactness,
        **common.environment(args.device, engine.threads),
    }


def read(name: str, args: argparse.Namespace, engine: Engine, scratch: Path) -> Category:
    tokenizer, longest = engine.tokenizer, min(args.max_prompt, engine.max_model_len - args.max_tokens)
    if name == "repository":
        say(f"making a datastore of {args.package}")
        return repository(args.package, tokenizer, scratch / "store", args.prompts, longest)
    return read_category(name, args.data, tokenizer, args.prompts, longest)


def default_drafters(engine: Engine) -> list[str]:
    """Those that need no weights of their own."""
    n_layers = engine.runner.model.config.get_text_config().num_hidden_layers
    return ["recycling", "lookahead", f"layers:{max(1, n_layers // LAYERS_SHARE)}", "counts:2", "counts:3"]


def peers(engine: Engine, args: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Callable[[], Peer]]:
    if not args.against:
        return {}
    task = Task(
        weights_folder(args, engine, stack),
        SamplingParams(max_tokens=args.max_tokens),
        engine.eos_token_ids,
        threads=engine.threads,
        max_len=min(engine.max_model_len, -(-(args.max_prompt + args.max_tokens) // 256) * 256),
        device=args.device,
        dtype=args.dtype,
        gguf=gguf_file(args.model),
    )
    vllm_python = args.vllm_python or (LOCAL_VLLM if LOCAL_VLLM.exists() else None)
    return {name: partial(open_peer, name, task, vllm_python) for name in args.against}


def write(document: dict[str, Any], out: Path) -> None:
    """REPORT.md, and its pictures where matplotlib is installed. What it says is in the document."""
    from benchmarks import report_plots

    plots = out / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    rows = document["rows"]
    report_plots.draw_drafters(plots / "drafters.svg", rows, document["categories"])
    if 0 in document["settings"]["temperatures"]:
        report_plots.draw_speed(plots / "speed.svg", rows, document["fastest_peers"], PEERS)
        report_plots.draw_frontier(plots / "frontier.svg", document["frontier"])
        report_plots.draw_acceptance(plots / "acceptance.svg", document["pooled"])
    (out / "REPORT.md").write_text(write_report(document), encoding="utf-8")
    say(f"wrote {out / 'REPORT.md'}")


def commit() -> str:
    """The last commit of the package, with a + where files differ from it; "unknown" outside a repository."""

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", HERE.parent, *command], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("log", "-1", "--format=%h", "--", "ngramspec", "datastore") + "+" * bool(
            git("status", "--porcelain", "ngramspec", "datastore")
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").split("\n")[0])
    common.model_options(parser)
    parser.add_argument(
        "--data", type=Path, default=DATA, metavar="DIR", help="spec_bench.jsonl, humaneval.jsonl and others; default ../shared/data"
    )
    parser.add_argument("--minutes", type=float, default=55.0, metavar="M", help="for all of it; the least is one prompt for each category")
    parser.add_argument("--prompts", type=common.positive, default=12, metavar="N", help="at most so many for each category")
    parser.add_argument("--max-tokens", type=common.positive, default=64, metavar="K")
    parser.add_argument("--max-prompt", type=common.positive, default=768, metavar="K", help="longer prompts are left out")
    parser.add_argument("--categories", type=choice_of(CATEGORIES), default=list(CATEGORIES), metavar="C,...", help=",".join(CATEGORIES))
    parser.add_argument("--temperatures", type=temperatures, default=[0.0, 0.8], metavar="T,...", help="other tools run at 0")
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="NAME[:ARG]",
        help="as ngramspec complete has it; may be repeated; default: all without weights",
    )
    parser.add_argument("--against", type=peer_names, default=list(NAMES), metavar="P,...", help=f"{','.join(NAMES)}; '' for none")
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help=f"default {LOCAL_VLLM} if it is there")
    parser.add_argument("--package", default="networkx", metavar="P", help="installed; its files are the repository")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR")
    parser.add_argument(
        "--state", type=Path, default=HERE / ".report" / "cells.jsonl", metavar="F.jsonl", help="what is measured is kept here"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what is kept")
    args = parser.parse_args(argv)
    wanted = {file for name in args.categories for file in CATEGORIES[name]}
    if missing := sorted(file for file in wanted if not (args.data / file).is_file()):
        parser.error(f"--data: {args.data} lacks {', '.join(missing)}; other categories can be chosen with --categories")
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


def choice_of(known: dict[str, Any]) -> Callable[[str], list[str]]:
    def choose(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return choose


def temperatures(text: str) -> list[float]:
    try:
        return sorted({float(part) for part in text.split(",")})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"temperatures with commas between, got {text!r}") from error


if __name__ == "__main__":
    main()
