"""Convert between text and token ids as llama.cpp's routes do: control tokens are parsed where a request says so.

Texts, ids and mixtures of both enter, ids and texts leave. Knows the engine's tokenizer, and nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ngramspec.engine.llm_engine import Engine
from ngramspec.prompts.chat_template import Prompts
from ngramspec.server.error_responses import ApiError
from ngramspec.server.llamacpp.schemas import TextOrTokens
from ngramspec.server.token_strings import TokenTexts

MAX_TEXTS = 1024  # in a list of texts and ids: each takes some time of its own


class LlamaTokenizer:
    """The tokens of one engine. Threads may share it."""

    def __init__(self, engine: Engine, prompts: Prompts, texts: TokenTexts) -> None:
        self.engine, self.prompts, self.texts = engine, prompts, texts

    @property
    def tokenizer(self) -> Any:
        """Raises ApiError where there is none."""
        if self.engine.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: only token ids can be sent, and are answered", code="not_supported")
        return self.engine.tokenizer

    def encode(self, given: TextOrTokens, *, bos: bool, parse: bool) -> list[int]:
        """Return the ids of a text, of ids, or of a list of both; `bos`: what begins with text begins as the tokenizer begins texts.

        Raises ApiError (400), TokenizerError.
        """
        parts = [given] if isinstance(given, str) else given
        if len(parts) > MAX_TEXTS and sum(isinstance(part, str) for part in parts) > MAX_TEXTS:
            raise ApiError(400, f"a list of texts and ids may have {MAX_TEXTS} texts")
        ids: list[int] = []
        for at, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            elif bos and at == 0:
                ids += self.prompts.to_continue(part, parse_special=parse)
            else:
                ids += self.engine.encode_text(part, parse_special=parse)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        if ids and max(ids) >= self.engine.vocab_size:
            raise ApiError(400, f"tokens must be 0 to {self.engine.vocab_size - 1}, got {max(ids)}", param="tokens")
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def join_text(given: TextOrTokens) -> str:
    """Return the text in a text, in ids, or in a list of both."""
    return given if isinstance(given, str) else "".join(part for part in given if isinstance(part, str))
