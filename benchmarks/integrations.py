"""What are our drafts worth in other people's engines, and does the text stay the host's own?

    python -m benchmarks.integrations --host vllm|transformers|llama_cpp --prompts F.jsonl [F2...] [--model M] [--limit N]
        [--max-tokens K] [--concurrency C,C] [--datastore D] [--modes NAME,NAME] [--host-python PATH] [--temperature T --seed S]

Every mode of a host (without drafts, its own, ours) is a process of the host's interpreter, which keeps its model; all get the same token
ids, in turns of one prompt, or of three times `--concurrency`: the next begins as one ends. A rate counts generated tokens over the seconds
of generating; `speedup` is the median, over turns, of a mode's rate over that of the host without drafts. `identical`: texts like those of
the host without drafts. `tokens_per_step`: of one text. Several files, and several numbers of prompts at a time, are asked one after
another of the same processes, each with a table and a JSON document on one line; the last line of standard output is the last one's. No
prompt is asked twice, and the warm-up's is none of them: drafters remember answers.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Prompt, print_progress
from benchmarks.our_engine import find_gguf_files
from benchmarks.peers import (
    HF_DRAFTS,
    LLAMA_LOOKUP,
    LOCAL_LLAMA,
    LOCAL_VLLM,
    VLLM_REST_S,
    VLLM_SPECULATION,
    Peer,
    PeerAbsentError,
    make_vllm_environment,
)
from ngramspec.models.loader import load_model

# Modes by host. The first is what the others are compared with, the last is ours.
HOSTS: dict[str, tuple[str, ...]] = {
    "vllm": ("none", "ngram", "suffix", "ngramspec"),
    "transformers": ("none", "prompt_lookup", "ngramspec"),
    "llama_cpp": ("none", "prompt_lookup", "ngramspec"),
}
WORKERS = {"vllm": "vllm", "transformers": "hf", "llama_cpp": "llama"}
VLLM_DEPTH = 12  # our longest draft in vLLM, if nothing else is said
# A turn has this many times the prompts that run at a time. With once as many, most of its time would be that of the longest texts.
PROMPTS_PER_PLACE = 3


def main(argv: Sequence[str] | None = None) -> None:
    for document in measure(parse_args(argv)):
        columns = ("tok_s", "speedup", "identical", "tokens_per_step", "drafted", "accepted")
        rows = [[name, *(row[key] for key in columns)] for name, row in document["modes"].items()]
        common.print_table(["mode", "tokens/s", "speedup", "identical", "tokens/step", "drafted", "accepted"], rows)
        common.print_document(document)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.make_parser("integrations", __doc__)
    add = parser.add_argument
    add("--host", choices=list(HOSTS), required=True)
    add("--prompts", type=common.parse_file, nargs="+", required=True, metavar="F.jsonl", help="rows with `prompt` or `messages`")
    add("--model", default="smollm2", help="folder, hub name, GGUF file, or smollm2; llama_cpp takes a GGUF file")
    add("--limit", type=parse_numbers, metavar="N[,N]", help="only N prompts of each file, the next ones for each C")
    add("--max-tokens", type=common.parse_positive, default=96, metavar="K")
    add(
        "--concurrency",
        type=parse_numbers,
        default=[1],
        metavar="C[,C]",
        help="prompts at a time; vLLM alone takes more than one; 8,1: both",
    )
    add("--datastore", metavar="D", help="our mode drafts from this datastore too")
    add("--modes", help="some of the host's modes, with commas between")
    add("--depth", type=common.parse_positive, metavar="N", help=f"our longest draft; vllm {VLLM_DEPTH}, others their own default")
    add("--temperature", type=common.parse_number, default=0.0, metavar="T")
    add("--seed", type=int, default=0, metavar="S")
    add("--threads", type=common.parse_positive, default=2, metavar="N")
    add("--host-python", type=Path, metavar="PATH", help=f"the host's interpreter; default {LOCAL_VLLM}, {LOCAL_LLAMA}, or this one")
    args = parser.parse_args(argv)
    if args.host != "vllm" and args.concurrency != [1]:
        parser.error(f"--concurrency: {args.host} takes one prompt at a time")
    if len(args.concurrency) > 2 or min(args.concurrency) != 1 < len(args.concurrency):
        parser.error("--concurrency: one number, or 1 and another")
    limits = args.limit or [None]
    args.limit = limits * len(args.concurrency) if len(limits) == 1 else limits
    if len(args.limit) != len(args.concurrency) or (len(args.limit) > 1 and None in args.limit):
        parser.error("--limit: one number, or one for each number of --concurrency; with two of those it is required")
    known = HOSTS[args.host]
    args.modes = known if args.modes is None else tuple(args.modes.split(","))
    if wrong := [name for name in args.modes if name not in known]:
        parser.error(f"--modes: {wrong[0]!r} is none of {', '.join(known)}")
    if args.modes[0] != known[0]:
        parser.error(f"--modes: the first must be {known[0]!r}, which the others are compared with")
    local = {"vllm": LOCAL_VLLM, "llama_cpp": LOCAL_LLAMA}.get(args.host)
    args.host_python = args.host_python or (local if local is not None and local.exists() else Path(sys.executable))
    return args


def parse_numbers(text: str) -> list[int]:
    """Parse positive numbers with commas between, in their order. Raises ArgumentTypeError."""
    return [common.parse_positive(part) for part in text.split(",")]


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the JSON document of each file at each concurrency. Raises SystemExit if the host cannot run."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ngramspec-integrations-")))
        loaded = load_model(args.model, dtype=torch.float32)
        sets = read_sets(args, loaded.tokenizer)
        loaded.tokenizer.save_pretrained(folder)
        model: Path | None = folder
        if args.host == "llama_cpp":
            model = next(iter(find_gguf_files(args.model)), None)
            if model is None:
                raise _refuse(f"llama.cpp takes a GGUF file, {args.model!r} is none")
        else:
            loaded.model.save_pretrained(folder)
        eos = loaded.tokenizer.eos_token_id
        del loaded
        longest = max(len(prompt.ids) for *_, some in sets for prompt in some)
        settings = {
            "max_len": -(-(longest + args.max_tokens) // 256) * 256,
            **{name: getattr(args, name) for name in ("max_tokens", "temperature", "seed", "threads")},
            "eos": [] if eos is None else [eos],
        }
        peers = {mode: stack.enter_context(contextlib.closing(open_host(args, mode, model, folder, dict(settings)))) for mode in args.modes}
        for concurrency, path, some in sets:
            runs = run_turns(peers, some, concurrency)
            counts = {mode: peer.ask(count=True) for mode, peer in peers.items()}
            yield {
                "host": args.host,
                "version": next(iter(peers.values())).version,
                "prompts": len(some),
                "modes": {mode: make_row(runs[mode], runs[args.modes[0]], counts[mode]) for mode in args.modes},
                "settings": {
                    "prompts": path.name,
                    "datastore": args.datastore and Path(args.datastore).name,
                    "concurrency": concurrency,
                    **{name: getattr(args, name) for name in ("model", "max_tokens", "temperature", "seed", "depth")},
                },
                **common.describe_machine("cpu", args.threads),
            }


def open_host(args: argparse.Namespace, mode: str, model: Path, folder: Path, settings: dict[str, Any]) -> Peer:
    """Start a host in a mode. `folder` has the tokenizer. Raises SystemExit."""
    print_progress(f"starting {args.host} with {mode}")
    environment, rest_s, ours = {"PYTHONPATH": str(Path(__file__).parents[1])}, 0.0, mode == "ngramspec"  # this ngramspec, not another
    if args.host == "vllm":
        environment, rest_s = environment | make_vllm_environment(args.host_python, settings.pop("threads")), VLLM_REST_S
        drafter = {"method": "custom_class", "model": "ngramspec.integrations.vllm.Proposer"}
        drafter |= {"num_speculative_tokens": args.depth or VLLM_DEPTH}
        settings |= {"dtype": "float32", "max_num_seqs": max(args.concurrency), "disable_log_stats": False}
        settings["speculation"] = drafter if ours else VLLM_SPECULATION[f"vllm-{mode}"]
        if ours and args.datastore:
            settings["additional_config"] = {"ngramspec": {"datastore": args.datastore}}
    else:
        own = {"datastore": args.datastore, "depth": args.depth, "tokenizer": str(folder)}
        if args.host == "transformers":
            del settings["max_len"]
            settings |= {"device": "cpu", "dtype": "float32"} | (HF_DRAFTS["hf-pld"] if mode == "prompt_lookup" else {})
        else:
            settings["lookup"] = LLAMA_LOOKUP["llama-pld" if mode == "prompt_lookup" else "llama-none"]
        settings["our_drafts"] = own if ours else None
    try:
        return Peer(args.host_python, WORKERS[args.host], model, settings, environment, rest_s=rest_s)
    except PeerAbsentError as error:
        raise _refuse(f"{args.host} with {mode}: {error}") from error


def read_sets(args: argparse.Namespace, tokenizer: Any) -> list[tuple[int, Path, list[Prompt]]]:
    """Return prompts at a time, file, prompts: those of no two are the same. Raises SystemExit if a file has too few."""
    sets, start = [], 0
    for concurrency, limit in zip(args.concurrency, args.limit, strict=True):
        end = None if limit is None else start + limit
        for path in args.prompts:
            prompts = common.read_prompts(path, tokenizer, end)[start:]
            if not prompts:
                raise _refuse(f"{path.name} has no more than {start} prompts, and none is asked twice: --limit must leave some")
            sets.append((concurrency, path, prompts))
        start = end or 0
    return sets


def _refuse(why: str) -> SystemExit:
    return SystemExit(f"benchmarks.integrations: {why}")


def run_turns(peers: dict[str, Peer], prompts: list[Prompt], concurrency: int) -> dict[str, dict[str, Any]]:
    """Return outputs and seconds by mode, and the rate of each turn."""
    n_turns = max(round(len(prompts) / (PROMPTS_PER_PLACE * concurrency if concurrency > 1 else 1)), 1)
    turns = [prompts[len(prompts) * i // n_turns : len(prompts) * (i + 1) // n_turns] for i in range(n_turns)]
    runs: dict[str, dict[str, Any]] = {mode: {"outputs": [], "seconds": 0.0, "rates": []} for mode in peers}
    for peer in peers.values():
        peer.ask(prompts=[prompts[-1].ids[::-1]], warm_up=True)
    for n, (order, turn) in enumerate(zip(common.order_turns(list(peers), len(turns)), turns, strict=True), 1):
        for mode in order:
            answer = peers[mode].ask(prompts=[prompt.ids for prompt in turn], at_once=concurrency)
            runs[mode]["outputs"] += answer["outputs"]
            runs[mode]["seconds"] += answer["seconds"]
            runs[mode]["rates"].append(find_rate(answer))
        print_progress(f"turn {n} of {len(turns)}: " + ", ".join(f"{mode} {find_rate(run):.1f}" for mode, run in runs.items()))
    return runs


def find_rate(run: dict[str, Any]) -> float:
    """Return tokens per second."""
    return sum(map(len, run["outputs"])) / max(run["seconds"], 1e-9)


def make_row(run: dict[str, Any], plain: dict[str, Any], counts: dict[str, int]) -> dict[str, Any]:
    """Return a mode's part of the document; `plain`: the run of the host without drafts."""
    n_tokens = sum(map(len, run["outputs"]))
    return {
        "tok_s": round(find_rate(run), 2),
        "speedup": round(statistics.median(a / max(b, 1e-9) for a, b in zip(run["rates"], plain["rates"], strict=True)), 3),
        "identical": sum(a == b for a, b in zip(run["outputs"], plain["outputs"], strict=True)),
        "tokens_per_step": round(n_tokens / max(n_tokens - counts["accepted"], 1), 3) if counts["accepted"] is not None else None,
        "drafted": counts["drafted"],
        "accepted": counts["accepted"],
        "tokens": n_tokens,
        "seconds": round(run["seconds"], 3),
    }


if __name__ == "__main__":
    common.run_command(main)
