"""Compile functions with numba and keep their machine code on disk, checked when it is read.

`njit` is numba's decorator with a cache of our own on the one dispatcher that it returns; nothing of numba is patched. A file that is
truncated or altered is compiled again, and replaced, which is logged once. If no folder can be written, functions are compiled for this
process only, which is logged once. Several processes may compile into one folder at once: a file's name follows from the function, its
version, the processor and the types of its arguments, and it appears by rename; processes that need the same file wait for the first to
write it. What is in no folder may have come with the package (`bundled_code`). The module does not know what is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import logging
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba.core.caching import CompileResultCacheImpl, InTreeCacheLocator, NullCache, UserProvidedCacheLocator
from numba.core.runtime import _nrt_python
from numba.core.serialize import dumps

from . import bundled_code
from .cache_dir import cache_dir
from .code_digest import compute_code_digest
from .partial_files import SUFFIX as PARTIAL_SUFFIX
from .partial_files import remove_stale, write_whole

log = logging.getLogger(__name__)
SUFFIX = ".nbc"  # of a file of machine code, as numba has it
WAIT_S = 60.0  # for another process to compile the same function; the largest takes 10 to 20 s
_DIGEST = hashlib.sha256().digest_size
_Processor = tuple[str, str, str]  # what LLVM compiles for: system, name of the processor, features
_turn = threading.Lock()
_caches: dict[Callable[..., Any], CodeCache] = {}  # by function


def njit(*function: Callable[..., Any], cache: Any = False, **options: Any) -> Any:
    """Do what `numba.njit` does; with `cache` the machine code is kept in checked files.

    A function with `parallel` is for Python alone to call: see `_take_turns`.
    """

    def compile_lazily(py_func: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(no_cfunc_wrapper=True, **options)(py_func)  # nobody calls from C
        if cache:
            setattr(dispatcher, "_cache", make_cache(py_func))  # noqa: B010  # what `enable_caching` sets; numba has no public way
        return _take_turns(dispatcher) if options.get("parallel") else dispatcher

    return compile_lazily(*function) if function else compile_lazily


def _take_turns(dispatcher: Any) -> Callable[..., Any]:
    """Let threads take turns in parallel loops if numba's threading layer serves one caller at a time.

    "workqueue", the layer of a macOS without OpenMP, aborts the process when two threads of it run parallel loops at once.
    """

    @functools.wraps(dispatcher.py_func)
    def call(*args: Any) -> Any:
        try:
            shared = numba.threading_layer() != "workqueue"
        except ValueError:  # no layer has been chosen yet
            shared = False
        if shared:
            return dispatcher(*args)
        with _turn:
            return dispatcher(*args)

    return call


def clear_all() -> None:
    """Remove all machine code that this process could load, so that it is compiled again."""
    bundled_code.switch_off()
    for folder in {Path(cache.cache_path) for cache in _caches.values()}:
        clear_folder(folder)


def clear_folder(folder: Path) -> None:
    """Remove all machine code in a folder; what cannot be removed is left."""
    _remove(folder.glob(f"*{SUFFIX}"))


def make_cache(py_func: Callable[..., Any]) -> CodeCache:
    """Return a function's cache, which keeps nothing if no folder can be written."""
    _caches[py_func] = CodeCache(py_func)
    return _caches[py_func]


def is_kept(dispatcher: Any, types: str = "") -> bool:
    """Return whether machine code of this version of a compiled function, for this processor, is on disk, and none of it damaged.

    `types`: it is for arguments whose types, as text, contain this. Remove what is damaged.
    """
    cache = _caches.get(dispatcher.py_func)
    return cache is not None and cache.has_files(dispatcher.targetctx.codegen(), types)


def is_writable(dispatcher: Any) -> bool:
    """Return whether a compiled function's machine code can be kept."""
    cache = _caches.get(dispatcher.py_func)
    if cache is None:
        return False
    try:
        check_writable(cache.cache_path)
    except OSError:
        return False
    return True


class CodeCache(NullCache):
    """The compiled variants of one function, a file each: a SHA-256 digest, then the pickled signature and code.

    The digest covers numba's version, the text of the function's source file and the code of all that it calls as well, so that code of
    another version is not even unpickled.
    Saving a variant removes the function's files of earlier versions, wherever in the module it was, so that edits and upgrades do not pile
    up machine code.
    """

    def __init__(self, py_func: Callable[..., Any]) -> None:
        """Keep the code of a function; most are called by compiled code alone, and their caches remain unused."""
        self._py_func = py_func
        self._enabled = True
        self._turns: dict[Path, Any] = {}  # locks of the files that this process compiles

    @functools.cached_property
    def _impl(self) -> _CacheImpl:
        return _CacheImpl(self._py_func)

    @functools.cached_property
    def _folder(self) -> Path:
        return Path(self._impl.locator.get_cache_path())

    @property
    def cache_path(self) -> str:
        return str(self._folder)

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def flush(self) -> None:
        _remove(self._find_files())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what was compiled for a signature; None if that is not there, or not whole: then this process compiles it."""
        if not self._enabled:
            return None
        if (found := self._find_overload(sig, target_context)) is not None:
            return found
        path = self._folder / self._make_name(self._make_key(sig, _find_processor(target_context.codegen())))
        self._take_turn(path)
        if (found := self._find_overload(sig, target_context)) is not None:
            self._end_turn(path)
        return found

    def _find_overload(self, sig: Any, target_context: Any) -> Any:
        for folder, processor in self._list_sources(target_context.codegen()):
            key = self._make_key(sig, processor)
            try:
                content = self._read_content(folder / self._make_name(key))
            except OSError:
                continue
            if content is None:
                report_damaged()
                continue
            try:
                of, payload = pickle.loads(content)
            except (AttributeError, ImportError):  # the function is as it was, but a type of its arguments has moved
                continue
            if of == key:
                return self._impl.link_code(target_context, payload)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled for a signature, if the folder can be written."""
        path = self._folder / self._make_name(key := self._make_key(sig, _find_processor(data.codegen)))
        try:
            if self._enabled and self._impl.check_cachable(data):
                self._write_content(path, dumps((key, self._impl.reduce(data))))
        except OSError:
            report_unusable()
        finally:
            self._end_turn(path)

    def _write_content(self, path: Path, content: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        _remove(path for path in self._find_files() if not path.name.startswith(self._name))
        for pattern in (f".*{PARTIAL_SUFFIX}", "*.lock"):
            remove_stale(self._folder, pattern)
        if path in self._turns:  # so that nobody else writes it
            remove_stale(self._folder, f".{glob.escape(path.name)}.*{PARTIAL_SUFFIX}", 0)
        write_whole(path, self._compute_digest(content) + content)

    def _take_turn(self, path: Path) -> None:
        """Wait until no other process compiles what is to be in this file."""
        from filelock import FileLock  # imports asyncio, which a start that compiles nothing need not wait for

        if path not in self._turns:
            lock = FileLock(path.with_suffix(".lock"))
            with contextlib.suppress(OSError):  # a timeout is one, too
                lock.acquire(timeout=WAIT_S)
                self._turns[path] = lock

    def _end_turn(self, path: Path) -> None:
        if lock := self._turns.pop(path, None):
            lock.release()
            _remove([path.with_suffix(".lock")])

    def _read_content(self, path: Path) -> bytes | None:
        """Return a file's pickled signature and code, None if it is damaged. Raises OSError."""
        raw = path.read_bytes()
        content = raw[_DIGEST:]
        return content if raw[:_DIGEST] == self._compute_digest(content) else None

    @functools.cached_property
    def _name(self) -> str:
        """What names of this version's files begin with."""
        return f"{self._impl.filename_base}.{hashlib.sha256(self._version).hexdigest()[:8]}-"

    @functools.cached_property
    def _version(self) -> bytes:
        """What the digests of this version's files begin with; first read by a call, when the modules of all callees are imported."""
        source = _digest_file(Path(self._py_func.__code__.co_filename))
        return numba.__version__.encode() + source + compute_code_digest(self._py_func)

    def _compute_digest(self, content: bytes) -> bytes:
        return hashlib.sha256(self._version + content).digest()

    def has_files(self, codegen: Any, types: str = "") -> bool:
        """Return whether any variant of this version for this processor is on disk, and none of them damaged.

        `types`: see `is_kept`. Remove damaged ones of the user's, so that they count once.
        """
        own, *bundled = (
            list(folder.glob(f"{glob.escape(self._name_variants(processor))}*")) for folder, processor in self._list_sources(codegen)
        )
        damaged = [path for path in own if self._is_damaged(path)]
        _remove(damaged)
        return not damaged and any(not types or types in self._read_types(path) for paths in (own, *bundled) for path in paths)

    def _read_types(self, path: Path) -> str:
        """Return the types of the arguments that a file's code is for, as text; "" if it cannot be read."""
        try:
            content = self._read_content(path)
            return "" if content is None else str(pickle.loads(content)[0][0])
        except (OSError, AttributeError, ImportError):  # a type of the arguments has moved
            return ""

    def _is_damaged(self, path: Path) -> bool:
        try:
            return self._read_content(path) is None
        except OSError:
            return False

    def _find_files(self) -> Iterator[Path]:
        name, _, line = self._impl.filename_base.rpartition("-")  # "module.function-116.py311": its first line, and Python's version
        return self._folder.glob(f"{glob.escape(name)}-*.{line.partition('.')[2]}.*{SUFFIX}")

    def _list_sources(self, codegen: Any) -> list[tuple[Path, _Processor]]:
        """Return where code for this processor may be, and what it was compiled for: the user's first, then what came with the package."""
        host = _find_processor(codegen)
        sources = [(self._folder, host)]
        if bundle := bundled_code.find_bundle():
            folder, level = bundle
            sources.append((folder, (host[0], *level)))
        return sources

    def _name_variants(self, processor: _Processor) -> str:
        """Return what the names of all variants for a processor begin with."""
        return f"{self._name}{_hash_short(processor)}-"

    def _make_name(self, key: tuple[Any, _Processor, str]) -> str:
        return f"{self._name_variants(key[1])}{_hash_short(key, 16)}{SUFFIX}"

    def _make_key(self, sig: Any, processor: _Processor) -> tuple[Any, _Processor, str]:
        """Return what tells variants apart: types of the arguments, processor, and what the function closes over."""
        cells = tuple(cell.cell_contents for cell in self._py_func.__closure__ or ())
        return sig, processor, hashlib.sha256(dumps(cells)).hexdigest()


def _find_processor(codegen: Any) -> _Processor:
    """Return what is compiled for, code that checks bounds (NUMBA_BOUNDSCHECK) apart from code that does not."""
    system, name, features = codegen.magic_tuple()
    return system, name, f"{features},bounds" if bundled_code.checks_bounds() else features


def _hash_short(value: Any, n: int = 8) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:n]


def _digest_file(path: Path) -> bytes:
    status = path.stat()
    return _digest_once(path, status.st_mtime_ns, status.st_size)


@functools.cache
def _digest_once(path: Path, *_changed: int) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


class _CheckedOnce:
    """Finds out once for a folder, and not for each of its functions, whether it can be written."""

    get_cache_path: Callable[[], str]

    def ensure_cache_path(self) -> None:
        """Raises OSError."""
        _check_once(self.get_cache_path())


@functools.cache
def _check_once(folder: str) -> None:
    check_writable(folder)


def check_writable(folder: str) -> None:
    """Make a folder and write to it. Raises OSError."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


class _EnvironmentLocator(_CheckedOnce, UserProvidedCacheLocator):
    pass


class _PackageLocator(_CheckedOnce, InTreeCacheLocator):
    pass


class _UserCacheLocator(_CheckedOnce, UserProvidedCacheLocator):
    """Locates the cache in a folder of ngramspec's in the user's cache, if the package's own folder cannot be written."""

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


class _NoLocator(UserProvidedCacheLocator):
    """Stands for a folder if none can be written: reading finds nothing there, and writing raises OSError."""

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        super().__init__(py_func, py_file)
        self._cache_path = os.devnull

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _NoLocator:
        return cls(py_func, py_file)


class _CacheImpl(CompileResultCacheImpl):
    _locator_classes = (_EnvironmentLocator, _PackageLocator, _UserCacheLocator, _NoLocator)

    def link_code(self, target_context: Any, payload: Any) -> Any:
        """Link what a file holds. Its bitcode is parsed when a function is compiled that includes it, and what numba knows of how functions
        are compiled is imported by numba then: together a fifth of the time of a start that compiles nothing."""
        (name, kind, (code, bitcode)), fndesc, *rest = payload
        _register_runtime()
        target_context.codegen()._engine._defined_symbols |= {fndesc.llvm_func_name, fndesc.llvm_cpython_wrapper_name}
        found = self.rebuild(target_context, ((name, kind, (code, _empty_bitcode())), fndesc, *rest))
        found.library._get_module_for_linking = functools.cache(functools.partial(binding.parse_bitcode, bitcode))
        return found


@functools.cache
def _register_runtime() -> None:
    """Tell LLVM where numba's functions are that manage memory. Those that numba compiles first are in the machine code that calls them."""
    for name, address in _nrt_python.c_helpers.items():
        binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


@functools.cache
def _empty_bitcode() -> bytes:
    return bytes(binding.parse_assembly("").as_bitcode())


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


@functools.cache
def report_damaged() -> None:
    """Log once in a process that it has to compile."""
    log.warning("compiled code on disk is damaged, so it is compiled again, which may take minutes")


@functools.cache
def report_unusable() -> None:
    """Log once in a process that every start has to compile."""
    log.warning("compiled code cannot be kept, so every start compiles it again (NGRAMSPEC_CACHE may name a folder with room)")
