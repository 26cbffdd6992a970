"""The page at `/` on which a person sees what speculation does: its files, and the little that it asks before the first run.

Files of `static/` leave as they are, under a content policy that allows this server and nothing else. The page's requests are
those of any client; knows nothing of completions.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Response
from pydantic import BaseModel

from ngramspec import __version__
from ngramspec.server.auth import Identity, identify
from ngramspec.server.state import ServerState

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Config(BaseModel):
    """What the page shows and offers to whoever asks with this key."""

    version: str
    model: str
    exactness: str
    chat: bool
    """Whether the model has a chat template."""
    sources: bool
    """Whether answers may say where their tokens came from."""
    datastores: list[str]
    hidden: list[str]
    """Those of them that are drafted from only if a request names them."""
    max_tokens: int
    """The most that a request may ask for."""


def make_router(state: ServerState) -> APIRouter:
    api = APIRouter()
    static = {file.name: file.read_bytes() for file in files(__package__).joinpath("static").iterdir() if file.is_file()}

    def make_file_response(name: str) -> Response:
        return Response(static[name], media_type=_TYPES[name.rpartition(".")[2]], headers=HEADERS)

    @api.get("/", include_in_schema=False)
    async def serve_page() -> Response:
        return make_file_response("index.html")

    @api.get("/playground/config")
    async def config(identity: Annotated[Identity, Depends(identify)]) -> Config:
        engine = state.engine
        return Config(
            version=__version__,
            model=state.names[0],
            exactness=engine.promise,
            chat=bool(getattr(engine.tokenizer, "chat_template", None)),
            sources=identity.trusted,
            datastores=[name for name in engine.datastores if identity.stores is None or name in identity.stores],
            hidden=sorted(identity.hidden),
            max_tokens=min(engine.max_model_len - 1, state.settings.limits.output_tokens),
        )

    @api.get("/static/{name}", include_in_schema=False)
    async def serve_file(name: str) -> Response:
        if name not in static:
            raise HTTPException(404)
        return make_file_response(name)

    return api
