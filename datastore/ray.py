"""Building on many machines: the segment building of `pieces`, one Ray Data task and one segment per block, one manifest at the end.

The driver lists files, holds the store's lock and commits; workers read, tokenize, sort and write. Corpus and store must lie under the
same paths everywhere. Ray is imported only here, and only when a build runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from . import corpus, segment_writer
from .build import commit_anew, done, unique, vectors_for
from .commit import writing
from .corpus import CorpusError, CorpusOptions, Found, Skipped
from .errors import DatastoreError, DatastoreFullError
from .format import SegmentEntry, map_segment
from .progress import Progress, Summary, Tell, silent
from .segment_writer import Vectors
from .tokens import Encoder

BLOCK_BYTES = 256 << 20
"""Of files in a block, at most. Its text, tokens and the memory for sorting them are in one worker: some 8 times as much."""


def build(
    paths: Sequence[str | os.PathLike[str]],
    store: str | os.PathLike[str],
    tokenizer: Tokenizer,
    name: str,
    *,
    options: CorpusOptions | None = None,
    blocks: int | None = None,
    router: bool = False,
    vectors: Vectors | None = None,
    writer: str = "ngramspec",
    tell: Tell = silent,
) -> Summary:
    """As `build.build`, on the Ray that is running, or on one of this machine. `blocks`: how many segments; default by size and cores.

    Raises as `build.build`, CorpusError where Ray is not installed, and DatastoreError for what fails on a worker.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise CorpusError("a distributed build needs Ray, which is not installed: pip install 'ngramspec[ray]'") from error
    clock = time.perf_counter()
    options = options or CorpusOptions()
    sources = corpus.sources_of(paths)
    skipped, progress = Skipped(), Progress()
    seconds: dict[str, float] = {}
    folder = Path(os.path.realpath(store))
    with writing(folder, create=True) as writer_:
        found = corpus.find(sources, options, skipped, omit=str(folder))
        n_bytes = sum(file.size for file in found)
        seconds["looking"] = time.perf_counter() - clock
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False)
        encoder = Encoder(tokenizer, name)
        arguments = {"folder": folder, "encoder": [ray.put(encoder)], "options": options, "vectors": vectors or vectors_for(router)}
        n_blocks = blocks or max(int(ray.cluster_resources().get("CPU", 1)), -(-n_bytes // BLOCK_BYTES))
        rows = [
            {"block": n, "files": json.dumps([dataclasses.asdict(file) for file in block])}
            for n, block in enumerate(split(found, n_blocks))
        ]
        progress.start_reading(len(found), n_bytes)
        tell(progress)
        results: list[dict[str, Any]] = []
        task: Any = _task  # Ray's declarations know no further arguments
        if rows:
            ray.data.DataContext.get_current().enable_progress_bars = False
            for row in ray.data.from_items(rows, override_num_blocks=len(rows)).map(task, fn_kwargs=arguments).iter_rows():
                results.append(json.loads(row["result"]))
                _raise(results[-1])
                progress.count_read(results[-1]["files"], results[-1]["bytes"])
                progress.tokens += results[-1]["tokens"]
                tell(progress)
        seconds["segments"] = time.perf_counter() - clock - seconds["looking"]
        results.sort(key=lambda result: result["block"])
        for result in results:
            skipped.counts.update(result["skipped"])
            skipped.secrets.update(result["secrets"])
            skipped.named += [(path, why) for path, why in result["named"]]
        entries = [SegmentEntry(**result["entry"]) for result in results if result["entry"]]
        entries = without_duplicates(folder, entries, skipped)
        manifest = commit_anew(writer_, encoder, entries, sources, options, router, writer, skipped, seconds)
    return done(manifest, skipped, progress, tell, clock, seconds)


def _task(row: dict[str, Any], folder: Path, encoder: Any, options: CorpusOptions, vectors: Vectors | None) -> dict[str, Any]:
    """On a worker: a block's row -> a row with the segment's entry, or why there is none. `encoder`: [reference to Ray's object store]."""
    import ray

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
    files = [Found(**file) for file in json.loads(row["files"])]
    result: dict[str, Any] = {"block": int(row["block"]), "files": len(files), "bytes": sum(file.size for file in files)}
    try:
        entry, skipped = segment_of(files, options, ray.get(encoder[0]), folder, vectors)
        result |= {
            "skipped": dict(skipped.counts),
            "secrets": dict(skipped.secrets),
            "named": skipped.named,
            "tokens": entry.tokens if entry else 0,
        }
        result["entry"] = dataclasses.asdict(entry) if entry else None
    except (DatastoreError, OSError) as error:
        # as a result and not raised: Ray would try again, and wrap it so that its kind is lost
        result |= {"error": str(error), "full": isinstance(error, DatastoreFullError)}
    return {"result": json.dumps(result)}


def segment_of(
    files: Sequence[Found], options: CorpusOptions, encoder: Encoder, folder: Path, vectors: Vectors | None
) -> tuple[SegmentEntry | None, Skipped]:
    """A block's files -> its segment's entry, None where it holds no text, and what was left out."""
    skipped = Skipped()
    documents = (document for file in files for document in corpus.read(file, options, skipped))
    return segment_writer.build_segment(folder, unique(documents, skipped, set()), encoder, vectors), skipped


def split(files: Sequence[Found], count: int) -> list[list[Found]]:
    """Consecutive files in at most `count` blocks of about the same number of bytes."""
    total = sum(file.size + 1 for file in files)
    blocks: dict[int, list[Found]] = {}
    before = 0
    for file in files:
        blocks.setdefault(before * count // total, []).append(file)
        before += file.size + 1
    return list(blocks.values())


def without_duplicates(folder: Path, entries: Sequence[SegmentEntry], skipped: Skipped) -> list[SegmentEntry]:
    """Mark documents dead whose content an earlier block has too; workers see only their own block."""
    seen: Counter[bytes] = Counter()
    kept = []
    for entry in entries:
        raw = map_segment(folder, entry).docs["hash"].tobytes()
        hashes = [raw[at : at + 16] for at in range(0, len(raw), 16)]
        dead = tuple(number for number, content in enumerate(hashes) if content in seen)
        seen.update(hashes)
        for _ in dead:
            skipped.add(corpus.file_filters.DUPLICATE)
        if len(dead) < entry.docs:
            kept.append(dataclasses.replace(entry, dead=dead))
    return kept


def _raise(result: dict[str, Any]) -> None:
    if "error" in result:
        raise (DatastoreFullError if result["full"] else DatastoreError)(result["error"])
