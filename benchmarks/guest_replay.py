"""Recorded outputs through the object that vLLM asks for drafts, called as vLLM's runner calls it; vLLM is not needed.

    python -m benchmarks.guest_replay --traces F.jsonl [F.jsonl ...] --tokenizer T [--datastore D] [--requests N,N] [--limit N]
        [--max-out K] [--depth K] [--slope S] [--mirrors]

So many requests are under way, the next one coming as one ends. `step_ms`: the median of what a call for all of them takes, with caches
that something as large as a pass has emptied before. `accepted`: tokens of a draft that were right, a step of one request; `drafted`: its
tokens. `suffix`: the same of arctic-inference's suffix decoding as vLLM configures it (chains of 24 at most, earlier outputs of this run
known), where that is installed. No clock decides what is drafted: a row costs `--slope` of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common, replay
from benchmarks.replay import Trace
from ngramspec.integrations import vllm
from ngramspec.models.loader import load_tokenizer

EMPTIED = 64 << 20
"""Bytes that are read before each call."""


class Row:
    """A request: what it knows so far, and its draft."""

    def __init__(self, key: str, trace: Trace) -> None:
        self.key, self.text, self.n_prompt = key, np.array(trace.prompt + trace.output, np.int32), len(trace.prompt)
        self.known = self.n_prompt
        self.draft: list[int] = []

    @property
    def done(self) -> bool:
        return self.known >= len(self.text)

    def verify(self) -> list[int]:
        """What a step gives: of the draft what the text goes on with, and one token more."""
        rest = self.text[self.known :].tolist()
        n = 0
        while n < min(len(self.draft), len(rest) - 1) and self.draft[n] == rest[n]:
            n += 1
        self.known += n + 1
        return rest[: n + 1]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    tokenizer = load_tokenizer(args.tokenizer)
    traces = [trace for path in args.traces for trace in replay.read_traces(path, tokenizer, args.limit, args.max_out)]
    sys.modules.setdefault("vllm", types.SimpleNamespace(__version__=vllm.TESTED[0]))  # type: ignore[arg-type]
    document: dict[str, Any] = {"benchmark": "guest_replay", "traces": [path.name for path in args.traces], "requests": {}}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for n in args.requests:
            document["requests"][n] = follow(traces, n, args, folder, len(tokenizer))
            common.say(f"{n} requests: {document['requests'][n]}")
    try:
        document["suffix"] = suffix(traces)
    except ImportError as error:
        document["suffix"] = {"absent": str(error)}
    names = ("limit", "max_out", "depth", "slope", "mirrors")
    settings = {name: getattr(args, name) for name in names} | {"datastore": args.datastore and args.datastore.name}
    common.print_document(document | {"settings": settings} | common.environment("cpu", 1))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.new_parser("guest_replay", __doc__)
    add = parser.add_argument
    add("--traces", type=common.file, nargs="+", required=True, metavar="F.jsonl", help="recorded outputs, as replay reads them")
    add("--tokenizer", default="smollm2", help="folder, hub name, GGUF file or smollm2")
    add("--datastore", type=Path, metavar="D", help="draft from this datastore too")
    add("--requests", type=common.counts, default=[1, 8, 32], metavar="N,N,...", help="requests under way; default 1,8,32")
    add("--limit", type=common.positive, metavar="N", help="traces per file (all)")
    add("--max-out", type=common.positive, default=256, metavar="K", help="tokens of an output that are followed (256)")
    add("--depth", type=common.positive, default=24, metavar="K", help="num_speculative_tokens (24)")
    add("--slope", type=float, default=0.02, metavar="S", help="what a row is said to take, as a share of a step (0.02)")
    add("--mirrors", action="store_true", help="as where the runner cannot be found: rows are known by their texts")
    return parser.parse_args(argv)


def follow(traces: list[Trace], n_requests: int, args: argparse.Namespace, model: str, vocab_size: int) -> dict[str, float]:
    """All traces, so many at a time."""
    longest = max(len(trace.prompt) + len(trace.output) for trace in traces) + 1
    drafter = vllm.Proposer(configuration(longest, n_requests, args, model, vocab_size))
    runner = Runner(drafter, n_requests, longest, known=not args.mirrors)
    waiting, big = list(enumerate(traces)), np.ones(EMPTIED // 8)
    rows: list[Row] = []
    took_ms, steps, drafted, accepted = [], 0, 0, 0
    while waiting or rows:
        while waiting and len(rows) < n_requests:
            i, trace = waiting.pop(0)
            rows.append(Row(str(i), trace))
        sampled = []
        for row in rows:
            drafted, steps = drafted + len(row.draft), steps + 1
            sampled.append(row.verify())
            accepted += len(sampled[-1]) - 1
        runner.load(rows)
        big.sum()
        start = time.perf_counter()
        drafts = drafter.propose(sampled, runner.lengths, runner.input_batch.token_ids_cpu)
        if len(rows) == min(n_requests, len(traces)):
            took_ms.append((time.perf_counter() - start) * 1e3)
        assert not drafter.failed, "drafting failed"
        for row, draft in zip(rows, drafts, strict=True):
            row.draft = draft
        rows = [row for row in rows if not row.done]
        runner.requests = {row.key: runner.requests[row.key] for row in rows}  # vLLM keeps a request's object, too
    return {
        "step_ms": round(statistics.median(took_ms), 3),
        "tokens_per_step": round(1 + accepted / steps, 4),
        "accepted": round(accepted / steps, 4),
        "drafted": round(drafted / steps, 4),
    }


class Runner:
    """What vLLM's runner has that its proposers look at: requests by id, and a batch whose rows are theirs."""

    def __init__(self, drafter: vllm.Proposer, n_rows: int, longest: int, *, known: bool) -> None:
        self.input_batch = types.SimpleNamespace(req_ids=[], token_ids_cpu=np.zeros((n_rows, longest), np.int32))
        self.requests: dict[str, Any] = {}
        self.lengths = np.zeros(n_rows, np.int32)
        if known:
            self.load_model(drafter)

    def load_model(self, drafter: vllm.Proposer) -> None:
        """The drafter finds its runner in who calls."""
        drafter.load_model(None)

    def request(self, row: Row) -> Any:
        params = types.SimpleNamespace(max_tokens=len(row.text) - row.n_prompt, all_stop_token_ids=set(), extra_args=None, temperature=0.0)
        return types.SimpleNamespace(num_prompt_tokens=row.n_prompt, sampling_params=params)

    def load(self, rows: list[Row]) -> None:
        """The rows' texts into the batch."""
        for i, row in enumerate(rows):
            self.lengths[i] = row.known
            self.input_batch.token_ids_cpu[i, : row.known] = row.text[: row.known]
            if row.key not in self.requests:
                self.requests[row.key] = self.request(row)
        self.input_batch.req_ids = [row.key for row in rows]


def configuration(longest: int, n_requests: int, args: argparse.Namespace, model: str, vocab_size: int) -> Any:
    """What of vLLM's configuration is read."""
    space = types.SimpleNamespace
    settings: dict[str, Any] = {"steady": True, "slope": args.slope}
    if args.datastore:
        settings |= {"datastore": str(args.datastore), "tokenizer": model}
    return space(
        model_config=space(max_model_len=longest, model=model, tokenizer=model, get_vocab_size=lambda: vocab_size),
        scheduler_config=space(max_num_seqs=n_requests),
        speculative_config=space(num_speculative_tokens=args.depth),
        parallel_config=space(tensor_parallel_size=1),
        device_config=space(device_type="cpu"),
        additional_config={"ngramspec": settings},
    )


def suffix(traces: list[Trace]) -> dict[str, float]:
    """arctic-inference's, one request after the other, which know each other's outputs. Raises ImportError."""
    found = replay.replay(replay.Arctic(tree=False, cache=True), traces)
    tokens = found["tokens_per_pass"]
    return {"tokens_per_step": tokens, "accepted": round(tokens - 1, 4), "drafted": found["rows_per_pass"]}


if __name__ == "__main__":
    main()
