"""Building on many machines: one Ray Data task and one segment per block of files, one manifest at the end.

The driver lists files, holds the store's lock and commits; workers read, tokenize, sort and write. Corpus and store must lie under the
same paths everywhere. Ray is imported only here, and only when a build runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from . import corpus, segment_writer
from .build import begin_store, drop_duplicates, make_settings
from .corpus import CorpusError, CorpusOptions, FoundFile, Skipped
from .errors import DatastoreError, DatastoreFullError
from .format import SegmentEntry, map_segment
from .progress import ProgressCallback, Summary, ignore_progress
from .recorder import Recorder
from .segment_writer import SegmentSettings, VectorFunction
from .tokens import Encoder

# bytes of a block's files, at most. Its text, tokens and the memory for sorting them are in one worker: some 8 times as much
BLOCK_BYTES = 256 << 20


def build(
    paths: Sequence[str | os.PathLike[str]],
    store: str | os.PathLike[str],
    tokenizer: Tokenizer,
    name: str,
    *,
    options: CorpusOptions | None = None,
    blocks: int | None = None,
    router: bool = False,
    vectors: VectorFunction | None = None,
    writer: str = "ngramspec",
    on_progress: ProgressCallback = ignore_progress,
) -> Summary:
    """Do as `build.build` on the Ray that is running, or on one of this machine. `blocks`: how many segments; default by size and cores.

    Raises as `build.build`, CorpusError if Ray is not installed, and DatastoreError for what fails on a worker.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise CorpusError("a distributed build needs Ray, which is not installed: pip install 'ngramspec[ray]'") from error
    recorder, folder = Recorder(on_progress), Path(os.path.realpath(store))
    with begin_store(paths, folder, recorder, options) as new:
        encoder = Encoder(tokenizer, name)
        settings = make_settings(encoder.vocab_size, encoder.fingerprint, router, vectors, None)
        n_bytes = sum(file.size for file in new.found)
        with recorder.measure("segments"):
            if not ray.is_initialized():
                ray.init(log_to_driver=False, include_dashboard=False)
            arguments = {"folder": folder, "encoder": [ray.put(encoder)], "options": new.options, "settings": settings}
            n_blocks = blocks or max(int(ray.cluster_resources().get("CPU", 1)), -(-n_bytes // BLOCK_BYTES))
            rows = [
                {"block": n, "files": json.dumps([file._asdict() for file in block])}
                for n, block in enumerate(split_files(new.found, n_blocks))
            ]
            recorder.start_reading(len(new.found), n_bytes)
            results: list[dict[str, Any]] = []
            task: Any = _build_block_task  # Ray's declarations know no further arguments
            if rows:
                ray.data.DataContext.get_current().enable_progress_bars = False
                for row in ray.data.from_items(rows, override_num_blocks=len(rows)).map(task, fn_kwargs=arguments).iter_rows():
                    result = json.loads(row["result"])
                    _raise_error(result)
                    recorder.count_read(result["files"], result["bytes"], result["tokens"])
                    results.append(result)
        results.sort(key=lambda result: result["block"])
        for result in results:
            recorder.skipped.counts.update(result["skipped"])
            recorder.skipped.secrets.update(result["secrets"])
            recorder.skipped.named += [(path, why) for path, why in result["named"]]
        entries = [SegmentEntry(**result["entry"]) for result in results if result["entry"]]
        return new.finish(mark_duplicates(folder, entries, recorder.skipped), encoder, router, writer)


def _build_block_task(row: dict[str, Any], folder: Path, encoder: Any, options: CorpusOptions, settings: SegmentSettings) -> dict[str, Any]:
    """Build a block on a worker: its row -> a row with the segment's entry, or why there is none.

    `encoder`: [reference to Ray's object store].
    """
    import ray

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
    files = [FoundFile(**file) for file in json.loads(row["files"])]
    result: dict[str, Any] = {"block": int(row["block"]), "files": len(files), "bytes": sum(file.size for file in files)}
    try:
        entry, skipped = build_block(files, options, ray.get(encoder[0]), folder, settings)
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


def build_block(
    files: Sequence[FoundFile], options: CorpusOptions, encoder: Encoder, folder: Path, settings: SegmentSettings
) -> tuple[SegmentEntry | None, Skipped]:
    """Write the segment of a block's files -> its entry, None if there is no text in them, and what was left out."""
    recorder = Recorder()
    documents = (document for file in files for document in corpus.read_documents(file, options, recorder.skipped))
    return segment_writer.build_segment(folder, drop_duplicates(documents, recorder), encoder, settings), recorder.skipped


def split_files(files: Sequence[FoundFile], count: int) -> list[list[FoundFile]]:
    """Return consecutive files in at most `count` blocks of about the same number of bytes."""
    total = sum(file.size + 1 for file in files)
    blocks: dict[int, list[FoundFile]] = {}
    before = 0
    for file in files:
        blocks.setdefault(before * count // total, []).append(file)
        before += file.size + 1
    return list(blocks.values())


def mark_duplicates(folder: Path, entries: Sequence[SegmentEntry], skipped: Skipped) -> list[SegmentEntry]:
    """Add tombstones for documents whose content an earlier block has too; workers see only their own block."""
    seen: Counter[bytes] = Counter()
    kept = []
    for entry in entries:
        raw = map_segment(folder, entry).docs["hash"].tobytes()
        hashes = [raw[at : at + 16] for at in range(0, len(raw), 16)]
        tombstones = tuple(number for number, content in enumerate(hashes) if content in seen)
        seen.update(hashes)
        for _ in tombstones:
            skipped.add(corpus.file_filters.DUPLICATE)
        if len(tombstones) < entry.docs:
            kept.append(dataclasses.replace(entry, tombstones=tombstones))
    return kept


def _raise_error(result: dict[str, Any]) -> None:
    if "error" in result:
        raise (DatastoreFullError if result["full"] else DatastoreError)(result["error"])
