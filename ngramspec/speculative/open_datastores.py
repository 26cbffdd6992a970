"""The datastores that an engine is given: what they are called, and that they are the model's own.

Folders or open stores enter, open and checked ones leave, by name. Knows nothing of how drafts come from them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from ngramspec.datastore.reader import Datastore
from ngramspec.errors import InvalidInputError
from ngramspec.tokenizer.encode import Encoding

Store: TypeAlias = str | os.PathLike[str] | Datastore


def named(datastore: Store | Sequence[Store] | Mapping[str, Store]) -> dict[str, Store]:
    """Those that have no name are called as their folders are, with a number behind it where that is taken. Raises InvalidInputError."""
    if isinstance(datastore, Mapping):
        if wrong := [name for name in datastore if not (isinstance(name, str) and name)]:
            raise InvalidInputError(f"a datastore's name must be a text that is not empty, got {wrong[0]!r}")
        return dict(datastore)
    stores: dict[str, Store] = {}
    for store in [datastore] if isinstance(datastore, (str, os.PathLike, Datastore)) else datastore:
        folder = Path(store.path if isinstance(store, Datastore) else store).resolve().name or "datastore"
        names = itertools.chain([folder], (f"{folder}-{i}" for i in itertools.count(2)))
        stores[next(name for name in names if name not in stores)] = store
    return stores


def open_store(store: Store) -> Datastore:
    """Raises DatastoreError."""
    return store if isinstance(store, Datastore) else Datastore.open(store)


def check_store(store: Store, encoding: Encoding, model: str) -> Datastore:
    """The store, opened. Raises DatastoreError, TokenizerMismatchError where it was made with another tokenizer than that of the `model`,
    TokenizerError."""
    fingerprint = encoding.fingerprint
    opened = open_store(store)
    opened.check_tokenizer(fingerprint, model)
    return opened
