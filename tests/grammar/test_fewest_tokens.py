"""The fewest tokens of a text: never more than it has, and enough to tell what is far too long."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from ngramspec.grammar.fewest_tokens import FewestTokens


def normalized(*steps: Any) -> Tokenizer:
    backend = tiny.byte_tokenizer().backend_tokenizer
    backend.normalizer = normalizers.Sequence([*steps])
    return backend


def stripping() -> Tokenizer:
    backend = tiny.byte_tokenizer().backend_tokenizer
    backend.add_tokens([AddedToken("<|x|>", lstrip=True, rstrip=True)])
    return backend


def unknown() -> Tokenizer:
    return Tokenizer(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True))


def without_blanks() -> Tokenizer:
    backend = tiny.word_tokenizer().backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


KEEPING = {
    "bytes": tiny.byte_tokenizer().backend_tokenizer,
    "words": tiny.word_tokenizer().backend_tokenizer,
    "NFC": normalized(normalizers.NFC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")),
}
DROPPING = {
    "NFKC": normalized(normalizers.NFKC()),
    "strip": normalized(normalizers.Strip()),
    "shorter": normalized(normalizers.Replace("  ", " ")),
    "stripping": stripping(),
    "unknown": unknown(),
    "blanks": without_blanks(),
}
TEXT = st.text(st.sampled_from("a e ▁\u212a\u0301\u0327\u1100\u1161\u11a8\ud55c日😀19\n<|x|>bos the."), max_size=40)


@pytest.mark.parametrize("name", [*KEEPING, *DROPPING])
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
@example(text="\u212a" * 30)
@example(text="\u1100\u1161\u11a8" * 30)
@example(text="e\u0301\u0327" * 30)
@example(text=" " * 50 + "<|x|>" + " " * 50)
@example(text="\u2603" * 50)
def test_never_more_than_there_are(name: str, text: str) -> None:
    backend = (KEEPING | DROPPING)[name]
    assert FewestTokens(backend)(text) <= len(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", KEEPING)
def test_enough_to_tell(name: str) -> None:
    fewest = FewestTokens(KEEPING[name])
    for text in ("the quick brown fox " * 500, "0123456789" * 500):
        n = len(KEEPING[name].encode(text, add_special_tokens=False).ids)
        assert n / 10 <= fewest(text) <= n


def test_of_a_real_vocabulary(smollm2_tokenizer: Any) -> None:
    backend = smollm2_tokenizer.backend_tokenizer
    fewest = FewestTokens(backend)
    for text in ("def add(a, b):\n    return a + b\n" * 200, "12345" * 500, " " * 3000, "=" * 3000, "\x00\x7f" * 99, "日本語" * 300):
        assert fewest(text) <= len(backend.encode(text, add_special_tokens=False).ids)
    assert fewest("a" * (2 << 20)) > 8192


def test_no_tokenizer_says_nothing() -> None:
    assert FewestTokens(None)("a" * 1000) == 0
