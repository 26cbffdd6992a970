"""The errors that a user can meet, each with a type of its own, so that callers need not read messages."""

from __future__ import annotations

from collections.abc import Collection

# Modules by the extra of pyproject.toml that installs them.
_EXTRAS = {
    "engine": (
        "torch",
        "transformers",
        "accelerate",
        "gguf",
        "safetensors",
        "huggingface_hub",
        "jinja2",
        "llguidance",
        "regex",
        "jsonschema_rs",
    ),
    "server": ("fastapi", "uvicorn", "sse_starlette", "prometheus_client", "pydantic", "pydantic_settings", "starlette"),
}


class NgramspecError(Exception):
    """The base of all errors raised on purpose, but for those of datastores, whose base is `ngramspec.datastore.DatastoreError`. The
    message names the offending value and what would be accepted."""


class InvalidInputError(NgramspecError, ValueError):
    """A prompt, parameter, hint or setting is out of bounds or of the wrong type; the message says which and what is accepted."""

    def __init__(self, message: str = "", *, param: str | None = None, code: str | None = None) -> None:
        """Make the error. `param`: the field at fault, such as `messages[0].content`; `code`: OpenAI's word for what is wrong."""
        super().__init__(message)
        self.param, self.code = param, code


class GrammarError(InvalidInputError):
    """A grammar is malformed, matches nothing, is too large or takes too long; or what compiles grammars is not installed."""


class ModelNotFoundError(NgramspecError):
    """The model argument names no folder, GGUF file, known shorthand or reachable hub repository."""


class UnsupportedModelError(NgramspecError):
    """The architecture needs something that the runner does not implement (named in the message)."""


class HostVersionError(NgramspecError):
    """A host engine (vLLM, transformers, llama-cpp-python) has an untested version; the message names the tested ones."""


class MissingPackageError(NgramspecError, ImportError):
    """What was asked for needs a package that is not installed; the message names it."""


class RemoteCodeError(UnsupportedModelError):
    """The model ships its own code and would need `trust_remote_code`, which ngramspec never enables."""


class TokenizerError(NgramspecError):
    """The model has no usable tokenizer, and none was passed."""


class OutOfMemoryError(NgramspecError, MemoryError):
    """Weights or KV pool do not fit; the message says what was needed and what is free."""


class PromptTooLongError(InvalidInputError):
    """The prompt does not fit `max_model_len` or the KV pool."""


class EngineClosedError(NgramspecError, RuntimeError):
    """The engine was closed, or stopped after the error chained to this one."""


class CallbackError(NgramspecError, RuntimeError):
    """A `deliver` callback asked for what only the engine's own thread could do, in which it runs itself: it would wait forever."""


def explain_missing_package(error: Exception, what: str) -> str | None:
    """Return which package `what` lacks and which extra installs it; None if the error is not of a module of an extra."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.split(".")[0]
    for extra, packages in _EXTRAS.items():
        if package in packages:
            return f"{package} is not installed, which {what} needs; run: pip install 'ngramspec[{extra}]'"
    return None


def make_datastore_error(field: str, known: Collection[str], got: object) -> InvalidInputError:
    """Return the error of a field that names others than the open datastores, whose names are `known`."""
    names = f"among {sorted(known)!r:.1000}" if known else "left out, since none is open"
    return InvalidInputError(f"{field} must be {names}, got {got!r:.1000}")
