"""Recorded outputs through the object that vLLM asks for drafts, called as vLLM's runner calls it; vLLM is not needed.

N requests are under way, the next one coming as one ends. Figures of the JSON document:

step_ms   the median time of a call for all of them, with caches that something as large as a pass has emptied before
accepted  tokens of a draft that were right, per step of one request; `drafted`: its tokens
suffix    the same of arctic-inference's suffix decoding as vLLM configures it (chains of 24 at most, earlier outputs of this run known),
          if that is installed

No clock decides what is drafted: a row costs `--slope` of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.recordings import RecordedText, read_traces
from benchmarks.replayed import Arctic, replay
from ngramspec.integrations import vllm

EMPTIED_BYTES = 64 << 20  # read before each call
MAX_OUT = 256  # tokens of an output that are followed, if nothing else is said


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "through the object that vLLM asks for drafts, and arctic-inference's suffix decoding; the options below are of this"
    parser.add_argument("--vllm-proposer", action="store_true", help=text)
    parser.add_argument("--requests", type=common.parse_counts, default=[1, 8, 32], metavar="N,N,...", help="under way (1,8,32)")
    parser.add_argument("--depth", type=common.parse_positive, default=24, metavar="K", help="num_speculative_tokens (24)")
    parser.add_argument("--slope", type=common.parse_number, default=0.02, metavar="S", help="cost of a row as a share of a step (0.02)")
    parser.add_argument("--mirrors", action="store_true", help="as if the runner could not be found: rows are known by their texts")


class FollowedRequest:
    """A request with its recorded text: what it knows so far, and its draft."""

    def __init__(self, key: str, trace: RecordedText) -> None:
        self.key, self.text, self.n_prompt = key, np.array(trace.prompt + trace.output, np.int32), len(trace.prompt)
        self.known = self.n_prompt
        self.draft: list[int] = []

    @property
    def done(self) -> bool:
        return self.known >= len(self.text)

    def verify(self) -> list[int]:
        """Return the tokens of a step: of the draft what the text goes on with, and one token more."""
        rest = self.text[self.known :].tolist()
        n = 0
        while n < min(len(self.draft), len(rest) - 1) and self.draft[n] == rest[n]:
            n += 1
        self.known += n + 1
        return rest[: n + 1]


def measure(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Return the JSON document."""
    max_out = args.max_out or MAX_OUT
    traces = [trace for path in args.traces for trace in read_traces(path, tokenizer, args.limit, max_out)]
    sys.modules.setdefault("vllm", types.SimpleNamespace(__version__=vllm.TESTED[0]))  # type: ignore[arg-type]
    document: dict[str, Any] = {"benchmark": "guest_replay", "traces": [path.name for path in args.traces], "requests": {}}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for n in args.requests:
            document["requests"][n] = follow_all(traces, n, args, folder, len(tokenizer))
            common.print_progress(f"{n} requests: {document['requests'][n]}")
    try:  # one request after the other, which know each other's outputs
        found = replay(Arctic(tree=False, cache=True), traces)
        tokens = found["tokens_per_pass"]
        document["suffix"] = {"tokens_per_step": tokens, "accepted": round(tokens - 1, 4), "drafted": found["rows_per_pass"]}
    except ImportError as error:
        document["suffix"] = {"absent": str(error)}
    settings = {"limit": args.limit, "max_out": max_out, "depth": args.depth, "slope": args.slope, "mirrors": args.mirrors}
    return (
        document
        | {"settings": settings | {"datastore": Path(args.datastore[0]).name if args.datastore else None}}
        | common.describe_machine("cpu", 1)
    )


def follow_all(traces: list[RecordedText], n_requests: int, args: argparse.Namespace, model: str, vocab_size: int) -> dict[str, float]:
    """Follow all traces, `n_requests` at a time, and return the figures."""
    longest = max(len(trace.prompt) + len(trace.output) for trace in traces) + 1
    drafter = vllm.Proposer(make_configuration(longest, n_requests, args, model, vocab_size))
    runner = StubRunner(drafter, n_requests, longest, known=not args.mirrors)
    waiting, big = list(enumerate(traces)), np.ones(EMPTIED_BYTES // 8)
    requests: list[FollowedRequest] = []
    took_ms, steps, drafted, accepted = [], 0, 0, 0
    while waiting or requests:
        while waiting and len(requests) < n_requests:
            i, trace = waiting.pop(0)
            requests.append(FollowedRequest(str(i), trace))
        sampled = []
        for request in requests:
            drafted, steps = drafted + len(request.draft), steps + 1
            sampled.append(request.verify())
            accepted += len(sampled[-1]) - 1
        runner.load(requests)
        big.sum()
        start = time.perf_counter()
        drafts = drafter.propose(sampled, runner.lengths, runner.input_batch.token_ids_cpu)
        if len(requests) == min(n_requests, len(traces)):
            took_ms.append((time.perf_counter() - start) * 1e3)
        assert not drafter.failed, "drafting failed"
        for request, draft in zip(requests, drafts, strict=True):
            request.draft = draft
        requests = [request for request in requests if not request.done]
        runner.requests = {request.key: runner.requests[request.key] for request in requests}  # vLLM keeps a request's object, too
    return {
        "step_ms": round(statistics.median(took_ms), 3),
        "tokens_per_step": round(1 + accepted / steps, 4),
        "accepted": round(accepted / steps, 4),
        "drafted": round(drafted / steps, 4),
    }


class StubRunner:
    """What vLLM's runner has that its proposers look at: requests by id, and a batch whose rows are theirs."""

    def __init__(self, drafter: vllm.Proposer, n_rows: int, longest: int, *, known: bool) -> None:
        self.input_batch = types.SimpleNamespace(req_ids=[], token_ids_cpu=np.zeros((n_rows, longest), np.int32))
        self.requests: dict[str, Any] = {}
        self.lengths = np.zeros(n_rows, np.int32)
        if known:
            self.load_model(drafter)

    def load_model(self, drafter: vllm.Proposer) -> None:
        """Load the drafter, which finds its runner in who calls."""
        drafter.load_model(None)

    def load(self, requests: list[FollowedRequest]) -> None:
        """Put the requests' texts into the batch."""
        for i, request in enumerate(requests):
            self.lengths[i] = request.known
            self.input_batch.token_ids_cpu[i, : request.known] = request.text[: request.known]
            if request.key not in self.requests:
                n_output = len(request.text) - request.n_prompt
                params = types.SimpleNamespace(max_tokens=n_output, all_stop_token_ids=set(), extra_args=None, temperature=0.0)
                self.requests[request.key] = types.SimpleNamespace(num_prompt_tokens=request.n_prompt, sampling_params=params)
        self.input_batch.req_ids = [request.key for request in requests]


def make_configuration(longest: int, n_requests: int, args: argparse.Namespace, model: str, vocab_size: int) -> Any:
    """Return the part of vLLM's configuration that is read."""
    space = types.SimpleNamespace
    settings: dict[str, Any] = {"steady": True, "slope": args.slope}
    if args.datastore:
        settings |= {"datastore": args.datastore[0], "tokenizer": model}
    return space(
        model_config=space(max_model_len=longest, model=model, tokenizer=model, get_vocab_size=lambda: vocab_size),
        scheduler_config=space(max_num_seqs=n_requests),
        speculative_config=space(num_speculative_tokens=args.depth),
        parallel_config=space(tensor_parallel_size=1),
        device_config=space(device_type="cpu"),
        additional_config={"ngramspec": settings},
    )
