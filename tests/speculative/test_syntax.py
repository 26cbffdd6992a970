"""The syntax table: which contexts it knows in a tokenizer's ids, how it sees indentation, and what is cached of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from ngramspec.engine.llm_engine import Engine
from ngramspec.sampling_params import SamplingParams
from ngramspec.speculative import syntax
from ngramspec.speculative.drafter import DraftOptions
from ngramspec.speculative.proposer import TreeProposer
from ngramspec.speculative.syntax import (
    FOLLOWERS,
    LEVELS,
    SyntaxTable,
    classify_token,
    encode_change,
    find_columns,
    find_context,
    find_margin,
    get_follower,
    make_empty_syntax,
    open_syntax,
)
from ngramspec.tokenizer.spelling import list_token_bytes

CODE = """class Stack:
    def __init__(self):
        self.items = []

    def pop(self):
        if not self.items:
            return None
        return self.items.pop()
"""


@pytest.fixture(scope="module")
def table(smollm2_tokenizer: Any) -> SyntaxTable:
    return open_syntax(smollm2_tokenizer.backend_tokenizer, len(smollm2_tokenizer))


def list_followers(table: SyntaxTable, tokenizer: Any, text: str) -> dict[str, int]:
    """Return the texts that the table lists after a text, with the levels of their probabilities."""
    recent = np.array(tokenizer(text, add_special_tokens=False)["input_ids"][::-1], np.int32)
    row = find_context(table, recent, len(recent))
    assert row >= 0
    margin = find_margin(table, recent, len(recent))
    tokens = [int(get_follower(table, row, rank, margin)) for rank in range(FOLLOWERS)]
    levels = table.levels[row].tolist()
    return {tokenizer.decode([token]): level for token, level in zip(tokens, levels, strict=True) if token >= 0}


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ("\nfor i in range", "("),
        ("\n    if x is", " None"),
        ("\n    def __init", "__("),
        ("\nif __", "name"),
        ("\n    else", ":"),
    ],
)
def test_what_follows_in_code_is_known(table: SyntaxTable, smollm2_tokenizer: Any, text: str, follows: str) -> None:
    found = list_followers(table, smollm2_tokenizer, text)
    assert follows in found
    assert LEVELS[found[follows] - 1] >= 0.2


def test_indentation_follows_the_line_before(table: SyntaxTable, smollm2_tokenizer: Any) -> None:
    for depth in (4, 8, 12):
        blanks = " " * depth
        deeper = list_followers(table, smollm2_tokenizer, f"\n{blanks}x = 1\n{blanks}if x:")
        assert max(deeper, key=lambda each: deeper[each]) == "\n" + " " * (depth + 3)  # the last blank is in the next word's token


def test_no_text_is_classified_by_its_letters() -> None:
    frequent = {b" return", b"):"}
    assert classify_token(b" return", frequent) == b" return"
    assert classify_token(b" returns", frequent) == classify_token(b" x", frequent) == b" a"
    assert classify_token(b"Name", frequent) == b"A"
    assert classify_token(b" 42", frequent) == b" 0"
    assert classify_token(b".append", frequent) == classify_token(b".pop", frequent) == b".a"
    assert classify_token("é".encode()[:1], frequent) == b"a"
    assert classify_token(b"\n       ", frequent) == classify_token(b"\n   ", frequent) == b"\n "
    assert classify_token(b"):", frequent) == b"):"
    assert classify_token(b"+=+=+=", frequent) != classify_token(b"+=+=+=\n", frequent)


@pytest.mark.parametrize(
    ("text", "joined", "columns"),
    [
        (b"   ", 1, (4, -1)),
        (b"    ", 0, (4, -1)),
        (b"\n", 1, (0, 0)),
        (b"\n   ", 1, (4, 4)),
        (b":\n", 1, (-1, 0)),
        (b")\n\n", 1, (-1, 0)),
        (b"x ", 1, (-1, -1)),
        (b"word", 1, (-1, -1)),
        (b"\n\t", 1, (-1, -1)),
    ],
)
def test_columns_of_a_token(text: bytes, joined: int, columns: tuple[int, int]) -> None:
    assert find_columns(text, joined) == columns


@pytest.mark.parametrize("name", ["byte_tokenizer", "smollm2_tokenizer"])
def test_margin_is_that_of_the_latest_line_with_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    table = open_syntax(tokenizer.backend_tokenizer, len(tokenizer))
    ids = np.array(tokenizer(CODE, add_special_tokens=False)["input_ids"], np.int32)
    for end in range(1, len(ids)):
        lines = tokenizer.decode(ids[:end].tolist()).split("\n")
        if name == "byte_tokenizer" and not lines[-1].strip():
            continue  # one byte at a time, blanks do not end where a token does
        written = [line for line in lines if line.strip()]
        recent = ids[:end][::-1].copy()
        found = find_margin(table, recent, len(recent))
        if len(written) == 1 and "\n" not in CODE[: len("".join(lines))]:
            assert found == -1
        elif name == "smollm2_tokenizer" and len(written) > 1 and written[-1] == lines[-1]:
            assert found == len(written[-1]) - len(written[-1].lstrip())


def test_a_change_of_indentation_becomes_a_token() -> None:
    table = make_empty_syntax()
    table.tokens[0] = [7, -1, encode_change(0, 4), encode_change(1, -4)]
    table.indents[0, 8], table.indents[1, 0] = 70, 71
    assert [get_follower(table, 0, rank, 4) for rank in range(FOLLOWERS)] == [7, -1, 70, 71]
    assert [get_follower(table, 0, rank, -1) for rank in range(FOLLOWERS)] == [7, -1, -1, -1]
    assert get_follower(table, 0, 3, 0) == -1
    assert get_follower(table, 0, 2, 63) == -1


def test_numbers_of_a_tokenizer_are_cached(smollm2_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, n = smollm2_tokenizer.backend_tokenizer, len(smollm2_tokenizer)
    cache, calls = tmp_path / "deep" / "model.syntax", [0]

    def count(*args: Any) -> dict[bytes, int]:
        calls[0] += 1
        return list_token_bytes(*args)

    monkeypatch.setattr(syntax, "list_token_bytes", count)
    first = open_syntax(backend, n, cache)
    again = open_syntax(backend, n, cache)
    assert calls == [1]
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    open_syntax(backend, n + 64, cache)  # another model's vocabulary
    assert calls == [2]
    for damaged in (b"", cache.read_bytes()[:-1], cache.read_bytes()[:100] + b"x" + cache.read_bytes()[101:]):
        cache.write_bytes(damaged)
        for a, b in zip(first, open_syntax(backend, n, cache), strict=True):
            np.testing.assert_array_equal(a, b)
    assert calls == [5]
    with pytest.raises(OSError, match=r".*"):
        (cache / "x").mkdir()
    open_syntax(backend, n, cache / "x")  # nothing can be written there
    assert calls == [6]


def test_ids_are_those_of_the_model(smollm2_tokenizer: Any) -> None:
    small = open_syntax(smollm2_tokenizer.backend_tokenizer, 1000)
    assert len(small.classes) == len(small.blanks) == 1000
    assert small.tokens.max() < 1000
    assert small.indents.max() < 1000


def test_without_a_tokenizer_nothing_is_known() -> None:
    for backend in (None, tiny.byte_tokenizer().backend_tokenizer):
        table = open_syntax(backend, 0 if backend is None else 256)
        recent = np.array([40, 41, 42], np.int32)
        assert backend is not None or find_context(table, recent, 3) == -1
    proposer = TreeProposer(DraftOptions(vocab_size=64, max_seqs=1))
    slots = np.zeros(1, np.int32)
    proposer.begin(0, np.array([5, 6, 7, 5, 6], np.int32))
    tree = proposer.propose(slots, np.full(1, 8, np.int32), np.ones(16), 1, 8)[0]
    assert "syntax" not in [proposer.source_names[source] for source in tree.sources]


def test_it_drafts_and_changes_no_text(smollm2_gguf: Path) -> None:
    params = SamplingParams(max_tokens=48, temperature=0.0)
    prompt = "import math\n\n\ndef area(radius):\n"
    texts, made = [], []
    for on in (True, False):
        with Engine(str(smollm2_gguf), max_seqs=1, kv_memory=64 << 20, max_model_len=512, syntax=on) as engine:
            while engine.core.is_compiling_drafts:
                time.sleep(0.05)
            done = engine.complete(prompt, params)
            texts += [done.token_ids, engine.complete(prompt, params, speculation=False).token_ids]
            made.append(done.stats.drafted_by_source.get("syntax", 0))
    assert texts == [texts[0]] * 4
    assert made[0] > 0 == made[1]


def test_a_table_can_be_learned(tmp_path: Path, smollm2_gguf: Path, smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import learn_syntax

    for i in range(4):
        (tmp_path / f"module{i}.py").write_text(CODE.replace("Stack", f"Stack{i}") * 4)
    out = tmp_path / "table.npz"
    command = ["learn_syntax", "--corpus", str(tmp_path), "--tokenizer", "smollm2", "--out", str(out), "--contexts", "500"]
    monkeypatch.setattr("sys.argv", command)
    learn_syntax.main()
    monkeypatch.setattr(syntax, "SYNTAX", out)
    table = open_syntax(smollm2_tokenizer.backend_tokenizer, len(smollm2_tokenizer))
    found = list_followers(table, smollm2_tokenizer, "\n        if not self")
    assert max(found, key=lambda each: found[each]) == "."
    assert json.dumps(found)
