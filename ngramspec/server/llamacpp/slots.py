"""llama.cpp's saved slots: the tokens of a client's latest request, kept in a file and computed again from it.

What was computed for the tokens is in the prefix cache, and with `prefix_cache_path` on disk; a slot's file only says which tokens they
are. Each tenant has a folder and slots of its own. Token ids and names of files enter and leave. Knows neither routes nor the engine.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from ngramspec.datastore.cache_dir import expand_home
from ngramspec.datastore.partial_files import remove_stale, write_whole
from ngramspec.server.error_responses import ApiError, make_field_error

MAX_FILES = 1000  # of a tenant
_BYTES_PER_TOKEN = 12  # of a file: digits, a comma and a blank
_MAX_HEAD = 4096  # bytes of a file without its tokens
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


class SavedSlots:
    """The slots of all tenants."""

    def __init__(self, folder: Path, model: str, *, n_slots: int, vocab_size: int, max_tokens: int) -> None:
        """Keep slots in this folder, which need not be there. `model`: whose tokens these are; `max_tokens`: most of a slot."""
        self._folder, self._model, self._n_slots = expand_home(folder), model, n_slots
        self._vocab_size, self._max_tokens = vocab_size, max_tokens
        self._tokens: dict[tuple[str, int], array[int]] = {}

    def note_tokens(self, tenant: str, slot: int, tokens: list[int]) -> None:
        """Remember what a slot has now. A number that no slot has is passed over."""
        if 0 <= slot < self._n_slots:
            self._tokens[tenant, slot] = array("i", tokens[: self._max_tokens])

    def get_tokens(self, tenant: str, slot: int) -> list[int]:
        """Return what a slot has. Raises ApiError (400) for a number that no slot has."""
        if not 0 <= slot < self._n_slots:
            raise make_field_error("id_slot", f"must be 0 to {self._n_slots - 1}, got {slot}")
        return list(self._tokens.get((tenant, slot), ()))

    def erase_tokens(self, tenant: str, slot: int) -> int:
        """Forget what a slot has; return how many tokens that were. Raises ApiError (400)."""
        n = len(self.get_tokens(tenant, slot))
        self._tokens.pop((tenant, slot), None)
        return n

    def write(self, tenant: str, filename: str, tokens: list[int]) -> int:
        """Write a slot's file, in place of an earlier one; return its bytes. Raises ApiError."""
        path = self._get_path(tenant, filename)
        body = json.dumps({"model": self._model, "tokens": tokens}).encode()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists() and sum(1 for _ in path.parent.iterdir()) >= MAX_FILES:
                raise make_field_error("filename", f"{MAX_FILES} slots are saved already; give the name of one of them")
            remove_stale(path.parent)
            write_whole(path, body, 0o600)
        except OSError as error:
            raise ApiError(500, f"the slot cannot be saved: {error.strerror}", code="slot_not_saved") from None
        return len(body)

    def read(self, tenant: str, filename: str) -> tuple[list[int], int]:
        """Return the tokens in a slot's file, and its bytes. Raises ApiError (400)."""
        path = self._get_path(tenant, filename)
        most = _MAX_HEAD + _BYTES_PER_TOKEN * self._max_tokens
        try:
            if path.is_symlink() or not path.is_file():
                raise FileNotFoundError
            with path.open("rb") as file:
                body = file.read(most + 1)
        except OSError:
            raise make_field_error("filename", f"no slot was saved as {filename!r}", "slot_not_found") from None
        tokens = self._parse(body) if len(body) <= most else None
        if tokens is None:
            raise make_field_error("filename", f"{filename!r} is no slot of this model", "slot_not_usable")
        return tokens, len(body)

    def _parse(self, body: bytes) -> list[int] | None:
        """Return the tokens in a file; None if they are not this model's, or too many."""
        try:
            saved: Any = from_json(body)
        except ValueError:
            return None
        tokens = saved.get("tokens") if isinstance(saved, dict) and saved.get("model") == self._model else None
        if not isinstance(tokens, list) or len(tokens) > self._max_tokens:
            return None
        return tokens if all(type(token) is int and 0 <= token < self._vocab_size for token in tokens) else None

    def _get_path(self, tenant: str, filename: str) -> Path:
        """Return where a file is: in the tenant's own folder, whatever its name. Raises ApiError (400)."""
        if not _NAME.fullmatch(filename):
            why = "must be letters, digits, _, - and dots, up to 128, and begin with no dot"
            raise make_field_error("filename", f"{why}, got {filename[:40]!r}")
        return self._folder / hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:32] / filename
