"""Open the datastores that an engine is given, under names, and check that they were made with the model's tokenizer.

Folders or open stores enter; open, checked ones leave, by name. Knows nothing of drafting.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from ngramspec.datastore.reader import Datastore
from ngramspec.errors import InvalidInputError
from ngramspec.tokenizer.encode import Encoding

Store: TypeAlias = str | os.PathLike[str] | Datastore


def name_datastores(datastore: Store | Sequence[Store] | Mapping[str, Store]) -> dict[str, Store]:
    """Name each datastore: by its folder, with a number appended if the name is taken, unless a name is given. Raises InvalidInputError."""
    if isinstance(datastore, Mapping):
        if wrong := [name for name in datastore if not (isinstance(name, str) and name)]:
            raise InvalidInputError(f"a datastore's name must be a text that is not empty, got {wrong[0]!r}")
        return dict(datastore)
    stores: dict[str, Store] = {}
    several = [datastore] if isinstance(datastore, (str, os.PathLike, Datastore)) or not isinstance(datastore, Iterable) else datastore
    for store in several:
        if not isinstance(store, (str, os.PathLike, Datastore)):
            raise InvalidInputError(f"a datastore must be a folder or an open Datastore, got {store!r:.80}")
        folder = Path(store.path if isinstance(store, Datastore) else store).resolve().name or "datastore"
        names = itertools.chain([folder], (f"{folder}-{i}" for i in itertools.count(2)))
        stores[next(name for name in names if name not in stores)] = store
    return stores


def open_store(store: Store) -> Datastore:
    """Open a store that is not open yet; its files are let go of until a request needs them. Raises DatastoreError."""
    if isinstance(store, Datastore):
        return store
    opened = Datastore.open(store)
    opened.release()
    return opened


def check_store(store: Store, encoding: Encoding, model: str) -> Datastore:
    """Open a store and check its tokenizer.

    Raises DatastoreError, TokenizerError, and TokenizerMismatchError if it was made with another tokenizer than the `model`'s.
    """
    fingerprint = encoding.fingerprint
    opened = open_store(store)
    opened.check_tokenizer(fingerprint, model)
    return opened
