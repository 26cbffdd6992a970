"""Download models from the Hugging Face hub: the files of a folder, or one GGUF file (with its parts) of a repository.

A repository's name enters, a path in the hub's cache leaves; progress is reported by messages. Without a connection the cache is used. The
module does not read what it downloads.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ngramspec.errors import ModelNotFoundError

Progress = Callable[[str], None]
GGUF_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+?)(?::(?P<tag>[\w.-]+)|/(?P<file>[\w./-]+\.gguf))", re.IGNORECASE)
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-\d{5}\.gguf", re.IGNORECASE)
# Quantisations of which a repository's file is meant by a name without one, the first that is there; llama.cpp's begins alike.
PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")
HUB_S = 5.0  # seconds for the hub to say which files a repository has; its client's default is to wait on
# Words in names of files that are no language models by themselves: projectors of images and sound, importance matrices.
_BESIDE = ("mmproj", "imatrix")


class GgufName(NamedTuple):
    """The name of a GGUF file in a repository: org/name:Q4_K_M, org/name/file.gguf, or org/name for the `PREFERRED` one."""

    name: str
    tag: str | None
    file: str | None

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}" if self.tag else f"{self.name}/{self.file}" if self.file else self.name


def parse_gguf_name(spec: str) -> GgufName | None:
    """Return the parts of a GGUF file's name on the hub; None for any other name."""
    found = GGUF_NAME.fullmatch(spec)
    return GgufName(found["name"], found["tag"], found["file"]) if found and ".." not in spec else None


def _group_parts(files: list[str]) -> dict[str, list[str]]:
    """Return the GGUF files among a repository's files, all parts of one together, by their names without number and ending."""
    models = sorted(f for f in files if f.lower().endswith(".gguf") and not any(word in f.lower() for word in _BESIDE))
    groups: dict[str, list[str]] = {}
    for file in models:
        part = _PART.fullmatch(file)
        groups.setdefault(part["stem"] if part else file[: -len(".gguf")], []).append(file)
    return groups


def select_files(wanted: GgufName, files: list[str]) -> list[str]:
    """Return the files of a repository that a name means: one, or all parts of one. Raises ModelNotFoundError."""
    groups = _group_parts(files)

    def find(quantisation: str) -> list[list[str]]:
        tag = re.compile(rf"(?:.*[-._/])?{re.escape(quantisation)}", re.IGNORECASE)
        return [group for stem, group in groups.items() if tag.fullmatch(stem)]

    if wanted.tag is not None:
        chosen = find(wanted.tag)
    elif wanted.file is not None:
        chosen = [group for group in groups.values() if wanted.file in group]
    else:
        chosen = next(filter(None, map(find, PREFERRED)), list(groups.values()))[:1]
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        raise ModelNotFoundError(f"{str(wanted)!r} means several files; accepted: {', '.join(f'{wanted.name}/{g[0]}' for g in chosen)}")
    asked = wanted.tag or wanted.file
    there = ", ".join(group[0] for group in groups.values()) or "none"
    raise ModelNotFoundError(f"{wanted.name!r} has no GGUF file{f' {asked!r}' if asked else ''}; its GGUF files: {there}")


def list_files(wanted: GgufName) -> list[str]:
    """Return the files that a name means, from the hub's list or, without a connection, the cache. Raises ModelNotFoundError."""
    return _find_files(wanted)[0]


def _find_files(wanted: GgufName) -> tuple[list[str], bool]:
    """Return the files that a name means, and whether they are from the cache, since the hub could not be asked."""
    import huggingface_hub
    from huggingface_hub import errors as hub_errors

    with _translate_errors(wanted.name):
        files, unreachable = _ask_hub(wanted.name)
        if unreachable is not None:
            try:
                folder = Path(huggingface_hub.snapshot_download(wanted.name, local_files_only=True))
                files = _list_cached(folder)
            except hub_errors.LocalEntryNotFoundError:
                raise unreachable from None  # what the hub said matters
            try:
                return select_files(wanted, files), True
            except ModelNotFoundError as error:
                raise ModelNotFoundError(f"in the cache {error}, and the hub could not be asked: {_read_reason(unreachable)}") from None
    return select_files(wanted, files), False


def _ask_hub(name: str) -> tuple[list[str], Exception | None]:
    """Return the files of a repository, or what has kept the hub from telling them within HUB_S. Raises what it says of the name."""
    import huggingface_hub
    from huggingface_hub import errors as hub_errors

    try:
        # Asked once: `list_repo_files` tries again for 23 seconds if there is no connection, and waits on where nothing comes.
        about = huggingface_hub.HfApi().model_info(name, timeout=HUB_S)
    except (hub_errors.RepositoryNotFoundError, hub_errors.HFValidationError):
        raise
    except Exception as error:  # the hub client raises its HTTP library's errors as they are
        return [], error
    return [each.rfilename for each in about.siblings or ()], None


def download_gguf(wanted: GgufName, progress: Progress | None = None) -> Path:
    """Return the GGUF file that a name means, or its first part, from the hub or its cache. Raises ModelNotFoundError."""
    import huggingface_hub

    report = progress or (lambda message: None)
    report(f"looking up {wanted} on the hub")
    paths = []
    files, is_offline = _find_files(wanted)
    for file in files:
        with _translate_errors(wanted.name):
            bar = _make_reporter(file, report)
            paths.append(huggingface_hub.hf_hub_download(wanted.name, file, tqdm_class=bar, local_files_only=is_offline))
    return Path(paths[0])


def download_folder(name: str, patterns: list[str], progress: Progress | None = None) -> Path:
    """Return the folder of a hub repository's files by these patterns, from the hub or its cache. Raises ModelNotFoundError."""
    import huggingface_hub
    import huggingface_hub.utils
    from huggingface_hub import errors as hub_errors

    if progress:
        progress(f"looking up {name} on the hub")
    bars = not huggingface_hub.utils.are_progress_bars_disabled()
    huggingface_hub.utils.disable_progress_bars()
    try:
        with _translate_errors(name):
            files, unreachable = _ask_hub(name)
            _check_holds_folder(name, files)
            offline, ignored = unreachable is not None, ["*/*", "consolidated*"]
            try:
                folder = Path(
                    huggingface_hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored, local_files_only=offline)
                )
            except hub_errors.LocalEntryNotFoundError as error:
                raise unreachable or error from None
            if offline:
                _check_holds_folder(name, _list_cached(folder))
            return folder
    finally:
        if bars:
            huggingface_hub.utils.enable_progress_bars()


def _list_cached(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*")]


def _check_holds_folder(name: str, files: list[str]) -> None:
    """Raise ModelNotFoundError if a repository holds GGUF files alone, of which the name of a folder says not which."""
    groups = _group_parts(files)
    if groups and not any(file.endswith(".safetensors") or "tokenizer" in file for file in files):
        there = ", ".join(f"{name}/{group[0]}" for group in groups.values())
        raise ModelNotFoundError(f"{name!r} has no safetensors; name one of its GGUF files: {there}")


def _make_reporter(file: str, report: Progress) -> type[Any]:
    """Return a class of progress bars that report a file's download at every tenth of it."""
    from tqdm import tqdm

    class Reporter(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._size, self._done, self._lock_done = options.get("total") or 0, options.get("initial") or 0, threading.Lock()
            super().__init__(*args, **{**{k: v for k, v in options.items() if k != "name"}, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            with self._lock_done:
                before, self._done = self._done, self._done + int(n or 0)
                if self._size and before * 10 // self._size != self._done * 10 // self._size:
                    report(f"downloading {file}: {self._done * 100 // self._size} % of {self._size / 1e9:.2f} GB")
            return None

    return Reporter


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Turn whatever the hub's client raises into a ModelNotFoundError."""
    from huggingface_hub import errors as hub_errors

    try:
        yield
    except ModelNotFoundError:
        raise
    except hub_errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"the hub gives {name!r} only to accounts that its owners accepted; log in with `hf auth login`"
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"{name!r} is neither a local folder nor a model on the hub") from error
    except Exception as error:
        reason = _read_reason(error)
        raise ModelNotFoundError(f"{name!r} is not a local folder, and the hub could not be asked for it (offline?): {reason}") from error


def _read_reason(error: Exception) -> str:
    """Return an error's first line. The hub client raises its HTTP library's errors as they are, and which library that is has changed."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
