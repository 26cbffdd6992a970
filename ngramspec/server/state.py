"""What routes work with: the engine, and what stands between it and a request. Made once by `app`, handed to every router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ngramspec.engine.llm_engine import Engine, Hints
from ngramspec.prompts.chat_template import Prompts
from ngramspec.prompts.fim import Fim
from ngramspec.server.auth import Keyring
from ngramspec.server.encoding import Encoders
from ngramspec.server.engine_input import RequestLimits
from ngramspec.server.error_responses import ApiError
from ngramspec.server.metrics import Metrics
from ngramspec.server.queue import AdmissionQueue
from ngramspec.server.repositories import Repositories
from ngramspec.server.settings import ServerSettings
from ngramspec.server.token_strings import TokenTexts

# Characters that are encoded for a prompt which is computed ahead, in about 0.1 s of the engine's thread: more than editors send.
AHEAD_CHARS = 1 << 18


@dataclass(slots=True)
class ServerState:
    """The parts of one application."""

    engine: Engine
    settings: ServerSettings
    metrics: Metrics
    admission: AdmissionQueue
    limits: RequestLimits
    keyring: Keyring
    prompts: Prompts
    """The model's chat template, and what was learned of it: all routes share it."""
    texts: TokenTexts
    """What single tokens say: all routes share it."""
    fim: Fim | None
    """The model's fill-in-the-middle format, None if it has none."""
    repositories: Repositories
    encoders: Encoders
    names: tuple[str, ...]
    """The names of the model; answers carry the first."""
    fingerprint: str
    """OpenAI's `system_fingerprint`: what texts depend on beside the request."""

    def expect_prompts(self, hints: Hints, prefix: str, suffix: str, *extra: Sequence[tuple[str, str]], limit: int | None = None) -> None:
        """Name the prompts that will probably follow a request to fill in the middle, of these texts, for the engine to compute ahead."""
        fim, n_chars = self.fim, len(prefix) + len(suffix) + sum(len(text) for files in extra for _, text in files)
        if fim is not None and self.settings.fim_ahead and n_chars <= AHEAD_CHARS:
            hints["next_prompts"] = lambda written: fim.list_next_prompts(prefix, suffix, written, *extra, limit=limit)


def model_not_found(asked: str, names: Sequence[str]) -> ApiError:
    served = ", ".join(map(repr, names))
    return ApiError(404, f"the model {asked[:200]!r} is not here; accepted: {served}", param="model", code="model_not_found")
