"""How much faster is speculation, and is the text the same?

    python -m benchmarks.decode --model M | --random-weights CONFIG [--device cpu|cuda:N] [--dtype D]
        --prompts F.jsonl | --random-prompts N | --trace [F.jsonl] [--limit N] [--max-tokens K] [--temperature T --seed S]
        [--concurrency C] [--fixed-length N,N] [--against PEER,PEER (see --help)] [--vllm-python PATH]

Every prompt (every C prompts, handed in together) is completed with speculation off, on, and by each peer, in turns; so all see the same
machine. A rate counts generated tokens over the whole time from the prompt to the last of them. `identical`: with speculation on, and by a
peer, the same tokens as with speculation off. Progress goes to standard error, a table and a last line of JSON to standard output.

With `--trace` a recording is replayed ("replayed": true): every pass runs, and the text is that of the recorded outputs, whatever the
model would have written. So a model of random weights shows the time, and a real model's text what drafts are worth.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Prompt
from benchmarks.ours import FixedCost, FixedLength, Ours
from benchmarks.peers import NAMES, Contender, Peer, PeerAbsentError, Run, Task, open_peer
from benchmarks.recorded import ReplayEngine, outputs_of, recorded_prompts
from ngramspec import Engine, SamplingParams, Stats
from ngramspec.datastore.format import MANIFEST
from ngramspec.model.loading import load_model, load_tokenizer, smollm2_gguf

SETTINGS = ("limit", "max_tokens", "temperature", "seed", "concurrency", "spec_rows", "no_answers", "no_recycle", "cost", "tokenizer")
LOCAL_VLLM = Path(".venv-vllm/bin/python")
"""Where `make peers` puts it."""


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with open_engine(args) as engine:
        document = measure(engine, args)
    show(document)
    common.print_document(document)


def open_engine(args: argparse.Namespace, **options: Any) -> Engine:
    """An engine for `measure`. Raises what `Engine` raises."""
    if args.spec_rows:
        options["spec_rows"] = args.spec_rows
    if args.no_answers:
        options["answers"] = 0
    return (ReplayEngine if args.trace else Engine)(
        args.model,
        tokenizer=None if args.tokenizer is None else load_tokenizer(args.tokenizer),
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        linears=args.linears,
        max_seqs=max(64, args.concurrency),
        datastore=args.datastore,
        recycle=not args.no_recycle,
        progress=say,
        **options,
    )


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """The JSON document of a comparison on this engine, which `open_engine` opened."""
    vllm_python = args.vllm_python or (LOCAL_VLLM if LOCAL_VLLM.exists() else None)
    if args.cost != "measured":
        engine.core.cost = FixedCost(common.SLOPES[args.cost], engine.cost.max_rows)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    prompts, skipped = choose_prompts(args, engine)
    if isinstance(engine, ReplayEngine):
        engine.outputs = outputs_of(prompts)
    contenders: dict[str, Contender] = {"off": Ours(engine, params, False), "on": Ours(engine, params, True)}
    for length in args.fixed_length:
        drafts = FixedLength(length, vocab_size=engine.vocab_size, max_seqs=max(64, args.concurrency))
        contenders[f"fixed {length}"] = Ours(engine, params, True, drafts)
    absent: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if args.against:
            longest = max(len(prompt.ids) for prompt in prompts) + args.max_tokens
            task = Task(
                weights_folder(args, engine, stack),
                params,
                engine.eos_token_ids,
                threads=engine.threads,
                max_len=min(engine.max_model_len, -(-longest // 256) * 256),
                device=args.device,
                dtype=args.dtype,
                gguf=gguf_file(args.model),
            )
        for name in args.against:
            say(f"starting {name}")
            try:
                contenders[name] = stack.enter_context(contextlib.closing(open_peer(name, task, vllm_python)))
            except PeerAbsentError as error:
                absent[name] = str(error)
                say(f"{name} is absent: {error}")
        runs = compare(contenders, absent, prompts, args.concurrency)
    source = "random" if args.random_prompts else args.prompts.name if args.prompts else "library"
    document = {
        "model": args.model,
        "prompts": len(prompts),
        "skipped": skipped,
        "replayed": isinstance(engine, ReplayEngine),
        **figures(runs, absent, sampled=args.temperature > 0),
        "settings": {
            "prompts": (args.trace.name or "library") if args.trace else source,
            **{name: getattr(args, name) for name in SETTINGS},
            "datastore": [Path(path).name for path in args.datastore],
        },
        "exactness": engine.props()["exactness"],
        "dtype": engine.props()["dtype"],
        **common.environment(args.device, engine.threads),
    }
    document["versions"] |= {name: peer.version for name, peer in contenders.items() if isinstance(peer, Peer)}
    return document


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=(__doc__ or "").split("\n")[0])
    common.model_options(parser)
    common.linears_option(parser)
    parser.add_argument("--tokenizer", metavar="M", help="this model's tokenizer; random weights without it: words for tokens")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompts", type=Path, metavar="F.jsonl", help="rows with `prompt` or `messages`; without it, functions of the standard library"
    )
    source.add_argument(
        "--random-prompts",
        type=common.positive,
        metavar="N",
        help="N prompts of random words, by default at temperature 1.5: nothing repeats",
    )
    source.add_argument(
        "--trace",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="F.jsonl",
        help="replay recorded outputs (rows as replay reads them); without a file, edits of the standard library",
    )
    parser.add_argument("--limit", type=common.positive, metavar="N", help="only the first N prompts")
    parser.add_argument("--max-tokens", type=common.positive, metavar="K", help="default 128, with --trace 512")
    parser.add_argument("--temperature", type=float, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of sampling and of random prompts")
    parser.add_argument("--concurrency", type=common.positive, default=1, metavar="C", help="prompts completed at once")
    parser.add_argument(
        "--fixed-length", type=lengths, default=[], metavar="N,N,...", help="also with drafts of a fixed length, as peers make them"
    )
    parser.add_argument("--against", type=peer_names, default=[], metavar="PEERS", help=",".join(NAMES))
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PATH", help=f"interpreter of an environment with vLLM; default {LOCAL_VLLM} if it is there"
    )
    parser.add_argument("--datastore", action="append", default=[], metavar="D", help="draft from this datastore too; may be repeated")
    parser.add_argument("--spec-rows", type=common.positive, metavar="N", help="most draft tokens of a sequence in a pass")
    parser.add_argument("--no-answers", action="store_true", help="do not draft from the answers to earlier prompts")
    parser.add_argument("--no-recycle", action="store_true", help="do not draft from the model's own candidates")
    parser.add_argument(
        "--cost",
        choices=["measured", *common.SLOPES],
        default="measured",
        help="what drafts are told a row costs; not measured: as in replay",
    )
    args = parser.parse_args(argv)
    for store in args.datastore:
        if not (Path(store) / MANIFEST).is_file():
            parser.error(f"--datastore: {store} is not a datastore")
    for name in ("prompts", "trace"):
        path = getattr(args, name)
        if path not in (None, Path()) and not path.is_file():
            parser.error(f"--{name}: there is no file {str(path)!r}")
    if args.trace and (args.against or args.temperature):
        parser.error("--trace: a recording is followed greedily, and by nobody but us; leave --against and --temperature out")
    if args.temperature is None:
        args.temperature = 1.5 if args.random_prompts else 0.0
    args.max_tokens = args.max_tokens or (512 if args.trace else 128)
    args.no_recycle = args.no_recycle or args.trace is not None  # the model's own candidates are not the recorded model's
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


def lengths(text: str) -> list[int]:
    return sorted({*map(common.positive, text.split(","))})


def peer_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(NAMES)}")
    return list(dict.fromkeys(names))


def choose_prompts(args: argparse.Namespace, engine: Engine) -> tuple[list[Prompt], int]:
    """The prompts asked for, and how many were left out because with their output the model could not hold them."""
    tokenizer = engine.tokenizer or common.Words(engine.vocab_size)
    if args.trace:
        path = args.trace if args.trace.name else None
        try:
            prompts = recorded_prompts(path, tokenizer, engine.vocab_size, args.limit, args.max_tokens)
        except ValueError as error:
            raise SystemExit(f"--trace: {error}") from error
    elif args.random_prompts:
        prompts = common.random_prompts(tokenizer, args.random_prompts, args.seed)[: args.limit]
    elif args.prompts:
        prompts = common.read_prompts(args.prompts, tokenizer, args.limit)
    else:
        prompts = common.library_prompts(tokenizer)[: args.limit]
    fitting = [prompt for prompt in prompts if len(prompt.ids) + args.max_tokens <= engine.max_model_len]
    if not fitting:
        raise SystemExit(f"no prompt leaves room for {args.max_tokens} tokens within the model's {engine.max_model_len}")
    return fitting, len(prompts) - len(fitting)


def weights_folder(args: argparse.Namespace, engine: Engine, stack: contextlib.ExitStack) -> Path:
    """The engine's weights as a folder of safetensors: where it read them, or else a copy that goes with the stack."""
    source = Path(engine.runner.model.config.name_or_path)
    if (source / "config.json").is_file() and any(source.glob("*.safetensors")):
        return source.absolute()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ngramspec-peers-")))
    load_model(args.model, dtype=getattr(torch, args.dtype)).model.save_pretrained(folder)
    if engine.tokenizer is not None:
        engine.tokenizer.save_pretrained(folder)
    return folder


def gguf_file(model: str) -> Path | None:
    """The GGUF file that a model's name stands for, if it does."""
    path = smollm2_gguf() if model == "smollm2" else Path(model)
    return path if path.suffix.lower() == ".gguf" else None


def compare(contenders: dict[str, Contender], absent: dict[str, str], prompts: list[Prompt], concurrency: int) -> dict[str, list[Run]]:
    """One run per contender and group of prompts. A peer that stops working is moved to `absent`."""
    groups = [[prompt.ids for prompt in prompts[i : i + concurrency]] for i in range(0, len(prompts), concurrency)]
    for name in list(contenders):
        # What is made at the first call is made now, with text that helps nobody's cache.
        attempt(name, contenders, absent, [ids[::-1] for ids in groups[0]])
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for n, (group, order) in enumerate(zip(groups, common.turns(list(contenders), len(groups)), strict=True), 1):
        for name in order:
            run = attempt(name, contenders, absent, group)
            if run is not None:
                runs[name].append(run)
        rates = "  ".join(f"{name} {rate(runs[name]):.1f}" for name in contenders)
        say(f"{n}/{len(groups)}  identical {identical(runs['off'], runs['on'])}  tok/s: {rates}")
    return {name: runs[name] for name in contenders}


def attempt(name: str, contenders: dict[str, Contender], absent: dict[str, str], group: list[list[int]]) -> Run | None:
    if name not in contenders:
        return None
    try:
        return contenders[name].complete(group)
    except PeerAbsentError as error:
        absent[name] = str(error)
        del contenders[name]
        say(f"{name} stopped: {error}")
        return None


def figures(runs: dict[str, list[Run]], absent: dict[str, str], *, sampled: bool) -> dict[str, Any]:
    """The contract's part of the JSON document."""
    off, on = runs["off"], runs["on"]
    stats = Stats()
    for run in on:
        stats.add(run.stats)
    others = {
        name: {
            "tok_s": round(rate(theirs), 2),
            "identical": None if sampled and not name.startswith("fixed") else identical(off, theirs),  # peers' generators are others
            "tokens": sum(run.n_tokens for run in theirs),
            "off_against": round(rate(off) / rate(theirs), 3),
            "on_against": round(rate(on) / rate(theirs), 3),
            "off_against_median": round(median_ratio(off, theirs), 3),
            "on_against_median": round(median_ratio(on, theirs), 3),
        }
        for name, theirs in runs.items()
        if name not in ("off", "on")
    }
    peers = {name: row for name, row in others.items() if not name.startswith("fixed")}
    fixed = {}
    for name, row in others.items():
        if name.startswith("fixed"):
            theirs = Stats()
            for run in runs[name]:
                theirs.add(run.stats)
            shape = {"tokens_per_pass": round(theirs.tokens_per_pass, 3), "rows_per_pass": round(theirs.rows_per_pass, 3)}
            fixed[name.removeprefix("fixed ")] = row | shape
    return {
        "tokens": sum(run.n_tokens for run in off),
        "identical": identical(off, on),
        "tok_s_off": round(rate(off), 2),
        "tok_s_on": round(rate(on), 2),
        "speedup": round(rate(on) / rate(off), 3),
        "speedup_median": round(median_ratio(on, off), 3),
        "tokens_per_pass": round(stats.tokens_per_pass, 3),
        "rows_per_pass": round(stats.rows_per_pass, 3),
        "acceptance": round(stats.acceptance_rate, 4),
        "accepted_by_source": stats.accepted_by_source,
        "drafted_by_source": stats.drafted_by_source,
        "digest": common.digest(output for run in off for output in run.outputs),
        "fixed_length": fixed,
        "on_against_best_fixed": min((row["on_against"] for row in fixed.values()), default=None),
        "peers": peers | {name: {"absent": reason} for name, reason in absent.items()},
    }


def rate(runs: list[Run]) -> float:
    """Tokens per second."""
    return sum(run.n_tokens for run in runs) / max(sum(run.seconds for run in runs), 1e-9)


def median_ratio(a: list[Run], b: list[Run]) -> float:
    """How many times faster a was than b: the median over the groups of prompts, which one disturbed group does not move."""
    return statistics.median(rate([x]) / rate([y]) for x, y in zip(a, b, strict=True))


def identical(a: list[Run], b: list[Run]) -> int:
    """Prompts for which both have the same tokens."""
    return sum(x == y for run_a, run_b in zip(a, b, strict=True) for x, y in zip(run_a.outputs, run_b.outputs, strict=True))


def show(document: dict[str, Any]) -> None:
    prompts, off = document["prompts"], document["tok_s_off"]
    rows: list[list[Any]] = [
        ["speculation off", off, 1.0, 1.0, None],
        ["speculation on", document["tok_s_on"], document["speedup"], document["speedup_median"], f"{document['identical']}/{prompts}"],
    ]
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


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
