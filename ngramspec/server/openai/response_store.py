"""Responses that later requests may refer to, for each tenant the latest ones that fit into its share of memory.

Answers of /v1/responses and the items that led to them enter; they leave to requests of the same tenant alone. Used from one event loop.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, NamedTuple

from ngramspec.server.error_responses import ApiError

MAX_BYTES = 16 << 20  # of a tenant's stored responses, as JSON: some hundred long conversations


class StoredResponse(NamedTuple):
    """An answer and its conversation."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    """The items of input, with those of the responses before, and of output."""
    n_bytes: int


class ResponseStore:
    """The responses of all tenants. The oldest of a tenant make room for its new ones."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tenants: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._items: dict[tuple[str, str], dict[str, Any]] = {}  # of output, by tenant and id
        self._n_bytes: dict[str, int] = {}

    def put(self, tenant: str, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Store a response, unless it takes more than all of the tenant's share."""
        stored = StoredResponse(response, items, len(json.dumps([response, items], ensure_ascii=False).encode()))
        if stored.n_bytes > self._max_bytes:
            return
        responses = self._tenants.setdefault(tenant, OrderedDict())
        responses[response["id"]] = stored
        self._items |= {(tenant, item["id"]): item for item in response["output"]}
        self._n_bytes[tenant] = self._n_bytes.get(tenant, 0) + stored.n_bytes
        while self._n_bytes[tenant] > self._max_bytes:
            self.delete(tenant, next(iter(responses)))

    def get(self, tenant: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raises ApiError 404 if this tenant has none of this id. `param`: the field that names it."""
        stored = self._tenants.get(tenant, OrderedDict()).get(response_id)
        if stored is None:
            why = f"there is no response {response_id[:100]!r}: it was not stored, or made room for later ones"
            raise ApiError(404, why, param=param, code="response_not_found")
        return stored

    def get_item(self, tenant: str, item_id: str, param: str) -> dict[str, Any]:
        """Return an item of a stored response's output. Raises ApiError 404 as `get` does."""
        item = self._items.get((tenant, item_id))
        if item is None:
            why = f"{param}: there is no item {item_id[:100]!r} in the output of a stored response"
            raise ApiError(404, why, param=param, code="item_not_found")
        return item

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a stored response. Raises ApiError 404 as `get` does."""
        stored = self.get(tenant, response_id)
        self._n_bytes[tenant] -= stored.n_bytes
        del self._tenants[tenant][response_id]
        for item in stored.response["output"]:
            del self._items[tenant, item["id"]]
