"""How the engine accepts drafts: rejection sampling keeps the distribution, lenience does not, and completions say which it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import tiny

from ngramspec import Engine, SamplingParams
from ngramspec.engine.acceptance import Acceptance, ExactMatch, RelaxedAcceptance
from ngramspec.outputs import BLOCK
from ngramspec.papers.count_drafter import Counts
from ngramspec.speculative.drafter import Candidates
from ngramspec.speculative.single import SingleDrafter

LETTERS = (97, 98, 99, 100, 101)
N_PROMPT = 2 * BLOCK + 1  # samples take two blocks from the first one, so that each computes one row of the prompt and all run at once
N = 4096
BOUND = 171.6
"""Of chi-square with 124 degrees of freedom at the 0.3 % level: two tests, both with fixed seeds."""


class Guess(Counts):
    """Guesses, by the request's own u, what the request would take from the counts, and says nothing of a distribution."""

    name = "guess"

    def propose(self, seqs: list[int], budget: int) -> list[Candidates]:  # type: ignore[override]
        guesses = []
        for seq in seqs:
            model, text = self._models[seq], self._infos[seq]
            sampler, position = text.sampler.fork(), len(model.tokens) - text.n_prompt
            token = sampler.sample(np.log(model.get_distribution(model.tokens)).astype(np.float32), position)
            guesses.append(Candidates(np.array([token], np.int32), np.array([-1], np.int32), np.ones(1, np.float32)))
        return guesses


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = tiny.tiny_model("llama", std=0.12)
    with Engine(model, tokenizer=tiny.byte_tokenizer(), threads=1, max_seqs=128, max_model_len=256, kv_memory=32 << 20) as engine:
        yield engine


def use(engine: Engine, drafter: Counts, acceptance: Acceptance, *, draws: bool) -> None:
    alone = SingleDrafter(drafter, vocab_size=engine.vocab_size, spec_length=3, spec_rows=8, draws=draws)
    engine.use(speculator=alone, acceptance=acceptance)


def texts(engine: Engine, first_seed: int, *, speculation: bool = True) -> Counter[tuple[int, ...]]:
    prompt = np.random.default_rng(0).choice(LETTERS, size=N_PROMPT, p=[0.4, 0.3, 0.1, 0.1, 0.1]).tolist()
    plain = {"max_tokens": 3, "temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3, "ignore_eos": True}
    bans = {token: -100.0 for token in range(256) if token not in LETTERS}
    counts: Counter[tuple[int, ...]] = Counter()
    for k in range(0, N, 128):
        params = SamplingParams(seed=first_seed + k, n=128, logit_bias=bans, **plain)  # type: ignore[arg-type]
        counts.update(tuple(choice.token_ids) for choice in engine.complete(prompt, params, speculation=speculation).choices)
    return counts


def distance(a: Counter[tuple[int, ...]], b: Counter[tuple[int, ...]]) -> float:
    """Two-sample chi-square of equally many texts."""
    return float(sum((a[text] - b[text]) ** 2 / (a[text] + b[text]) for text in a.keys() | b.keys()))


@pytest.mark.slow
def test_rejection_sampling_keeps_the_distribution(engine: Engine) -> None:
    plain = texts(engine, 10**6, speculation=False)
    assert len(plain) > 100, "of 125"
    for drafter, draws in ((Counts(2, 3), True), (Guess(2, 3), False)):
        use(engine, drafter, RelaxedAcceptance(rejection=True), draws=draws)
        assert distance(plain, texts(engine, 5 * 10**6)) < BOUND, drafter.name
    use(engine, Counts(2, 3), RelaxedAcceptance(rejection=True, lenience=0.4), draws=True)
    assert distance(plain, texts(engine, 5 * 10**6)) > 2 * BOUND, "the test sees a distribution that is another"


def test_a_completion_says_how_its_drafts_were_accepted(engine: Engine) -> None:
    greedy, sampled = SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, temperature=1.0, seed=1)
    told = {}
    for name, acceptance in (
        ("walk", ExactMatch()),
        ("rejection", RelaxedAcceptance(rejection=True)),
        ("lenient", RelaxedAcceptance(rejection=False, lenience=0.5)),
    ):
        use(engine, Counts(2, 3), acceptance, draws=acceptance.name == "rejection")
        assert engine.promise == {"walk": engine.exactness, "rejection": "distribution", "lenient": "lenient"}[name]
        told[name] = [engine.complete([97, 98], params).exactness for params in (greedy, sampled)]
        assert engine.complete([97, 98], sampled, speculation=False).exactness == engine.exactness
    exact = engine.exactness
    assert told == {"walk": [exact, exact], "rejection": [exact, "distribution"], "lenient": ["lenient", "lenient"]}
