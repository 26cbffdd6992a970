"""Texts that follow a grammar: what is written is in its language, and the same whatever is drafted; what it forbids is never drafted."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exact import Oracle, prompts, tight_pool

from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import GrammarError
from ngramspec.grammar import compiling, forced_tokens
from ngramspec.grammar import llguidance as grammars
from ngramspec.grammar.compiler_pool import GrammarCompilerPool
from ngramspec.grammar.compiling import make_matcher
from ngramspec.grammar.constraint import Grammar
from ngramspec.outputs import DraftTree
from ngramspec.sampling.sampler import apply_mask
from ngramspec.sampling_params import SamplingParams
from ngramspec.tokenizer.encode import Encoding

if TYPE_CHECKING:
    from llguidance import LLMatcher

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["circle", "square"]}, "sides": {"type": "integer"}},
    "required": ["name", "kind", "sides"],
    "additionalProperties": False,
}
LANGUAGES: dict[str, tuple[Grammar, Callable[[str], object]]] = {
    "schema": (Grammar.json_schema(SCHEMA), lambda text: json.loads(text)["kind"] in ("circle", "square") or None),
    "object": (Grammar.json_object(), lambda text: isinstance(json.loads(text), dict) or None),
    "regex": (Grammar.regex(r"[a-f]{2,4}-[0-9]{3}(, [a-f]+)*"), re.compile(r"[a-f]{2,4}-[0-9]{3}(, [a-f]+)*").fullmatch),
    "choice": (Grammar.choice(["positive", "neg|a.tive", 'it\'s "so"']), re.compile(r'positive|neg\|a\.tive|it\'s "so"').fullmatch),
    "lark": (Grammar.lark('start: "(" start ")" | /[xyz]/'), re.compile(r"\(*[xyz]\)*").fullmatch),
    "gbnf": (Grammar.gbnf('root ::= "yes, " ("of course" | "perhaps")'), re.compile("yes, (of course|perhaps)").fullmatch),
}
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 11},
    "three": {"temperature": 1.2, "seed": 2, "n": 3},
    "penalised": {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "logit_bias": {7: 2.0, 200: -100.0}},
    "long": {"min_tokens": 9, "logprobs": 2},
    "endless": {"ignore_eos": True, "temperature": 0.7, "seed": 1},
    "stopped": {"stop": ("a", "t"), "temperature": 1.0, "seed": 9},
}


def text_of(token_ids: list[int]) -> str:
    return bytes(t for t in token_ids if t < tiny.BOS).decode(errors="replace")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Engine, Engine, Oracle]]:
    """An engine without speculation, and one with the oracle and a pool so tight that it preempts."""
    oracle = Oracle()
    common = {"tokenizer": tiny.byte_tokenizer(), "max_seqs": 8, "max_model_len": 150}
    plain = Engine(tiny.tiny_model("llama"), speculation=False, prefix_cache=False, **common)
    tight = Engine(tiny.tiny_model("llama"), max_rows=23, drafters=[oracle], kv_memory=tight_pool("llama"), **common)
    tight.core.cost = tiny.FreeRows()
    yield plain, tight, oracle
    plain.close()
    tight.close()


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("way", WAYS)
def test_same_texts_in_the_language_whatever_is_drafted(pair: tuple[Engine, Engine, Oracle], language: str, way: str) -> None:
    plain, tight, oracle = pair
    grammar, fits = LANGUAGES[language]
    params = SamplingParams(max_tokens=40, grammar=grammar, **WAYS[way])
    asked = prompts(5)
    completions = [plain.complete(p, params) for p in asked]
    expected = [[(c.token_ids, c.finish_reason, c.logprobs) for c in done.choices] for done in completions]
    oracle.truth = [p + choice.token_ids for p, done in zip(asked, completions, strict=True) for choice in done.choices]
    for made in (
        [tight.complete(p, params) for p in asked],
        tight.complete(asked, params),
        tight.complete(asked, params, speculation=False),
        tight.complete(asked, params, prediction='{"name": "abc", "kind": "square", "sides": 4}', prefix_cache=False),
    ):
        assert [[(c.token_ids, c.finish_reason, c.logprobs) for c in done.choices] for done in made] == expected
    for choice in (choice for done in completions for choice in done.choices):
        if choice.finish_reason == "stop" and way != "stopped":
            assert choice.text == text_of(choice.token_ids)
            assert fits(choice.text) is not None
        else:
            assert way == "stopped" or len(choice.token_ids) == 40


def test_all_of_it_happened(pair: tuple[Engine, Engine, Oracle]) -> None:
    """Preemption, tokens that the grammar foresaw, and drafts that were wrong."""
    _, tight, oracle = pair
    oracle.truth = []
    params = SamplingParams(max_tokens=60, grammar=LANGUAGES["schema"][0])
    completions = tight.complete(prompts(6), params)
    assert all(c.finish_reason == "stop" or len(c.token_ids) == 60 for c in completions)
    stats = [c.stats for c in completions]
    assert sum(s.accepted_by_source.get("grammar", 0) for s in stats) > 30
    assert all(s.passes < s.tokens for s in stats)
    assert tight.core.scheduler.n_preempted > 0
    assert sum(source == "grammar" for c in completions for source in c.draft_sources) == sum(
        s.accepted_by_source["grammar"] for s in stats
    )
    tight.use(drafts_forced_tokens=False)
    again = tight.complete(prompts(6), params)
    tight.use(drafts_forced_tokens=True)
    assert [c.token_ids for c in again] == [c.token_ids for c in completions]
    assert not any(c.stats.drafted_by_source.get("grammar", 0) for c in again)


@pytest.mark.parametrize("width", [1, 3])
def test_beams_follow_a_grammar(width: int) -> None:
    with Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_model_len=150) as engine:
        for language, (grammar, fits) in LANGUAGES.items():
            for prompt in prompts(2):
                off = engine.beam_search(prompt, width, 40, grammar=grammar, speculation=False)
                assert engine.beam_search(prompt, width, 40, grammar=grammar) == off
                assert 1 <= len(off) <= width
                assert len({tuple(beam.token_ids) for beam in off}) == len(off)
                whole = [beam for beam in off if beam.token_ids[-1] == tiny.EOS]
                assert whole or language in ("object", "schema", "lark")
                assert all(fits(beam.text) is not None for beam in whole)
                assert all(len(beam.token_ids) == 40 for beam in off if beam not in whole)


@pytest.mark.parametrize("acceptance", ["walk", "rejection"])
def test_every_acceptance_stays_in_the_language(acceptance: str) -> None:
    with Engine(
        tiny.tiny_model("qwen2"), tokenizer=tiny.byte_tokenizer(), acceptance=acceptance, lenience=0.6, max_model_len=150
    ) as engine:
        for language in ("schema", "regex"):
            grammar, fits = LANGUAGES[language]
            for done in engine.complete(prompts(4), SamplingParams(max_tokens=80, temperature=0.9, seed=4, grammar=grammar)):
                assert done.finish_reason == "length" or fits(done.text) is not None


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema({"type": "no such type"}),
        Grammar.json_schema({"$ref": "#"}),
        Grammar.regex("(("),
        Grammar.lark("start: nothing"),
        Grammar.gbnf("no-root ::= 'a'"),
        Grammar.regex("(?=a)b"),
        Grammar.json_schema({"allOf": [{"type": "string", "pattern": f".*x{i}.*"} for i in range(100)]}),
        Grammar.lark("start: " + "(" * 5000 + '"a"' + ")" * 5000),
        Grammar.gbnf("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    ],
    ids=lambda grammar: grammar.text[:30],
)
def test_what_cannot_be_compiled_is_refused(pair: tuple[Engine, Engine, Oracle], grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match="grammar"):
        pair[0].complete("x", SamplingParams(grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "reason"), [(Grammar.regex("(a"), "unclosed group"), (Grammar.json_schema({"$ref": "#"}), "a reference to itself")]
)
def test_the_reason_is_told(pair: tuple[Engine, Engine, Oracle], grammar: Grammar, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        pair[0].complete("x", SamplingParams(grammar=grammar))


def test_what_takes_too_long_is_refused(pair: tuple[Engine, Engine, Oracle]) -> None:
    """And others are compiled after it."""
    endless = Grammar.json_schema({"anyOf": [{"type": "integer", "multipleOf": 65_537 + 2 * i} for i in range(100)]})
    pair[0].complete("x", SamplingParams(grammar=Grammar.regex("first")))
    with pytest.raises(GrammarError, match=r"more than 2 s"):
        pair[0].complete("x", SamplingParams(grammar=endless))
    assert pair[0].complete("x", SamplingParams(grammar=Grammar.regex("fast"))).text == "fast"


class CountingMatcher:
    """A matcher of llguidance's that counts: masks, and tokens that are computed since they are forced."""

    masks = forced = 0

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> CountingMatcher:
        return CountingMatcher(self._matcher.deep_copy())

    def compute_bitmask(self) -> bytes:
        CountingMatcher.masks += 1
        return self._matcher.compute_bitmask()

    def compute_ff_tokens(self) -> list[int]:
        found = self._matcher.compute_ff_tokens()
        CountingMatcher.forced += len(found)
        return found


@pytest.mark.parametrize("speculation", [False, True])
def test_forced_text_is_computed_once(monkeypatch: pytest.MonkeyPatch, speculation: bool) -> None:
    """And not anew for each of its tokens, which would take time in proportion to the square of its length."""
    text = "q" + "yx" * 100
    monkeypatch.setattr(grammars, "make_matcher", lambda *args: CountingMatcher(make_matcher(*args)))
    monkeypatch.setattr(CountingMatcher, "masks", 0)
    monkeypatch.setattr(CountingMatcher, "forced", 0)
    with Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_model_len=250) as engine:
        params = SamplingParams(max_tokens=240, grammar=Grammar.choice(["r", text]), logit_bias={ord("r"): -100.0})
        assert engine.complete("x", params, speculation=speculation).text == text
    assert CountingMatcher.masks <= 20
    assert len(text) / 2 <= CountingMatcher.forced <= 2 * len(text)


def test_too_much_forced_text_ends_the_request_that_asks_for_it(pair: tuple[Engine, Engine, Oracle]) -> None:
    """Here it lies too deep for being found when the grammar is compiled."""
    hidden = SamplingParams(max_tokens=60, grammar=Grammar.regex("([a-z]{1,30}-){5}(x{1000}){20}"), logit_bias={ord("-"): 90.0})
    alone = pair[1].complete("y", SamplingParams(max_tokens=60, seed=3, temperature=1.0))
    guilty = pair[1].submit("x", hidden)
    assert pair[1].complete("y", SamplingParams(max_tokens=60, seed=3, temperature=1.0)).token_ids == alone.token_ids
    with pytest.raises(GrammarError, match="at most 16384 bytes in a row"):
        guilty.result()


def test_grammars_are_kept_by_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody finds out by compiling a grammar whether another tenant has; and one tenant's many grammars drop no other's."""
    compiled: list[str] = []

    def translate(self: GrammarCompilerPool, grammar: Grammar) -> tuple[str, str | None]:
        compiled.append(grammar.text)
        return compiling.translate_grammar(grammar)

    monkeypatch.setattr(GrammarCompilerPool, "translate", translate)
    kept = grammars.Grammars(Encoding(tiny.byte_tokenizer(), tiny.VOCAB), [tiny.EOS])
    secret = Grammar.regex("secret")
    for tenant, is_new in (("a", True), ("a", False), ("b", True), ("b", False), ("", True), (None, True), (None, True), ("a", False)):
        before = len(compiled)
        kept.compile(secret, tenant)
        assert (len(compiled) > before) == is_new, tenant
    for i in range(grammars.KEPT + 9):
        kept.compile(Grammar.choice([f"flood {i}"]), "flooder")
    for i in range(grammars.KEPT):
        kept.compile(Grammar.choice(["one"]), f"crowd {i}")
        kept.compile(secret, "a")
    assert compiled.count("secret") == 5
    n = len(compiled)
    kept.compile(Grammar.choice(["flood 0"]), "flooder")
    assert len(compiled) == n + 1
    kept.close()


def test_without_the_library_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match="pip install 'llguidance"):
        grammars.Grammars(Encoding(tiny.byte_tokenizer(), tiny.VOCAB), [tiny.EOS]).compile(Grammar.regex("a"))


def test_what_is_no_grammar_is_refused() -> None:
    for make in (
        lambda: Grammar("yaml", "x"),
        lambda: Grammar.regex(""),
        lambda: Grammar.regex("\ud800"),
        lambda: Grammar.regex("a" * (1 << 19)),
        lambda: Grammar.choice([]),
        lambda: Grammar.choice([""]),
        lambda: Grammar.choice("ab"),
        lambda: Grammar.json_schema("[1]"),
        lambda: Grammar.json_schema("{"),
        lambda: Grammar.json_schema({"a": object()}),
        lambda: SamplingParams(grammar="a+"),
    ):
        with pytest.raises(ValueError, match=r"must|at most"):
            make()


def test_a_ban_of_all_that_may_come_is_told(pair: tuple[Engine, Engine, Oracle]) -> None:
    with pytest.raises(GrammarError, match="logit_bias"):
        pair[1].complete("x", SamplingParams(grammar=Grammar.choice(["a"]), logit_bias={ord("a"): -100.0}))
    assert pair[1].complete("x", SamplingParams(grammar=Grammar.choice(["a"]))).text == "a"


@settings(deadline=None)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5))
def test_choices_mean_themselves(texts: list[str]) -> None:
    texts = [text.replace("\x00", "0") for text in texts]
    engine = _engine()
    done = engine.complete("x", SamplingParams(max_tokens=40, grammar=Grammar.choice(texts), temperature=2.0))
    assert bytes(t for t in done.token_ids if t < tiny.BOS).decode() in texts


def _engine() -> Engine:
    global _KEPT
    _KEPT = _KEPT or Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_model_len=100)
    return _KEPT


_KEPT: Engine | None = None


@settings(deadline=None)
@given(st.integers(1, 100), st.sets(st.integers(0, 127)), st.integers(0, 3))
def test_masked(n: int, allowed: set[int], words: int) -> None:
    row = np.arange(n, dtype=np.float32)
    mask = np.zeros(words, np.uint32)
    for token in allowed:
        if token < 32 * words:
            mask[token // 32] |= np.uint32(1 << token % 32)
    expected = [float(t) if t in allowed and t < 32 * words else -np.inf for t in range(n)]
    assert apply_mask(row, mask).tolist() == expected
    assert row.tolist() == list(range(n))


class Digits:
    """Allows rising digits; forces 7, 8, 9 after a 6."""

    def __init__(self) -> None:
        self.path: list[int] = []

    def step(self, token: int) -> bool:
        ok = not self.path or token > self.path[-1]
        if ok:
            self.path.append(token)
        return ok

    def undo(self) -> None:
        self.path.pop()

    def get_forced_tokens(self) -> list[tuple[int, float]]:
        return [(t, 0.9) for t in range(self.path[-1] + 1, 10)] if self.path and self.path[-1] >= 6 else []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 9)), max_size=20), st.integers(0, 6), st.integers(0, 25))
def test_a_tree_follows_its_grammar(pairs: list[tuple[int, int]], max_depth: int, max_nodes: int) -> None:
    seen: set[tuple[int, int]] = set()
    nodes = [(p, t) for i, (p, t) in enumerate(pairs) if not ((q := (min(p, i - 1), t)) in seen or seen.add(q))]
    parents = np.array([min(p, i - 1) for i, (p, _) in enumerate(nodes)], np.int32)
    tokens = np.array([t for _, t in nodes], np.int32)
    unique = len({(int(p), int(t)) for p, t in zip(parents, tokens, strict=True)}) == len(nodes)
    if not unique:
        return
    given_tree = DraftTree(tokens, parents, np.full(len(nodes), 0.5, np.float32), np.zeros(len(nodes), np.uint8))
    lookahead = Digits()
    tree = forced_tokens.apply_grammar(given_tree, lookahead, source=3, max_depth=max_depth, max_nodes=max_nodes, least=0.2)
    assert lookahead.path == []
    assert len(tree) <= max_nodes
    assert tree.origins is not None
    paths: list[list[int]] = []
    for i, (token, parent, origin) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.origins.tolist(), strict=True)):
        assert parent < i
        paths.append([*(paths[parent] if parent >= 0 else []), token])
        assert len(paths[-1]) <= max_depth
        assert paths[-1] == sorted(set(paths[-1]))
        if origin < 0:
            assert tree.sources[i] == 3
            assert paths[-1][-2] >= 6
        else:
            assert tokens[origin] == token
            above = -1 if parent < 0 else int(tree.origins[parent])
            assert parents[origin] == above
    assert len({tuple(path) for path in paths}) == len(paths)


def test_what_others_have_used_up_fails_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a compiled grammar share a lexer with a limit of states; a text fails only if it exceeds the limit by itself."""
    monkeypatch.setitem(compiling.LIMITS, "max_lexer_states", 600)
    kept = grammars.Grammars(Encoding(tiny.byte_tokenizer(), tiny.VOCAB), [tiny.EOS])
    try:
        begun = kept.compile(Grammar.regex("(a|b)*a(a|b){12}c")).fork()
        text = b"abbabaababbb"
        for token in text:
            begun.accept(token)
        lookahead, rng = begun.make_lookahead(), random.Random(0)
        other = begun.fork()
        for _ in range(100):
            n = sum(lookahead.step(rng.choice(b"ab")) for _ in range(20))
            for _ in range(n):
                lookahead.undo()

        def exceed_the_limit() -> None:
            for _ in range(2000):
                other.mask()
                other.accept(rng.choice(b"ab"))

        with pytest.raises(GrammarError):
            exceed_the_limit()
        for token in b"abababababab":
            assert begun.mask().any()
            begun.accept(token)
    finally:
        kept.close()
