"""Keep blocks of the prefix cache in a folder, so that they survive a restart.

A file holds one block's keys and values under the block's hash, which stands for the tokens, all before them, and the tenant
(`blocks.BlockHashes`), or a snapshot of the recurrent layers' state after that block; a sub-folder per model has those that one version of
the code computed from one file. Contents are compared with their checksum when they are read. The folder is the user's alone, and files
beyond its bound are removed, those read least recently first.

`PrefixStore` decides what is worth a file and moves blocks between folder and pool, in the engine's thread; files are written by a thread
of its own. Several processes may share a folder: each looks for the others' files when a prompt needs them, and counts them before the
folder can have grown far beyond its bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import queue
import stat
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ngramspec.datastore.partial_files import SUFFIX, remove_stale, write_whole
from ngramspec.errors import InvalidInputError
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import BLOCK

log = logging.getLogger(__name__)

# If this many tokens of a prompt had to be computed, its blocks are kept after its first request; else once a second request has reused
# them: of an editor's prompts, each key changes some hundred tokens.
KEPT_TOKENS = 1024
# A state takes 20 to 60 MB. Of a prompt's states the last one is kept, and from there back others: the least gap between two of them, in
# blocks, doubles from the first number to the second, since the next prompt differs near the end as a rule.
STATE_GAPS = 8, 64
REMEMBERED = 8  # the latest requests whose blocks may still have to be written
BLOCKS_AT_ONCE = 16  # that are handed to the writer before the engine looks for requests again
# Bytes that may wait for the disk; the rest stays in the pool until then. One that hangs would otherwise fill the memory with copies.
WAITING_BYTES = 64 << 20
STALLED_S = 10.0  # without a file written, after which nobody waits for the disk at the end: longer than a sleeping disk takes to wake
IDLE_S = 0.5  # without a request, until blocks are written
_DIGEST = 16  # bytes of a checksum
BLOCK_SUFFIX, STATE_SUFFIX = ".kv", ".state"
RECOUNT = 0.05  # share of the bound that one process writes between two counts of what all have written
_NAME = 32 * "[0-9a-f]"  # of a file: its block's hash


def make_root(root: Path) -> None:
    """Make the user's folder. Raises InvalidInputError if it cannot be made."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is no folder" if isinstance(error, FileExistsError) else error
        raise InvalidInputError(f"prefix_cache_path {str(root)!r} cannot be used: {reason}") from None


class PrefixFolder:
    """Files of blocks, each of the same size, and of states, each of another. Raises InvalidInputError if the folder cannot be used.

    A file's name is its block's hash and the suffix of its kind (`name_block`, `name_state`).
    """

    def __init__(self, root: Path, model: str, block_bytes: int, state_bytes: int, max_bytes: int) -> None:
        """Open the folder, or make it. `root`: the user's folder; `model`: name of what computes keys, values and states.

        `state_bytes`: 0 for a model without recurrent layers. `max_bytes`: of all models' files together.
        """
        self.path, self.state_bytes, self.max_bytes = root / model, state_bytes, max_bytes
        self._sizes = {BLOCK_SUFFIX: block_bytes, STATE_SUFFIX: state_bytes}
        self._root = root
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.stat()
        except OSError as error:
            raise InvalidInputError(f"prefix_cache_path {str(root)!r} cannot be used: {error}") from None
        if (hasattr(os, "getuid") and status.st_uid != os.getuid()) or stat.S_IMODE(status.st_mode) & 0o022:
            raise InvalidInputError(f"prefix_cache_path {str(root)!r} holds a folder that others may write: {self.path.name}")
        files = self._remove_truncated(self._list_files())
        self.known = {path.name for _, _, path in files if path.parent == self.path}
        """Names of the files that are there, as far as this process knows: others may have written or removed some since."""
        self._n_bytes = sum(size for _, size, _ in files)  # of the folder when it was counted, and of what was written since
        self._n_written = 0
        self._remove_stale()
        self._waiting: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._n_waiting = 0  # bytes, what is being written included
        self._last_written_s = 0.0
        self._written = threading.Condition()
        self._writer = threading.Thread(target=self._write_all, name="ngramspec-prefix-writer", daemon=True)
        self._writer.start()

    def has_file(self, name: str) -> bool:
        """Return whether there is such a file."""
        return (self.path / name).exists()

    def read(self, name: str) -> bytes | None:
        """Return the contents of a block or state; None if there is no file, or it is damaged, which removes it."""
        path = self.path / name
        try:
            raw = path.read_bytes()
        except OSError:
            self.known.discard(name)
            return None
        self.known.add(name)
        body = raw[_DIGEST:]
        if len(body) != self._sizes[path.suffix] or _compute_checksum(name, body) != raw[:_DIGEST]:
            log.warning("%s is damaged and is removed", path)
            self.known.discard(name)
            with contextlib.suppress(OSError):  # the folder may be one that can only be read
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return body

    @property
    def has_room(self) -> bool:
        """Whether the disk keeps up, so that more can be given to `write`."""
        return self._n_waiting < WAITING_BYTES

    def write(self, name: str, body: bytes) -> None:
        """Have a block or state written."""
        self.known.add(name)
        with self._written:
            if not self._n_waiting:
                self._last_written_s = time.monotonic()
            self._n_waiting += len(body)
        self._waiting.put((name, body))

    def wait_for_room(self) -> bool:
        """Wait until more can be given to `write`; return False if the disk has stalled."""
        return self._wait_until_below(WAITING_BYTES)

    def _wait_until_below(self, n_bytes: int) -> bool:
        """Wait until fewer bytes wait for the disk; return False if it has written nothing for STALLED_S."""
        with self._written:
            while self._n_waiting >= n_bytes:
                if (left_s := self._last_written_s + STALLED_S - time.monotonic()) <= 0:
                    return False
                self._written.wait(left_s)
        return True

    def close(self) -> None:
        """Return once everything is written, or the disk has stalled."""
        self._waiting.put(None)
        if self._wait_until_below(1):
            self._writer.join()
        else:
            log.warning("%s cannot be written: the disk does not answer; prompts that were to be kept there are lost", self.path)

    def _write_all(self) -> None:
        """Write what waits. If the disk is full or the folder has gone, log that once, until a file can be written again."""
        failed = False
        while (job := self._waiting.get()) is not None:
            name, body = job
            try:
                if not (self.path / name).exists():  # another process may have computed it, too
                    self._write_file(name, body)
                    failed = False
            except OSError as error:
                self.known.discard(name)
                if not failed:
                    log.warning("no prompts are kept for a later start until %s can be written: %s", self.path, error.strerror)
                failed = True
            with self._written:
                self._n_waiting -= len(body)
                self._last_written_s = time.monotonic()
                self._written.notify_all()

    def _write_file(self, name: str, body: bytes) -> None:
        """Write a block or state, and keep the folder within its bound. Raises OSError."""
        path = self.path / name
        write_whole(path, _compute_checksum(name, body) + body, 0o600)
        self._n_bytes += _DIGEST + len(body)
        self._n_written += _DIGEST + len(body)
        if self._n_bytes > self.max_bytes or self._n_written > RECOUNT * self.max_bytes:
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Remove the files read or written least recently, of all models, if there is more than the bound, until a tenth of it is free."""
        files = sorted(self._list_files())
        self._n_bytes, self._n_written = sum(size for _, size, _ in files), 0
        self._remove_stale()
        if self._n_bytes <= self.max_bytes:
            return
        for _, size, path in files:
            if self._n_bytes <= 0.9 * self.max_bytes:
                break
            try:
                path.unlink(missing_ok=True)
            except OSError:  # another user's, of a model that ran for them
                continue
            self._n_bytes -= size
            if path.parent == self.path:
                self.known.discard(path.name)

    def _remove_stale(self) -> None:
        """Remove what a process that was killed had begun to write."""
        remove_stale(self._root, f"*/*{_NAME}.*{SUFFIX}")

    def _remove_truncated(self, files: list[tuple[float, int, Path]]) -> list[tuple[float, int, Path]]:
        """Remove this model's files that a crash or a full disk has cut short, so that all are written again; return the other files."""
        cut = {path for _, size, path in files if path.parent == self.path and size != _DIGEST + self._sizes[path.suffix]}
        for path in cut:
            with contextlib.suppress(OSError):
                path.unlink()
        if cut:
            log.warning("%d files of %s are damaged and are removed", len(cut), self.path)
        return [each for each in files if each[2] not in cut]

    def _list_files(self) -> list[tuple[float, int, Path]]:
        """Return time, size and path of every file of the folder."""
        found = []
        for suffix in (BLOCK_SUFFIX, STATE_SUFFIX):
            for path in self._root.glob(f"*/{_NAME}{suffix}"):
                with contextlib.suppress(OSError):  # another process has removed it
                    status = path.stat()
                    found.append((status.st_mtime, status.st_size, path))
        return found


class PrefixStore:
    """What the scheduler and the engine's thread ask of a folder. One caller at a time."""

    def __init__(self, folder: PrefixFolder, pool: BlockTables) -> None:
        self.folder, self.pool = folder, pool
        self._unsaved: deque[list[tuple[bytes, str]]] = deque(maxlen=REMEMBERED)
        """Hashes of the blocks to write and names of their files, a list per request, the latest last."""
        self._last_work_s = 0.0

    def restore(self, hashes: Sequence[bytes]) -> None:
        """Bring blocks of this prefix that only the folder has into the pool, as far as it has room that nobody holds.

        Where layers keep a state, these are the blocks up to the last one after which there is a state, and that state.
        """
        if not self.folder.state_bytes:
            self._restore_blocks(hashes)
            return
        known = sum(
            1 for _ in itertools.takewhile(lambda each: each in self.pool.block_of or self.folder.has_file(name_block(each)), hashes)
        )
        for n in range(known, 0, -1):
            digest = hashes[n - 1]
            if not (self.pool.has_state(digest) or self.folder.has_file(name_state(digest))):
                continue
            if not self._restore_blocks(hashes[:n]) or self._restore_state(digest):
                return

    def _restore_blocks(self, hashes: Sequence[bytes]) -> bool:
        """Return whether all of these blocks are in the pool now."""
        for n, digest in enumerate(hashes):
            if digest in self.pool.block_of:
                self.pool.touch(digest)
                continue
            if self.pool.n_available <= n or (body := self.folder.read(name_block(digest))) is None:
                return False
            self.pool.write_block(self.pool.adopt(digest), body)
        return True

    def _restore_state(self, digest: bytes) -> bool:
        """Return whether the state after this block is in the pool or was whole in the folder."""
        if self.pool.has_state(digest):
            return True
        if (body := self.folder.read(name_state(digest))) is None:
            return False
        self.pool.write_state(digest, body)
        return True

    def note_request(self, hashes: Sequence[bytes], n_reused: int) -> None:
        """Remember the blocks of a request that ends, of which it reused the first `n_reused`, if they are worth a file."""
        worth = len(hashes) if (len(hashes) - n_reused) * BLOCK >= KEPT_TOKENS else n_reused
        wanted = [(digest, name_block(digest)) for digest in hashes[:worth]]
        if self.folder.state_bytes:
            states = self._choose_states(hashes[:worth])
            wanted = [*wanted[: hashes.index(states[0]) + 1 if states else 0], *((digest, name_state(digest)) for digest in states)]
        if missing := [(digest, name) for digest, name in wanted if name not in self.folder.known]:
            self._unsaved.append(missing)

    def _choose_states(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the blocks of a prefix whose states are worth a file: the last one that has a state, and some before it."""
        chosen, (gap, widest), most = list[bytes](), STATE_GAPS, len(hashes) - 1
        for n in range(len(hashes) - 1, -1, -1):
            if n <= most and self.pool.has_state(hashes[n]):
                chosen.append(hashes[n])
                most, gap = n - gap, min(2 * gap, widest)
        return chosen

    @property
    def idle_after_s(self) -> float | None:
        """Seconds without a request after which `save_some` has something to do; None if there is nothing."""
        if not self._unsaved:
            return None
        if not self.folder.has_room:
            return IDLE_S
        return max(self._last_work_s + IDLE_S - time.monotonic(), 0.0)

    def note_work(self) -> None:
        """Note that a request has been worked on, so that writing waits."""
        self._last_work_s = time.monotonic()

    def save_some(self) -> None:
        """Give some blocks to the writer, those of the latest request first, as long as the disk keeps up."""
        left = BLOCKS_AT_ONCE
        while self._unsaved and left and self.folder.has_room:
            chain = self._unsaved[-1]
            while chain and left and self.folder.has_room:
                digest, name = chain.pop(0)
                if name not in self.folder.known and (body := self._read_from_pool(digest, name)) is not None:
                    self.folder.write(name, body)
                    left -= 1
            if not chain:
                self._unsaved.pop()

    def _read_from_pool(self, digest: bytes, name: str) -> bytes | None:
        if name.endswith(STATE_SUFFIX):
            return self.pool.read_state(digest)
        block = self.pool.block_of.get(digest)
        return None if block is None else self.pool.read_block(block)

    def close(self) -> None:
        """Write what is left, and return once it is written, or the disk has stalled."""
        while self._unsaved and self.folder.wait_for_room():
            self.save_some()
        self.folder.close()


def name_block(digest: bytes) -> str:
    """Return the name of the file of the block with this hash."""
    return digest.hex() + BLOCK_SUFFIX


def name_state(digest: bytes) -> str:
    """Return the name of the file of the state after the block with this hash."""
    return digest.hex() + STATE_SUFFIX


def _compute_checksum(name: str, body: bytes) -> bytes:
    """Return the checksum of the contents of a file with this name."""
    return hashlib.blake2b(body, digest_size=_DIGEST, key=name.encode()).digest()
