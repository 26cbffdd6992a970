"""Compare random requests, run together with drafts in little memory, with each of them alone and without drafts: bit for bit.

    python -m tools.exactness --model MODEL --minutes 10
    python -m tools.exactness --model A B C --minutes 1 --kv-tokens 1600 --max-rows 16 --together 8 --seed 7     # preempts, small chunks

Prompts are cut from Python's standard library; some begin like others, or go on after an earlier request's text. Parameters, hints,
grammars, the order, beam searches and a few cancellations are random; a run with the same arguments has the same requests. Compared are
token ids, texts, ends and log-probabilities. The last line of output for each model is one JSON document; the code is 1 if a request
differs.
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

from benchmarks.common import parse_number
from ngramspec import Beam, Completion, Engine, Grammar, SamplingParams
from ngramspec.cli.common import parse_size
from ngramspec.errors import OutOfMemoryError
from ngramspec.outputs import BLOCK

BOOK = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 40}, "year": {"type": "integer"}, "tags": {"type": "array", "maxItems": 3}},
    "required": ["title", "year", "tags"],
}
GRAMMARS = (Grammar.json_schema(BOOK), Grammar.json_object(), Grammar.regex(r"(    [a-z_]+ = [a-z0-9_+]+\n){1,9}"))
# Shares of requests; `next`: of those that go on after an earlier request's text.
SHARES = {
    "sampled": 0.5, "penalised": 0.2, "grammar": 0.1, "stop": 0.2, "logprobs": 0.3, "prompt_logprobs": 0.1, "several": 0.1, "next": 0.3,
}  # fmt: skip
CANCELLED = 0.05  # share of requests
WIDTH = 3  # of beam searches
ALIKE = 3  # requests in a row whose prompts are cut from one place


def main() -> None:
    args = parse_args()
    texts = [path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    differ = [compare(model, args, texts) for model in args.model]
    sys.exit(any(differ))


def compare(model: str, args: argparse.Namespace, texts: list[str]) -> bool:
    """Run requests on one model, print what was found, and return whether a request differs."""
    of_model = {"max_model_len": args.max_model_len, "precision": args.precision, "quantize": args.quantize}
    options = {"max_seqs": args.together, "max_rows": args.max_rows, "kv_memory": args.kv_memory, **of_model}
    found = dict.fromkeys(("requests", "beams", "tokens", "cancelled", "preemptions", "cached", "drafted", "accepted", "differ"), 0)
    with Engine(model, **options) as drafting, Engine(model, speculation=False, prefix_cache=False, max_seqs=WIDTH, **of_model) as plain:
        drafting.finish_compiling(lambda text: print(text, file=sys.stderr))
        if args.store:
            drafting.add_datastore("store", args.store)
        if args.kv_tokens:
            del drafting.runner.pool.free[args.kv_tokens // BLOCK :]
        number, earlier, deadline = 0, [], time.monotonic() + 60 * args.minutes
        while time.monotonic() < deadline:
            numbers = range(number, number + 2 * args.together)
            number = numbers.stop
            rng = np.random.default_rng((args.seed, number))
            requests = [make_request(args.seed, i, texts, drafting, earlier) for i in numbers]
            alone = [plain.complete(*request) for request in requests]
            earlier = [[*each.prompt_token_ids, *each.choices[0].token_ids] for each in alone]
            hints = [make_hints(np.random.default_rng((args.seed, i, 1)), each) for i, each in zip(numbers, alone, strict=True)]
            beams = [] if drafting.runner.is_recurrent else [(requests[0][0], WIDTH, 16)]
            together, searched = run_together(drafting, requests, hints, beams, rng)
            for beam, ours in zip(beams, searched, strict=True):
                found["beams"] += ours is not None
                if ours is not None and ours != plain.beam_search(*beam, speculation=False):
                    found["differ"] += 1
                    print(f"request {numbers[0]}: the beam search differs", flush=True)
            for i, completion in together.items():
                if completion is None:
                    found["cancelled"] += 1
                    continue
                found["requests"] += 1
                found["cached"] += completion.cached_tokens
                for choice in completion.choices:
                    found["tokens"] += len(choice.token_ids)
                    found["drafted"] += choice.stats.drafted
                    found["accepted"] += choice.stats.accepted
                if difference := describe_difference(completion, alone[i]):
                    found["differ"] += 1
                    print(f"request {numbers[i]}: {difference}; {requests[i][1]}", flush=True)
            found["preemptions"] = drafting.status().preemptions
            print(json.dumps(found), file=sys.stderr, flush=True)
        found["exactness"] = drafting.exactness
    print(json.dumps({"trial": "exactness", "model": Path(model).name, "seed": args.seed, **options, **found}), flush=True)
    return found["differ"] > 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", nargs="+", default=["smollm2"])
    parser.add_argument("--minutes", type=parse_number, default=10, help="for each model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--together", type=int, default=8, help="requests that run at a time")
    parser.add_argument("--max-rows", type=int, help="rows of a pass")
    parser.add_argument(
        "--kv-memory", type=lambda text: parse_size(text, "--kv-memory"), help="such as 150M: little makes the engine preempt"
    )
    parser.add_argument("--kv-tokens", type=int, help="tokens that the KV pool is cut to: makes the engine preempt hybrids, too")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--max-model-len", type=int, default=640, help="tokens of a prompt and its text")
    parser.add_argument("--store", help="a datastore to draft from")
    return parser.parse_args()


def make_request(
    seed: int, number: int, texts: list[str], engine: Engine, earlier: list[list[int]]
) -> tuple[list[int], SamplingParams]:  # fmt: skip
    """Return a random prompt and its parameters. `earlier`: prompts with the texts that they led to."""
    rng, place = np.random.default_rng((seed, number)), np.random.default_rng((seed, number // ALIKE, 2))
    is_set = {name: bool(rng.random() < share) for name, share in SHARES.items()}
    text, longest = texts[place.integers(len(texts))], engine.max_model_len
    start = int(place.integers(max(1, len(text) - 4000)))
    ids = engine.encode_text(text[start : start + 8000])
    n_prompt, n_more = int(rng.integers(1, longest * 3 // 4)), int(rng.integers(1, longest // 4))
    prompt = ids[:n_prompt]
    if is_set["next"] and earlier:
        before = earlier[rng.integers(len(earlier))]
        prompt = (before + prompt[: n_prompt // 4])[: longest * 3 // 4]
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
    if is_set["prompt_logprobs"]:
        sampling["prompt_logprobs"] = int(rng.integers(3))
    if is_set["several"]:
        sampling["n"] = 2
    return prompt, SamplingParams(**sampling)


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
    engine: Engine, requests: list[tuple[list[int], SamplingParams]], hints: list[dict[str, Any]],
    beams: list[tuple[list[int], int, int]], rng: np.random.Generator,
) -> tuple[dict[int, Completion | None], list[list[Beam] | None]]:  # fmt: skip
    """Run the requests in a random order, all submitted at once, and cancel a few; then beam searches beside them.

    Return ({index: its completion, None if cancelled}, the results of the searches, None if one found no memory).
    """
    order = [int(i) for i in rng.permutation(len(requests))]
    running = {i: engine.submit(*requests[i], **hints[i]) for i in order}
    cancelled = {i for i in order if rng.random() < CANCELLED}
    for i in cancelled:
        time.sleep(float(rng.random()) / 10)
        running[i].cancel()
    searched: list[list[Beam] | None] = []
    for beam in beams:
        try:
            searched.append(engine.beam_search(*beam))
        except OutOfMemoryError:  # it is not preempted
            searched.append(None)
    return {i: None if i in cancelled else request.result() for i, request in running.items()}, searched


def describe_difference(together: Completion, alone: Completion) -> str:
    """Return what differs first between two completions; "" if nothing does."""
    if together.prompt_logprobs != alone.prompt_logprobs:
        return "prompt_logprobs differ"
    for ours, plain in zip(together.choices, alone.choices, strict=True):
        for name in ("token_ids", "text", "finish_reason", "stop_reason", "logprobs"):
            if getattr(ours, name) != getattr(plain, name):
                where = next((k for k, pair in enumerate(zip(ours.token_ids, plain.token_ids, strict=False)) if pair[0] != pair[1]), None)
                return f"sample {ours.index}: {name} differ, tokens from number {where} on of {len(plain.token_ids)}"
    return ""


if __name__ == "__main__":
    main()
