"""Who may do what: every route against every kind of key, hosts, tenants, datastores. A route that is in no table fails."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from tiny_server import Server

from ngramspec.server import auth
from ngramspec.server.auth import Identity, Keyring
from ngramspec.server.error_responses import ApiError
from ngramspec.server.settings import Key, ServerSettings

OPEN, KEY, ADMIN = "open", "key", "admin"
TEXT: dict[str, Any] = {"prompt": "ab", "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
RESPONSE: dict[str, Any] = {"input": "a", "max_output_tokens": 1}
ROUTES: dict[tuple[str, str], tuple[str, str, Any, int]] = {
    # (method, template): who may, a path of it, a body, the status with a key that may
    ("GET", "/"): (OPEN, "/", None, 200),
    ("GET", "/static/{name}"): (OPEN, "/static/app.js", None, 200),
    ("GET", "/live"): (OPEN, "/live", None, 200),
    ("GET", "/health"): (OPEN, "/health", None, 200),
    ("GET", "/v1/health"): (OPEN, "/v1/health", None, 200),
    ("GET", "/openapi.json"): (KEY, "/openapi.json", None, 200),
    ("GET", "/metrics"): (ADMIN, "/metrics", None, 200),
    ("GET", "/playground/config"): (KEY, "/playground/config", None, 200),
    ("GET", "/v1/models"): (KEY, "/v1/models", None, 200),
    ("GET", "/v1/models/{name:path}"): (KEY, "/v1/models/none", None, 404),
    ("POST", "/v1/completions"): (KEY, "/v1/completions", TEXT, 200),
    ("GET", "/models"): (KEY, "/models", None, 200),
    ("POST", "/v1/chat/completions"): (KEY, "/v1/chat/completions", CHAT, 200),
    ("POST", "/chat/completions"): (KEY, "/chat/completions", CHAT, 200),
    ("POST", "/v1/responses"): (KEY, "/v1/responses", RESPONSE, 200),
    ("POST", "/responses"): (KEY, "/responses", RESPONSE, 200),
    ("GET", "/v1/responses/{response_id}"): (KEY, "/v1/responses/resp_a", None, 404),
    ("DELETE", "/v1/responses/{response_id}"): (KEY, "/v1/responses/resp_a", None, 404),
    ("GET", "/v1/responses/{response_id}/input_items"): (KEY, "/v1/responses/resp_a/input_items", None, 404),
    ("POST", "/v1/responses/{response_id}/cancel"): (KEY, "/v1/responses/resp_a/cancel", None, 400),
    ("POST", "/v1/responses/input_tokens"): (KEY, "/v1/responses/input_tokens", RESPONSE, 200),
    ("POST", "/v1/chat/completions/input_tokens"): (KEY, "/v1/chat/completions/input_tokens", CHAT, 200),
    ("POST", "/chat/completions/input_tokens"): (KEY, "/chat/completions/input_tokens", CHAT, 200),
    ("POST", "/v1/messages"): (KEY, "/v1/messages", {}, 400),
    ("POST", "/v1/messages/count_tokens"): (KEY, "/v1/messages/count_tokens", {}, 400),
    ("GET", "/api/version"): (KEY, "/api/version", None, 200),
    ("GET", "/api/tags"): (KEY, "/api/tags", None, 200),
    ("GET", "/api/ps"): (KEY, "/api/ps", None, 200),
    ("POST", "/api/show"): (KEY, "/api/show", {}, 400),
    ("POST", "/api/chat"): (KEY, "/api/chat", {}, 400),
    ("POST", "/api/generate"): (KEY, "/api/generate", {}, 400),
    ("GET", "/version"): (KEY, "/version", None, 200),
    ("GET", "/tokenizer_info"): (KEY, "/tokenizer_info", None, 200),
    ("GET", "/load"): (ADMIN, "/load", None, 200),
    ("POST", "/apply-template"): (KEY, "/apply-template", CHAT, 200),
    ("POST", "/infill"): (KEY, "/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 1}, 400),
    ("POST", "/completion"): (KEY, "/completion", {"prompt": "ab", "n_predict": 1}, 200),
    ("POST", "/completions"): (KEY, "/completions", {"prompt": "ab", "n_predict": 1}, 200),
    ("POST", "/tokenize"): (KEY, "/tokenize", {"content": "ab"}, 200),
    ("POST", "/detokenize"): (KEY, "/detokenize", {"tokens": [97]}, 200),
    ("GET", "/props"): (KEY, "/props", None, 200),
    ("GET", "/slots"): (ADMIN, "/slots", None, 200),
    ("POST", "/slots/{id_slot}"): (KEY, "/slots/0?action=erase", None, 400),
    ("GET", "/admin/datastores"): (ADMIN, "/admin/datastores", None, 200),
    ("GET", "/admin/repositories"): (ADMIN, "/admin/repositories", None, 200),
    ("PUT", "/admin/datastores/{name}"): (ADMIN, "/admin/datastores/a", {"path": "/nowhere"}, 400),
    ("POST", "/admin/datastores/{name}/update"): (ADMIN, "/admin/datastores/a/update", None, 404),
    ("DELETE", "/admin/datastores/{name}"): (ADMIN, "/admin/datastores/a", None, 404),
}
ODD_PATHS = (
    "/v1/models/",
    "/v1/models?api_key=reader-key",
    "//v1/models",
    "/health/../v1/models",
    "/health%2f..%2fv1%2fmodels",
    "/static/..%2f..%2fmetrics",
    "/static/../metrics",
    "/%76%31/models",
    "/v1/models;/health",
    "/V1/MODELS",
    "/v1/models%00",
    "/docs",
    "/redoc",
    "/admin",
    "/admin/datastores/",
)
READER, BOSS = "reader-key", "boss-key-1"


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """(method, path template) of everything that the application answers."""
    found = set()
    for route in iter_route_contexts(app.routes):
        assert route.methods, f"{route} is no plain route: it needs an entry of its own"
        found |= {(method, str(route.path)) for method in route.methods}
    return found


@pytest.fixture(scope="module")
def locked(make_server: Callable[..., Server]) -> Server:
    return make_server(ServerSettings(api_keys=(f"reader:{READER}",), admin_keys=(f"boss:{BOSS}",)))  # type: ignore[arg-type]


@pytest.fixture
def ask(locked: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=locked.url, timeout=60) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_is_in_the_table(locked: Server) -> None:
    assert routes_of(locked.app) == set(ROUTES)
    assert {route for route, (who, *_) in ROUTES.items() if who == OPEN} == auth.OPEN


@pytest.mark.parametrize("route", ROUTES, ids="{0[0]} {0[1]}".format)
def test_route_by_key(ask: httpx.Client, route: tuple[str, str]) -> None:
    method, _ = route
    who, path, body, status = ROUTES[route]

    def status_with(headers: dict[str, str]) -> int:
        response = ask.request(method, path, json=body, headers=headers)
        if response.status_code == 401:
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]  # in the envelope of the API whose route it is
            if path.startswith("/api/"):
                assert "key" in error
            else:
                assert error.get("code", error["type"]) == ("authentication_error" if "/messages" in path else "invalid_api_key")
        return response.status_code

    bad: list[dict[str, str]] = [
        {},
        bearer("wrong-key"),
        {"authorization": "Bearer"},
        bearer(READER + "x"),
        bearer(READER[:-1]),
        bearer(READER.upper()),
        bearer(f"reader:{READER}"),
        {"authorization": READER},
        {"authorization": f"Basic {READER}"},
        {"x-api-key": "wrong-key"},
        {"cookie": f"key={READER}"},
        {"authorization": "Bearer wrong-key", "x-api-key": READER},
    ]
    for headers in bad:
        assert status_with(headers) == (status if who == OPEN else 401), headers
    for headers in (bearer(READER), {"x-api-key": READER}, {"authorization": f"bearer  {READER}"}):
        assert status_with(headers) == (403 if who == ADMIN else status), headers
    assert status_with(bearer(BOSS)) == status


@pytest.mark.parametrize("path", ODD_PATHS)
def test_odd_paths_open_nothing(locked: Server, path: str) -> None:
    """Sent as they are: a client would tidy them up. Only what is spelled as the route is the route."""
    with httpx.Client(timeout=60) as client:
        request = client.build_request("GET", locked.url)
        request.url = request.url.copy_with(raw_path=path.encode())
        assert client.send(request).status_code in (401, 404)


def test_two_keys_are_none(locked: Server) -> None:
    with httpx.Client(base_url=locked.url) as client:
        for name in ("authorization", "x-api-key"):
            value = f"Bearer {READER}" if name == "authorization" else READER
            assert client.get("/v1/models", headers=[(name, value), (name, value)]).status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LOCALHOST.:80", 200),
        ("[::1]:8000", 200),
        ("name.example:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1", 403),
        ("evil.example@localhost", 403),
        ("", 403),
    ],
)
def test_hosts_without_keys(make_server: Callable[..., Server], host: str, status: int) -> None:
    server = make_server(ServerSettings(allowed_hosts=("name.example",)))
    with httpx.Client(base_url=server.url) as client:
        for path in ("/", "/health", "/v1/models"):
            assert client.get(path, headers={"host": host}).status_code == status


def test_with_keys_any_host_is_fine(ask: httpx.Client) -> None:
    assert ask.get("/v1/models", headers=bearer(READER) | {"host": "name.example"}).status_code == 200


def test_hosts_of_a_server_for_other_machines() -> None:
    hosts = auth.AllowedHosts(ServerSettings(host="0.0.0.0"))
    assert hosts.is_allowed(b"192.168.1.7:8000")
    assert not hosts.is_allowed(b"evil.example")
    assert not hosts.is_allowed(None)
    assert auth.AllowedHosts(ServerSettings(host="10.0.0.5")).is_allowed(b"10.0.0.5")


ADMINISTRATORS = [(method, path, body, status) for (method, _), (who, path, body, status) in ROUTES.items() if path.startswith("/admin")]


def test_without_keys_nobody_administers(make_server: Callable[..., Server]) -> None:
    """A proxy on this machine that adds no headers looks like this machine: nothing but a key, or the operator's word, opens /admin."""
    server = make_server(ServerSettings())
    for method, path, body, _ in ADMINISTRATORS:
        refused = httpx.request(method, server.url + path, json=body)
        assert refused.status_code == 403
        told = refused.json()["error"]["message"]
        assert "--admin-key" in told
        assert "--admin-on-loopback" in told


def test_the_operator_lets_this_machine_administer(make_server: Callable[..., Server]) -> None:
    """But not who comes through a proxy that says so."""
    server = make_server(ServerSettings(admin_on_loopback=True))
    for method, path, body, status in ADMINISTRATORS:
        assert httpx.request(method, server.url + path, json=body).status_code == status
        for header in ("x-forwarded-for", "x-forwarded-proto", "forwarded", "x-real-ip", "via", "cf-connecting-ip"):
            assert httpx.request(method, server.url + path, json=body, headers={header: "127.0.0.1"}).status_code == 403


def test_with_keys_this_machine_is_no_administrator(ask: httpx.Client) -> None:
    sources = TEXT | {"return_sources": True}
    assert ask.post("/v1/completions", json=sources, headers=bearer(READER)).status_code == 403
    assert ask.post("/v1/completions", json=sources, headers=bearer(BOSS)).status_code == 200
    with pytest.raises(ValueError, match="admin_on_loopback"):
        ServerSettings(api_keys=(f"reader:{READER}",), admin_on_loopback=True)  # type: ignore[arg-type]


def test_sources_without_keys_are_for_this_machine(client: httpx.Client) -> None:
    sources = TEXT | {"return_sources": True}
    assert client.post("/v1/completions", json=sources).status_code == 200
    assert client.post("/v1/completions", json=sources, headers={"x-forwarded-for": "8.8.8.8"}).status_code == 403


def test_keys_are_compared_whole_and_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever key is given, first, last or none: as many comparisons, each of two digests of one length."""
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    keys = [Key(key=f"key-number-{i}", name=str(i)) for i in range(5)]  # type: ignore[arg-type]
    ring = Keyring(keys)
    for given, name in ((b"key-number-0", "0"), (b"key-number-4", "4"), (b"", None), (b"key-number-", None), (b"\xff" * 9000, None)):
        compared.clear()
        found = ring.find(given)
        assert (found.name if found else None) == name
        assert compared == [(32, 32)] * 5


def test_datastores_of_an_identity() -> None:
    everything = Identity("", False, "", None, True)
    assert everything.choose_datastores(None, ["x", "y"]) is None
    assert everything.choose_datastores("x", ["x", "y"]) == ["x"]
    assert everything.choose_datastores([], ["x"]) == []
    some = Identity("b", False, "b", frozenset({"y", "gone"}), False)
    assert some.choose_datastores(None, ["x", "y"]) == ["y"]
    assert some.choose_datastores(["y", "y"], ["x", "y"]) == ["y"]
    messages = []
    for name in ("x", "gone", "none"):
        with pytest.raises(ApiError) as error:
            some.choose_datastores([name], ["x", "y"])
        assert (error.value.status, error.value.param) == (400, "datastore")
        messages.append(error.value.message.replace(name, "?"))
    assert len(set(messages)) == 1, "what may not be used looks like what is not there"
    assert not some.trusted
    assert everything.trusted


def test_what_one_key_wrote_another_does_not_find(make_server: Callable[..., Server]) -> None:
    """The same prompt again: its prefix is cached for the same key, and for no other."""
    keys = ("a:the-key-of-a", "b:the-key-of-b")
    server = make_server(ServerSettings(api_keys=keys))  # type: ignore[arg-type]
    body = {"prompt": "the same long beginning " * 20, "max_tokens": 1}

    def cached(key: str) -> int:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            answer = client.post("/v1/completions", json=body, headers=bearer(key)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("the-key-of-a") == 0
    assert cached("the-key-of-a") > 400
    assert cached("the-key-of-b") == 0


@pytest.mark.parametrize(
    ("host", "only_here"), [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)]
)
def test_which_addresses_other_machines_reach(host: str, only_here: bool) -> None:
    assert auth.is_loopback(host) is only_here
