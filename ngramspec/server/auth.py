"""Who asks, and what they may: keys, tenants, datastores, names of hosts.

A request's headers enter, an `Identity` or an ApiError leaves. The application applies `identify` to every route; `OPEN` lists the routes
that need no key, and there are no others.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader, HTTPBearer

from ngramspec.server import logs
from ngramspec.server.error_responses import ApiError
from ngramspec.server.repositories import Repositories
from ngramspec.server.settings import Key, ServerSettings

NAMES_LISTED = 20  # datastores that an error message names
REFRESH_S = 1.0  # between two looks at the file of keys
# (method, path template) of every route that answers without a key: nothing in them comes from a model or a store.
OPEN = frozenset({("GET", "/live"), ("GET", "/health"), ("GET", "/v1/health"), ("GET", "/"), ("GET", "/static/{name}")})

Headers = Sequence[tuple[bytes, bytes]]

# A name or an IPv6 address, and maybe a port.
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\s:/@\[\]]+))(?::[0-9]{0,5})?")
# Headers by which a proxy says for whom it asks, beside `X-Forwarded-…`.
_PROXIED = frozenset({"forwarded", "via", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "true-client-ip", "cf-connecting-ip"})
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sent a request."""

    name: str
    """The key's name, for logs; "" where the server has no keys."""
    admin: bool
    """May administer: an administrator's key, or, without keys, this machine where the settings say `admin_on_loopback`."""
    tenant: str
    """Answers and cached prompts are shared within a tenant, and never beyond."""
    stores: frozenset[str] | None
    """Names of the datastores that may be used; None: all."""
    local: bool
    """The request came from this machine, through no proxy."""
    hidden: frozenset[str] = frozenset()
    """Names of the datastores that are drafted from only if the request names them: other working trees'."""

    @property
    def trusted(self) -> bool:
        """May see where drafts come from, and detailed statistics: they tell what a store holds."""
        return self.admin or (self.local and not self.name)

    def choose_datastores(self, asked: str | Sequence[str] | None, known: Collection[str]) -> list[str] | None:
        """Return the names to draft from for a request that asks for these (None: whatever it may use), of those that are `known`.

        None stands for all of them. A store that this identity may not use is as unknown as one that is not there.
        """
        if asked is None:
            return None if self.stores is None and not self.hidden else sorted(self._list_usable(known) - self.hidden)
        names = [asked] if isinstance(asked, str) else list(dict.fromkeys(asked))
        usable = self._list_usable(known)
        if unknown := [name for name in names if name not in usable]:
            listed = ", ".join(sorted(usable)[:NAMES_LISTED]) + (", …" if len(usable) > NAMES_LISTED else "")
            there = f"; accepted: {listed}" if usable else "; there is none"
            raise ApiError(400, f"unknown datastore {unknown[0][:100]!r}{there}", param="datastore", code="unknown_datastore")
        return names

    def _list_usable(self, known: Collection[str]) -> set[str]:
        return set(known) if self.stores is None else set(known) & self.stores

    def in_tree(self, name: str | None, trees: Repositories) -> Identity:
        """Return who asks at the address of a tree; None: at the server's own. Several trees share neither answers nor cached prompts.

        Raises ApiError 404 where there is no such tree, or none that may be used.
        """
        if name is not None and (name not in trees.trees or (self.stores is not None and name not in self.stores)):
            raise ApiError(404, f"there is no repository {name[:100]!r}", code="unknown_repository")
        tenant = f"{self.tenant}/{name}" if name is not None and len(trees.trees) > 1 else self.tenant
        return replace(self, tenant=tenant, hidden=trees.get_hidden_stores(name)) if trees.trees else self


class Keyring:
    """The keys of a server, as digests."""

    def __init__(self, keys: Iterable[Key], settings: ServerSettings | None = None) -> None:
        """Hold these keys; with `settings`, those in its file too, as it changes."""
        self._settings, self._looked_s, self._stamp = settings, time.monotonic(), _read_stamp(settings)
        self._set_keys(keys)

    def _set_keys(self, keys: Iterable[Key]) -> None:
        self._keys = [(_digest(key.key.get_secret_value().encode()), key) for key in keys]

    def refresh(self) -> None:
        """Read the file of keys again if it has changed; looks at most once a second. One that cannot be read changes nothing."""
        if self._settings is None or self._settings.api_key_file is None or time.monotonic() - self._looked_s < REFRESH_S:
            return
        self._looked_s = time.monotonic()
        if (stamp := _read_stamp(self._settings)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._set_keys(self._settings.load_keys())
        except ValueError as error:
            logs.log_event("keys", f"the file of keys has changed and cannot be used, the keys before still hold: {error}")  # holds no key
        else:
            logs.log_event("keys", f"the file of keys has changed: {len(self._keys)} keys hold now")

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, given: bytes) -> Key | None:
        """Return the key that was given. Compares with every one of them, in constant time each, whatever was given."""
        digest, found = _digest(given), None
        for known, key in self._keys:
            if hmac.compare_digest(known, digest):
                found = key
        return found


def _read_stamp(settings: ServerSettings | None) -> tuple[int, int, int] | None:
    """Return what changes with the file of keys; None if there is none."""
    if settings is None or settings.api_key_file is None:
        return None
    try:
        status = settings.api_key_file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


_bearer = HTTPBearer(auto_error=False, description="One of the server's keys.")
_header = APIKeyHeader(name="X-Api-Key", auto_error=False, description="The same, for clients that cannot send a bearer token.")


async def identify(
    request: Request,
    _: Annotated[object, Security(_bearer)] = None,  # these two stand for the key in the OpenAPI document
    __: Annotated[object, Security(_header)] = None,
) -> Identity:
    """Return who sends this request; a dependency of routes. Raises ApiError 401 if a key is needed and none of the server's is given."""
    state = request.app.state.server
    local = is_local(request)
    route = request.scope.get("route")
    if not len(state.keyring):
        admin = local and state.settings.admin_on_loopback
        return _enter_tree(request, Identity("", admin=admin, tenant="", stores=None, local=local))
    key = request.state.key  # which the middleware has looked up
    if key is not None:
        return _enter_tree(request, Identity(key.name, key.admin, key.name, key.stores, local))
    if (request.method, getattr(route, "path", None)) in OPEN:
        return Identity("", admin=False, tenant="", stores=frozenset(), local=local)
    state.metrics.count_refused("unauthorized")
    missing = given_key(request.scope["headers"]) is None
    problem = "needs a key: send it as `Authorization: Bearer KEY`" if missing else "does not know this key"
    raise ApiError(401, f"this server {problem}", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def require_administrator(request: Request, identity: Annotated[Identity, Depends(identify)]) -> Identity:
    """Return who asks, if it is an administrator. Raises ApiError 403, also if a page of another site asks to change something."""
    if not identity.admin:
        allow = "the server was started without keys; --admin-key KEY makes one, --admin-on-loopback lets requests from its own machine in"
        raise ApiError(403, "this needs an administrator's key" + ("" if len(request.app.state.server.keyring) else f": {allow}"))
    if request.method not in ("GET", "HEAD"):
        check_site(request.scope["headers"], request.app.state.server.settings)
    return identity


async def require_operator(request: Request, identity: Annotated[Identity, Depends(identify)]) -> Identity:
    """Return who asks, for routes that tell of all tenants together. Raises ApiError 403 for a key that is no administrator's."""
    if len(request.app.state.server.keyring) and not identity.admin:
        raise ApiError(403, "this tells of every key's requests, and needs an administrator's key")
    return identity


def check_site(headers: Headers, settings: ServerSettings) -> None:
    """Check that a request which changes something was sent by a program, by a page of ours, or by one of a site that may: a browser says
    so, whatever the request has for a body. Raises ApiError 403."""
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    if origins and all(origin != "*" and origin in settings.cors_origins for origin in origins):
        return
    sites = {value.lower() for name, value in headers if name == b"sec-fetch-site"}
    hosts = {value.decode("latin-1").lower() for name, value in headers if name == b"host"}
    own = all(origin.lower().removeprefix("http://").removeprefix("https://") in hosts for origin in origins)
    if not own or not sites <= {b"same-origin", b"none"}:
        raise ApiError(403, "a page of another site may not change anything here; --cors-origin lets a site in")


def given_key(raw: Headers) -> bytes | None:
    """Return the key in a request's headers: one bearer token, else one X-Api-Key. Of two of a kind none counts."""
    bearers = [value for name, value in raw if name == b"authorization"]
    if len(bearers) == 1:
        scheme, _, key = bearers[0].partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else b""
    others = [value for name, value in raw if name == b"x-api-key"]
    if bearers or len(others) > 1:
        return b""
    return others[0].strip() if others else None


def is_local(request: Request) -> bool:
    """Return whether a request comes from this machine. One that a proxy passed on does not, whoever sent it there."""
    if any(name in _PROXIED or name.startswith("x-forwarded-") for name in request.headers):
        return False
    if request.client is None:
        return is_unix_socket(request.app.state.server.settings.host)
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


class AllowedHosts:
    """Which `Host` a request may name. Without keys, a page of another site could else reach the server by a name that resolves to it."""

    def __init__(self, settings: ServerSettings) -> None:
        self.checked = not settings.api_keys
        self.names = {name.lower() for name in (*LOOPBACK_NAMES, *settings.allowed_hosts)}
        self.addresses = not all(map(is_loopback, settings.hosts))
        """Bound to other addresses, any literal address is fine: no name is resolved for it."""
        self.names |= {host.rpartition("/")[2].lower() for host in settings.hosts} - {"0.0.0.0", "::", ""}  # of a socket, its file's name

    def is_allowed(self, host: bytes | None) -> bool:
        if not self.checked:
            return True
        if host is None:
            return False
        parts = _HOST.fullmatch(host.decode("latin-1").lower())
        if parts is None:
            return False
        name = parts["address"] or parts["name"].removesuffix(".")
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.addresses


def is_unix_socket(host: str) -> bool:
    """Return whether an address to bind is the path of a Unix socket, by its end, as in llama.cpp."""
    return host.endswith(".sock")


def is_loopback(host: str) -> bool:
    """Return whether an address to bind is reachable from this machine only."""
    if is_unix_socket(host):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _enter_tree(request: Request, identity: Identity) -> Identity:
    return identity.in_tree(getattr(request.state, "repository", None), request.app.state.server.repositories)
