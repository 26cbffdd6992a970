"""How good are the drafters, without a model? Recorded outputs are followed as the walk would follow them.

    python -m benchmarks.replay --traces F.jsonl [F2...] [--tokenizer M] [--limit N] [--max-out K] [--peers] [--drafters a,b] [--micro]

A trace is a prompt and the tokens that a model then wrote. At every pass a drafter sees the prompt and the output so far; the longest
drafted path that the output follows is accepted, and the one token more that a pass always yields.

    tokens_per_pass   1.00 is no help
    rows_per_pass     drafted tokens that a pass carries beside the root
    us_per_pass       microseconds of drafting and updating, prompt included, one sequence at a time
    speed_flat, _steep   tokens_per_pass / (1 + s * rows_per_pass), s = 0.005 (a large GPU) and 0.04 (two CPU cores)

Ours run once for each cost; every set starts from the shipped weights. `--micro` measures the time per sequence and step with 64
sequences at once instead; it needs no traces. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from benchmarks.common import SLOPES, Words, environment, new_parser, print_document, print_table, say, timed
from benchmarks.ours import chain
from ngramspec.datastore import Datastore
from ngramspec.sampling.sampler import Sampler
from ngramspec.speculative import ngram_table
from ngramspec.speculative.base import Seen, Text
from ngramspec.speculative.datastore_drafter import SuffixDrafter
from ngramspec.speculative.proposer import ANSWERS, HISTORY, Proposer, warmup

MAX_ROWS = 64
REST_ROWS = (4, 8, 16, 24, 32, 48, 64)
FIGURES = ("tokens_per_pass", "rows_per_pass", "us_per_pass", "speed_flat", "speed_steep")


@dataclass(frozen=True, slots=True)
class Trace:
    """What a model was asked, and what it wrote."""

    prompt: list[int]
    output: list[int]
    prediction: list[int] | None = None
    top: tuple[np.ndarray, np.ndarray] | None = None
    """The model's own likeliest tokens at each output position [n, KEPT] int64 and their logits [n, KEPT] float32, where recorded."""


def edited_text(row: dict[str, Any]) -> str:
    """The text that an edit request carries: the first fenced block of its last user message, "" where there is none."""
    asked = [str(m["content"]) for m in row.get("messages", ()) if m["role"] == "user"] or [str(row.get("prompt", ""))]
    block = re.search(r"^```[^\n]*\n(.*?)^```", asked[-1], re.DOTALL | re.MULTILINE)
    return block[1] if block else ""


def read_traces(path: Path, tokenizer: Any, limit: int | None, max_out: int, predicted: bool = False) -> list[Trace]:
    """Traces of a JSONL file. A row has `prompt_ids` and `output_ids`; or `messages`, whose last assistant message is the output, else
    `model_output` or `reference` is; or `prompt` and `reference`. Outputs of fewer than 8 tokens are left out.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    traces: list[Trace] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if limit is not None and len(traces) >= limit:
                break
            row = json.loads(line)
            if "output_ids" in row:
                prompt, output = list(row["prompt_ids"]), list(row["output_ids"])
            elif "messages" in row:
                messages = [{"role": str(m["role"]), "content": str(m.get("content") or "")} for m in row["messages"]]
                replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
                text = messages[replies[-1]]["content"] if replies else str(row.get("model_output") or row.get("reference") or "")
                asked = messages[: replies[-1]] if replies else messages
                prompt = encode(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
                output = encode(text)
            else:
                prompt, output = encode(row["prompt"]), encode(str(row.get("model_output") or row["reference"]))
            if len(output) >= 8:
                top = (np.array(row["top_ids"], np.int64), np.array(row["top_logprobs"], np.float32)) if "top_ids" in row else None
                traces.append(Trace(prompt, output[:max_out], encode(edited_text(row)) if predicted else None, top))
    if not traces:
        raise ValueError(f"{path} has no usable traces")
    return traces


class Replayed:
    """A drafter as the replay sees it. Parents of a draft: -1 is the last known token."""

    def begin(self, trace: Trace) -> None: ...
    def draft(self, text: np.ndarray) -> tuple[Sequence[int], Sequence[int]]:
        raise NotImplementedError

    def accept(self, new: np.ndarray, path: np.ndarray) -> None: ...
    def end(self) -> None: ...


class Ours(Replayed):
    """A speculator of the engine with one sequence, told what passes cost. It pays `paid` passes without drafts."""

    def __init__(
        self, speculator: Any, cost_ms: np.ndarray, stops: tuple[int, ...] = (), *, predicted: bool = False, params: Any = None
    ) -> None:
        """cost_ms [R+1] float64, of a pass with T rows. `params`: drafts know the request's sampling and the text's end, and the prompt's
        last token is the output's first, as where the pass that ends the prompt has given it."""
        self.speculator, self.cost_ms, self.stops, self.predicted, self.params = speculator, cost_ms, stops, predicted, params
        self.slots, self.paid = np.zeros(1, np.int32), 0.0
        self.accepted_by_source = dict.fromkeys(speculator.source_names, 0)

    def begin(self, trace: Trace) -> None:
        prompt, self.top = np.array(trace.prompt, np.int32), trace.top
        self.text, self.n_prompt, self.known = np.array([*trace.prompt, *trace.output], np.int32), len(prompt), len(prompt)
        text = None
        if self.params is not None:
            V, stops = self.speculator.vocab_size, frozenset(self.stops)
            sampler = Sampler(self.params, index=0, seed=0, prompt=prompt, vocab_size=V, stop_ids=stops)
            text = Text(sampler, len(prompt), len(self.text))
        prediction = np.array(trace.prediction, np.int32) if self.predicted and trace.prediction else None
        self.speculator.begin(0, prompt, stops=self.stops, prediction=prediction, text=text)

    def draft(self, text: np.ndarray) -> tuple[Sequence[int], Sequence[int]]:
        room = len(self.cost_ms) - 2
        depth = room if self.params is None else len(self.text) - len(text) - 1  # the last token is the model's own
        self.tree = self.speculator.propose(self.slots, np.array([depth], np.int32), self.cost_ms, 1, room)[0]
        self.paid += float(self.cost_ms[1 + len(self.tree)] / self.cost_ms[1])
        return self.tree.tokens.tolist(), self.tree.parents.tolist()

    def accept(self, new: np.ndarray, path: np.ndarray) -> None:
        seen = None
        if self.speculator.needs_topk and self.top is not None:  # of accepted rows only: a replay has no others
            rows = slice(self.known - self.n_prompt, self.known - self.n_prompt + len(new))
            text = np.append(np.int32(-1), self.text)[self.known - 1 : self.known + len(new)]
            n = len(text) - 1  # as of a pass whose tree is the chain of what was accepted
            batch: Any = SimpleNamespace(
                input_ids=text[1:].astype(np.int64),
                parents=np.arange(-1, n - 1, dtype=np.int32),
                roots=np.zeros(1, np.int32),
                ends=np.full(1, n, np.int32),
                root_logits=np.zeros(1, np.int32),
            )
            heard = np.array([[0, text[0], 0]], np.int64)
            seen = Seen(heard, batch, self.top[0][rows].astype(np.int32), self.top[1][rows])
        for source in self.tree.sources[path].tolist():
            self.accepted_by_source[self.speculator.source_names[source]] += 1
        self.speculator.observe(self.slots, [new], [path], seen)
        self.known += len(new)

    def end(self) -> None:
        self.speculator.end(0)
        self.speculator.remember(self.text[self.n_prompt - (self.params is not None) :])


def proposer(
    *, answers: bool = False, stores: Sequence[Datastore] = (), similar: bool = True, vocab_size: int = 0, **more: Any
) -> Proposer:
    """`vocab_size` above 0: with the model's own candidates, where the traces have them."""
    return Proposer(
        vocab_size=vocab_size or 2**31 - 1,
        max_seqs=1,
        spec_rows=MAX_ROWS,
        recycle=vocab_size > 0,
        answers=ANSWERS if answers else 0,
        datastore=SuffixDrafter({str(store.path): store for store in stores}, 1, similar=similar) if stores else None,
        **more,
    )


class Chain(Replayed):
    """The text alone: the longest context's most frequent continuation, chained, no probabilities."""

    accepted_by_source: Mapping[str, int] = MappingProxyType({})

    def draft(self, text: np.ndarray) -> tuple[Sequence[int], Sequence[int]]:
        tokens = chain(text[-HISTORY:], 8).tolist()
        return tokens, range(-1, len(tokens) - 1)


class FirstMatch(Replayed):
    """Copy what followed an earlier occurrence of the last n tokens, longest n first, earliest occurrence first.

    With n = 3..1 and 10 tokens it is transformers' prompt lookup (PromptLookupCandidateGenerator), with n = 4..2 and 7 vLLM's n-gram rule.
    """

    def __init__(self, longest: int, shortest: int, length: int) -> None:
        self.sizes, self.length = range(longest, shortest - 1, -1), length

    def draft(self, text: np.ndarray) -> tuple[Sequence[int], Sequence[int]]:
        for n in self.sizes:
            if len(text) > n:
                windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
                found = np.flatnonzero((windows == text[-n:]).all(axis=1))
                if len(found):
                    start = int(found[0]) + n
                    tokens = text[start : start + self.length].tolist()
                    return tokens, range(-1, len(tokens) - 1)
        return (), ()


class Arctic(Replayed):
    """arctic-inference's suffix decoding; `factor`, `rows` and `depth` as its configuration names them."""

    def __init__(self, tree: bool, cache: bool, factor: float = 1.0, rows: int = 24, depth: int = 24) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=-1 if cache else 0)
        self.options = {"max_spec_tokens": rows, "max_spec_factor": factor, "max_spec_offset": 0.0, "min_token_prob": 0.1}
        self.options["use_tree_spec"] = tree
        self.request, self.depth = 0, depth

    def begin(self, trace: Trace) -> None:
        self.request += 1
        self.cache.start_request(self.request, np.array(trace.prompt, np.int32))

    def draft(self, text: np.ndarray) -> tuple[Sequence[int], Sequence[int]]:
        draft = self.cache.speculate(self.request, np.ascontiguousarray(text[-self.depth :]), **self.options)
        return list(draft.token_ids), list(draft.parents)

    def accept(self, new: np.ndarray, path: np.ndarray) -> None:
        self.cache.add_active_response(self.request, new)

    def end(self) -> None:
        self.cache.stop_request(self.request)


class Rest(Replayed):
    """REST's retriever over the documents of a datastore: contexts of 16 down to 2 tokens, at most `rows` drafted tokens."""

    SPANS = range(16, 1, -1)

    def __init__(self, index: Path, rows: int) -> None:
        import draftretriever

        self.reader, self.rows = draftretriever.Reader(str(index)), rows

    def draft(self, text: np.ndarray) -> tuple[Sequence[int], Sequence[int]]:
        recent = text[-self.SPANS[0] :].tolist()
        for span in self.SPANS:
            if span <= len(recent):
                found = self.reader.search(recent[-span:], choices=self.rows)[0]
                if found:
                    return self._tree(found)
        return (), ()

    def _tree(self, candidates: list[list[int]]) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        nodes: dict[tuple[int, int], int] = {}
        for candidate in candidates:
            node = -1
            for token in candidate:
                if token < 0:
                    break
                if (node, token) not in nodes:
                    nodes[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = nodes[node, token]
        return tokens, parents


def rest_index(stores: Sequence[Datastore], folder: Path) -> Path:
    """REST's index of the same documents."""
    import draftretriever

    path = folder / "rest.idx"
    writer = draftretriever.Writer(str(path), vocab_size=stores[0].snapshot.manifest.vocab_size)
    for store in stores:
        for doc in store.snapshot.documents():
            writer.add_entry(store.snapshot.text_tokens(doc.segment, doc.number).tolist())
    writer.finalize()
    return path


def drafters(
    stops: tuple[int, ...], predicted: bool = False, stores: Sequence[Datastore] = (), vocab_size: int = 0
) -> dict[str, Callable[[], Replayed]]:
    """Ours, each for both costs, and the tables alone."""
    variants: dict[str, dict[str, Any]] = {}
    if predicted:
        variants |= {"+prediction": {"predicted": True}, "+both": {"answers": True, "predicted": True}}
    if stores:
        variants |= {"+datastore": {"stores": stores}, "+lookup": {"stores": stores, "similar": False}}
    variants |= {"": {}, "+answers": {"answers": True}, "+recycled": {"answers": True, "vocab_size": vocab_size}}

    def make(slope: float, predicted: bool = False, **options: Any) -> Replayed:
        return Ours(proposer(**options), 1.0 + slope * np.arange(-1.0, MAX_ROWS + 1), stops, predicted=predicted)

    ours = {f"ngramspec{name}-{cost}": partial(make, SLOPES[cost], **more) for name, more in variants.items() for cost in SLOPES}
    return {**ours, "ngram-chain": Chain}


def peers(stores: Sequence[Datastore], folder: Path) -> tuple[dict[str, Callable[[], Replayed]], dict[str, str]]:
    """The peers that can run here, and for those that cannot, why. `folder` holds what they keep on disk."""
    found: dict[str, Callable[[], Replayed]] = {"pld-hf": partial(FirstMatch, 3, 1, 10), "ngram-vllm": partial(FirstMatch, 4, 2, 7)}
    wide: dict[str, Any] = {"factor": 4.0, "rows": 32, "depth": 64}
    kinds: dict[str, dict[str, Any]] = {"": {"tree": False}, "-tree": {"tree": True}, "-tree-f4": {"tree": True, **wide}}
    arctic = {
        f"arctic{kind}{'+cache' * cache}": partial(Arctic, cache=cache, **more) for cache in (False, True) for kind, more in kinds.items()
    }
    rest: dict[str, Callable[[], Replayed]] = {}
    if stores:
        index = rest_index(stores, folder) if importlib.util.find_spec("draftretriever") else folder
        rest = {f"rest-{rows}": partial(Rest, index, rows) for rows in REST_ROWS}
    absent: dict[str, str] = {}
    for package, some in (("arctic_inference", arctic), ("draftretriever", rest)):
        if importlib.util.find_spec(package) is None:
            absent |= dict.fromkeys(some, f"{package} is not installed (make peers)")
        else:
            found |= some
    return found, absent


def follow(tokens: Sequence[int], parents: Sequence[int], output: Sequence[int]) -> list[int]:
    """Nodes of the longest path that the output takes, in depth order."""
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path, node = [], -1
    for token in output:
        node = child.get((node, token), -2)
        if node < 0:
            break
        path.append(node)
    return path


def replay(drafter: Replayed, traces: list[Trace]) -> dict[str, Any]:
    """Follow all traces -> the figures."""
    passes = tokens = rows = 0
    busy_ms = 0.0
    for trace in traces:
        text = np.array(trace.prompt + trace.output, np.int32)
        n, end = len(trace.prompt), len(text)
        busy_ms += timed(lambda trace=trace: drafter.begin(trace))
        while n < end:
            start = time.perf_counter()
            drafted, parents = drafter.draft(text[:n])
            busy_ms += (time.perf_counter() - start) * 1e3
            path = follow(drafted, parents, trace.output[n - len(trace.prompt) :])
            new, nodes = text[n : n + len(path) + 1], np.array(path, np.int32)
            busy_ms += timed(lambda new=new, nodes=nodes: drafter.accept(new, nodes))
            n += len(new)
            passes, tokens, rows = passes + 1, tokens + len(new), rows + len(drafted)
        drafter.end()
    found: dict[str, Any] = dict(figures(tokens / passes, rows / passes, busy_ms / passes * 1e3))
    if (by_source := getattr(drafter, "accepted_by_source", None)) is not None:
        found["accepted_by_source"] = {name: n for name, n in by_source.items() if n}
    return found


def figures(tokens_per_pass: float, rows_per_pass: float, us_per_pass: float) -> dict[str, float]:
    speeds = (tokens_per_pass / (1 + s * rows_per_pass) for s in SLOPES.values())
    return {name: round(value, 4) for name, value in zip(FIGURES, (tokens_per_pass, rows_per_pass, us_per_pass, *speeds), strict=True)}


@njit(nogil=True)
def _tables_only(states, contexts, slots, tokens, history, heads, totals, runs):
    """What a step costs the tables: append one token to each sequence, look all its contexts up."""
    found = 0
    keys = np.empty(len(contexts) + 1, np.uint64)
    recent = np.empty(contexts[-1], np.int32)
    for b in range(len(slots)):
        state = states[slots[b]]
        seq = ngram_table.view_arrays(state, contexts)
        ngram_table.push_token(state, seq, tokens[b], history, keys)
        for i in range(len(recent)):
            recent[i] = seq.tokens[(state[ngram_table.LENGTH] - 1 - i) & (len(seq.tokens) - 1)]
        found += ngram_table.look_up(state, seq, state, seq, recent, len(recent), heads, totals, runs)[0]
    return found


def micro(traces: list[Trace], stops: tuple[int, ...] = (), n_seqs: int = 64, repeat: int = 5) -> dict[str, float]:
    """Microseconds per sequence and step with `n_seqs` sequences at a time: the tables alone, and the whole tree for both costs."""
    traces = (traces * (n_seqs // len(traces) + 1))[:n_seqs]
    texts = [np.array(t.prompt + t.output, np.int32) for t in traces]
    starts, slots = [len(t.prompt) for t in traces], np.arange(n_seqs, dtype=np.int32)
    n_steps = min(min(len(t.output) for t in traces), 48)
    columns = [np.array([text[start + i] for start, text in zip(starts, texts, strict=True)], np.int32) for i in range(n_steps)]

    def begun(stops: tuple[int, ...] = ()) -> Proposer:
        proposer = Proposer(vocab_size=2**31 - 1, max_seqs=n_seqs, recycle=False)
        for slot, (start, text) in enumerate(zip(starts, texts, strict=True)):
            proposer.begin(slot, text[:start], stops=stops)
        return proposer

    def tables() -> float:
        """Median milliseconds of a step."""
        proposer = begun()
        scratch = [np.zeros(2 * len(ngram_table.LADDER) + 2, np.int64) for _ in range(3)]
        step = partial(_tables_only, proposer._states, proposer._contexts, slots)
        return statistics.median(timed(partial(step, tokens, proposer.history, *scratch)) for tokens in columns)

    def trees(slope: float) -> tuple[float, list[float]]:
        """Median milliseconds of a step, and rows per sequence of each."""
        proposer, at, spent, rows = begun(stops), list(starts), [], []
        cost_ms = 1.0 + slope * np.arange(-1.0, MAX_ROWS + 1) / n_seqs  # a row costs every sequence a share, as with one sequence
        depth = np.full(n_seqs, MAX_ROWS, np.int32)
        while all(n < len(text) for n, text in zip(at, texts, strict=True)):
            start = time.perf_counter()
            drafts = proposer.propose(slots, depth, cost_ms, n_seqs, MAX_ROWS * n_seqs)
            took = (time.perf_counter() - start) * 1e3
            accepted, paths = [], []
            for s, tree in enumerate(drafts):
                paths.append(np.array(follow(tree.tokens.tolist(), tree.parents.tolist(), texts[s][at[s] :].tolist()), np.int32))
                accepted.append(texts[s][at[s] : at[s] + len(paths[-1]) + 1])
                at[s] += len(accepted[-1])
            spent.append(took + timed(partial(proposer.observe, slots, accepted, paths)))
            rows.append(sum(map(len, drafts)) / n_seqs)
        return statistics.median(spent), rows

    results = {"tables_us": round(min(tables() for _ in range(repeat)) / n_seqs * 1e3, 3)}
    for name, slope in SLOPES.items():
        rounds = [trees(slope) for _ in range(repeat)]
        results[f"tree_{name}_us"] = round(min(ms for ms, _ in rounds) / n_seqs * 1e3, 3)
        results[f"tree_{name}_rows"] = round(statistics.mean(n for _, rows in rounds for n in rows), 2)
    return results


def library_traces(n: int = 64) -> list[Trace]:
    """Without a file: the standard library's sources, words as tokens."""
    import inspect

    source = "".join(map(inspect.getsource, (argparse, statistics, json, inspect, importlib.util, re)))
    words = Words(50_000)(source)["input_ids"]
    size = min(len(words) // n, 1500)
    return [Trace(words[i * size : i * size + size - 256], words[i * size + size - 256 : i * size + size]) for i in range(n)]


def mean_of(sets: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    return {name: {key: round(statistics.mean(s[name][key] for s in sets), 4) for key in FIGURES} for name in sets[0]}


def main() -> None:
    parser = new_parser("replay", __doc__)
    parser.add_argument("--traces", nargs="+", type=Path, default=[])
    parser.add_argument("--tokenizer", default="smollm2", help="folder, hub name, GGUF file or smollm2")
    parser.add_argument("--limit", type=int, help="traces per file (all)")
    parser.add_argument("--max-out", type=int, default=512, help="tokens of an output that are followed")
    parser.add_argument("--peers", action="store_true", help="also prompt lookup, vLLM's n-gram rule and arctic-inference")
    parser.add_argument("--drafters", help="only these, separated by commas")
    parser.add_argument("--datastore", action="append", default=[], metavar="STORE", help="also with this datastore; REST gets its text")
    text = "also with a predicted output: the text that the request asks to edit, its first fenced block"
    parser.add_argument("--prediction-from", choices=["reference-minus-edit"], help=text)
    parser.add_argument("--micro", action="store_true", help="time per sequence and step with 64 sequences")
    args = parser.parse_args()
    if not args.traces and not args.micro:
        parser.error("--traces is needed (or --micro)")

    tokenizer: Any = None
    if args.traces:
        from ngramspec.models.loader import load_tokenizer

        tokenizer = load_tokenizer(args.tokenizer)
    eos = getattr(tokenizer, "eos_token_id", None)
    stops = (int(eos),) if isinstance(eos, int) else ()
    warmup()
    settings = {name: getattr(args, name) for name in ("tokenizer", "limit", "max_out")}
    settings |= {"slopes": SLOPES, "max_rows": MAX_ROWS, "stops": stops, "prediction_from": args.prediction_from}
    settings["datastore"] = [Path(path).name for path in args.datastore]
    document = {"benchmark": "replay", "traces": list(map(str, args.traces)), "settings": settings, **environment("cpu", 1)}

    if args.micro:
        print("Drafting time with 64 sequences at a time, microseconds per sequence and step (median of steps, best of five).", flush=True)
        traces = [t for p in args.traces for t in read_traces(p, tokenizer, args.limit, args.max_out)] or library_traces()
        document["micro"] = micro(traces, stops)
        print_table(["what", "value"], list(map(list, document["micro"].items())))
        print_document(document)
        return

    predicted = args.prediction_from is not None
    stores = [Datastore.open(path) for path in args.datastore]
    chosen, absent = drafters(stops, predicted, stores, len(tokenizer)), dict[str, str]()
    if args.peers:
        scratch = tempfile.TemporaryDirectory()
        others, absent = peers(stores, Path(scratch.name))
        chosen |= others
    if args.drafters:
        names = [name.strip() for name in args.drafters.split(",")]
        if unknown := [name for name in names if name not in chosen and name not in absent]:
            parser.error(f"no drafter named {', '.join(unknown)}; there are {', '.join(chosen)} (peers with --peers)")
        chosen = {name: chosen[name] for name in names if name in chosen}
    print(f"Replaying recorded outputs through {', '.join(chosen)}.", flush=True)
    for name, why in absent.items():
        print(f"absent: {name}: {why}", flush=True)
    sets: dict[str, dict[str, dict[str, Any]]] = {}
    for path in args.traces:
        traces = read_traces(path, tokenizer, args.limit, args.max_out, predicted)
        results = sets[path.stem] = {}
        for name, make in chosen.items():
            say(f"{path.stem}: {name}")
            results[name] = replay(make(), traces)
        print(f"\n{path.stem}: {len(traces)} traces, {sum(len(t.output) for t in traces)} tokens")
        print_table(["drafter", *FIGURES], [[name, *(r[key] for key in FIGURES)] for name, r in results.items()])
    document |= {"drafters": mean_of(list(sets.values())), "absent": absent}
    if len(sets) > 1:
        document["sets"] = sets
    print_document(document)


if __name__ == "__main__":
    main()
