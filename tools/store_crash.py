"""Test whether a datastore survives its writer's death. Kill building, updating and merging at many moments, then run them again.

    python -m tools.store_crash [--moments 200] [--seed 0] [--documents 60]

Every other moment is a call that touches the store's files (before an open, rename, unlink or fsync, or in the middle of a write), drawn
from all of them; the others are points in time. After each kill -9 the store must open, every byte verified, as the old generation or the
new one, or, where there was none before, not exist; the same command must then succeed and leave no file that belongs to no generation.
Processes are forked from one that has imported everything and started no thread. Progress goes to standard error, a table and
a last line of JSON to standard output; exit code 1 if a kill did harm. Knows nothing of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ngramspec.datastore import Datastore, DatastoreNotFoundError, file_io
from ngramspec.datastore import manifest as manifests
from ngramspec.datastore.build import build
from ngramspec.datastore.update import merge, update

State = dict[str, bytes] | None  # content hash by path of what a datastore holds; None if there is none
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.store_crash", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--moments", type=int, default=200, help="kills, shared among build, building again, update and merge")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=60)
    args = parser.parse_args(argv)
    document = run_crashes(args.moments, args.seed, args.documents)
    for row in document["operations"]:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in row["outcomes"].items())
        print(f"{row['operation']:8} {row['kills']:4} kills among {row['calls']} calls and {row['ms']:.0f} ms: {outcomes}")
    for failure in document["failures"]:
        print(failure)
    print(json.dumps(document), flush=True)
    sys.exit(bool(document["failures"]))


def run_crashes(moments: int, seed: int = 0, documents: int = 60) -> dict[str, Any]:
    """Kill each of four operations `moments` / 4 times and return what was found; `failures` is empty if all is well."""
    rng = random.Random(seed)
    operations, failures = [], []
    with tempfile.TemporaryDirectory(prefix="ngramspec-crash-") as folder:
        scene = Scene(Path(folder), rng, documents)
        for number, name in enumerate(("build", "rebuild", "update", "merge")):
            count = moments // 4 + (number < moments % 4)
            row, harm = _attack(scene, name, count, rng)
            operations.append(row)
            failures += harm
    return {
        "benchmark": "datastore crash",
        "moments": sum(row["kills"] for row in operations),
        "operations": operations,
        "failures": failures,
        "settings": {"seed": seed, "documents": documents},
    }


class Scene:
    """A small corpus in two versions, and stores as they are before each operation."""

    def __init__(self, root: Path, rng: random.Random, documents: int) -> None:
        self.corpus, self.store, self.kept = root / "corpus", root / "store", root / "kept"
        self.tokenizer = byte_tokenizer()
        self.corpus.mkdir()
        for n in range(documents):
            self.write(f"{n}.py", rng)
        run(lambda: build([self.corpus], self.kept / "update", self.tokenizer, "bytes"))
        for n in range(0, documents, 7):
            self.write(f"{n}.py", rng)
        (self.corpus / "1.py").unlink()
        shutil.copytree(self.kept / "update", self.kept / "rebuild")
        shutil.copytree(self.kept / "update", self.kept / "merge")
        run(lambda: update(self.kept / "merge", self.tokenizer, "bytes"))
        self.operations: dict[str, Callable[[], Any]] = {
            "build": lambda: build([self.corpus], self.store, self.tokenizer, "bytes"),
            "rebuild": lambda: build([self.corpus], self.store, self.tokenizer, "bytes"),
            "update": lambda: update(self.store, self.tokenizer, "bytes"),
            "merge": lambda: merge(self.store),
        }

    def write(self, name: str, rng: random.Random) -> None:
        (self.corpus / name).write_text("\n".join(f"x{rng.randrange(99)} = {rng.randrange(99)}" for _ in range(rng.randrange(1, 200))))

    def reset(self, name: str) -> None:
        shutil.rmtree(self.store, ignore_errors=True)
        if (self.kept / name).exists():
            shutil.copytree(self.kept / name, self.store)


def _attack(scene: Scene, name: str, kills: int, rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    operation = scene.operations[name]
    scene.reset(name)
    old = read_state(scene.store)
    n_calls = run(operation, store=scene.store)
    new, generation = read_state(scene.store), manifests.read_manifest(scene.store).generation
    times = []
    for _ in range(3):
        scene.reset(name)
        started = time.perf_counter()
        run(operation)
        times.append(time.perf_counter() - started)
    seconds = min(times)
    outcomes: Counter[str] = Counter()
    failures = []
    calls = rng.sample(range(1, n_calls + 1), min(n_calls, -(-kills // 2)))
    for number in range(kills):
        scene.reset(name)
        if number % 2 == 0 and calls:
            at = calls.pop()
            where = f"{name} killed at call {at} of {n_calls}"
            killed = run(operation, store=scene.store, kill_at=at) < 0
        else:
            delay = rng.uniform(0, seconds)
            where = f"{name} killed after {delay * 1000:.1f} ms"
            killed = run(operation, delay=delay) < 0
        try:
            found = read_state(scene.store)
            if found not in (old, new):
                raise AssertionError("the store holds neither the old nor the new generation")
            left = "none" if found is None else "new" if manifests.read_manifest(scene.store).generation == generation else "old"
            outcomes[left if killed else "ended before"] += 1
            run(operation)
            if read_state(scene.store) != new:
                raise AssertionError("running it again does not give the new generation")
            if extra := list_unnamed_files(scene.store):
                raise AssertionError(f"running it again leaves {extra}")
        except Exception as error:
            failures.append(f"{where}: {type(error).__name__}: {error}")
    print(f"{name}: {kills} kills, {len(failures)} did harm", file=sys.stderr, flush=True)
    row = {"operation": name, "kills": kills, "calls": n_calls, "ms": round(seconds * 1000, 1), "outcomes": dict(outcomes)}
    return row, failures


def read_state(store: Path) -> State:
    """Return what a datastore holds, after verifying every byte. Raises DatastoreError if it is damaged."""
    try:
        with Datastore.open(store, verify="full") as opened:
            return {document.path: document.hash for document in opened.snapshot.iterate_documents()}
    except DatastoreNotFoundError:
        return None


def list_unnamed_files(store: Path) -> list[str]:
    """Return the files of a datastore that its generation does not name."""
    manifest = manifests.read_manifest(store)
    named = {"MANIFEST", "LOCK", *(file.name for file in manifest.files)}
    return sorted({path.name for path in store.iterdir()} - named)


def run(operation: Callable[[], Any], store: Path | None = None, kill_at: int = 0, delay: float | None = None) -> int:
    """Run in a process of its own; return the calls that touched the datastore, -1 if it was killed. Raises RuntimeError if it failed.

    `kill_at`: its own kill -9 at that call; `delay`: ours, after this many seconds.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            calls = _Calls(str(store), kill_at) if store is not None else None
            operation()
            os.write(writer, str(calls.count if calls else 0).encode())
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    os.close(writer)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)  # it is not waited for yet, so that the number is still its own
    with os.fdopen(reader, "rb") as file:
        count = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return -1
    if status != 0:
        raise RuntimeError("the operation failed")
    return int(count)


class _Calls:
    """Counts the calls that touch a folder, and ends the process at the given one."""

    def __init__(self, folder: str, kill_at: int) -> None:
        self.folder, self.kill_at, self.count = folder, kill_at, 0
        real_fsync, real_write = os.fsync, file_io.WholeWriter.write

        def fsync(file: int) -> None:
            self.pass_by()
            real_fsync(file)

        def write(whole: Any, data: Any) -> None:
            with memoryview(data) as view:
                half = len(view) // 2
                real_write(whole, view[:half])
                self.pass_by()
                real_write(whole, view[half:])

        os.fsync = fsync
        file_io.WholeWriter.write = write  # type: ignore[method-assign]
        sys.addaudithook(self.note_event)

    def note_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and isinstance(arguments[0], (str, os.PathLike)) and os.fspath(arguments[0]).startswith(self.folder):
            self.pass_by()

    def pass_by(self) -> None:
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def byte_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


if __name__ == "__main__":
    main()
