"""Log-probabilities in OpenAI's two shapes: the lists of `/v1/completions`, and the objects of `/v1/chat/completions`.

`TokenLogprob`s of the engine enter, dicts for an answer leave. Knows what tokens say, not requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ngramspec.outputs import TokenLogprob
from ngramspec.server.token_strings import TokenTexts, finite


def legacy(texts: TokenTexts, tokens: Sequence[tuple[int, TokenLogprob | None, str]], offset: int) -> dict[str, Any]:
    """Of /v1/completions. tokens: (id, its log-probability, what it added to the text); `offset`: length of the text before.

    A prompt's first token has no log-probability. `top_logprobs` has the likeliest tokens and the one that was taken.
    """
    found: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, logprob, added in tokens:
        found["text_offset"].append(offset)
        found["tokens"].append(texts.text(token))
        found["token_logprobs"].append(None if logprob is None else finite(logprob.logprob))
        found["top_logprobs"].append(None if logprob is None else _top(texts, logprob))
        offset += len(added)
    return found


def _top(texts: TokenTexts, logprob: TokenLogprob) -> dict[str, float]:
    top: dict[str, float] = {}
    for token, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
        top.setdefault(texts.text(token), finite(value))  # of two with one text, the likelier
    return top


def chat(texts: TokenTexts, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Of /v1/chat/completions."""

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": finite(value), "bytes": list(texts.bytes(token))}

    return {
        "content": [
            entry(each.token_id, each.logprob) | {"top_logprobs": [entry(token, value) for token, value in each.top]} for each in logprobs
        ],
        "refusal": None,
    }
