"""What the CUDA path does on this machine's GPU, part by part.

    python -m benchmarks.gpu [--only PART,PART | --share 1/3] [--out F.json] [--prompts F.jsonl] [--trace F.jsonl] [--tokenizer M] ...

Parts, in their order: the CUDA tests; a mixture of experts (passes, kernels and identical texts); whether texts are identical; passes by
rows; what exactness costs; the kernels of a pass; recorded edits replayed; the host's share of a step; transformers' own generation; the
memory's speed. Each runs in a process of its own, so that one that fails or takes too long is recorded and the others go on. All of them
take forty minutes at most; `--share 1/3`, `2/3` and `3/3` are parts that fit ten minutes each, without the mixture, and with `--out` the
document grows from call to call. Progress goes to standard error, a table and a last line of JSON to standard output. Without a device:
exit code 2, and what would have been measured. With a part that failed: 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import print_progress
from benchmarks.gpu import parts
from benchmarks.gpu.parts import Figures, Named, Plan

NO_DEVICE = 2
COMMAND = [sys.executable, "-m", "benchmarks.gpu"]
TARGETS = Path(__file__).with_name("targets.toml")


MODELS = {
    "large": "timed passes",
    "small": "identity on real text",
    "code": "replayed edits",
    "hybrid": "recurrent layers",
    "moe": "experts",
}
# The parts by name, those first that are missed most if there is no time for all: the third each belongs to (0: none), the seconds it may
# take, what it does.
PARTS: dict[str, tuple[int, int, Callable[[Plan], Named]]] = {
    "tests": (1, 240, parts.run_tests),
    "moe": (0, 400, parts.measure_experts),
    "identity": (2, 340, parts.check_identity),
    "passes": (1, 205, parts.measure_passes),
    "exactness": (2, 130, parts.compare_products),
    "kernels": (1, 110, parts.profile_kernels),
    "replay": (3, 260, parts.replay),
    "host": (2, 130, parts.measure_host),
    "generate": (3, 300, parts.generate),
    "floor": (1, 45, parts.measure_floor),
}


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    plan = make_plan(args)
    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"there is no CUDA device here ({plan.device}); nothing was measured", file=sys.stderr)
        show_intent(plan, args.only)
        sys.exit(NO_DEVICE)
    if args.child:
        serve(args.child, plan)
        return
    known: dict[str, Any] = {}
    if args.out and args.out.is_file():
        known = json.loads(args.out.read_text())["parts"]
    document: dict[str, Any] = {}
    for name in args.only:
        limit = args.limit or PARTS[name][1]
        print_progress(f"\n==== {name}, at most {limit} s")
        for part in run_part(name, argv, limit):
            known[name] = part
            document = make_document(plan, known)
            if args.out:
                args.out.write_text(json.dumps(document, ensure_ascii=False) + "\n")
        print_progress(f"==== {name}: {part['seconds']} s{', ' + part['error'] if part['error'] else ''}")
    show(document)
    common.print_document(document)
    if any(known[name]["error"] for name in args.only):
        sys.exit(1)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = common.make_parser("gpu", __doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", type=common.make_name_parser(PARTS), default=list(PARTS), metavar="PART,PART", help=",".join(PARTS))
    which.add_argument("--share", dest="only", type=parse_share, metavar="K/3", help="a third of the parts, which fits ten minutes")
    parser.add_argument("--out", type=Path, metavar="F.json", help="keep the document here too, with the parts of earlier calls")
    usual = dataclasses.asdict(Plan()) | {"small": parts.choose_small_model()}
    parser.add_argument("--device", type=common.parse_device, default=usual["device"], metavar="cuda:N", help="cpu tries the program out")
    parser.add_argument("--dtype", choices=common.DTYPES)
    for name, what in MODELS.items():
        parser.add_argument(f"--{name}", default=usual[name], metavar="M", help=f"model of {what}; default {usual[name]}")
    parser.add_argument("--tokenizer", metavar="M", help="of prompts and traces; default the small model's, else words")
    for name, what in (("prompts", "identity on the small model; default random ids"), ("trace", "the replay; default library edits")):
        parser.add_argument(f"--{name}", type=common.parse_file, metavar="F.jsonl", help=f"of {what}")
    parser.add_argument("--limit", type=common.parse_positive, metavar="S", help="seconds that a part may take, instead of its own limit")
    parser.add_argument("--tiny", action="store_true", help="little of everything: whether it runs, not how fast")
    parser.add_argument("--child", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.only = [name for name in PARTS if name in args.only]
    return args


def make_plan(args: argparse.Namespace) -> Plan:
    tokenizer = args.tokenizer or ("smollm2" if args.small == "smollm2" else None)
    chosen: dict[str, Any] = {name: getattr(args, name) for name in ("device", "large", "small", "code", "prompts", "trace")}
    chosen |= {"dtype": common.settle_dtype(args.device, args.dtype), "tokenizer": tokenizer}
    if args.tiny:
        chosen |= {
            "context": 32,
            "contexts": (32, 64),
            "rows": (1, 2, 8),
            "batches": (1, 2),
            "lengths": (2,),
            "repeat": 2,
            "n_prompts": 4,
            "n_traces": 2,
        }
        chosen |= {"max_tokens": 8, "kv_bytes": 16 << 20, "tests": ("--collect-only", "-m", "cuda", "tests/benchmarks/test_benchmarks.py")}
    return Plan(**chosen)


def parse_share(text: str) -> list[str]:
    if text not in ("1/3", "2/3", "3/3"):
        raise argparse.ArgumentTypeError(f"must be 1/3, 2/3 or 3/3, got {text!r}")
    return [name for name, (third, _, _) in PARTS.items() if third == int(text[0])]


def serve(name: str, plan: Plan) -> None:
    """Run a part in its own process: print its figures as lines of JSON on standard output, on which nothing else may write."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if plan.device.startswith("cuda"):
        torch.cuda.set_device(plan.device)  # passes are timed from this thread too
    for key, figures in PARTS[name][2](plan):
        print(json.dumps([key, figures]), file=answers, flush=True)


def run_part(name: str, argv: Sequence[str], limit_s: float) -> Iterator[dict[str, Any]]:
    """Run a part in a process of its own: {"seconds", "error" (None: it went well), "figures"}, after each figure and at its end."""
    start = time.perf_counter()
    figures: Figures = {}

    def describe(error: str | None) -> dict[str, Any]:
        return {"seconds": round(time.perf_counter() - start, 1), "error": error, "figures": figures}

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
                print_progress(f"{name}: {key} after {time.perf_counter() - start:.0f} s")
                yield describe("not finished")
            code = process.wait()
        except BaseException:
            end()
            raise
        finally:
            timer.cancel()
    error = f"stopped after {limit_s:g} s" if ended.is_set() else f"ended with code {code}; see its messages" if code else None
    if error is None and figures.get("pytest", {}).get("exit_code") not in (None, 0, 5):  # 5: there was nothing to run
        error = "tests failed"
    yield describe(error)


def make_document(plan: Plan, known: dict[str, Any]) -> dict[str, Any]:
    names = (*MODELS, "dtype", "context", "repeat", "n_prompts", "max_tokens")
    settings = {name: getattr(plan, name) for name in names}
    settings |= {"prompts": plan.prompts.name if plan.prompts else "random", "trace": plan.trace.name if plan.trace else "library"}
    return {
        "benchmark": "gpu",
        "targets": [evaluate_target(target, plan, known) for target in tomllib.loads(TARGETS.read_text())["target"]],
        "parts": known,
        "settings": settings | {"tokenizer": Path(plan.tokenizer).name if plan.tokenizer else "words"},
        **common.describe_machine(plan.device, torch.get_num_threads()),
    }


def evaluate_target(target: dict[str, Any], plan: Plan, known: dict[str, Any]) -> dict[str, Any]:
    """Return a target with its value in the parts' figures, None where it was not measured."""
    figures = {name: part["figures"] for name, part in known.items()}
    values, value, met = [], None, None
    for path in target["figure"]:
        found: list[Any] = [figures]
        for part in path.split("/"):
            name = part.format(large=plan.large, small=plan.small, hybrid=plan.hybrid, moe=plan.moe, last=plan.batches[-1])
            found = [each[key] for each in found for key in each if name in (key, "*")]
        values.append(found)
    if all(values) and None not in (flat := [each for found in values for each in found]):
        value = min(flat) if "at_most" not in target else max(flat)
        met = target.get("at_least", -math.inf if "at_most" in target else True) <= value <= target.get("at_most", math.inf)
    goal = next((f"{sign} {target[bound]:g}" for bound, sign in (("at_most", "<="), ("at_least", ">=")) if bound in target), "all")
    what = target["what"].format(large=plan.large, small=plan.small, hybrid=plan.hybrid, moe=plan.moe, last=plan.batches[-1])
    return {"what": what, "value": value, "goal": goal, "met": met}


def show_intent(plan: Plan, names: Sequence[str]) -> None:
    """Print what would be measured, and what each figure of it should be."""
    print("With a device this would measure:")
    for name in names:
        third, limit, part = PARTS[name]
        call = f"call {third} of 3" if third else "a call of its own"
        print(f"  {name} ({call}, at most {limit} s): {(part.__doc__ or '').splitlines()[0]}")
    models = ", ".join(getattr(plan, name) for name in MODELS)
    print(f"on {models} in {plan.dtype}, with {max(plan.contexts)} tokens of context at most.\n")
    figures = [
        target for target in tomllib.loads(TARGETS.read_text())["target"] if any(part_of(path) in names for path in target["figure"])
    ]
    rows = [[target["what"], target["goal"]] for target in (evaluate_target(each, plan, {}) for each in figures)]
    common.print_table(["figure", "should be"], rows)


def part_of(path: str) -> str:
    """Return the part whose figures a target's path leads through."""
    return path.partition("/")[0]


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
    common.run_command(main)
