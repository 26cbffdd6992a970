"""Do texts end where llama.cpp ends them?

    python -m benchmarks.text_ends --model F.gguf --texts F.jsonl [--texts F.jsonl ...] [--limit 40] [--max-tokens 128] [--threads N]
        [--llama-python PATH]

Both hosts write greedily from the same token ids, each until the file's own end-of-generation tokens end its text. Rows have `prompt`
(with `suffix`: a prompt to fill in the middle) or `messages`. Rounding differs between the hosts, so texts may part at any token; as long
as they agree, one must not go on where the other ends. Prompts that are plain text are also encoded by both, control tokens included.
Progress goes to standard error, a table and a last line of JSON to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.ours import described, gguf_files
from benchmarks.peers import PeerAbsentError, llama_python_option, open_llama
from ngramspec import Engine, SamplingParams
from ngramspec.models.loader import load_tokenizer
from ngramspec.server.fim import Fim

MAX_PROMPT = 2048
"""Tokens of the longest prompts that are compared."""
VERDICTS = ("same", "parted", "parted_at_end", "missed_end")
"""The same text; texts that part at some token; that part where one of them ends; and one that goes on behind the other's end token."""


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    document = measure(args)
    rows = [[name, *(counts.get(verdict, 0) for verdict in VERDICTS)] for name, counts in document["texts"].items()]
    common.print_table(["texts", *VERDICTS], rows)
    common.print_document(document)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.new_parser("text_ends", __doc__)
    common.model_options(parser)
    parser.add_argument("--texts", type=common.file, action="append", required=True, metavar="F.jsonl")
    parser.add_argument("--limit", type=common.positive, default=40, metavar="N", help="rows of each file, evenly over it; default 40")
    parser.add_argument("--max-tokens", type=common.positive, default=128, metavar="N", help="of each text; default 128")
    llama_python_option(parser)
    args = parser.parse_args(argv)
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON document. Raises SystemExit where llama.cpp cannot be compared with, and what `Engine` raises."""
    files, tokenizer = gguf_files(args.model), load_tokenizer(args.model)
    texts = {path.name: read_rows(path, tokenizer, args.limit) for path in args.texts}
    threads = args.threads or os.cpu_count() or 1
    settings = {"threads": threads, "max_len": longest(texts) + args.max_tokens, "max_tokens": args.max_tokens}
    settings |= {"temperature": 0.0, "seed": 0, "eos": None, "lookup": None}
    try:
        llama = open_llama(args.llama_python, "llama", files[0] if files else None, settings)
    except PeerAbsentError as error:
        raise SystemExit(f"llama.cpp: {error}") from error
    with Engine(args.model, progress=common.say, **common.engine_options(args)) as engine:
        try:
            theirs: set[int] = set(llama.ask(eog=True)["eog"])
            found: dict[str, dict[str, int]] = {}
            for name, rows in texts.items():
                common.say(f"{name}: {len(rows)} prompts")
                plain = [row for row in rows if row["text"] is not None]
                encoded = llama.ask(tokenize=[row["text"] for row in plain])["ids"]
                counts: Counter[str] = Counter(
                    compare(
                        engine.complete(row["ids"], SamplingParams(max_tokens=args.max_tokens)).token_ids,
                        llama.complete([row["ids"]]).outputs[0],
                        set(engine.eos_token_ids),
                        theirs,
                    )
                    for row in rows
                )
                counts["encoded_the_same"] = sum(row["ids"] == ids for row, ids in zip(plain, encoded, strict=True))
                counts["encoded"] = len(plain)
                found[name] = dict(counts)
        finally:
            llama.close()
        ends = {"ours": sorted(engine.eos_token_ids), "llama": sorted(theirs)}
        versions = common.environment(engine.runner.device, engine.threads)
        versions["versions"]["llama"] = llama.version
        return {"model": args.model, "max_tokens": args.max_tokens, "texts": found, "ends": ends} | described(engine) | versions


def read_rows(path: Path, tokenizer: Any, limit: int) -> list[dict[str, Any]]:
    """Return `limit` rows, evenly over those of at most MAX_PROMPT tokens, as `ids`, and `text` where the prompt is plain text."""
    fim = Fim.detect(tokenizer)
    rows = []
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        text = None
        if row.get("messages"):
            ids = common.encode_chat(common.first_turn(row["messages"]), tokenizer)
        elif row.get("suffix") is not None:
            if fim is None:
                raise SystemExit(f"{path.name} has prompts to fill in the middle, for which the model has no tokens")
            ids = fim.prompt(row["prompt"], row["suffix"])
        else:
            text = row["prompt"]
            ids = tokenizer(text)["input_ids"]
        if len(ids) <= MAX_PROMPT:
            rows.append({"ids": ids, "text": text})
    return [rows[i * len(rows) // limit] for i in range(limit)] if limit < len(rows) else rows


def longest(texts: dict[str, list[dict[str, Any]]]) -> int:
    return max(len(row["ids"]) for rows in texts.values() for row in rows)


def compare(ours: Sequence[int], theirs: Sequence[int], our_ends: Collection[int], their_ends: Collection[int]) -> str:
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


if __name__ == "__main__":
    main()
