"""Parts of the GPU benchmark that write text: is it the same whatever is drafted and batched, how much sooner does it come."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import decode
from benchmarks.common import Prompt, read_prompts, wait_for
from benchmarks.gpu_plan import Figures, Plan, open_engine, release, say, tokenizer_for
from benchmarks.ours import Ours
from benchmarks.peers import Contender, PeerAbsentError, Run
from benchmarks.recorded import library_edits
from ngramspec import Engine, SamplingParams
from ngramspec.batch.types import DraftTree
from ngramspec.drafting.proposer import Proposer
from ngramspec.model.loading import load_model
from ngramspec.model.random_weights import PREFIX

STATIC = {"cache_implementation": "static"}
LOOKUP = {"prompt_lookup_num_tokens": 10}
GENERATE: dict[str, dict[str, Any]] = {
    "hf eager": {},
    "hf static, compiled": STATIC,
    "hf prompt lookup": LOOKUP,
    "hf prompt lookup, static": STATIC | LOOKUP,
}
"""transformers' ways to generate; with a static cache on a GPU it compiles its forward by itself."""
N_GENERATED, PROMPT_LENGTH = 6, 192


class Foretold(Proposer):
    """Drafts from outputs that are known: much of them accepted, some not, on any model. A chain, or a tree with a wrong sibling each."""

    LENGTH = 7

    def __init__(self, outputs: Mapping[tuple[int, ...], Sequence[int]], *, tree: bool, vocab_size: int, max_seqs: int = 64) -> None:
        super().__init__(vocab_size=vocab_size, max_seqs=max_seqs, spec_rows=2 * self.LENGTH, answers=0, recycle=False)
        self.outputs, self.tree = outputs, tree
        self.known: dict[int, Sequence[int]] = {}
        self.at: dict[int, int] = {}

    def begin(self, slot: int, tokens: np.ndarray, *, n_output: int = 0, **_: Any) -> None:
        self.known[slot] = self.outputs.get(tuple(tokens[: len(tokens) - n_output].tolist()), ())
        self.at[slot] = n_output

    def propose(self, slots: np.ndarray, max_depth: np.ndarray, cost_ms: np.ndarray, base_rows: int, max_nodes: int) -> list[DraftTree]:
        trees = []
        for slot, depth in zip(slots.tolist(), max_depth.tolist(), strict=True):
            width = 2 if self.tree else 1
            at = self.at[slot]
            right = self.known[slot][at : at + max(min(self.LENGTH, depth, max_nodes // width), 0)]
            tokens, parents, above = [], [], -1
            for d, token in enumerate(right):
                both = [token, (token + 1) % self.vocab_size][:width]
                order = range(width) if (at + d) % 2 else reversed(range(width))  # the right one first, or last
                next_above = above
                for i in order:
                    if i == 0:
                        next_above = len(tokens)
                    tokens.append(both[i])
                    parents.append(above)
                above = next_above
            n = len(tokens)
            max_nodes -= n
            trees.append(DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(n, np.float32), np.zeros(n, np.uint8)))
        return trees

    def observe(self, slots: np.ndarray, accepted: list[np.ndarray], paths: list[np.ndarray]) -> None:
        for slot, tokens in zip(slots.tolist(), accepted, strict=True):
            self.at[slot] += len(tokens)

    def end(self, slot: int) -> None:
        self.known.pop(slot, None)

    def remember(self, answer: np.ndarray, tenant: str = "") -> None:
        pass

    def is_unpredictable(self, slot: int) -> bool:
        return False

    def record_topk(self, before: Any, last: Any, tokens: np.ndarray, logits: np.ndarray) -> None:
        pass


def spoiled(output: Sequence[int], vocab_size: int) -> list[int]:
    """The output with every fifth token another."""
    return [(token + 7) % vocab_size if i % 5 == 4 else token for i, token in enumerate(output)]


def identity(plan: Plan) -> Iterator[tuple[str, Figures]]:
    """Texts with drafts, as chain and as tree, and in batches, against those written one token and one prompt at a time."""
    for model, n in ({plan.small: plan.n_prompts} | {plan.large: plan.n_prompts // 4 + 4}).items():
        with open_engine(plan, model, max_seqs=max(64, *plan.batches)) as engine:
            prompts = identity_prompts(plan, engine, model, n)
            for name, params in samplings(plan, len(prompts)).items():
                yield f"{model}, {name}", compare_texts(engine, prompts, params, plan.batches)
        del engine
        release(plan)


def identity_prompts(plan: Plan, engine: Engine, model: str, n: int) -> list[list[int]]:
    """Text for real weights: the plan's prompts or else code, as much as there is. For random ones ids, from 8 to some 400 a prompt."""
    room = engine.max_model_len - plan.max_tokens - 1
    found: list[list[int]] = []
    if not model.startswith(PREFIX):
        tokenizer = tokenizer_for(plan, model, engine.vocab_size)
        if plan.prompts is not None:
            found = [prompt.ids for prompt in read_prompts(plan.prompts, tokenizer)]
        else:
            found = [trace.prompt for trace in library_edits(tokenizer)]
    found = [ids for ids in found if len(ids) <= room][:n]
    rng = np.random.default_rng(1)
    return found or [rng.integers(0, engine.vocab_size, int(rng.integers(8, min(400, room)))).tolist() for _ in range(n)]


def samplings(plan: Plan, n: int) -> dict[str, list[SamplingParams]]:
    """Parameters by prompt."""
    common: dict[str, Any] = {"max_tokens": 3 * plan.max_tokens // 4, "ignore_eos": True}
    return {
        "greedy": [SamplingParams(**common)] * n,
        "seeded": [SamplingParams(**common, temperature=0.8, top_p=0.95, seed=i) for i in range(n)],
    }


def compare_texts(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], batches: Sequence[int]) -> Figures:
    """How many texts are the reference's, by way of drafting and batch."""
    own, V = engine.core.proposer, engine.vocab_size
    reference, _ = write(engine, prompts, params, 1, speculation=False)
    known = {tuple(ids): spoiled(text, V) for ids, text in zip(prompts, reference, strict=True)}
    max_seqs = max(64, *batches)
    ways = {
        "off": own,
        "on": own,
        "chain": Foretold(known, tree=False, vocab_size=V, max_seqs=max_seqs),
        "tree": Foretold(known, tree=True, vocab_size=V, max_seqs=max_seqs),
    }
    identical: Figures = {}
    accepted: Figures = {}
    for batch, (way, proposer) in itertools.product(batches, ways.items()):
        if (batch, way) == (1, "off"):
            continue
        engine.core.proposer = proposer
        texts, tokens_per_pass = write(engine, prompts, params, batch, speculation=way != "off")
        identical[f"{way}, batch {batch}"] = sum(a == b for a, b in zip(reference, texts, strict=True))
        accepted[f"{way}, batch {batch}"] = round(tokens_per_pass, 3)
        say(f"{way}, batch {batch}: {identical[f'{way}, batch {batch}']} of {len(prompts)} the same")
    engine.core.proposer = own
    return {
        "prompts": len(prompts),
        "tokens": sum(map(len, reference)),
        "distinct_tokens": len({token for text in reference for token in text}),
        "exactness": engine.exactness,
        "all_identical": all(n == len(prompts) for n in identical.values()),
        "identical": identical,
        "tokens_per_pass": accepted,
    }


def write(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], batch: int, *, speculation: bool
) -> tuple[list[list[int]], float]:
    """The texts, `batch` prompts at a time, and tokens per pass."""
    texts, passes = [], 0
    for first in range(0, len(prompts), batch):
        requests = [
            engine.submit(ids, each, speculation=speculation)
            for ids, each in zip(prompts[first : first + batch], params[first : first + batch], strict=True)
        ]
        for request in requests:
            done = request.result()
            texts.append(done.token_ids)
            passes += done.stats.passes
    return texts, sum(map(len, texts)) / max(passes, 1)


def replay(plan: Plan) -> Iterator[tuple[str, Figures]]:
    """Recorded edits on the coding model's shape, speculation on against off and against fixed lengths, alone and in a batch."""
    alone, many = 1, plan.batches[-1]
    arguments = ["--model", plan.code, "--device", plan.device, "--dtype", plan.dtype, "--max-tokens", str(8 * plan.max_tokens)]
    arguments += ["--trace", *([str(plan.trace)] if plan.trace else []), "--fixed-length", ",".join(map(str, plan.lengths))]
    if plan.tokenizer is not None:
        arguments += ["--tokenizer", plan.tokenizer]
    limits = {alone: plan.n_traces, many: max(plan.n_traces // 4, 1) * many}
    plans = {batch: decode.parse([*arguments, "--concurrency", str(batch), "--limit", str(limits[batch])]) for batch in limits}
    with decode.open_engine(plans[many], kv_memory=plan.kv_bytes) as engine:
        for batch, args in plans.items():
            document = decode.measure(engine, args)
            yield f"batch {batch}", {key: value for key, value in document.items() if key not in ("versions", "platform", "device")}


class Generate:
    """transformers' `generate`, greedy and without an end, on a model that is there."""

    def __init__(self, model: Any, max_tokens: int, options: Mapping[str, Any]) -> None:
        self.model, self.max_tokens, self.options = model, max_tokens, options

    def complete(self, prompts: list[list[int]]) -> Run:
        """Raises PeerAbsentError where transformers refuses."""
        device = str(self.model.device)
        outputs, start = [], time.perf_counter()
        try:
            for ids in prompts:
                prompt = torch.tensor([ids], device=device)
                made = self.model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=self.max_tokens,
                    min_new_tokens=self.max_tokens,
                    do_sample=False,
                    pad_token_id=0,
                    **self.options,
                )
                outputs.append(made[0, len(ids) :].tolist())
        except Exception as error:  # whatever it is that this version cannot do
            raise PeerAbsentError(f"{type(error).__name__}: {error}"[:300]) from error
        wait_for(device)
        return Run(outputs, time.perf_counter() - start)

    def close(self) -> None:
        """The model is everybody's."""


def generate(plan: Plan) -> Iterator[tuple[str, Figures]]:
    """Against transformers' own generation: the same weights, prompts of the same length (it compiles anew for another)."""
    for model in dict.fromkeys((plan.small, plan.large)):
        stock = load_model(model, dtype=getattr(torch, plan.dtype), device=plan.device).model
        with open_engine(plan, model) as engine:
            tokenizer = tokenizer_for(plan, model, engine.vocab_size)
            ids = [trace.prompt[:PROMPT_LENGTH] for trace in library_edits(tokenizer)]
            prompts = [Prompt(str(n), each) for n, each in enumerate(each for each in ids if len(each) == PROMPT_LENGTH)][:N_GENERATED]
            n_tokens = 2 * plan.max_tokens
            params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
            contenders: dict[str, Contender] = {"off": Ours(engine, params, False), "on": Ours(engine, params, True)}
            contenders |= {name: Generate(stock, n_tokens, options) for name, options in GENERATE.items()}
            absent: dict[str, str] = {}
            runs = decode.compare(contenders, absent, prompts, 1)
            yield model, {"prompts": len(prompts), **decode.figures(runs, absent, sampled=False)}
        del stock, engine, contenders
        release(plan)
