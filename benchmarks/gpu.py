"""What the CUDA path does on this machine's GPU, part by part.

    python -m benchmarks.gpu [--only PART,PART | --share 1/3] [--out F.json] [--prompts F.jsonl] [--trace F.jsonl] [--tokenizer M] ...

Parts: the CUDA tests; the memory's speed; passes by rows; the kernels of a pass; the host's share of a step; what exactness costs; whether
texts are identical; recorded edits replayed; transformers' own generation. Each runs in a process of its own, so that one that fails
or takes too long is recorded and the others go on. All of them take half an hour at most; `--share 1/3`, `2/3` and `3/3` are parts that
fit ten minutes each, and with `--out` the document grows from call to call. Progress goes to standard error, a table and a last line of
JSON to standard output. Without a device: exit code 2. With a part that failed: 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, gpu_passes, gpu_texts
from benchmarks.gpu_plan import Figures, Part, Plan, say, smallest

NO_DEVICE = 2
COMMAND = [sys.executable, "-m", "benchmarks.gpu"]


def tests(plan: Plan) -> Iterator[tuple[str, Figures]]:
    """The tests that need a device."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", "-rfE", *plan.tests]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line.strip())
    counts = {word.rstrip("s"): int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", " ".join(lines[-3:]))}
    failures = [line[:300] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    yield "pytest", {"exit_code": process.returncode, **counts, "failures": failures}


PARTS: dict[str, tuple[int, int, Part]] = {
    "tests": (1, 230, tests),
    "floor": (1, 45, gpu_passes.floor),
    "passes": (1, 170, gpu_passes.passes),
    "kernels": (1, 110, gpu_passes.kernels),
    "host": (2, 130, gpu_passes.host),
    "exactness": (2, 130, gpu_passes.exactness),
    "identity": (2, 310, gpu_texts.identity),
    "replay": (3, 260, gpu_texts.replay),
    "generate": (3, 300, gpu_texts.generate),
}
"""By name: the third it belongs to, the seconds it may take, what it does."""

Targets = list[tuple[str, Callable[[dict[str, Figures]], Any], str, Callable[[Any], bool]]]


def targets(plan: Plan) -> Targets:
    """What is to be shown: words, its value in the parts' figures (KeyError: not measured), the goal, whether it is met."""
    large, small, last = plan.large, plan.small, plan.batches[-1]

    def least_ratio(parts: dict[str, Figures]) -> float:
        return min(
            row["on_against"] for model in (small, large) for row in parts["generate"][model]["peers"].values() if "absent" not in row
        )

    def at_most(goal: float) -> tuple[str, Callable[[Any], bool]]:
        return f"<= {goal:g}", lambda value: value <= goal

    def at_least(goal: float) -> tuple[str, Callable[[Any], bool]]:
        return f">= {goal:g}", lambda value: value >= goal

    def all_of(parts: dict[str, Figures], model: str) -> bool:
        return all(parts["identity"][f"{model}, {name}"]["all_identical"] for name in ("greedy", "seeded"))

    yes: tuple[str, Callable[[Any], bool]] = ("all", bool)
    return [
        ("1 row over the reading of the weights", lambda p: p["passes"][large]["over_floor"]["1"], *at_most(1.20)),
        *(
            (f"{n} rows over 1 row", lambda p, n=n: p["passes"][large]["over_one_row"][str(n)], *at_most(goal))
            for n, goal in ((8, 1.05), (16, 1.08), (64, 1.25))
        ),
        (f"host's share, {large}", lambda p: p["host"][f"{large}, off"]["host_share"], *at_most(0.05)),
        (f"host's share with drafts, {large}", lambda p: p["host"][f"{large}, drafts"]["host_share"], *at_most(0.05)),
        (f"host's share, {small}", lambda p: p["host"][f"{small}, off"]["host_share"], *at_most(0.20)),
        (f"host's share with drafts, {small}", lambda p: p["host"][f"{small}, drafts"]["host_share"], *at_most(0.20)),
        (f"identical texts, {small}", lambda p: all_of(p, small), *yes),
        (f"identical texts, {large}", lambda p: all_of(p, large), *yes),
        ("exact over vendor, 1 row", lambda p: p["exactness"][large]["ratio"]["1"], *at_most(1.05)),
        ("replayed edits, on over off, batch 1", lambda p: p["replay"]["batch 1"]["speedup"], *at_least(5.0)),
        (f"the same, batch {last}", lambda p: p["replay"][f"batch {last}"]["speedup"], *at_least(1.0)),
        ("on over the best fixed length, batch 1", lambda p: p["replay"]["batch 1"]["on_against_best_fixed"], *at_least(1.0)),
        (f"the same, batch {last}", lambda p: p["replay"][f"batch {last}"]["on_against_best_fixed"], *at_least(1.0)),
        ("on over the fastest of transformers' generate", least_ratio, *at_least(1.0)),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    plan = make_plan(args)
    if plan.on_cuda and not torch.cuda.is_available():
        print(f"there is no CUDA device here ({plan.device}); nothing was measured", file=sys.stderr)
        sys.exit(NO_DEVICE)
    if args.child:
        serve(args.child, plan)
        return
    parts: dict[str, Any] = {}
    if args.out is not None and args.out.is_file():
        parts = json.loads(args.out.read_text())["parts"]
    document: dict[str, Any] = {}
    for name in args.only:
        say(f"\n==== {name}, at most {args.limit or PARTS[name][1]} s")
        parts[name] = run_part(name, argv, args.limit or PARTS[name][1])
        say(f"==== {name}: {parts[name]['seconds']} s{', ' + parts[name]['error'] if parts[name]['error'] else ''}")
        document = make_document(plan, parts)
        if args.out is not None:
            args.out.write_text(json.dumps(document, ensure_ascii=False) + "\n")
    show(document)
    common.print_document(document)
    if any(parts[name]["error"] for name in args.only):
        sys.exit(1)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", type=part_names, default=list(PARTS), metavar="PART,PART", help=",".join(PARTS))
    which.add_argument("--share", dest="only", type=share, metavar="K/3", help="a third of the parts, which fits ten minutes")
    parser.add_argument("--out", type=Path, metavar="F.json", help="keep the document here too, with the parts of earlier calls")
    usual = dataclasses.asdict(Plan()) | {"small": smallest()}
    parser.add_argument("--device", type=common.device, default=usual["device"], metavar="cuda:N", help="cpu tries the program out")
    parser.add_argument("--dtype", choices=common.DTYPES)
    for name, what in (("large", "timed passes"), ("small", "identity on real text"), ("code", "replayed edits")):
        parser.add_argument(f"--{name}", default=usual[name], metavar="M", help=f"model of {what}; default {usual[name]}")
    parser.add_argument("--tokenizer", metavar="M", help="of prompts and traces; default the small model's, else words")
    parser.add_argument("--prompts", type=Path, metavar="F.jsonl", help="prompts for identity on the small model; default random ids")
    parser.add_argument("--trace", type=Path, metavar="F.jsonl", help="recorded edits to replay; default edits of the standard library")
    parser.add_argument("--limit", type=common.positive, metavar="S", help="seconds that a part may take, instead of its own limit")
    parser.add_argument("--tiny", action="store_true", help="little of everything: whether it runs, not how fast")
    parser.add_argument("--child", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("prompts", "trace"):
        path = getattr(args, name)
        if path is not None and not path.is_file():
            parser.error(f"--{name}: there is no file {str(path)!r}")
    return args


def make_plan(args: argparse.Namespace) -> Plan:
    tokenizer = args.tokenizer or ("smollm2" if args.small == "smollm2" else None)
    chosen: dict[str, Any] = {name: getattr(args, name) for name in ("device", "large", "small", "code", "prompts", "trace")}
    chosen |= {"dtype": common.settle_dtype(args.device, args.dtype), "tokenizer": tokenizer}
    if args.tiny:
        chosen |= {"context": 32, "rows": (1, 2, 8), "batches": (1, 2), "lengths": (2,), "repeat": 2, "n_prompts": 4, "n_traces": 2}
        chosen |= {"max_tokens": 8, "kv_bytes": 16 << 20, "tests": ("--collect-only", "-m", "cuda", "tests/benchmarks/test_benchmarks.py")}
    return Plan(**chosen)


def part_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def share(text: str) -> list[str]:
    if text not in ("1/3", "2/3", "3/3"):
        raise argparse.ArgumentTypeError(f"must be 1/3, 2/3 or 3/3, got {text!r}")
    return [name for name, (third, _, _) in PARTS.items() if third == int(text[0])]


def serve(name: str, plan: Plan) -> None:
    """In the part's own process: its figures as lines of JSON on standard output, on which nothing else may write."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if plan.on_cuda:
        torch.cuda.set_device(plan.device)  # passes are timed from this thread too
    for key, figures in PARTS[name][2](plan):
        print(json.dumps([key, figures]), file=answers, flush=True)


def run_part(name: str, argv: Sequence[str], limit_s: float) -> dict[str, Any]:
    """A part in a process of its own: {"seconds", "error" (None: it went well), "figures"}, with what it gave before it failed."""
    start = time.perf_counter()
    figures: Figures = {}
    ended = threading.Event()
    with subprocess.Popen([*COMMAND, *argv, "--child", name], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:

        def end() -> None:
            ended.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started goes with it

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                key, value = json.loads(line)
                figures[key] = value
                say(f"{name}: {key} after {time.perf_counter() - start:.0f} s")
            code = process.wait()
        except BaseException:
            end()
            raise
        finally:
            timer.cancel()
    error = f"stopped after {limit_s:g} s" if ended.is_set() else f"ended with code {code}; see its messages" if code else None
    if error is None and figures.get("pytest", {}).get("exit_code") not in (None, 0, 5):  # 5: there was nothing to run
        error = "tests failed"
    return {"seconds": round(time.perf_counter() - start, 1), "error": error, "figures": figures}


def make_document(plan: Plan, parts: dict[str, Any]) -> dict[str, Any]:
    figures = {name: part["figures"] for name, part in parts.items()}
    reached = []
    for what, value_of, goal, met in targets(plan):
        try:
            value = value_of(figures)
        except (KeyError, ValueError):
            value = None
        reached.append({"what": what, "value": value, "goal": goal, "met": None if value is None else met(value)})
    settings = {name: getattr(plan, name) for name in ("large", "small", "code", "dtype", "context", "repeat", "n_prompts", "max_tokens")}
    settings |= {"prompts": plan.prompts.name if plan.prompts else "random", "trace": plan.trace.name if plan.trace else "library"}
    return {
        "benchmark": "gpu",
        "targets": reached,
        "parts": parts,
        "settings": settings | {"tokenizer": Path(plan.tokenizer).name if plan.tokenizer else "words"},
        **common.environment(plan.device, torch.get_num_threads()),
    }


def show(document: dict[str, Any]) -> None:
    words = {True: "yes", False: "NO", None: "not measured"}
    rows = [
        [row["what"], row["value"] if not isinstance(row["value"], bool) else words[row["value"]], row["goal"], words[row["met"]]]
        for row in document["targets"]
    ]
    common.print_table(["", "value", "goal", "met"], rows)
    for name, part in document["parts"].items():
        print(f"{name}: {part['seconds']} s{', FAILED: ' + part['error'] if part['error'] else ''}")


if __name__ == "__main__":
    main()
