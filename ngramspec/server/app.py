"""Put the application together: one engine, its routes, and the middleware that every request passes."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Depends, FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers

from ngramspec import __version__
from ngramspec.engine.llm_engine import Engine
from ngramspec.grammar.fewest_tokens import FewestTokens
from ngramspec.prompts.chat_template import Prompts
from ngramspec.prompts.fim import Fim
from ngramspec.server import admin, error_responses, health, playground, tokenization
from ngramspec.server.anthropic import routes as anthropic
from ngramspec.server.auth import Keyring, identify
from ngramspec.server.encoding import Encoders
from ngramspec.server.engine_input import RequestLimits
from ngramspec.server.llamacpp import routes as llamacpp
from ngramspec.server.metrics import Metrics
from ngramspec.server.middleware import RequestMiddleware
from ngramspec.server.ollama import routes as ollama
from ngramspec.server.openai import chat, completions, responses
from ngramspec.server.queue import AdmissionQueue
from ngramspec.server.repositories import Repositories
from ngramspec.server.settings import ServerSettings
from ngramspec.server.sse import is_generating
from ngramspec.server.state import ServerState
from ngramspec.server.token_strings import TokenTexts

LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # `localhost` among the sites whose pages may ask, as in llama.cpp


def _make_origin_pattern(origins: Sequence[str]) -> str | None:
    """Return the pattern of the sites that are not listed one by one. No site gets credentials: keys are in headers."""
    return ".*" if "*" in origins else LOOPBACK_ORIGIN if "localhost" in origins else None


class Cors(CORSMiddleware):
    """CORS whose answer to a preflight is 200, as llama.cpp's is: without its headers the browser sends nothing more."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        response.status_code = 200
        return response


def create_app(engine: Engine, settings: ServerSettings, repositories: Repositories | None = None) -> FastAPI:
    """Return the application for an engine. Engine and repositories stay the caller's to start and close.

    Raises UnsupportedModelError for a chat template that cannot be rendered within its limits, InvalidInputError for variables of it that
    cannot be set.
    """
    prompts = Prompts(engine)
    prompts.check_template()
    prompts.check_variables(settings.chat_template_kwargs)
    metrics = Metrics(engine)
    tokenizer = getattr(engine.tokenizer, "backend_tokenizer", None)
    state = ServerState(
        engine,
        settings,
        metrics,
        AdmissionQueue(engine, settings, metrics),
        RequestLimits(settings.limits, engine.max_model_len, engine.vocab_size, FewestTokens(tokenizer)),
        Keyring(settings.api_keys, settings),
        prompts,
        TokenTexts(engine.tokenizer),
        Fim.detect(engine.tokenizer, settings.fim_options),
        repositories or Repositories(),
        Encoders(metrics),
        settings.alias or (engine.name,),
        f"b{__version__}-ngramspec-{engine.promise}-{engine.precision}",  # llama.cpp's begin so, too
    )
    app = FastAPI(
        title="ngramspec",
        version=__version__,
        summary="Language model completions sooner, token for token the same.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(identify)],
        redirect_slashes=False,
    )
    app.state.server = state
    app.openapi = lambda: health.describe_api(app, locked=len(state.keyring) > 0)  # type: ignore[method-assign]
    error_responses.install_error_handlers(app)
    modules = [completions, chat, responses, anthropic, ollama, llamacpp, tokenization, admin, health]
    modules += [playground] if settings.playground else []
    routers = [module.make_router(state) for module in modules]
    for router in routers:
        app.include_router(router)
    if settings.cors_origins:
        app.add_middleware(
            Cors,
            allow_origins=[origin for origin in settings.cors_origins if origin != "*"],
            allow_origin_regex=_make_origin_pattern(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],  # those that the page's client asks for, such as the `openai` client's x-stainless-*; limits bounds them
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    generating = frozenset(route.path for router in routers for route in router.routes if is_generating(route))
    app.add_middleware(RequestMiddleware, state=state, generating=generating)  # outermost
    return app
