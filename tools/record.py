"""Let a model write, and keep what it wrote with its own candidates: traces for `benchmarks.replay` and `tools.learn_mix`.

    python -m tools.record --model M --prompts F.jsonl --out TRACES.jsonl [--limit N] [--max-tokens K] [--temperature T --seed S]

A row of the prompts has `prompt_ids`, `prompt` or `messages`. A row of the traces has `prompt_ids`, `output_ids`, and per output token
`top_ids` and `top_logprobs`, the most likely tokens there, most likely first. Rows are written as they finish, so that an interrupted
run leaves whole ones.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import describe_machine, get_candidates, print_document
from ngramspec import Engine, SamplingParams
from ngramspec.speculative.features import KEPT

BATCH = 32


def prompt_ids(row: dict[str, Any], tokenizer: Any) -> list[int]:
    if "prompt_ids" in row:
        return list(row["prompt_ids"])
    text = row["prompt"] if "prompt" in row else tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.record", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="folder, hub name, GGUF file or smollm2")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-prompt", type=int, default=1024, help="tokens; longer prompts are left out")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started, n_tokens = time.perf_counter(), 0
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, logprobs=KEPT)
    with Engine(args.model) as engine, args.prompts.open(encoding="utf-8") as file, args.out.open("w", encoding="utf-8") as out:
        prompts = [ids for line in file if 0 < len(ids := prompt_ids(json.loads(line), engine.tokenizer)) <= args.max_prompt][: args.limit]
        for i in range(0, len(prompts), BATCH):
            for done in engine.complete(prompts[i : i + BATCH], params):
                row = {"prompt_ids": done.prompt_token_ids, "output_ids": done.token_ids, **get_candidates(done)}
                out.write(json.dumps(row) + "\n")
                n_tokens += len(done.token_ids)
            print(f"{min(i + BATCH, len(prompts))}/{len(prompts)} prompts, {n_tokens} tokens", flush=True)
    settings = {"prompts": args.prompts.name, "max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    figures = {"prompts": len(prompts), "tokens": n_tokens, "seconds": round(time.perf_counter() - started, 1), "settings": settings}
    print_document({"benchmark": "record", "model": args.model, **figures, **describe_machine("cpu", torch.get_num_threads())})


if __name__ == "__main__":
    main()
