"""What can go wrong with a datastore, one type each, so that a caller can tell bad input from a damaged or busy store.

Knows nothing of files. Every message names the offending value and what would be accepted.
"""

from __future__ import annotations


class DatastoreError(Exception):
    """Base of all errors of a datastore."""


class DatastoreNotFoundError(DatastoreError):
    """There is no datastore at this path."""


class DatastoreFormatError(DatastoreError):
    """The store has another format version; the message says which program reads it."""


class DatastoreCorruptError(DatastoreError):
    """A file of the store is damaged, truncated or forged; the message names the file, its section and what is wrong."""


class TokenizerMismatchError(DatastoreError):
    """The store was made with another tokenizer; the message names both."""


class CorpusError(DatastoreError, ValueError):
    """A source or an option that cannot be worked with."""


class EmptyCorpusError(DatastoreError):
    """Nothing was found to put into a store."""


class DatastoreLockedError(DatastoreError):
    """Another process writes to this store."""

    def __init__(self, store: object) -> None:
        super().__init__(f"another process writes to {store}: wait for it, or end it, and try again")
        self.waiting = f"another process writes to {store}: waiting for it"
        """What a caller says that tries again by itself."""


class DatastoreFullError(DatastoreError):
    """The disk has no room. The old generation is as it was, and nothing half-written is left."""


class ContentsChangedError(DatastoreError):
    """Files that a store is named by were changed before they were read again."""
