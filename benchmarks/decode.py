"""How much faster is speculation, and is the text the same?

    python -m benchmarks.decode --model M | --random-weights CONFIG [--device cpu|cuda:N] [--dtype D]
        --prompts F.jsonl | --random-prompts N | --trace [F.jsonl] [--limit N] [--max-tokens K] [--temperature T --seed S]
        [--concurrency C [--per-turn M]] [--fixed-length N,N] [--against PEER,PEER (see --help)] [--vllm-python PATH] [--llama-python PATH]
        [--precision auto|int8|float32]
    python -m benchmarks.decode --identity --model M --prompts F.jsonl [--prompts F.jsonl ...] [--limit N] [--max-tokens K]
        [--temperature T --seed S] [--modes off@8,on@1,on@8,off@1] [--log F.jsonl]

Every prompt (every C prompts, handed in together) is completed with speculation off, on, and by each peer, in turns; so all see the same
machine. With `--per-turn M` a turn has M prompts of which C run at a time, the next one as soon as one ends, as a server's queue has them;
without it the last text of C runs alone. A rate counts generated tokens over the whole time from the prompt to the last of them.
`identical`: with speculation on, and by a peer, the same tokens as with speculation off. Progress goes to standard error, a table and a
last line of JSON to standard output.

With `--trace` a recording is replayed ("replayed": true): every pass runs, and the text is that of the recorded outputs, whatever the
model would have written. So a model of random weights shows the time, and a real model's text what drafts are worth.

With `--identity` nothing is timed: every prompt is completed in every mode, speculation off or on, as many prompts at a time as the mode
says, and the first mode is what the others are compared with. `--log` keeps each text's digest as it is done, and a later call with the
same code and settings goes on from there. The exit status is 1 if a text differs.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks import common
from benchmarks.common import Prompt, print_progress
from benchmarks.our_engine import FixedCost, FixedLength, OurEngine, describe_engine, find_gguf_files
from benchmarks.peers import (
    LLAMA_LOOKUP,
    LOCAL_VLLM,
    NAMES,
    Contender,
    Peer,
    PeerAbsentError,
    PeerTask,
    TimedRun,
    add_llama_python_option,
    open_peer,
)
from benchmarks.recordings import Recital, read_recorded_prompts
from ngramspec import Engine, SamplingParams, Stats
from ngramspec.datastore.format import MANIFEST
from ngramspec.models.loader import load_model, load_tokenizer

# Options that the document repeats.
SETTINGS = (
    "limit",
    "max_tokens",
    "temperature",
    "seed",
    "concurrency",
    "per_turn",
    "spec_rows",
    "no_answers",
    "no_recycle",
    "no_syntax",
    "cost",
    "tokenizer",
    "precision",
)
# Further options on which a text may depend.
TEXT_SETTINGS = ("device", "dtype", "linears", "tokenizer", "threads")
MAX_SEQS = 64  # of an engine, or more if --concurrency wants it


class Mode(NamedTuple):
    """A way to complete prompts that are compared for identity."""

    speculation: bool
    concurrency: int

    def __str__(self) -> str:
        return f"{'on' if self.speculation else 'off'}@{self.concurrency}"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with open_engine(args) as engine:
        document = compare_texts(engine, args) if args.identity else measure(engine, args)
    (print_identity if args.identity else print_figures)(document)
    common.print_document(document)
    if args.identity and not document["identical"]:
        sys.exit(1)


def open_engine(args: argparse.Namespace, **options: Any) -> Engine:
    """Open an engine for `measure`. Raises what `Engine` raises."""
    if args.spec_rows:
        options["spec_rows"] = args.spec_rows
    if args.no_answers:
        options["answers"] = 0
    return Engine(
        args.model,
        tokenizer=None if args.tokenizer is None else load_tokenizer(args.tokenizer),
        linears=args.linears,
        max_seqs=args.concurrency if args.per_turn else max(MAX_SEQS, args.concurrency),
        datastore=args.datastore,
        recycle=not args.no_recycle,
        syntax=not args.no_syntax,
        progress=print_progress,
        **common.get_engine_options(args),
        **options,
    )


def make_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON document of a comparison on this engine, which `open_engine` opened."""
    common.finish_start(engine)
    if args.cost != "measured":
        engine.use(cost=FixedCost(common.SLOPES[args.cost], engine.cost.max_rows))
    params = make_params(args)
    prompts, skipped = choose_prompts(args, engine)
    by_prompt: Any = params
    if args.trace:
        recital = Recital(prompts)
        engine.use(acceptance=recital)
        by_prompt = partial(recital.make_params, params)
    contenders: dict[str, Contender] = {"off": OurEngine(engine, by_prompt, False), "on": OurEngine(engine, by_prompt)}
    for length in args.fixed_length:
        drafts = FixedLength(length, vocab_size=engine.vocab_size, max_seqs=max(MAX_SEQS, args.concurrency))
        contenders[f"fixed {length}"] = OurEngine(engine, by_prompt, speculator=drafts)
    absent: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        task = make_peer_task(args, engine, params, max(len(prompt.ids) for prompt in prompts), stack) if args.against else None
        for name in args.against:
            print_progress(f"starting {name}")
            try:
                contenders[name] = stack.enter_context(contextlib.closing(open_peer(name, task, args.vllm_python, args.llama_python)))
            except PeerAbsentError as error:
                absent[name] = str(error)
                print_progress(f"{name} is absent: {error}")
        warm_up(contenders, absent, [prompt.ids for prompt in prompts[: args.concurrency]])
        runs = compare(contenders, absent, prompts, args.per_turn or args.concurrency)
    source = "random" if args.random_prompts else args.prompts[-1].name if args.prompts else "library"
    document = {
        "model": args.model,
        "prompts": len(prompts),
        "skipped": skipped,
        "replayed": bool(args.trace),
        **make_figures(runs, absent, sampled=args.temperature > 0),
        "settings": {
            "prompts": (args.trace.name or "library") if args.trace else source,
            **{name: getattr(args, name) for name in SETTINGS},
            "datastore": [Path(path).name for path in args.datastore],
        },
        **describe_engine(engine),
        **common.describe_machine(args.device, engine.threads),
    }
    document["versions"] |= {name: peer.version for name, peer in contenders.items() if isinstance(peer, Peer)}
    return document


def compare_texts(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON document of a comparison of texts in every mode."""
    common.finish_start(engine)
    log, first, result, n_tokens = common.ResultLog(args.log), str(args.modes[0]), dict[str, Any](), 0
    settings = {name: getattr(args, name) for name in ("model", "precision", "max_tokens", "temperature", "seed")}
    for path in args.prompts:
        prompts = common.pick_fitting(common.read_prompts(path, engine.tokenizer, args.limit), args.max_tokens, engine.max_model_len)
        same = {"set": path.stem, "code": common.digest_code(args.device), **{name: getattr(args, name) for name in TEXT_SETTINGS}}
        keys = {p.name: settings | same | {"prompt": p.name, "asked": common.hash_outputs([p.ids])} for p in prompts}
        row = result[path.stem] = {"prompts": len(prompts)}
        for mode in args.modes:
            ours, name = OurEngine(engine, make_params(args), mode.speculation), str(mode)
            todo = [prompt for prompt in prompts if log.get(keys[prompt.name] | {"mode": name}) is None]
            for group in cut_groups(todo, mode.concurrency):
                for prompt, text in zip(group, ours.complete([prompt.ids for prompt in group]).outputs, strict=True):
                    log.add({"key": keys[prompt.name] | {"mode": name}, "digest": common.hash_outputs([text]), "tokens": len(text)})
            pairs = [(log.get(key | {"mode": first}), log.get(key | {"mode": name})) for key in keys.values()]
            row[name] = sum(a["digest"] == b["digest"] for a, b in pairs)
            n_tokens += sum(b["tokens"] for _, b in pairs)
            print_progress(f"{name} {path.stem}: {row[name]} of {len(prompts)} are as {first}")
    return {
        "model": args.model,
        "identical": all(n == row["prompts"] for row in result.values() for n in row.values()),
        "tokens": n_tokens,
        "sets": result,
        "settings": {"modes": list(map(str, args.modes)), "limit": args.limit, **settings},
        **describe_engine(engine),
        **common.describe_machine(args.device, engine.threads),
    }


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.make_parser("decode", __doc__)
    common.add_model_options(parser)
    common.add_linears_option(parser)
    add = parser.add_argument
    add("--tokenizer", metavar="M", help="this model's tokenizer; random weights without it: words for tokens")
    source = parser.add_mutually_exclusive_group()
    text = "rows with `prompt` (and `suffix`) or `messages`; without it, functions of the standard library; of several --identity takes all"
    source.add_argument("--prompts", type=common.parse_file, action="append", metavar="F.jsonl", help=text)
    text = "N prompts of random words, by default at temperature 1.5: nothing repeats"
    source.add_argument("--random-prompts", type=common.parse_positive, metavar="N", help=text)
    text = "replay recorded outputs (rows as replay reads them); without a file, edits of the standard library"
    source.add_argument("--trace", type=common.parse_file, nargs="?", const=Path(), metavar="F.jsonl", help=text)
    add("--limit", type=common.parse_positive, metavar="N", help="only the first N prompts (of each file)")
    add("--max-tokens", type=common.parse_positive, metavar="K", help="default 128, with --trace 512")
    add("--temperature", type=common.parse_number, metavar="T", help="0, the default, is greedy")
    add("--seed", type=int, default=0, metavar="S", help="of sampling and of random prompts")
    add("--concurrency", type=common.parse_positive, default=1, metavar="C", help="prompts completed at once")
    add("--per-turn", type=common.parse_positive, metavar="M", help="prompts of a turn, C of which run at a time; default C")
    add(
        "--fixed-length",
        type=common.parse_counts,
        default=[],
        metavar="N,N,...",
        help="also with drafts of a fixed length, as peers make them",
    )
    add_peer_options(parser, [])
    add(
        "--datastore", type=parse_datastore, action="append", default=[], metavar="D", help="draft from this datastore too; may be repeated"
    )
    add("--spec-rows", type=common.parse_positive, metavar="N", help="most draft tokens of a sequence in a pass")
    add("--no-answers", action="store_true", help="do not draft from the answers to earlier prompts")
    add("--no-recycle", action="store_true", help="do not draft from the model's own candidates")
    add("--no-syntax", action="store_true", help="do not draft by the syntax table")
    add("--cost", choices=["measured", *common.SLOPES], default="measured", help="what drafts are told a row costs; or as in replay")
    add("--identity", action="store_true", help="compare texts in every mode; nothing is timed")
    add("--modes", type=parse_modes, default="off@8,on@1,on@8,off@1", metavar="off@8,on@1,...", help="of --identity")
    add("--log", type=Path, metavar="F.jsonl", help="of --identity: keep what is done here, and go on from it")
    args = parser.parse_args(argv)
    if args.trace and (args.against or args.temperature):
        parser.error("--trace: only ngramspec can follow a recording, and greedily; leave --against and --temperature out")
    if args.per_turn and (args.against or args.identity):
        parser.error("--per-turn: peers and --identity take all prompts of a turn at once; leave --against and --identity out")
    if args.identity and not args.prompts:
        parser.error("--identity: --prompts is needed")
    if args.identity and len(set(args.modes)) < 2:
        parser.error(f"--modes: two different ones are compared, got {args.modes[0]} alone")
    if args.temperature is None:
        args.temperature = 1.5 if args.random_prompts else 0.0
    args.max_tokens = args.max_tokens or (512 if args.trace else 128)
    args.no_recycle = args.no_recycle or args.trace is not None  # the model's own candidates are not the recorded model's
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


def add_peer_options(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    parser.add_argument("--against", type=common.make_name_parser(NAMES), default=list(default), metavar="PEERS", help=",".join(NAMES))
    text = f"interpreter of an environment with vLLM; default {LOCAL_VLLM} if it is there"
    local = LOCAL_VLLM if LOCAL_VLLM.exists() else None
    parser.add_argument("--vllm-python", type=Path, default=local, metavar="PATH", help=text)
    add_llama_python_option(parser)


def parse_datastore(text: str) -> str:
    if not (Path(text) / MANIFEST).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a datastore")
    return text


def parse_modes(text: str) -> list[Mode]:
    found = []
    for name in text.split(","):
        state, _, count = name.strip().partition("@")
        if state not in ("on", "off") or not count.isdecimal() or int(count) < 1:
            raise argparse.ArgumentTypeError(f"a mode is on@N or off@N, N prompts at a time, got {name!r}")
        found.append(Mode(state == "on", int(count)))
    return found


def choose_prompts(args: argparse.Namespace, engine: Engine) -> tuple[list[Prompt], int]:
    """Return the prompts asked for, and how many were left out because with their output the model could not hold them."""
    tokenizer = engine.tokenizer or common.WordTokenizer(engine.vocab_size)
    if args.trace:
        try:
            prompts = read_recorded_prompts(
                args.trace if args.trace.name else None, tokenizer, engine.vocab_size, args.limit, args.max_tokens
            )
        except ValueError as error:
            raise SystemExit(f"--trace: {error}") from error
    elif args.random_prompts:
        prompts = common.make_random_prompts(tokenizer, args.random_prompts, args.seed)[: args.limit]
    elif args.prompts:
        prompts = common.read_prompts(args.prompts[-1], tokenizer, args.limit)
    else:
        prompts = common.make_library_prompts(tokenizer)[: args.limit]
    found = common.pick_fitting(prompts, args.max_tokens, engine.max_model_len)
    return found, len(prompts) - len(found)


def find_peer_folder(args: argparse.Namespace, engine: Engine, gguf: Path | None, stack: contextlib.ExitStack) -> Path:
    """Return the folder of the file or safetensors that the engine read, or else a copy of its weights that goes with the stack."""
    if gguf is not None and all(name in LLAMA_LOOKUP for name in args.against):
        return gguf.parent
    folder = Path(engine.runner.model.config.name_or_path)
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ngramspec-peers-")))
    load_model(args.model, dtype=getattr(torch, args.dtype)).model.save_pretrained(folder)
    if engine.tokenizer is not None:
        engine.tokenizer.save_pretrained(folder)
    return folder


def make_peer_task(
    args: argparse.Namespace, engine: Engine, params: SamplingParams, max_prompt: int, stack: contextlib.ExitStack
) -> PeerTask:
    """Return what peers are given."""
    gguf = next(iter(find_gguf_files(args.model)), None)
    max_len = min(engine.max_model_len, -(-(max_prompt + params.max_tokens) // 256) * 256)
    return PeerTask(
        find_peer_folder(args, engine, gguf, stack).absolute(),
        params,
        engine.eos_token_ids,
        threads=engine.threads,
        max_len=max_len,
        device=args.device,
        dtype=args.dtype,
        gguf=gguf,
    )


def cut_groups(items: list[Any], size: int) -> list[list[Any]]:
    """Return the items in groups of `size`, the last of which may be smaller."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def compare(
    contenders: dict[str, Contender],
    absent: dict[str, str],
    prompts: list[Prompt],
    per_turn: int,
    *,
    rounds: Mapping[str, int] = MappingProxyType({}),
    budget_s: float = math.inf,
) -> dict[str, list[TimedRun]]:
    """Return one run per contender and group of prompts, in turns. A contender that stops working is moved to `absent`.

    `rounds`: groups that a contender takes part in, all if not said; no new one is begun when half of it would be over the budget.
    """
    groups = cut_groups([prompt.ids for prompt in prompts], per_turn)
    runs: dict[str, list[TimedRun]] = {name: [] for name in contenders}
    start = time.perf_counter()
    for n, (group, order) in enumerate(zip(groups, common.order_turns(list(contenders), len(groups)), strict=True), 1):
        round_start = time.perf_counter()
        for name in order:
            if n <= rounds.get(name, n) and (run := complete_or_drop(name, contenders, absent, group)) is not None:
                runs[name].append(run)
        rates = "  ".join(f"{name} {find_rate(runs[name]):.1f}" for name in contenders)
        same = f"identical {count_identical(runs['off'], runs['on'])}  " if "on" in runs else ""
        print_progress(f"{n}/{len(groups)}  {same}tok/s: {rates}")
        now = time.perf_counter()
        if now - start + (now - round_start) / 2 > budget_s:
            break
    return {name: runs[name] for name in contenders}


def warm_up(contenders: dict[str, Contender], absent: dict[str, str], group: list[list[int]]) -> None:
    """Run each contender once, so that what its first call makes is not timed; with reversed prompts, by which no cache gains."""
    for name in list(contenders):
        complete_or_drop(name, contenders, absent, [ids[::-1] for ids in group])


def complete_or_drop(name: str, contenders: dict[str, Contender], absent: dict[str, str], group: list[list[int]]) -> TimedRun | None:
    """Return a run; None of a contender that is absent or leaves now."""
    if name not in contenders:
        return None
    start = time.perf_counter()
    try:
        run = contenders[name].complete(group)
    except PeerAbsentError as error:
        absent[name] = str(error)
        del contenders[name]
        print_progress(f"{name} stopped: {error}")
        return None
    run.wall_s = time.perf_counter() - start
    return run


def make_figures(runs: Mapping[str, list[TimedRun]], absent: Mapping[str, str], *, sampled: bool) -> dict[str, Any]:
    """Return the figures of the JSON document."""
    off, on, stats = runs["off"], runs["on"], Stats.sum(run.stats for run in runs["on"])
    peers, fixed = dict[str, Any](), dict[str, Any]()
    for name, theirs in runs.items():
        if name in ("off", "on"):
            continue
        length = name.removeprefix("fixed ")
        row = {
            "tok_s": round(find_rate(theirs), 2),
            "identical": None if sampled and length == name else count_identical(off, theirs),  # peers' generators are others
            "tokens": sum(run.n_tokens for run in theirs),
            "off_against": round(find_rate(off) / find_rate(theirs), 3),
            "on_against": round(find_rate(on) / find_rate(theirs), 3),
            "off_against_median": round(find_median_ratio(off, theirs), 3),
            "on_against_median": round(find_median_ratio(on, theirs), 3),
        }
        if length == name:
            peers[name] = row
        else:
            drafts = Stats.sum(run.stats for run in theirs)
            fixed[length] = row | {"tokens_per_pass": round(drafts.tokens_per_pass, 3), "rows_per_pass": round(drafts.rows_per_pass, 3)}
    return {
        "tokens": sum(run.n_tokens for run in off),
        "identical": count_identical(off, on),
        "tok_s_off": round(find_rate(off), 2),
        "tok_s_on": round(find_rate(on), 2),
        "speedup": round(find_rate(on) / find_rate(off), 3),
        "speedup_median": round(find_median_ratio(on, off), 3),
        "tokens_per_pass": round(stats.tokens_per_pass, 3),
        "rows_per_pass": round(stats.rows_per_pass, 3),
        "acceptance": round(stats.acceptance_rate, 4),
        "accepted_by_source": stats.accepted_by_source,
        "drafted_by_source": stats.drafted_by_source,
        "expected_by_source": {source: round(n, 2) for source, n in stats.expected_by_source.items()},
        "digest": common.hash_outputs(output for run in off for output in run.outputs),
        "fixed_length": fixed,
        "on_against_best_fixed": min((row["on_against"] for row in fixed.values()), default=None),
        "peers": peers | {name: {"absent": reason} for name, reason in absent.items()},
    }


def find_rate(runs: list[TimedRun]) -> float:
    """Return tokens per second."""
    return sum(run.n_tokens for run in runs) / max(sum(run.seconds for run in runs), 1e-9)


def find_median_ratio(a: list[TimedRun], b: list[TimedRun]) -> float:
    """Return how many times faster a was than b: the median over the groups of prompts, which one disturbed group does not move."""
    return statistics.median(find_rate([x]) / find_rate([y]) for x, y in zip(a, b, strict=True))


def count_identical(a: list[TimedRun], b: list[TimedRun]) -> int:
    """Return for how many prompts both have the same tokens."""
    return sum(x == y for run_a, run_b in zip(a, b, strict=True) for x, y in zip(run_a.outputs, run_b.outputs, strict=True))


def print_figures(document: dict[str, Any]) -> None:
    prompts, off = document["prompts"], document["tok_s_off"]
    same = f"{document['identical']}/{prompts}"
    rows: list[list[Any]] = [["speculation off", off, 1.0, 1.0, None]]
    rows.append(["speculation on", document["tok_s_on"], document["speedup"], document["speedup_median"], same])
    fixed = {f"fixed length {n}": row for n, row in document["fixed_length"].items()}
    for name, peer in (fixed | document["peers"]).items():
        if "absent" in peer:
            rows.append([name, None, None, None, None])
        else:
            same = None if peer["identical"] is None else f"{peer['identical']}/{prompts}"
            rows.append([name, peer["tok_s"], peer["tok_s"] / off, 1 / peer["off_against_median"], same])
    common.print_table(["", "tok/s", "against off", "median", "same tokens"], rows)
    replayed = " (replayed)" if document["replayed"] else ""
    print(f"{document['tokens']} tokens of {prompts} prompts{replayed}; exactness: {document['exactness']}")
    print("{tokens_per_pass} tokens and {rows_per_pass} draft rows a pass, {acceptance:.0%} of the drafts accepted".format(**document))
    for name, peer in document["peers"].items():
        if "absent" in peer:
            print(f"{name} is absent: {peer['absent']}")


def print_identity(document: dict[str, Any]) -> None:
    first, *others = document["settings"]["modes"]
    rows = [[name, row["prompts"], *(row[mode] for mode in others)] for name, row in document["sets"].items()]
    common.print_table(["", "prompts", *(f"{mode} as {first}" for mode in others)], rows)


if __name__ == "__main__":
    common.run_command(main)
