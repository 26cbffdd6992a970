"""Drafts from a datastore, a predicted output, earlier answers and the model's own candidates, through the engine: never a token
changes, and each of them is seen to be used. A tiny random model writes; what it writes alone is the truth.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_store

from ngramspec.backends.base import Output
from ngramspec.cli import screen
from ngramspec.datastore import Datastore, DatastoreNotFoundError, TokenizerMismatchError
from ngramspec.datastore import tokens as store_tokens
from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import EngineClosedError
from ngramspec.outputs import Completion
from ngramspec.sampling.batch import Batch
from ngramspec.sampling_params import SamplingParams
from ngramspec.speculative import datastore_drafter, ngram_table
from ngramspec.speculative.budget.backoff import MAX_PERIOD
from ngramspec.speculative.budget.threshold import SpeculationThreshold
from ngramspec.speculative.drafter import DraftOptions, DraftParams
from ngramspec.speculative.proposer import TreeProposer

PROMPT = np.random.default_rng(0).integers(0, 250, 20).tolist()
OTHER = np.random.default_rng(1).integers(0, 250, 20).tolist()
PARAMS = SamplingParams(max_tokens=60, temperature=0.7, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def truth() -> list[int]:
    with Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), speculation=False, max_model_len=150) as plain:
        return plain.complete(PROMPT, PARAMS).token_ids


@pytest.fixture
def store(tmp_path: Path, truth: list[int], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two documents, of which the second holds the first half of what the model writes. How often a store is asked does not depend on
    how long a pass of this machine takes."""
    monkeypatch.setattr(SpeculationThreshold, "get_threshold", lambda *_: 0.0)
    monkeypatch.setattr(store_tokens, "compute_fingerprint", lambda tokenizer: tiny_store.FINGERPRINT)
    monkeypatch.setattr(datastore_drafter, "REFRESH_S", 0.0)
    tiny_store.write_store(tmp_path / "store", [[[1, 2, 3, 4], [*PROMPT[-4:], *truth[:30]]]], tiny.VOCAB)
    return tmp_path / "store"


def build(**options) -> Engine:
    options = {"recycle": False, "answers": 0} | options
    engine = Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_model_len=150, **options)
    engine.core.cost = tiny.FreeRows()
    return engine


def by(completion: Completion, source: str) -> int:
    return sum(1 for s in completion.draft_sources if s is not None and s.split(":")[0] == source)


def test_a_datastore_drafts_and_says_where_from(store: Path, truth: list[int]) -> None:
    with build(datastore=store) as engine:
        done = engine.complete(PROMPT, PARAMS)
    assert done.token_ids == truth
    assert by(done, "datastore") >= 20
    assert done.stats.passes <= 85
    lines = np.cumsum([0, *(t % 3 == 0 for t in [*PROMPT[-4:], *truth[:30]])]) + 1  # every third id ends a line in this store
    for i, source in enumerate(done.draft_sources[:30]):
        if source is not None and source.startswith("datastore:"):
            assert source == f"datastore:1/é.py:{lines[4 + i]}"
    runs = screen.find_verbatim_runs(done.draft_sources)
    assert runs[0][0].startswith("1/é.py:")
    assert sum(n for _, n in runs) == by(done, "datastore")


def test_a_running_engine_picks_up_a_new_generation(store: Path, truth: list[int]) -> None:
    with build(datastore=[str(store)]) as engine:
        engine.complete(PROMPT, PARAMS)
        tiny_store.write_store(store, [[[1, 2, 3, 4]], [[9, 9, *PROMPT[-4:], *truth]]], tiny.VOCAB, generation=2)
        done = engine.complete(PROMPT, PARAMS)
        assert done.token_ids == truth
        assert by(done, "datastore") >= 45
        (store / "MANIFEST").write_text("{")
        damaged = engine.complete(PROMPT, PARAMS)
        assert damaged.token_ids == truth
        assert by(damaged, "datastore") >= 45, "the last good generation stays in use"
        assert engine.props()["datastores"][0]["generation"] == 2


def test_several_stores_at_once(store: Path, tmp_path: Path, truth: list[int]) -> None:
    tiny_store.write_store(tmp_path / "second", [[[*truth[20:]]]], tiny.VOCAB)
    with build(datastore=[store, Datastore.open(tmp_path / "second")]) as engine:
        done = engine.complete(PROMPT, PARAMS)
    assert done.token_ids == truth
    places = {s.rsplit(":", 1)[0] for s in done.draft_sources if s is not None and s.startswith("datastore:")}
    assert places == {"datastore:1/é.py", "datastore:0/é.py"}


def test_a_store_of_another_tokenizer_is_refused_with_both_names(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tokens, "compute_fingerprint", lambda tokenizer: "0" * 64)
    with pytest.raises(TokenizerMismatchError, match=r"'tiny'.*'LlamaForCausalLM'"):
        build(datastore=store)
    with pytest.raises(DatastoreNotFoundError):
        build(datastore=tmp_path / "nothing")


@pytest.mark.parametrize("drafts", ["right", "wrong", "shifted", "empty"])
def test_a_prediction_changes_no_token(truth: list[int], drafts: str) -> None:
    edited = [*truth[:15], 7, 7, 7, *truth[22:]]
    prediction = {"right": truth, "wrong": OTHER, "shifted": edited, "empty": []}[drafts]
    with build() as engine:
        done = engine.complete(PROMPT, PARAMS, prediction=prediction)
        again = engine.complete([PROMPT, OTHER, PROMPT], PARAMS, prediction=prediction)
    assert done.token_ids == truth
    assert again[0].token_ids == again[2].token_ids == truth
    if drafts == "right":
        assert by(done, "prediction") >= 50
        assert done.stats.passes <= 8
    if drafts == "shifted":
        assert by(done, "prediction") >= 30


def test_a_text_prediction_and_bad_hints(truth: list[int]) -> None:
    with build() as engine:
        assert engine.complete(PROMPT, PARAMS, prediction="some text").token_ids == truth
        with pytest.raises(ValueError, match="token ids must be 0 to"):
            engine.complete(PROMPT, PARAMS, prediction=[tiny.VOCAB])
        with pytest.raises(TypeError, match="takes no 'predict'; use prediction"):
            engine.complete(PROMPT, PARAMS, predict="x")  # type: ignore[call-overload]


def test_answers_help_the_next_request_of_the_same_tenant(truth: list[int]) -> None:
    with build(answers=10_000) as engine:
        first = engine.complete(PROMPT, PARAMS, tenant="a")
        stranger = engine.complete(PROMPT, PARAMS, tenant="b")
        private = engine.complete(PROMPT, PARAMS, tenant=None)
        second = engine.complete(PROMPT, PARAMS, tenant="a")
    assert first.token_ids == stranger.token_ids == private.token_ids == second.token_ids == truth
    assert by(first, "answers") == by(stranger, "answers") == by(private, "answers") == 0
    assert by(second, "answers") >= 40
    assert second.stats.passes < first.stats.passes / 2


def test_recycled_candidates_are_used_and_change_nothing(truth: list[int]) -> None:
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    with build(recycle=True) as engine:
        assert engine.complete(PROMPT, PARAMS).token_ids == truth
        alone = engine.complete(PROMPT, params, speculation=False)
        together = engine.complete([PROMPT, OTHER, PROMPT], params)
    assert together[0].token_ids == together[2].token_ids == alone.token_ids
    assert sum(by(done, "recycled") for done in together) > 0


@pytest.fixture(scope="module")
def real(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    from ngramspec.datastore.build import build as build_store
    from ngramspec.models.loader import load_tokenizer

    root = tmp_path_factory.mktemp("corpus")
    (root / "shapes.py").write_text(SOURCE)
    tokenizer = load_tokenizer(str(smollm2_gguf))
    build_store([root], root / "store", tokenizer.backend_tokenizer, "smollm2")
    with Engine(str(smollm2_gguf), datastore=root / "store") as engine:
        yield engine, root


SOURCE = '''
class Shape:
    """Something with an area."""

    def area(self) -> float:
        raise NotImplementedError(f"{type(self).__name__} must say what its area is")

    def scaled(self, factor: float) -> "Shape":
        raise NotImplementedError(f"{type(self).__name__} must say how it is scaled")
'''


def test_a_real_store_drafts_for_a_real_model(real: tuple[Engine, Path]) -> None:
    engine, root = real
    prompt = SOURCE + SOURCE.replace("Shape", "Solid").replace("area", "volume")[: SOURCE.index("raise") + 8]
    params = SamplingParams(max_tokens=40)
    plain = engine.complete(prompt, params, speculation=False)
    done = engine.complete(prompt, params)
    assert done.token_ids == plain.token_ids
    assert done.stats.passes < plain.stats.passes
    assert all(s.split(":")[1].endswith("shapes.py") for s in done.draft_sources if s is not None and s.startswith("datastore:"))
    assert (root / "store" / "MANIFEST").exists()


# ---- named stores, chosen by the request, that come and go


def names(done: Completion) -> set[str]:
    """Folders that a completion's datastore tokens came from; these stores hold one document each, whose number is the store's."""
    return {s.split(":")[1].split("/")[0] for s in done.draft_sources if s is not None and s.startswith("datastore:")}


@pytest.fixture
def halves(store: Path, tmp_path: Path, truth: list[int]) -> dict[str, Path]:
    """Two stores: the first half of what the model writes, called 0/é.py there, and the second, called 1/é.py."""
    tiny_store.write_store(tmp_path / "first", [[[*PROMPT[-4:], *truth[:30]]]], tiny.VOCAB)
    tiny_store.write_store(tmp_path / "second", [[[9], truth[26:]]], tiny.VOCAB)
    return {"first": tmp_path / "first", "second": tmp_path / "second"}


@pytest.mark.parametrize("form", ["dict", "list"])
def test_a_request_chooses_its_stores(halves: dict[str, Path], truth: list[int], form: str) -> None:
    with build(datastore=halves if form == "dict" else list(halves.values())) as engine:
        assert list(engine.datastores) == ["first", "second"]
        assert [store.path for store in engine.datastores.values()] == list(halves.values())
        assert [store["name"] for store in engine.props()["datastores"]] == ["first", "second"]
        cases: list[tuple[list[str] | None, set[str]]] = [(None, {"0", "1"}), (["first"], {"0"}), (["second"], {"1"}), ([], set())]
        for chosen, expected in cases:
            done = engine.complete(PROMPT, PARAMS, datastores=chosen)
            assert done.token_ids == truth
            assert names(done) == expected
        requests = [engine.submit(PROMPT, PARAMS, datastores=chosen) for chosen, _ in cases * 2]  # in one batch
        for request, (_, expected) in zip(requests, cases * 2, strict=True):
            assert request.result(60).token_ids == truth
            assert names(request.completion) == expected
        for wrong in (["third"], "first", ["first", "third"]):
            with pytest.raises(ValueError, match=r"among \['first', 'second'\], got"):
                engine.complete(PROMPT, PARAMS, datastores=wrong)


def test_folders_of_one_name_are_numbered(halves: dict[str, Path], tmp_path: Path) -> None:
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        tiny_store.write_store(tmp_path / parent / "first", [[[1, 2]]], tiny.VOCAB)
    stores = [halves["first"], Datastore.open(tmp_path / "x" / "first"), f"{tmp_path}/y/first/", halves["second"]]
    with build(datastore=stores) as engine:
        assert list(engine.datastores) == ["first", "first-2", "first-3", "second"]
        assert engine.datastores["first-2"] is stores[1], "an open store is not opened again"
    with pytest.raises(ValueError, match="name must be a text that is not empty"):
        build(datastore={"": halves["first"]})


def test_stores_come_and_go_under_running_requests(halves: dict[str, Path], truth: list[int]) -> None:
    with build() as engine:
        assert engine.complete(PROMPT, PARAMS).token_ids == truth
        assert isinstance(engine.speculator, TreeProposer)
        forward = engine.runner.forward

        def unhurried(batch: Batch) -> Output:
            """The text is not to be over before the store is there."""
            time.sleep(0 if engine.datastores else 0.05)
            return forward(batch)

        engine.runner.forward = unhurried  # type: ignore[method-assign]
        engine.runner.native_forward = lambda: None  # type: ignore[method-assign]
        pieces = engine.stream(PROMPT, PARAMS)
        written = [next(pieces)]
        while sum(len(piece.token_ids) for piece in written) < 24:  # it has what comes behind
            written.append(next(pieces))
        engine.add_datastore("second", halves["second"])  # the first store at all: its drafter is made for running sequences too
        assert list(engine.datastores) == ["second"]
        written += list(pieces)
        assert [t for piece in written for t in piece.token_ids] == truth
        done = written[-1].completion
        assert done is not None
        assert names(done) == {"1"}
        engine.add_datastore("first", Datastore.open(halves["first"]))
        restricted, free = engine.stream(PROMPT, PARAMS, datastores=["second"]), engine.stream(PROMPT, PARAMS)
        got = [next(restricted), next(free)]
        engine.remove_datastore("second")
        with pytest.raises(ValueError, match="datastores must be among"):
            engine.complete(PROMPT, PARAMS, datastores=["second"])
        ends = [list(stream) for stream in (restricted, free)]
        assert all([*first.token_ids, *(t for p in rest for t in p.token_ids)] == truth for first, rest in zip(got, ends, strict=True))
        assert names(ends[0][-1].completion or done) == set(), "another store in the place of its own is not its own"
        assert names(engine.complete(PROMPT, PARAMS)) == {"0"}
        engine.add_datastore("first", halves["second"])  # another one under the same name
        assert names(engine.complete(PROMPT, PARAMS, datastores=["first"])) == {"1"}
        engine.remove_datastore("first")
        assert engine.speculator.datastore is None, "as before the first one"
        assert engine.complete(PROMPT, PARAMS).token_ids == truth
        with pytest.raises(KeyError, match="first"):
            engine.remove_datastore("first")
        with pytest.raises(DatastoreNotFoundError):
            engine.add_datastore("none", halves["first"] / "nothing")
        with pytest.raises(ValueError, match="not empty"):
            engine.add_datastore("", halves["first"])
        for i in range(70):
            engine.add_datastore(f"s{i}", halves["first"])
        assert len(engine.datastores) == 70
        assert names(engine.complete(PROMPT, PARAMS, datastores=["s69"])) == {"0"}
    with pytest.raises(EngineClosedError):
        engine.add_datastore("late", halves["first"])


def test_stores_without_speculation(halves: dict[str, Path], truth: list[int]) -> None:
    with build(datastore=halves, speculation=False) as engine:
        engine.remove_datastore("first")
        assert engine.complete(PROMPT, PARAMS, datastores=["second"]).token_ids == truth
        engine.add_datastore("first", halves["first"])
        assert set(engine.datastores) == {"first", "second"}


def test_files_like_a_request_come_from_stores_that_it_may_use(tmp_path: Path, truth: list[int]) -> None:
    from ngramspec.datastore.build import build as build_store

    tokenizer = tiny.byte_tokenizer()
    letters = np.random.default_rng(2).integers(97, 123, 3000).astype(np.uint8).tobytes().decode()
    words = "\n".join(letters[i : i + 50] for i in range(0, 3000, 50))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text(words)
    build_store([tmp_path / "src"], tmp_path / "store", tokenizer.backend_tokenizer, "bytes", router=True)
    prompt = words[:140]
    with build() as engine:
        engine.add_datastore("mine", tmp_path / "store")
        core = engine.core
        assert isinstance(core.speculator, TreeProposer)
        assert core.speculator.datastore is not None
        seen: list[int] = []
        begin = core.speculator.begin

        def spy(slot: int, tokens: np.ndarray, params: DraftParams) -> None:
            begin(slot, tokens, params)
            seen.append(int(core.speculator._states[slot, ngram_table.N_SIMILAR]))  # type: ignore[union-attr]

        core.speculator.begin = spy  # type: ignore[method-assign]
        for chosen in (None, ["mine"], []):
            engine.complete(prompt, SamplingParams(max_tokens=2), datastores=chosen)
    assert seen[0] == seen[1] > 1000
    assert seen[2] == 0


def test_a_sequence_that_ended_while_there_was_no_store_wakes_none_later(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that brings nothing is asked once in many passes, whoever was there before it."""
    opened, drafts, cost = Datastore.open(store), TreeProposer(DraftOptions(vocab_size=tiny.VOCAB, max_seqs=2)), np.arange(1.0, 10.0)
    slots, depth, nothing = np.array([1], np.int32), np.array([4], np.int32), np.empty(0, np.int32)
    foreign = np.array([200, 201, 202], np.int32)
    drafts.use_datastores({"store": opened}, [])
    drafts.begin(0, foreign)
    drafts.use_datastores({}, [])
    drafts.end(0)
    drafts.use_datastores({"store": opened}, [])
    drafts.begin(1, foreign)
    asked: list[int] = []
    schedule = drafts._schedule
    find = schedule._find_shortest_period
    monkeypatch.setattr(schedule, "_find_shortest_period", lambda: asked.append(1) or find())
    for _ in range(2000):
        drafts.propose(slots, depth, cost, 1, 4)
        drafts.observe(slots, [foreign[:1]], [nothing])
    asked.clear()
    for _ in range(10 * MAX_PERIOD):
        drafts.propose(slots, depth, cost, 1, 4)
        drafts.observe(slots, [foreign[:1]], [nothing])
    assert 10 <= len(asked) <= 20, "in other passes than those of a question no sequence is looked at"
    opened.close()
