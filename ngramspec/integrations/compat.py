"""What the integrations of all hosts ask at their border: is the host's version one that was tested, do the datastores fit its tokenizer,
is what drafts need compiled.

Versions, folders and tokenizers enter; open stores, token ids and typed errors leave. Knows no host but by name.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ngramspec.datastore.reader import Datastore
from ngramspec.errors import HostVersionError, InvalidInputError
from ngramspec.integrations.draft_session import warmup
from ngramspec.speculative.open_datastores import Store, check_store, name_datastores, open_store
from ngramspec.speculative.syntax import SyntaxTable, open_syntax
from ngramspec.tokenizer.encode import Encoding, Prompt

log = logging.getLogger(__name__)

# If this environment variable is 1, untested versions of a host are tried.
ANYWAY = "NGRAMSPEC_UNTESTED_HOSTS"

# Seconds after which compilation is logged; loading compiled code takes less.
SILENT_S = 5.0


def compile_drafting() -> None:
    """Call `warmup`, and log what is waited for if it takes longer than loading compiled code."""
    timer = threading.Timer(
        SILENT_S, log.warning, ["ngramspec compiles what drafts need, which takes minutes on the first start and is then kept on disk"]
    )
    timer.daemon = True
    timer.start()
    try:
        warmup()
    finally:
        timer.cancel()


def check_version(host: str, version: str, tested: tuple[str, str]) -> None:
    """Raise HostVersionError unless `version` lies between the first and the last `tested` one; the third number is ignored."""
    first, last = (_parse_version(each)[:2] for each in tested)
    if not first <= _parse_version(version)[:2] <= last and os.environ.get(ANYWAY) != "1":
        raise HostVersionError(
            f"{host} {version} was not tested; {tested[0]} to {tested[1]} were. {ANYWAY}=1 tries it: drafts may then fail, or the host"
        )


def _parse_version(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = "".join(char for char in part if char.isdecimal())
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers)


def open_stores(
    datastore: Store | Sequence[Store] | Mapping[str, Store], tokenizer: Any, model: str, vocab_size: int
) -> dict[str, Datastore]:
    """The datastores by name, opened, and made with the host's tokenizer (of transformers, or a `tokenizers.Tokenizer`).

    Raises InvalidInputError, DatastoreError, TokenizerMismatchError, TokenizerError.
    """
    encoding = Encoding(_wrap_tokenizer(tokenizer), vocab_size)
    stores = {name: check_store(open_store(store), encoding, model) for name, store in name_datastores(datastore).items()}
    for name, store in stores.items():
        if (n := store.snapshot.manifest.vocab_size) > vocab_size:
            raise InvalidInputError(f"datastore {name!r} has token ids up to {n - 1}, and {model!r} knows those to {vocab_size - 1}")
    return stores


def open_host_syntax(tokenizer: Any, vocab_size: int) -> SyntaxTable:
    """Return the syntax table in the ids of the host's tokenizer (of transformers, or a `tokenizers.Tokenizer`), an empty one without."""
    backend = getattr(_wrap_tokenizer(tokenizer), "backend_tokenizer", None)
    return open_syntax(backend if isinstance(backend, Tokenizer) else None, vocab_size)


def prediction_ids(prediction: Prompt | None, tokenizer: Any, vocab_size: int) -> np.ndarray | None:
    """Return the token ids [n] int32 of a prediction, text or token ids. `tokenizer`: of transformers, or a `tokenizers.Tokenizer`.

    Raises InvalidInputError, TokenizerError.
    """
    if prediction is None:
        return None
    return Encoding(_wrap_tokenizer(tokenizer), vocab_size).encode(prediction, "prediction", add_special_tokens=False)


class _Backend:
    """A tokenizer of the `tokenizers` library, wrapped to look like one of transformers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend_tokenizer = tokenizer

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}


def _wrap_tokenizer(tokenizer: Any) -> Any:
    return _Backend(tokenizer) if isinstance(tokenizer, Tokenizer) else tokenizer
