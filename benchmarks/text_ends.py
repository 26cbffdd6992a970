"""Compare where texts end in ngramspec and in llama.cpp.

Both hosts write greedily from the same token ids, each until the file's own end-of-generation tokens end its text. Rows have `prompt`
(with `suffix`: a prompt to fill in the middle) or `messages`. Rounding differs between the hosts, so texts may part at any token; as long
as they agree, one must not go on after the other has ended. Prompts that are plain text are also encoded by both, control tokens included.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.our_engine import describe_engine, find_gguf_files
from benchmarks.peers import PeerAbsentError, open_llama_worker
from ngramspec import Engine, SamplingParams
from ngramspec.backends.cpu.cores import count_cores
from ngramspec.models.loader import load_tokenizer
from ngramspec.prompts.fim import Fim

MAX_PROMPT = 2048  # tokens of the longest prompts that are compared
# The same text; texts that part at some token; that part where one of them ends; and one that goes on after the other's end token.
VERDICTS = ("same", "parted", "parted_at_end", "missed_end")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Print a table and return the JSON document. Raises SystemExit if llama.cpp cannot be compared with, and what `Engine` raises."""
    gguf, tokenizer = next(iter(find_gguf_files(args.model)), None), load_tokenizer(args.model)
    texts = {path.name: read_rows(path, tokenizer, args.limit) for path in args.texts}
    longest = max(len(row["ids"]) for rows in texts.values() for row in rows)
    settings = {"threads": args.threads or count_cores(), "max_len": longest + args.max_tokens, "max_tokens": args.max_tokens}
    try:
        llama = open_llama_worker(args.llama_python, "llama", gguf, settings | {"temperature": 0.0, "seed": 0, "eos": None})
    except PeerAbsentError as error:
        raise SystemExit(f"llama.cpp: {error}") from error
    found: dict[str, dict[str, int]] = {}
    with contextlib.closing(llama), Engine(args.model, progress=common.print_progress, **common.get_engine_options(args)) as engine:
        our_ends, their_ends = set(engine.eos_token_ids), set(llama.ask(eog=True)["eog"])
        for name, rows in texts.items():
            common.print_progress(f"{name}: {len(rows)} prompts")
            counts: Counter[str] = Counter()
            for row in rows:
                ours = engine.complete(row["ids"], SamplingParams(max_tokens=args.max_tokens)).token_ids
                counts[compare_ends(ours, llama.complete([row["ids"]]).outputs[0], our_ends, their_ends)] += 1
            plain = [row for row in rows if row["text"] is not None]
            encoded = llama.ask(tokenize=[row["text"] for row in plain])["ids"]
            counts["encoded_the_same"] = sum(row["ids"] == ids for row, ids in zip(plain, encoded, strict=True))
            counts["encoded"] = len(plain)
            found[name] = dict(counts)
        machine = common.describe_machine(engine.runner.device, engine.threads)
        machine["versions"]["llama"] = llama.version
        document = {"model": args.model, "max_tokens": args.max_tokens, "texts": found}
        document |= {"ends": {"ours": sorted(our_ends), "llama": sorted(their_ends)}} | describe_engine(engine) | machine
    common.print_table(["texts", *VERDICTS], [[name, *(counts.get(verdict, 0) for verdict in VERDICTS)] for name, counts in found.items()])
    return document


def read_rows(path: Path, tokenizer: Any, limit: int) -> list[dict[str, Any]]:
    """Return `limit` rows, evenly over those of at most MAX_PROMPT tokens, as `ids`, and `text` where the prompt is plain text."""
    fim = Fim.detect(tokenizer)
    rows = []
    for _, row in common.iterate_rows(path):
        text = None
        if row.get("messages"):
            ids = common.encode_chat(common.get_first_turn(row["messages"]), tokenizer)
        elif row.get("suffix") is not None:
            if fim is None:
                raise SystemExit(f"{path.name} has prompts to fill in the middle, for which the model has no tokens")
            ids = fim.make_prompt(row["prompt"], row["suffix"])
        else:
            text = row["prompt"]
            ids = tokenizer(text)["input_ids"]
        if len(ids) <= MAX_PROMPT:
            rows.append({"ids": ids, "text": text})
    return common.pick_evenly(rows, limit)


def compare_ends(ours: Sequence[int], theirs: Sequence[int], our_ends: Collection[int], their_ends: Collection[int]) -> str:
    """Return which of VERDICTS it is: outputs with their end tokens, if they have one."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if any(token in their_ends for token in ours[: len(ours) - 1]) or any(token in our_ends for token in theirs[: len(theirs) - 1]):
        return "missed_end"
    if at == len(ours) == len(theirs):
        return "same"
    parted = [output[at] for output in (ours, theirs) if at < len(output)]
    if len(parted) < 2:
        return "missed_end"
    return "parted_at_end" if any(token in our_ends or token in their_ends for token in parted) else "parted"
