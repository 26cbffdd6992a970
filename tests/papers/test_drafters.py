"""The drafters of the literature with a model: the same tokens as without, alone and merged, several sequences at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from tiny_heads import HIDDEN, blockwise_tensors, eagle_tensors, medusa_tensors, write_blockwise, write_eagle, write_medusa
from transformers import PreTrainedModel

from ngramspec.engine.llm_engine import Engine
from ngramspec.grammar.constraint import Grammar
from ngramspec.outputs import DraftTree
from ngramspec.papers.lookahead import Lookahead
from ngramspec.papers.recycling import TokenRecycling
from ngramspec.papers.registry import NAMES, make_drafter
from ngramspec.sampling_params import SamplingParams
from ngramspec.speculative import Drafter, TreeProposer
from ngramspec.speculative.budget.backoff import DrafterBackoff
from ngramspec.speculative.drafter import Candidates, DraftOptions, Speculator
from ngramspec.speculative.single import SingleDrafter

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=30, temperature=0.5, top_p=0.9, seed=11, repetition_penalty=1.1, ignore_eos=True)


def looping_model() -> PreTrainedModel:
    """One whose greedy output soon says the same token again and again."""
    return tiny.tiny_model("llama", std=0.1, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, 250, n).tolist() for n in (1, 5, 40, 70)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Prompts in pieces, sequences that wait for others, and a prefix cache."""
    with Engine(looping_model(), max_seqs=3, max_rows=24, max_model_len=160, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: Engine, asked: list[list[int]]) -> list[list[list[int]]]:
    engine.core.use(Speculator())
    return [[c.token_ids for c in engine.complete(asked, params)] for params in (GREEDY, SAMPLED)]


def right_medusa(folder: Path) -> Path:
    """Heads that expect what the model's own head expects: right where a text repeats one token."""
    tensors = medusa_tensors()
    for name, tensor in tensors.items():
        tensors[name] = torch.zeros_like(tensor) if "linear" in name else looping_model().get_output_embeddings().weight.clone()
    return write_medusa(folder, tensors)


def right_blockwise(folder: Path) -> Path:
    """A layer that leaves the state as it is."""
    return write_blockwise(folder, {name: torch.zeros_like(tensor) for name, tensor in blockwise_tensors().items()})


def right_eagle(folder: Path) -> Path:
    """A layer that hands the state on."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in eagle_tensors().items()}
    tensors["fc.weight"][:, HIDDEN:] = torch.eye(HIDDEN)
    return write_eagle(folder, tensors)


MAKERS: dict[str, Callable[[Path], Drafter]] = {
    "lookahead": lambda folder: make_drafter("lookahead:5,4,6"),
    "recycling": lambda folder: make_drafter("recycling"),
    "medusa": lambda folder: make_drafter(f"medusa:{right_medusa(folder)}"),
    "blockwise": lambda folder: make_drafter(f"blockwise:{right_blockwise(folder)}"),
    "eagle": lambda folder: make_drafter(f"eagle:{right_eagle(folder)}"),
}


@pytest.mark.parametrize("merged", [False, True], ids=["alone", "merged"])
@pytest.mark.parametrize("name", MAKERS)
def test_same_tokens_as_without(
    engine: Engine,
    asked: list[list[int]],
    expected: list[list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    merged: bool,
) -> None:
    monkeypatch.setattr(DrafterBackoff, "should_ask", lambda _: True)  # it drafts in every step, whatever its time
    drafter = MAKERS[name](tmp_path)
    if merged:
        engine.core.cost = tiny.FreeRows()
        engine.core.use(TreeProposer(DraftOptions(vocab_size=tiny.VOCAB, max_seqs=3, recycle=False), drafters=[drafter]))
    else:
        engine.core.use(SingleDrafter(drafter, vocab_size=tiny.VOCAB, spec_length=64, spec_rows=64))
    greedy, sampled = engine.complete(asked, GREEDY), engine.complete(asked, SAMPLED)
    assert [c.token_ids for c in greedy] == expected[0]
    assert [c.token_ids for c in sampled] == expected[1]
    proposer = engine.speculator
    assert proposer is not None
    assert (proposer.drafters if isinstance(proposer, TreeProposer) else [proposer.drafter]) == [drafter], "it was not switched off"
    assert sum(c.stats.drafted_by_source.get(name, 0) for c in greedy + sampled) > 100
    assert sum(c.stats.accepted_by_source.get(name, 0) for c in greedy) > 0
    if not merged:
        assert sum(c.stats.tokens for c in greedy) / sum(c.stats.passes for c in greedy) > 1.5
    engine.runner.pool.check_integrity()


def test_look_ahead_tokens_leave_the_text_as_it_is(engine: Engine, asked: list[list[int]], expected: list[list[list[int]]]) -> None:
    """The tokens that the texts repeat stand for those that a model was trained with, so that some are taken."""
    ids = list(dict.fromkeys(text[-1] for text in expected[0]))
    drafter = make_drafter("pass:" + ",".join(map(str, ids)))
    engine.core.use(SingleDrafter(drafter, vocab_size=tiny.VOCAB, spec_length=64, spec_rows=64))
    greedy, sampled = engine.complete(asked, GREEDY), engine.complete(asked, SAMPLED)
    assert [c.token_ids for c in greedy] == expected[0]
    assert [c.token_ids for c in sampled] == expected[1]
    assert sum(c.stats.accepted_by_source.get("pass", 0) for c in greedy) > 10
    engine.runner.pool.check_integrity()


class Listener(TokenRecycling):
    """Hears all states; what it drafts is often accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[int, np.ndarray] = {}
        self.done: list[np.ndarray] = []

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        super().begin(seq, tokens)
        self.heard[seq] = np.empty((0, HIDDEN), np.float32)

    def on_hidden_states(self, seq: int, first: int, states: np.ndarray) -> None:
        assert first == len(self.heard[seq]), "every state once, in order"
        self.heard[seq] = np.concatenate([self.heard[seq], states])

    def end(self, seq: int) -> None:
        super().end(seq)
        self.done.append(self.heard.pop(seq))


def test_the_states_heard_are_those_of_transformers() -> None:
    prompt = np.random.default_rng(5).integers(0, 250, 70).tolist()
    listener = Listener()
    with Engine(looping_model(), max_seqs=2, max_rows=24, prefix_cache=False, alone=listener, threads=1) as engine:
        completion = engine.complete(prompt, GREEDY)
    assert completion.stats.accepted > 5
    (heard,) = listener.done
    text = torch.tensor([prompt + completion.token_ids])
    states = looping_model().base_model(text).last_hidden_state[0].numpy()
    assert len(prompt) < len(heard) < len(states)
    np.testing.assert_allclose(heard, states[: len(heard)], rtol=1e-3, atol=1e-3)


def test_names_and_arguments() -> None:
    drafter = make_drafter("lookahead:9,3,5")
    assert isinstance(drafter, Lookahead)
    assert (drafter.window, drafter.ngram, drafter.guesses) == (9, 3, 5)
    for text in (
        "pass",
        "pass:",
        "pass:7,7",
        "pass:x",
        "lookahead:a",
        "lookahead:1,1,1",
        "lookahead:1,2,3,4",
        "recycling:0",
        "recycling:80,",
        "medusa",
        "no such",
    ):
        with pytest.raises(ValueError):
            make_drafter(text)
    assert {*MAKERS} <= {*NAMES}


class Recorder:
    """Proposes a token that the grammar forbids, and records the trees whose top-k it receives."""

    name = "recorder"

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[int], int]] = []

    def begin(self, seq: int, tokens: np.ndarray) -> None: ...

    def propose(self, seqs: list[int], budget: int) -> list[Candidates]:
        return [Candidates(np.array([ord("z")], np.int32), np.array([-1], np.int32), np.array([0.9], np.float32)) for _ in seqs]

    def on_topk(self, seq: int, tree: DraftTree, tokens: np.ndarray) -> None:
        self.seen.append((tree.tokens.tolist(), tree.parents.tolist(), len(tokens)))

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None: ...

    def end(self, seq: int) -> None: ...


@pytest.mark.parametrize("alone", [True, False])
def test_top_k_comes_with_the_tree_that_was_verified(alone: bool) -> None:
    """A grammar takes nodes out of a draft, and puts forced tokens in."""
    recorder, recycling = Recorder(), TokenRecycling()
    for drafter in (recorder, recycling):
        placed = {"alone": drafter} if alone else {"drafters": [drafter]}
        with Engine(looping_model(), tokenizer=tiny.byte_tokenizer(), max_model_len=160, threads=1, **placed) as engine:
            engine.core.cost = tiny.FreeRows()
            for word in ("abcdefgh", "ab"):
                assert word in engine.complete([65], grammar=Grammar.regex(f"[a-z]{word}[0-9]{{5}}"), max_tokens=12).text
            speculator = engine.speculator
            assert speculator.drafter is drafter if isinstance(speculator, SingleDrafter) else drafter in speculator.drafters
    assert all(n == 1 + len(tokens) for tokens, _, n in recorder.seen)
    assert (list(b"abcdefgh"), list(range(-1, 7)), 9) in recorder.seen
