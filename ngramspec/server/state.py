"""What routes work with: the engine, and what stands between it and a request.

Made once by `app`, handed to every router. Holds the parts and does nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ngramspec.engine.llm_engine import Engine
from ngramspec.server.auth import Keyring
from ngramspec.server.body_limits import Bounds
from ngramspec.server.encoding import Encoders
from ngramspec.server.error_responses import ApiError
from ngramspec.server.fim import Fim
from ngramspec.server.metrics import Metrics
from ngramspec.server.queue import Admission
from ngramspec.server.repositories import Repositories
from ngramspec.server.settings import ServerSettings


@dataclass(slots=True)
class State:
    """The parts of one application."""

    engine: Engine
    settings: ServerSettings
    metrics: Metrics
    admission: Admission
    bounds: Bounds
    keyring: Keyring
    fim: Fim | None
    """The model's fill-in-the-middle format, None where it has none."""
    repositories: Repositories
    encoders: Encoders

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, that of its answers first."""
        return self.settings.alias or (self.engine.name,)

    def name_for(self, asked: str | None) -> str:
        """The model's name in the answer to a request that asks for this one. Raises ApiError 404 for a name that is not served."""
        if asked in self.names:
            return str(asked)
        if asked and self.settings.strict_model:
            raise no_model(asked, self.names)
        return self.names[0]


def no_model(asked: str, there: Sequence[str]) -> ApiError:
    served = ", ".join(map(repr, there))
    return ApiError(404, f"the model {asked[:200]!r} is not here; {served} is", param="model", code="model_not_found")
