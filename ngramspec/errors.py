"""Every error that a user can meet, typed, so that a caller can tell them apart without reading text."""


class NgramspecError(Exception):
    """Base of all errors raised on purpose. The message names the offending value and what would be accepted."""


class InvalidInputError(NgramspecError, ValueError):
    """A prompt, parameter, hint or setting is out of bounds or of the wrong type; the message says which and what is accepted."""


class GrammarError(InvalidInputError):
    """A grammar is malformed, matches nothing, is too large or takes too long; or what compiles grammars is not installed."""


class ModelNotFoundError(NgramspecError):
    """The model argument names no folder, GGUF file, known shorthand or reachable hub repository."""


class UnsupportedModelError(NgramspecError):
    """The architecture needs something that the runner does not implement (named in the message)."""


class HostVersionError(NgramspecError):
    """A host (vLLM, transformers, llama-cpp-python) is of a version that its guest was not tested with; the message says which were."""


class MissingPackageError(NgramspecError):
    """The device needs a package that is not installed; the message names it."""


class RemoteCodeError(UnsupportedModelError):
    """The model ships its own code and would need `trust_remote_code`, which ngramspec never enables."""


class TokenizerError(NgramspecError):
    """The model has no usable tokenizer, and none was given."""


class OutOfMemoryError(NgramspecError, MemoryError):
    """Weights or KV pool do not fit; the message says what was needed and what is free."""


class PromptTooLongError(InvalidInputError):
    """Prompt does not fit `max_model_len` or the KV pool."""


class EngineClosedError(NgramspecError, RuntimeError):
    """The engine was closed, or died of the error chained to this one."""


class CallbackError(NgramspecError, RuntimeError):
    """A `deliver` callback asked for what only the engine's own thread could do, in which it runs itself: it would wait forever."""
