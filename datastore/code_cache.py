"""Compile functions with numba and keep their machine code on disk, checked when it is read.

`njit` is numba's, with a cache of our own in place of numba's: a file that is truncated, altered or of another version is compiled again,
and where nothing can be written the functions are compiled for this process only, which is logged once. Several processes may compile at
once into one folder: a file's name follows from the function and the types of its arguments, its content from its source, and it appears
by rename. The module does not know what is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, InTreeCacheLocator, NullCache, UserProvidedCacheLocator
from numba.core.serialize import dumps

from .cache_dir import cache_dir

log = logging.getLogger(__name__)
SUFFIX = ".nbc"
_DIGEST = hashlib.sha256().digest_size

_folders: set[Path] = set()
"""Where this process looks for machine code."""


def njit(*function: Callable[..., Any], cache: Any = False, **options: Any) -> Any:
    """Do as `numba.njit`; `cache`: keep the machine code in checked files."""

    def compile_lazily(py_func: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(py_func)
        if cache:
            setattr(dispatcher, "_cache", make_cache(py_func))  # noqa: B010  # what `enable_caching` sets; numba has no public way
        return dispatcher

    return compile_lazily(*function) if function else compile_lazily


def clear() -> None:
    """Remove all machine code that this process could load, so that it is compiled again."""
    for folder in _folders:
        clear_folder(folder)


def clear_folder(folder: Path) -> None:
    """Remove all machine code in a folder; what cannot be removed is left."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            path.unlink()


def make_cache(py_func: Callable[..., Any]) -> CodeCache | NullCache:
    """Return a function's cache; one that keeps nothing if no folder can be written."""
    try:
        return CodeCache(py_func)
    except RuntimeError:  # numba's, if every locator has declined
        report_unusable()
        return NullCache()


class CodeCache(NullCache):
    """The compiled variants of one function, a file each: a SHA-256 digest, then the pickled signature and code.

    The digest covers numba's version and the function's source file as well, so that code of another version is not even unpickled.
    """

    def __init__(self, py_func: Callable[..., Any]) -> None:
        """Raises RuntimeError if no folder can be written."""
        self._py_func, self._impl = py_func, _Located(py_func)
        self._folder = Path(self._impl.locator.get_cache_path())
        self._version = dumps((numba.__version__, self._impl.locator.get_source_stamp(), py_func.__code__.co_code))
        self._enabled = True
        _folders.add(self._folder)

    @property
    def cache_path(self) -> str:
        return str(self._folder)

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def flush(self) -> None:
        for path in self._folder.glob(f"{self._impl.filename_base}.*{SUFFIX}"):
            path.unlink(missing_ok=True)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what was compiled for a signature; None if that is not there, or not whole."""
        target_context.refresh()
        key = self._key(sig, target_context.codegen())
        try:
            raw = self._path(key).read_bytes() if self._enabled else b""
        except OSError:
            return None
        digest, content = raw[:_DIGEST], raw[_DIGEST:]
        if digest != self._digest(content):
            return None
        of, payload = pickle.loads(content)
        return self._impl.rebuild(target_context, payload) if of == key else None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled for a signature, if the folder can be written."""
        if not self._enabled or not self._impl.check_cachable(data):
            return
        key = self._key(sig, data.codegen)
        content = dumps((key, self._impl.reduce(data)))
        path = self._path(key)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{uuid.uuid4().hex[:16]}")
            try:
                partial.write_bytes(self._digest(content) + content)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError:
            report_unusable()

    def _digest(self, content: bytes) -> bytes:
        return hashlib.sha256(self._version + content).digest()

    def _path(self, key: Any) -> Path:
        return self._folder / f"{self._impl.filename_base}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}{SUFFIX}"

    def _key(self, sig: Any, codegen: Any) -> Any:
        """The variant: types of the arguments, processor, and what the function closes over."""
        cells = tuple(cell.cell_contents for cell in self._py_func.__closure__ or ())
        return sig, codegen.magic_tuple(), hashlib.sha256(dumps(cells)).hexdigest()


class _UserCacheLocator(UserProvidedCacheLocator):
    """Our own folder of the user's, if the package's cannot be written."""

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        super().__init__(py_func, py_file)
        self._cache_path = str(cache_dir() / "numba" / self.get_suitable_cache_subpath(py_file))

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _UserCacheLocator | None:
        try:
            locator = cls(py_func, py_file)
            locator.ensure_cache_path()
        except (OSError, RuntimeError):  # RuntimeError: there is no home
            return None
        return locator


class _Located(CompileResultCacheImpl):
    _locator_classes = (UserProvidedCacheLocator, InTreeCacheLocator, _UserCacheLocator)


@functools.cache
def report_unusable() -> None:
    """Log once in a process that every start has to compile."""
    log.warning("compiled code cannot be kept, so every start compiles it again (NGRAMSPEC_CACHE may name a folder with room)")
