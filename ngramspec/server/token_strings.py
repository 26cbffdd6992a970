"""What single tokens say: the text and bytes of each, alone and in a running text.

Token ids enter, texts and bytes leave. Knows the tokenizer, and neither requests nor answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ngramspec.outputs import Choice, Delta, TokenLogprob
from ngramspec.tokenizer.detokenizer import SpecialTokens, TextStream
from ngramspec.tokenizer.spelling import BYTE_OF_LETTER

# OpenAI's word for "very unlikely"; JSON has no infinity.
LEAST = -9999.0
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """What each token of a vocabulary says. Threads may share it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if tokenizer is not None:
            self._anchor = list(tokenizer("a", add_special_tokens=False)["input_ids"])  # a word's blank shows only behind another
            self._before = self._decode([])
        self.get_bytes = lru_cache(maxsize=1 << 16)(self._find_bytes)

    def get_text(self, token: int) -> str:
        r"""Return the token's text, control tokens' too; `bytes:\xe6` where it is not whole characters."""
        raw = self.get_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def decode_within(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens as it stands within a running text: with the blank before a first word, which decoders leave out."""
        return self._decode(list(tokens))[len(self._before) :]

    def decode_each(self, tokens: Sequence[int], special: SpecialTokens = SpecialTokens.SKIPPED) -> list[str]:
        """Return what each of a text's tokens adds to it: whole characters where they are complete."""
        if self._tokenizer is None or not tokens:
            return [""] * len(tokens)
        stream = TextStream(self._tokenizer, special=special)
        added = [stream.push(token) for token in tokens]
        return [*added[:-1], added[-1] + stream.finish()]

    def _find_bytes(self, token: int) -> bytes:
        if self._tokenizer is None:
            return b""
        text = self.decode_within([token])
        if _REPLACEMENT not in text:
            return text.encode()
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if found := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece):  # as SentencePiece spells bytes
            return bytes([int(found[1], 16)])
        if all(letter in BYTE_OF_LETTER for letter in piece):  # as GPT-2 does
            return bytes(BYTE_OF_LETTER[letter] for letter in piece)
        return text.encode()

    def _decode(self, tokens: list[int]) -> str:
        ids = self._anchor + tokens
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class TokenIdTexts(TokenTexts):
    """The same with `token_id:17` for the text of a single token, as vLLM has it."""

    def __init__(self, texts: TokenTexts) -> None:
        vars(self).update(vars(texts))

    def get_text(self, token: int) -> str:
        return f"token_id:{token}"


def split_end_logprob(part: Choice | Delta) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
    """Return the log-probabilities of a part's tokens, and apart from them that of a token that ends the text and says nothing."""
    found = part.logprobs or []
    ends = bool(found) and part.finish_reason == "stop" and not part.texts[-1]
    return (found[:-1], found[-1:]) if ends else (found, [])


def describe_prompt_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: by id, of each token and the most likely ones; None for the first token."""

    def describe(found: TokenLogprob) -> dict[str, Any]:
        ranked = [*((token, value, rank) for rank, (token, value) in enumerate(found.top, 1)), (found.token_id, found.logprob, found.rank)]
        return {
            str(token): {"logprob": clip_logprob(value), "rank": rank, "decoded_token": texts.get_text(token)}
            for token, value, rank in ranked
        }

    return [None if each is None else describe(each) for each in logprobs]


def clip_logprob(logprob: float) -> float:
    """Return a log-probability that JSON can hold: LEAST in place of -infinity and of what is smaller than LEAST."""
    return max(logprob, LEAST)
