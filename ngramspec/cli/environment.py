"""Settings of the engine from `NGRAMSPEC_…` variables, for every command that makes one; a variable that is no setting is refused.

The environment enters, values by field leave; the server's own settings are read by `ServerSettings`. Options go before variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from ngramspec.cli.common import BadInputError, parse_size
from ngramspec.config import EngineConfig
from ngramspec.errors import InvalidInputError
from ngramspec.options import Flag, Integer, Number, Option, options_of

PREFIX = "NGRAMSPEC_"
# Variables that are neither a setting of the engine nor one of the server.
OTHERS = frozenset(
    {"MODEL", "DATASTORES", "REPOS", "CACHE", "BUNDLED_CODE", "UNTESTED_HOSTS", "TEST_MODELS", "VLLM", "HF_REPO", "API_KEY"}
)  # the last: Zed's
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def add_environment(given: dict[str, Any], command: str) -> None:
    """Add the engine's settings that variables give and no option does, as far as the command has them.

    `given`: the values of options by setting. Raises BadInputError, also for a variable that is no setting of any command.
    """
    check_names(os.environ)
    for name, value in read_environment(EngineConfig, os.environ).items():
        only = options_of(EngineConfig)[name].only
        if not only or command in only:
            given.setdefault(name, value)


def read_environment(settings: type, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that variables give. Raises BadInputError for values out of bounds."""
    found = {}
    for name, option in options_of(settings).items():
        variable = PREFIX + name.upper()
        if (text := environment.get(variable, "").strip()) == "":
            continue
        value = _parse(option, variable, text)
        try:
            option.check(value)
        except InvalidInputError as error:
            raise BadInputError(f"{variable}: {error}") from error
        found[name] = value
    return found


def check_names(environment: Mapping[str, str]) -> None:
    """Raise BadInputError for a variable that begins as ours do and is no setting of the engine or the server."""
    names = {name.upper() for name in options_of(EngineConfig)} | OTHERS
    given = sorted(name.removeprefix(PREFIX) for name in environment if name.startswith(PREFIX))
    if not (unknown := [name for name in given if name not in names]):
        return
    try:
        from ngramspec.server.settings import Limits, ServerSettings  # takes time, which few need
    except ModuleNotFoundError:  # installed without the server, whose settings its variables may be
        return
    names |= {name.upper() for name in ServerSettings.model_fields} | {f"LIMITS__{name.upper()}" for name in Limits.model_fields}
    for name in unknown:
        if name.upper() in names:
            continue
        near = get_close_matches(name.upper(), names, 1) or names.intersection([name.split("__")[0]])
        hint = f"; {PREFIX}{next(iter(near))} is one" if near else ""
        if name.endswith(("_HOST", "_TCP", "_ADDR", "_PROTO")) or "PORT_" in name or "SERVICE_" in name:
            hint = "; Kubernetes sets it for a service called ngramspec: say `enableServiceLinks: false` in the pod"
        raise BadInputError(f"{PREFIX}{name} is no setting{hint}. docs/settings.md lists them")


def _parse(option: Option, variable: str, text: str) -> Any:
    if option.metavar == "SIZE":
        return parse_size(text, variable)
    try:
        match option.kind:
            case Integer():
                return int(text)
            case Number():
                return float(text)
            case Flag() if text.lower() in (*_TRUE, *_FALSE):
                return text.lower() in _TRUE
            case Flag():
                raise BadInputError(f"{variable} must be {' or '.join((*_TRUE, *_FALSE))}, got {text!r}")
    except ValueError:
        raise BadInputError(f"{variable} must be {option.kind.accepted}, got {text!r}") from None
    return text
