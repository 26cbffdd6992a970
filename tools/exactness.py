"""Compare random requests, run together with drafts in little memory, with each of them alone and without drafts: bit for bit.

    python -m tools.exactness --model MODEL --minutes 10
    python -m tools.exactness --model MODEL --kv-memory 150M --max-rows 16 --together 20 --seed 7     # preempts, small chunks

Prompts are cut from Python's standard library. Parameters, hints, grammars, the order and a few cancellations are random; a request with
the same `--seed` and number is the same one. Compared are token ids, texts, ends and log-probabilities. The last line of the output is one
JSON document; the code is 1 if a request differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

from ngramspec import Completion, Engine, Grammar, SamplingParams
from ngramspec.cli.common import parse_size

BOOK = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 40}, "year": {"type": "integer"}, "tags": {"type": "array", "maxItems": 3}},
    "required": ["title", "year", "tags"],
}
GRAMMARS = (Grammar.json_schema(BOOK), Grammar.json_object(), Grammar.regex(r"(    [a-z_]+ = [a-z0-9_+]+\n){1,9}"))
SHARES = {"sampled": 0.5, "penalised": 0.2, "grammar": 0.1, "stop": 0.2, "logprobs": 0.3, "several": 0.1}  # of requests
CANCELLED = 0.05  # share of requests


def main() -> None:
    args = parse_args()
    texts = [path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    options = {"max_seqs": args.together, "max_rows": args.max_rows, "kv_memory": args.kv_memory, "max_model_len": args.max_model_len}
    found = {"requests": 0, "tokens": 0, "cancelled": 0, "preemptions": 0, "accepted": 0, "differ": 0}
    with Engine(args.model, **options) as drafting, Engine(args.model, speculation=False, prefix_cache=False, max_seqs=1) as plain:
        drafting.finish_compiling(lambda text: print(text, file=sys.stderr))
        if args.store:
            drafting.add_datastore("store", args.store)
        number, deadline = 0, time.monotonic() + 60 * args.minutes
        while time.monotonic() < deadline:
            numbers = range(number, number + 2 * args.together)
            number = numbers.stop
            rng = np.random.default_rng((args.seed, number))
            requests = [make_request(np.random.default_rng((args.seed, i)), texts, drafting, args.max_model_len) for i in numbers]
            alone = [plain.complete(*request) for request in requests]
            hints = [make_hints(np.random.default_rng((args.seed, i, 1)), each) for i, each in zip(numbers, alone, strict=True)]
            for i, completion in run_together(drafting, requests, hints, rng).items():
                if completion is None:
                    found["cancelled"] += 1
                    continue
                found["requests"] += 1
                found["tokens"] += sum(len(choice.token_ids) for choice in completion.choices)
                found["accepted"] += sum(choice.stats.accepted for choice in completion.choices)
                if difference := describe_difference(completion, alone[i]):
                    found["differ"] += 1
                    print(f"request {numbers[i]}: {difference}; {requests[i][1]}", flush=True)
            found["preemptions"] = drafting.status().preemptions
            print(json.dumps(found), file=sys.stderr, flush=True)
    print(json.dumps({"trial": "exactness", "model": Path(args.model).name, "seed": args.seed, **options, **found}))
    sys.exit(found["differ"] > 0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--together", type=int, default=8, help="requests that run at a time")
    parser.add_argument("--max-rows", type=int, help="rows of a pass")
    parser.add_argument(
        "--kv-memory", type=lambda text: parse_size(text, "--kv-memory"), help="such as 150M: little makes the engine preempt"
    )
    parser.add_argument("--max-model-len", type=int, default=640, help="tokens of a prompt and its text")
    parser.add_argument("--store", help="a datastore to draft from")
    return parser.parse_args()


def make_request(rng: np.random.Generator, texts: list[str], engine: Engine, longest: int) -> tuple[list[int], SamplingParams]:
    """Return a random prompt and its parameters."""
    is_set = {name: bool(rng.random() < share) for name, share in SHARES.items()}
    text = texts[rng.integers(len(texts))]
    start = int(rng.integers(max(1, len(text) - 4000)))
    ids = engine.encode_text(text[start : start + 8000])
    n_prompt, n_more = int(rng.integers(1, longest * 3 // 4)), int(rng.integers(1, longest // 4))
    sampling: dict[str, Any] = {"max_tokens": n_more, "ignore_eos": bool(rng.random() < 0.3), "seed": int(rng.integers(1 << 30))}
    if is_set["sampled"]:
        sampling |= {"temperature": float(rng.choice([0.2, 0.8, 1.3])), "top_k": int(rng.choice([0, 5, 40]))}
        sampling |= {"top_p": float(rng.choice([1, 0.9])), "min_p": float(rng.choice([0, 0.05]))}
    if is_set["penalised"]:
        sampling |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1, "logit_bias": {ids[0]: -3.0}}
    if is_set["grammar"]:
        sampling["grammar"] = GRAMMARS[rng.integers(len(GRAMMARS))]
    elif is_set["stop"]:
        sampling["stop"] = [str(rng.choice(["\n\n", "return", "):"]))]
    if is_set["logprobs"]:
        sampling["logprobs"] = int(rng.integers(5))
    if is_set["several"]:
        sampling["n"] = 2
    return ids[:n_prompt], SamplingParams(**sampling)


def make_hints(rng: np.random.Generator, alone: Completion) -> dict[str, Any]:
    """Return random hints. A prediction is the true text with some tokens replaced, left out or written twice."""
    hints: dict[str, Any] = {"speculation": bool(rng.random() < 0.9)}
    if rng.random() < 0.5:
        true = alone.choices[0].token_ids
        changes = rng.choice(4, len(true), p=[0.85, 0.05, 0.05, 0.05])
        hints["prediction"] = [
            token for i, change in enumerate(changes) for token in ([true[i]], [true[i - 1]], [], [true[i], true[i]])[change]
        ]
    return hints


def run_together(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]], hints: list[dict[str, Any]], rng: np.random.Generator
) -> dict[int, Completion | None]:
    """Run the requests in a random order, all submitted at once, and cancel a few -> {index: its completion, None if cancelled}."""
    order = [int(i) for i in rng.permutation(len(requests))]
    running = {i: engine.submit(*requests[i], **hints[i]) for i in order}
    cancelled = {i for i in order if rng.random() < CANCELLED}
    for i in cancelled:
        time.sleep(float(rng.random()))
        running[i].cancel()
    return {i: None if i in cancelled else request.result() for i, request in running.items()}


def describe_difference(together: Completion, alone: Completion) -> str:
    """Return what differs first between two completions; "" if nothing does."""
    for ours, plain in zip(together.choices, alone.choices, strict=True):
        for name in ("token_ids", "text", "finish_reason", "stop_reason", "logprobs"):
            if getattr(ours, name) != getattr(plain, name):
                where = next((k for k, pair in enumerate(zip(ours.token_ids, plain.token_ids, strict=False)) if pair[0] != pair[1]), None)
                return f"sample {ours.index}: {name} differ, tokens from number {where} on of {len(plain.token_ids)}"
    return ""


if __name__ == "__main__":
    main()
