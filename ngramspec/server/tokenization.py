"""`/tokenize` and `/detokenize` as llama.cpp and vLLM have them, and vLLM's `/tokenizer_info`, `/version` and `/load`.

Texts, conversations and ids enter, ids and texts leave. Knows the engine's tokenizer and the model's chat template, and no sampling.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field, model_validator

from ngramspec import __version__
from ngramspec.prompts.chat_template import before_text
from ngramspec.server.auth import Identity, identify, require_operator
from ngramspec.server.error_responses import make_field_error
from ngramspec.server.llamacpp.schemas import TextOrTokens
from ngramspec.server.llamacpp.tokenize import LlamaTokenizer, join_text
from ngramspec.server.middleware import ParsedBodyRoute
from ngramspec.server.openai.chat import make_conversation
from ngramspec.server.openai.schemas import ChatPrompt, Message
from ngramspec.server.request_fields import Items, NullIsDefault, StrictModel, TokenId
from ngramspec.server.state import ServerState

MAX_PIECES = 1 << 16  # tokens that /tokenize describes one by one
Who = Annotated[Identity, Depends(identify)]


class TokenizeBody(NullIsDefault, ChatPrompt):
    """One of llama.cpp's `content` and vLLM's `prompt` and `messages`."""

    content: TextOrTokens | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    """What the tokenizer puts before a text is there. Default: for `prompt`."""
    return_token_strs: bool | None = None
    model: str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if [self.content, self.prompt, self.messages].count(None) != 2:
            raise make_field_error("content", "give one of content, prompt and messages")
        return self


class TokenPiece(BaseModel):
    id: int
    piece: str | list[int]


class TokenizeResponse(BaseModel):
    """The ids, for `content` with the pieces that were asked for, for `prompt` and `messages` with what vLLM tells."""

    tokens: list[int] | list[TokenPiece]
    count: int | None = None
    max_model_len: int | None = None
    token_strs: list[str] | None = None


class DetokenizeBody(StrictModel):
    tokens: Items[TokenId]
    model: str | None = None


class DetokenizeResponse(BaseModel):
    content: str
    """The text by llama.cpp's name, and as llama.cpp has it: its first word with the blank that a tokenizer puts before it."""
    prompt: str
    """The text by vLLM's name, and as the tokenizer decodes it."""


def make_router(state: ServerState) -> APIRouter:
    routes = APIRouter(tags=["tokens"], route_class=ParsedBodyRoute)
    engine = state.engine
    prompts = state.prompts
    tokens = LlamaTokenizer(engine, prompts, state.texts)

    def encode_prompt(text: str, *, add_special: bool) -> list[int]:
        return prompts.to_continue(text, parse_special=True) if add_special else engine.encode_text(text, parse_special=True)

    @routes.post("/tokenize", response_model=TokenizeResponse, response_model_exclude_unset=True)
    async def tokenize(body: TokenizeBody, identity: Who) -> dict[str, Any]:
        """Return the ids of a text or of a conversation."""
        conversation = None if body.messages is None else make_conversation(state, prompts, body)
        n_chars = conversation.n_chars if conversation else len(body.prompt or "") + len(join_text(body.content or ""))

        def encode() -> dict[str, Any]:
            if body.content is not None:
                ids = tokens.encode(body.content, bos=body.add_special, parse=body.parse_special)
                return {"tokens": _describe_pieces(tokens, ids) if body.with_pieces else ids}
            if conversation is not None:
                ids = prompts.chat(conversation.turns, conversation.toolbox.prompt_tools, conversation.style)
                ids = (before_text(tokens.tokenizer) if body.add_special_tokens else []) + ids
            else:
                ids = encode_prompt(body.prompt or "", add_special=body.add_special_tokens is not False)
            strings = [str(token) for token in tokens.tokenizer.convert_ids_to_tokens(ids)] if body.return_token_strs else None
            return {"tokens": ids, "count": len(ids), "max_model_len": engine.max_model_len, "token_strs": strings}

        with state.admission.reserve():
            return await state.encoders.run(identity.tenant, n_chars, encode)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody, identity: Who) -> DetokenizeResponse:
        """Return the text of ids, control tokens included."""

        def decode() -> DetokenizeResponse:
            prompt = tokens.decode(body.tokens)
            return DetokenizeResponse(content=tokens.texts.decode_within(body.tokens), prompt=prompt)

        with state.admission.reserve():
            return await state.encoders.run(identity.tenant, len(body.tokens), decode)

    @routes.get("/tokenizer_info")
    async def tokenizer_info(identity: Who) -> dict[str, Any]:
        """Return the tokenizer's class, template, special tokens and length."""
        tokenizer = tokens.tokenizer
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "chat_template": tokenizer.chat_template,
            "model_max_length": engine.max_model_len,
        } | dict(tokenizer.special_tokens_map)

    @routes.get("/version")
    async def version(identity: Who) -> dict[str, str]:
        """Return the server's version."""
        return {"version": __version__}

    @routes.get("/load")
    async def load(identity: Annotated[Identity, Depends(require_operator)]) -> dict[str, int]:
        """Return how many sequences run or wait; if there are keys, for administrators."""
        return {"server_load": state.admission.in_flight}

    return routes


def _describe_pieces(tokens: LlamaTokenizer, ids: list[int]) -> list[dict[str, Any]]:
    """Return each id with its text, or its bytes if they are not whole characters. Raises ApiError (400)."""
    if len(ids) > MAX_PIECES:
        raise make_field_error("with_pieces", f"for up to {MAX_PIECES} tokens, got {len(ids)}")

    def describe(raw: bytes) -> str | list[int]:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return list(raw)

    return [{"id": token, "piece": describe(tokens.texts.get_bytes(token))} for token in ids]
