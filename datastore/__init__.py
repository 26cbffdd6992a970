"""A suffix datastore on disk: text that a model is likely to repeat, found by what was written last.

Installed as `ngramspec.datastore`. A datastore is a folder: a JSON `MANIFEST` (format version, tokenizer
fingerprint, vocabulary size, segments with their checksums, what was walked), immutable segments of tokens
with their suffixes sorted, and the tokenizer itself, so that only building needs a model's. Token ids of a
context enter, the continuations of its longest suffix that occurs in the corpus leave, with their counts and
where they come from.

Opening maps files and checks headers, so it costs the same for any size. An update writes new segments and
switches the manifest by an atomic rename; an open reader keeps the generation it opened. A damaged file is a
typed error at open, every value read later is bounds-checked, and nothing is ever unpickled: the worst that a
bad datastore can do is draft badly.

    from ngramspec.datastore import Datastore
    from ngramspec.datastore.build import build
    from ngramspec.datastore.update import merge, prune, update

    build(["src"], "store", tokenizer, "my-model")  # a tokenizers.Tokenizer, and what users call it
    update("store")
    Datastore.open("store").lookup(ids)

This package imports neither torch, nor transformers, nor the rest of ngramspec. Names are imported on first use,
the compiler (numba) where something is looked up.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .corpus import CorpusError, CorpusOptions
    from .errors import (
        DatastoreCorruptError,
        DatastoreError,
        DatastoreFormatError,
        DatastoreFullError,
        DatastoreLockedError,
        DatastoreNotFoundError,
        EmptyCorpusError,
        TokenizerMismatchError,
    )
    from .lookup import Matcher, Trees
    from .progress import Progress, Summary
    from .reader import Datastore, Location, Match, Snapshot

_HOMES = {
    "Datastore": "reader",
    "Snapshot": "reader",
    "Location": "reader",
    "Match": "reader",
    "Matcher": "lookup",
    "Trees": "lookup",
    "CorpusOptions": "corpus",
    "CorpusError": "corpus",
    "Progress": "progress",
    "Summary": "progress",
    "DatastoreError": "errors",
    "DatastoreNotFoundError": "errors",
    "DatastoreFormatError": "errors",
    "DatastoreCorruptError": "errors",
    "TokenizerMismatchError": "errors",
    "EmptyCorpusError": "errors",
    "DatastoreLockedError": "errors",
    "DatastoreFullError": "errors",
}

__all__ = [
    "Datastore",
    "Snapshot",
    "Location",
    "Match",
    "Matcher",
    "Trees",
    "CorpusOptions",
    "CorpusError",
    "Progress",
    "Summary",
    "DatastoreError",
    "DatastoreNotFoundError",
    "DatastoreFormatError",
    "DatastoreCorruptError",
    "TokenizerMismatchError",
    "EmptyCorpusError",
    "DatastoreLockedError",
    "DatastoreFullError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
