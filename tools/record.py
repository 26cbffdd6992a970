"""Let a model write, and keep what it wrote with its own candidates: traces for `benchmarks.replay` and `tools.learn_mix`.

    python -m tools.record --model M --prompts F.jsonl... --out FOLDER [--limit N] [--max-tokens K] [--temperature T --seed S]

A row of the prompts has `prompt_ids`, `messages`, or `prompt`, which the model continues or, with a `suffix`, fills in up to it.
The traces of F.jsonl are FOLDER/F.jsonl: a row has `id`, `group`, `prompt_ids`, `output_ids`, and per output token `top_ids` and
`top_logprobs`, the most likely tokens there, most likely first. Rows are written as they finish, and a run that is started again
goes on after those that are there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.common import (
    describe_machine,
    encode_chat,
    get_candidates,
    iterate_rows,
    parse_number,
    pick_evenly,
    print_document,
    print_progress,
    run_command,
)
from ngramspec import Engine, SamplingParams
from ngramspec.prompts.fim import Fim
from ngramspec.speculative.features import KEPT

BATCH = 32


def encode_prompt(row: dict[str, Any], tokenizer: Any, fim: Fim | None) -> list[int]:
    """Return the ids of a prompt; of a conversation, of the part before its last answer. Raises SystemExit without tokens to fill in."""
    if "prompt_ids" in row:
        return list(row["prompt_ids"])
    if row.get("messages"):
        messages = row["messages"][:-1] if row["messages"][-1]["role"] == "assistant" else row["messages"]
        return encode_chat(messages, tokenizer)
    if row.get("suffix") is not None:
        if fim is None:
            raise SystemExit("the prompts have a suffix, and the model cannot fill in the middle")
        return fim.make_prompt(row["prompt"], row["suffix"])
    return list(tokenizer(row["prompt"], add_special_tokens=False)["input_ids"])


def read_prompts(path: Path, engine: Engine, limit: int | None, max_prompt: int) -> list[dict[str, Any]]:
    """Return `limit` rows, evenly over those of at most `max_prompt` tokens, with their `prompt_ids`."""
    fim, rows = Fim.detect(engine.tokenizer), []
    for n, (_, row) in enumerate(iterate_rows(path)):
        ids = encode_prompt(row, engine.tokenizer, fim)
        if 0 < len(ids) <= max_prompt:
            rows.append({"id": row.get("id", f"{path.stem}/{n}"), "group": row.get("group", ""), "prompt_ids": ids})
    return pick_evenly(rows, limit or len(rows))


def record(engine: Engine, rows: list[dict[str, Any]], params: SamplingParams, out: Path) -> int:
    """Append a trace of each row that `out` lacks, a batch at a time, and return how many tokens were written."""
    whole = out.read_bytes().rpartition(b"\n")[0] if out.exists() else b""  # a line that was not finished goes
    out.write_bytes(whole + b"\n" if whole else b"")
    done = {row["id"] for _, row in iterate_rows(out)}
    rows, n_tokens = [row for row in rows if row["id"] not in done], 0
    with out.open("a", encoding="utf-8") as file:
        for i in range(0, len(rows), BATCH):
            batch = rows[i : i + BATCH]
            for row, completion in zip(batch, engine.complete([row["prompt_ids"] for row in batch], params), strict=True):
                file.write(json.dumps({**row, "output_ids": completion.token_ids, **get_candidates(completion)}) + "\n")
                n_tokens += len(completion.token_ids)
            file.flush()
            print_progress(f"{out.stem}: {i + len(batch)}/{len(rows)} prompts, {n_tokens} tokens")
    return n_tokens


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.record", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="folder, hub name, GGUF file or smollm2")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--limit", type=int, help="prompts of each file, evenly over it (all)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-prompt", type=int, default=1024, help="tokens; longer prompts are left out")
    parser.add_argument("--temperature", type=parse_number, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.perf_counter()
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, logprobs=KEPT)
    args.out.mkdir(parents=True, exist_ok=True)
    with Engine(args.model, max_seqs=BATCH) as engine:
        tokens = {}
        for path in args.prompts:
            rows = read_prompts(path, engine, args.limit, args.max_prompt)
            tokens[path.stem] = record(engine, rows, params, args.out / f"{path.stem}.jsonl")
    settings = {"limit": args.limit, "max_tokens": args.max_tokens, "max_prompt": args.max_prompt}
    settings |= {"temperature": args.temperature, "seed": args.seed}
    figures = {"tokens": tokens, "seconds": round(time.perf_counter() - started, 1), "settings": settings}
    print_document({"benchmark": "record", "model": args.model, **figures, **describe_machine("cpu", engine.threads)})


if __name__ == "__main__":
    run_command(main)
