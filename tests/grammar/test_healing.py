"""Token healing: an output's first tokens spell what the prompt left out, and it is no part of the text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ngramspec import Engine, Grammar, InvalidInputError
from ngramspec.tokenizer.spelling import Spelling
from tests import tiny
from tests.prompts.test_fim import TOKENS, bytes_tokenizer, sentencepiece_tokenizer

QWEN = bytes_tokenizer(TOKENS["qwen"])
LLAMA = sentencepiece_tokenizer(TOKENS["codellama"])
PIECES = ["re", " ret", "    ", "(", "é", "日本", " ==", "7", "_x", "return"]


def list_bytes(tokenizer: PreTrainedTokenizerFast) -> dict[int, bytes]:
    """The bytes of every byte-level token that is no control token."""
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    ordinary = {name: number for name, number in tokenizer.get_vocab().items() if number not in tokenizer.added_tokens_decoder}
    return {number: bytes(byte_of[letter] for letter in name) for name, number in ordinary.items()}


def list_mask(spelling: Spelling, letters: str) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(spelling.find_mask(letters).view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("piece", PIECES)
def test_a_mask_has_the_tokens_that_can_begin_a_text(piece: str) -> None:
    spelling, texts = Spelling(QWEN.backend_tokenizer, len(QWEN)), list_bytes(QWEN)
    left, spelled = spelling.to_letters(piece), piece.encode()
    while left:
        wanted = {number for number, text in texts.items() if text.startswith(spelled) or spelled.startswith(text)}
        assert list_mask(spelling, left) == wanted == {number for number in range(len(QWEN)) if spelling.can_begin(left, number)}
        token = min(wanted, key=lambda number: (texts[number] == spelled, number))
        left, spelled = spelling.cut(left, token), spelled.removeprefix(texts[token]) if spelled.startswith(texts[token]) else b""
        assert bool(left) == bool(spelled)


def test_what_sentencepiece_spells() -> None:
    spelling = Spelling(LLAMA.backend_tokenizer, len(LLAMA))
    names = {LLAMA.convert_ids_to_tokens(number) for number in list_mask(spelling, spelling.to_letters(" de") or "")}
    assert names == {"▁", "▁d", "▁de", "▁def"}
    assert spelling.to_letters("x") is None, "only bytes spell it"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = tiny.tiny_model("llama", vocab_size=384, max_position_embeddings=512)
    with Engine(model, tokenizer=QWEN, max_seqs=4, kv_memory=16 << 20, threads=1) as engine:
        yield engine


PROMPT = QWEN("def add(a, b):\n    return a + b\n\ndef add(a, b):\n   ", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 1, "n": 2}, {"logprobs": 1}, {"repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("piece", PIECES)
def test_outputs_begin_with_the_piece(engine: Engine, piece: str, options: dict[str, Any]) -> None:
    made = engine.complete(PROMPT, max_tokens=24, ignore_eos=True, healed=piece, **options)
    texts, plain = list_bytes(QWEN), engine.complete(PROMPT, max_tokens=24, ignore_eos=True, healed=piece, speculation=False, **options)
    for choice, other in zip(made.choices, plain.choices, strict=True):
        assert choice.token_ids == other.token_ids, "whatever was drafted"
        written, n_spelled = b"", 0
        while len(written) < len(piece.encode()):
            written += texts[choice.token_ids[n_spelled]]
            n_spelled += 1
        assert written.startswith(piece.encode())
        assert QWEN.decode(choice.token_ids, skip_special_tokens=True) == piece + choice.text == piece + "".join(choice.texts)
        if "n" not in options and "repetition_penalty" not in options:  # from there on nothing is held
            n_left = len(choice.token_ids) - n_spelled
            rest = engine.complete(PROMPT + choice.token_ids[:n_spelled], max_tokens=n_left, ignore_eos=True, **options)
            assert rest.token_ids == choice.token_ids[n_spelled:]


def count_spelled(tokens: list[int], piece: str) -> int:
    """How many of an output's tokens show nothing of the text behind the piece."""
    texts = list_bytes(QWEN)
    lengths = itertools.accumulate(len(texts[token]) for token in itertools.takewhile(texts.__contains__, tokens))
    return sum(length <= len(piece.encode()) for length in lengths)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 1, "n": 2}, {"stop": ["no such text"]}], ids=str)
@pytest.mark.parametrize("piece", PIECES)
def test_tokens_that_only_spell_the_piece_do_not_count(engine: Engine, piece: str, options: dict[str, Any]) -> None:
    given = {"ignore_eos": True, "healed": piece, **options}
    whole = engine.complete(PROMPT, max_tokens=60, **given)
    for most in (1, 2, 20):
        drafted = engine.complete(PROMPT, max_tokens=most, prediction=whole.text, **given)
        plain = engine.complete(PROMPT, max_tokens=most, speculation=False, **given)
        streamed: dict[int, list[int]] = {}
        for delta in engine.stream(PROMPT, max_tokens=most, **given):
            streamed.setdefault(delta.index, []).extend(delta.token_ids)
        for choice, other, longer in zip(drafted.choices, plain.choices, whole.choices, strict=True):
            assert choice.token_ids == other.token_ids == streamed[choice.index]
            assert len(choice.token_ids) == most + count_spelled(choice.token_ids, piece)
            assert choice.token_ids == longer.token_ids[: len(choice.token_ids)]
            assert choice.finish_reason == "length"


def test_the_context_ends_what_is_healed(engine: Engine) -> None:
    for n_free in (1, 2, 3, 4):
        prompt = (PROMPT * 40)[: engine.max_model_len - n_free]
        assert len(engine.complete(prompt, max_tokens=9, ignore_eos=True, healed=" ret").token_ids) == n_free


@pytest.mark.parametrize("stops", ["stop_token_ids", "stop"])
@pytest.mark.parametrize("piece", ["re", " ret", "return", "日本"])
def test_stops_wait_for_tokens_behind_the_piece(engine: Engine, piece: str, stops: str) -> None:
    given: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "healed": piece}
    whole = engine.complete(PROMPT, **given)
    given[stops] = sorted(set(whole.token_ids if stops == "stop_token_ids" else whole.text))
    for n in (0, 1, 5):
        made, plain = (engine.complete(PROMPT, min_tokens=n, speculation=speculation, **given) for speculation in (True, False))
        assert (made.token_ids, made.finish_reason) == (plain.token_ids, plain.finish_reason)
        assert len(made.token_ids) > count_spelled(made.token_ids, piece) + n
        if n == 0:
            assert made.token_ids == whole.token_ids[: len(made.token_ids)]
            assert made.finish_reason == "stop"
            assert stops == "stop" or len(made.token_ids) == count_spelled(made.token_ids, piece) + 1


def test_stop_strings_are_looked_for_behind_the_piece(engine: Engine) -> None:
    whole = engine.complete(PROMPT, max_tokens=24, ignore_eos=True, healed="ret")
    assert engine.complete(PROMPT, max_tokens=24, ignore_eos=True, healed="ret", stop=["ret"]).text == whole.text.partition("ret")[0]
    stop = whole.text[3:5]
    cut = engine.complete(PROMPT, max_tokens=24, ignore_eos=True, healed="ret", stop=[stop])
    assert (cut.text, cut.choices[0].stop_reason) == (whole.text.partition(stop)[0], stop)


def test_deltas_and_predictions(engine: Engine) -> None:
    whole = engine.complete(PROMPT, max_tokens=40, ignore_eos=True, healed=" ret")
    assert "".join(delta.text for delta in engine.stream(PROMPT, max_tokens=40, ignore_eos=True, healed=" ret")) == whole.text
    predicted = engine.complete(PROMPT, max_tokens=40, ignore_eos=True, healed=" ret", prediction=whole.text)
    assert predicted.token_ids == whole.token_ids
    assert predicted.stats.passes < 20, "a prediction is of the text behind the piece"


def test_what_cannot_be_healed(engine: Engine) -> None:
    with pytest.raises(InvalidInputError, match="healed must be empty with a grammar or allowed_token_ids"):
        engine.complete(PROMPT, healed="a", grammar=Grammar.regex("b"))
    with pytest.raises(InvalidInputError, match="healed must be empty"):
        engine.complete(PROMPT, healed="a", allowed_token_ids=[1])
