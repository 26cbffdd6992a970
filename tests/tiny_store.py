"""Small datastores made of lists of token ids, by the writer's side of format.py, and what a build reads: for tests of datastores."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ngramspec.datastore.build import read_corpus
from ngramspec.datastore.corpus import CorpusOptions, Document, Skipped, find_files, resolve_sources
from ngramspec.datastore.format import DOC_DTYPE, SegmentEntry, choose_token_dtype, compute_suffix_width, get_separator, write_segment
from ngramspec.datastore.manifest import Manifest, write_manifest, write_tokenizer, write_vocabulary
from ngramspec.datastore.recorder import Recorder
from ngramspec.datastore.suffix_array import sort_suffixes

TOKENIZER = b"a tokenizer"
FINGERPRINT = hashlib.sha256(TOKENIZER).hexdigest()


def segment_arrays(documents: Sequence[Sequence[int]], vocab_size: int) -> tuple[np.ndarray, np.ndarray, bytes]:
    """tokens [n], docs DOC_DTYPE, paths: document i is called `<i>/é.py`."""
    dtype = choose_token_dtype(vocab_size)
    mark = get_separator(dtype.itemsize)
    tokens, names = [mark], [f"{i}/é.py".encode() for i in range(len(documents))]
    docs = np.zeros(len(documents), DOC_DTYPE)
    for i, document in enumerate(documents):
        name_at = sum(map(len, names[:i]))
        digest = np.void(hashlib.blake2b(bytes(str(document), "ascii"), digest_size=16).digest())
        docs[i] = (len(tokens), name_at, 3 * len(document), 1000 + i, digest, len(document), len(names[i]))
        tokens += [*document, mark]
    return np.array(tokens, dtype), docs, b"".join(names)


def add_segment(folder: Path, documents: Sequence[Sequence[int]], vocab_size: int, dead: Sequence[int] = ()) -> SegmentEntry:
    tokens, docs, paths = segment_arrays(documents, vocab_size)
    suffixes = sort_suffixes(tokens, compute_suffix_width(len(tokens)))
    entry = write_segment(
        folder, tokens=tokens, suffixes=suffixes, docs=docs, paths=paths, vectors=None, vocab_size=vocab_size, fingerprint=FINGERPRINT
    )
    return dataclasses.replace(entry, tombstones=tuple(dead))


def write_store(
    folder: Path,
    segments: Sequence[Sequence[Sequence[int]]],
    vocab_size: int,
    dead: Sequence[Sequence[int]] | None = None,
    generation: int = 1,
) -> Manifest:
    """A store with these segments of documents of token ids; every third token id has a line end."""
    folder.mkdir(exist_ok=True)
    marks = dead or [()] * len(segments)
    entries = tuple(add_segment(folder, documents, vocab_size, d) for documents, d in zip(segments, marks, strict=True))
    vocabulary = write_vocabulary(folder, np.arange(vocab_size) % 3 == 0)
    tokenizer = write_tokenizer(folder, TOKENIZER)
    manifest = Manifest(generation, "tiny", FINGERPRINT, vocab_size, vocabulary, tokenizer, entries, [{"path": "corpus"}], {"jobs": 2})
    write_manifest(folder, manifest)
    return manifest


def read_documents(*paths: str | Path, **options: Any) -> tuple[list[Document], Skipped]:
    """Return the documents that a build would take from a corpus, and what it would leave out."""
    recorder, chosen = Recorder(), CorpusOptions(**options)
    found = find_files(resolve_sources(paths), chosen, recorder.skipped)
    return list(read_corpus(found, chosen, recorder)), recorder.skipped
