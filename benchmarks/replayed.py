"""Drafters that are followed along recorded texts without a model: ours, and those of other tools.

A drafter and recorded texts enter, figures leave: at every pass the drafter sees the prompt and the output so far; the longest drafted path
that the output follows is accepted, and the one token more that a pass always yields. Reads no command line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.common import SLOPES, time_ms
from benchmarks.our_engine import make_chain
from benchmarks.recordings import RecordedText
from ngramspec.datastore import Datastore
from ngramspec.defaults import ANSWERS, HISTORY
from ngramspec.sampling.sampler import Sampler
from ngramspec.speculative.datastore_drafter import DatastoreDrafter
from ngramspec.speculative.drafter import DraftOptions, DraftParams, PassTopK, SequenceInfo
from ngramspec.speculative.proposer import TreeProposer
from ngramspec.speculative.syntax import SyntaxTable

MAX_ROWS = 64  # of a draft
FIGURES = ("tokens_per_pass", "rows_per_pass", "us_per_pass", "speed_flat", "speed_steep")


class Replayed:
    """A drafter that a replay follows. Parents of a draft: -1 is the last known token."""

    def begin(self, trace: RecordedText) -> None: ...
    def draft(self, text: np.ndarray) -> tuple[Sequence[int], Sequence[int]]:
        raise NotImplementedError

    def accept(self, new: np.ndarray, path: np.ndarray) -> None: ...
    def end(self) -> None: ...


class ReplayedProposer(Replayed):
    """A speculator of the engine with one sequence, told what passes cost. It pays `paid` passes without drafts."""

    def __init__(
        self, speculator: Any, cost_ms: np.ndarray, stops: tuple[int, ...] = (), *, predicted: bool = False, params: Any = None
    ) -> None:
        """cost_ms [R+1] float64, of a pass with T rows. `params`: drafts know the request's sampling and the text's end, and the prompt's
        last token is the output's first, as if the pass that ends the prompt had given it."""
        self.speculator, self.cost_ms, self.stops, self.predicted, self.params = speculator, cost_ms, stops, predicted, params
        self.slots, self.paid = np.zeros(1, np.int32), 0.0
        self.accepted_by_source = dict.fromkeys(speculator.source_names, 0)

    def begin(self, trace: RecordedText) -> None:
        prompt, self.top = np.array(trace.prompt, np.int32), trace.top
        self.text, self.n_prompt, self.known = np.array([*trace.prompt, *trace.output], np.int32), len(prompt), len(prompt)
        text = None
        if self.params is not None:
            V, stops = self.speculator.vocab_size, frozenset(self.stops)
            sampler = Sampler(self.params, index=0, seed=0, prompt=prompt, vocab_size=V, stop_ids=stops)
            text = SequenceInfo(sampler, len(prompt), len(self.text))
        prediction = np.array(trace.prediction, np.int32) if self.predicted and trace.prediction else None
        self.speculator.begin(0, prompt, DraftParams(stops=self.stops, prediction=prediction, info=text))

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
            seen = PassTopK(heard, batch, self.top[0][rows].astype(np.int32), self.top[1][rows])
        for source in self.tree.sources[path].tolist():
            self.accepted_by_source[self.speculator.source_names[source]] += 1
        self.speculator.observe(self.slots, [new], [path], seen)
        self.known += len(new)

    def end(self) -> None:
        self.speculator.end(0)
        self.speculator.remember(self.text[self.n_prompt - (self.params is not None) :])


def make_proposer(
    *,
    answers: bool = False,
    stores: Sequence[Datastore] = (),
    similar: bool = True,
    vocab_size: int = 0,
    syntax: SyntaxTable | None = None,
    **more: Any,
) -> TreeProposer:
    """Return the merged drafter with these sources. `vocab_size` above 0: with the model's own candidates, where the traces have them."""
    stored = DatastoreDrafter({str(store.path): store for store in stores}, 1, similar=similar) if stores else None
    if stored is not None:
        stored.wait_until_loaded()
    return TreeProposer(
        DraftOptions(
            vocab_size=vocab_size or 2**31 - 1,
            max_seqs=1,
            spec_rows=MAX_ROWS,
            recycle=vocab_size > 0,
            answers=ANSWERS if answers else 0,
            **more,
        ),
        datastore=stored,
        syntax=syntax,
    )


class Chain(Replayed):
    """Drafts from the text alone: the longest context's most frequent continuation, chained, no probabilities."""

    accepted_by_source: Mapping[str, int] = MappingProxyType({})

    def draft(self, text: np.ndarray) -> tuple[Sequence[int], Sequence[int]]:
        tokens = make_chain(text[-HISTORY:], 8).tolist()
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
    """Drafts by arctic-inference's suffix decoding; `factor`, `rows` and `depth` as its configuration names them."""

    def __init__(self, tree: bool, cache: bool, factor: float = 1.0, rows: int = 24, depth: int = 24) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=-1 if cache else 0)
        self.options = {"max_spec_tokens": rows, "max_spec_factor": factor, "max_spec_offset": 0.0, "min_token_prob": 0.1}
        self.options["use_tree_spec"] = tree
        self.request, self.depth = 0, depth

    def begin(self, trace: RecordedText) -> None:
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
    """Drafts by REST's retriever over the documents of a datastore: contexts of 16 down to 2 tokens, at most `rows` drafted tokens."""

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
                    return self._make_tree(found)
        return (), ()

    def _make_tree(self, candidates: list[list[int]]) -> tuple[list[int], list[int]]:
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


def write_rest_index(stores: Sequence[Datastore], folder: Path) -> Path:
    """Write REST's index of the same documents and return its path."""
    import draftretriever

    path = folder / "rest.idx"
    writer = draftretriever.Writer(str(path), vocab_size=stores[0].snapshot.manifest.vocab_size)
    for store in stores:
        for doc in store.snapshot.iterate_documents():
            writer.add_entry(store.snapshot.text_tokens(doc.segment, doc.number).tolist())
    writer.finalize()
    return path


def follow_path(tokens: Sequence[int], parents: Sequence[int], output: Sequence[int]) -> list[int]:
    """Return the nodes of the longest path that the output takes, in depth order."""
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path, node = [], -1
    for token in output:
        node = child.get((node, token), -2)
        if node < 0:
            break
        path.append(node)
    return path


def replay(drafter: Replayed, traces: list[RecordedText]) -> dict[str, Any]:
    """Follow all traces and return the figures."""
    passes = tokens = rows = 0
    busy_ms = 0.0
    for trace in traces:
        text = np.array(trace.prompt + trace.output, np.int32)
        n, end = len(trace.prompt), len(text)
        busy_ms += time_ms(lambda trace=trace: drafter.begin(trace))
        while n < end:
            start = time.perf_counter()
            drafted, parents = drafter.draft(text[:n])
            busy_ms += (time.perf_counter() - start) * 1e3
            path = follow_path(drafted, parents, trace.output[n - len(trace.prompt) :])
            new, nodes = text[n : n + len(path) + 1], np.array(path, np.int32)
            busy_ms += time_ms(lambda new=new, nodes=nodes: drafter.accept(new, nodes))
            n += len(new)
            passes, tokens, rows = passes + 1, tokens + len(new), rows + len(drafted)
        drafter.end()
    found: dict[str, Any] = dict(make_figures(tokens / passes, rows / passes, busy_ms / passes * 1e3))
    if (by_source := getattr(drafter, "accepted_by_source", None)) is not None:
        found["accepted_by_source"] = {name: n for name, n in by_source.items() if n}
    return found


def make_figures(tokens_per_pass: float, rows_per_pass: float, us_per_pass: float) -> dict[str, float]:
    speeds = (tokens_per_pass / (1 + s * rows_per_pass) for s in SLOPES.values())
    return {name: round(value, 4) for name, value in zip(FIGURES, (tokens_per_pass, rows_per_pass, us_per_pass, *speeds), strict=True)}
