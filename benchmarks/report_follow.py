"""The same comparison on more texts than the clock has time for: drafts followed along what the model writes, costs as measured.

The engine writes every prompt's text, many at once. Then drafters alone and all together follow it as the walk would, without the model,
and pay for each pass what the engine has measured. That counts passes and rows, not what drafting takes; and the model's own candidates
are known behind accepted tokens only, of which all together make less than in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.replay import Trace, replay
from benchmarks.report_data import Category
from benchmarks.report_measure import LOOKUP, MERGED, STORE, TABLES, Bench, Cell, State, key_of, say
from ngramspec.batch.sampling import Sampler
from ngramspec.drafters.counts import Counts
from ngramspec.drafting.base import NeedsModel, Text
from ngramspec.drafting.evidence import KEPT
from ngramspec.drafting.proposer import Proposer
from ngramspec.drafting.single import SingleDrafter

TEXTS = "texts"


def followed(bench: Bench, state: State, categories: Sequence[Category], temperatures: Sequence[float]) -> list[dict[str, Any]]:
    """One row per category, temperature and drafter. The texts are kept in the state, and written once."""
    rows = []
    for temperature in temperatures:
        for category in categories:
            cell = _texts(bench, state, category, temperature)
            traces = [_trace(text) for text in cell["texts"] if len(text["output"]) > 1]
            if not traces:
                continue
            say(f"following {len(traces)} texts: {category.name} at {temperature:g}")
            for name, make in bench.proposers(category).items():
                if name in (MERGED, TABLES, LOOKUP, STORE) or (name in bench.drafters and isinstance(bench.drafters[name](), Counts)):
                    rows.append({"category": category.name, "temperature": temperature, "contender": name} | _follow(bench, make, traces))
    return rows


def _texts(bench: Bench, state: State, category: Category, temperature: float) -> Cell:
    """What the model writes for every prompt of a category, and its own candidates at each token."""
    key = key_of(bench.plan, category, temperature, TEXTS)
    known = state.get(key)
    if known is not None:
        return known
    say(f"writing {len(category.prompts)} texts: {category.name} at {temperature:g}")
    core, engine = bench.engine.core, bench.engine
    engine._call(lambda: core.use(bench.default))
    texts = []
    for prompt, done in zip(
        category.prompts, engine.complete([p.ids for p in category.prompts], bench.params(temperature, logprobs=KEPT)), strict=True
    ):
        top = [each.top for each in done.choices[0].logprobs or ()]
        texts.append(
            {
                "prompt": prompt.ids,
                "output": done.token_ids,
                "top_ids": [[token for token, _ in row] for row in top],
                "top": [[round(logprob, 3) for _, logprob in row] for row in top],
            }
        )
    cell = {"key": key, "contender": TEXTS, "texts": texts}
    state.add([cell])
    return cell


def _trace(text: dict[str, Any]) -> Trace:
    """As in the engine, the pass that ends the prompt gives the first token and has no draft."""
    top = np.array(text["top_ids"][1:], np.int64), np.array(text["top"][1:], np.float32)
    return Trace([*text["prompt"], text["output"][0]], text["output"][1:], top=top)


def _follow(bench: Bench, make: Callable[[], Proposer | SingleDrafter], traces: list[Trace]) -> dict[str, Any]:
    follower = Follower(bench, make())
    found = replay(follower, traces)
    n = sum(len(trace.output) for trace in traces)
    return {
        "prompts": len(traces),
        "tokens_per_pass": found["tokens_per_pass"],
        "rows_per_pass": found["rows_per_pass"],
        "speed": round(n / follower.paid, 4),
    }


class Follower:
    """A drafter of the engine as `replay` sees it. It pays `paid` plain passes."""

    def __init__(self, bench: Bench, proposer: Proposer | SingleDrafter) -> None:
        self.engine, self.prices, self.proposer, self.paid = bench.engine, bench.prices, proposer, 0.0
        if isinstance(proposer, SingleDrafter) and isinstance(proposer.drafter, NeedsModel):
            proposer.bind(bench.engine.runner)
        self.params = bench.params(0)
        self.slots = np.zeros(1, np.int32)

    def begin(self, trace: Trace) -> None:
        self.text, self.n_prompt, self.top = np.array(trace.prompt + trace.output, np.int32), len(trace.prompt), trace.top
        V, stops = self.engine.vocab_size, tuple(self.engine.eos_token_ids)
        prompt = self.text[: self.n_prompt]
        sampler = Sampler(self.params, index=0, seed=0, prompt=prompt, vocab_size=V, stop_ids=frozenset(stops))
        self.proposer.begin(0, prompt, stops=stops, text=Text(sampler, self.n_prompt, len(self.text)))
        self.made = self.n_prompt

    def draft(self, text: np.ndarray) -> tuple[Sequence[int], Sequence[int]]:
        depth = np.array([len(self.text) - len(text) - 1], np.int32)  # the last token is the model's own
        self.tree = self.proposer.propose(self.slots, depth, self.prices, 1, self.engine.cost.max_rows - 1)[0]
        self.paid += float(self.prices[1 + len(self.tree)])
        return self.tree.tokens.tolist(), self.tree.parents.tolist()

    def accept(self, new: np.ndarray, path: np.ndarray) -> None:
        if isinstance(self.proposer, Proposer) and self.proposer.needs_topk and self.top is not None:
            rows = slice(self.made - self.n_prompt, self.made - self.n_prompt + len(new))
            before, last = (self.text[self.made - back : self.made - back + len(new)] for back in (2, 1))
            self.proposer.record_topk(0, before, last, self.top[0][rows].astype(np.int32), self.top[1][rows])
        self.proposer.observe(self.slots, [new], [path])
        self.made += len(new)

    def end(self) -> None:
        self.proposer.end(0)
        self.proposer.remember(self.text[self.n_prompt - 1 :])
