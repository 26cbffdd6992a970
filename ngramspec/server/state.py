"""What routes work with: the engine, and what stands between it and a request.

Made once by `app`, handed to every router. Holds the parts and does nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from ngramspec.engine import Engine
from ngramspec.server.admission import Admission
from ngramspec.server.auth import Keyring
from ngramspec.server.fim import Fim
from ngramspec.server.limits import Bounds
from ngramspec.server.metrics import Metrics
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
