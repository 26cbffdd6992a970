"""Datastores at run time: added, updated and taken away under requests that go on. Who may is in test_auth."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_server import Server

from ngramspec.datastore.build import build
from ngramspec.datastore.commit import lock_for_writing
from ngramspec.engine.llm_engine import Engine
from ngramspec.server.settings import Key, ServerSettings

TEXT = "def increment(value):\n    return value + 1\n" * 4


@pytest.fixture
def client(own: Engine, start_server: Callable[..., Server]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=start_server(own).url, timeout=60) as client:
        yield client
    for name in own.datastores:
        own.remove_datastore(name)


@pytest.fixture
def store(own: Engine, tmp_path: Path) -> Path:
    """Of the folder `source` beside it."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "one.py").write_text(TEXT)
    build([source], tmp_path / "store", own.tokenizer.backend_tokenizer, "tiny")
    return tmp_path / "store"


def put(client: httpx.Client, name: str, path: Any) -> httpx.Response:
    return client.put(f"/admin/datastores/{name}", json={"path": path if isinstance(path, (int, type(None))) else str(path)})


def test_a_datastores_life(client: httpx.Client, store: Path) -> None:
    assert client.get("/admin/datastores").json() == {"datastores": []}
    ask = {"prompt": TEXT + "def increment", "max_tokens": 4, "datastore": "code"}
    assert client.post("/v1/completions", json=ask).json()["error"]["code"] == "unknown_datastore"
    added = put(client, "code", store)
    assert added.status_code == 200
    assert (added.json()["name"], added.json()["documents"]) == ("code", 1)
    assert client.get("/admin/datastores").json() == {"datastores": [added.json()]}
    assert client.post("/v1/completions", json=ask).status_code == 200

    unchanged = client.post("/admin/datastores/code/update").json()
    assert (unchanged["changed"], unchanged["added"]) == (False, 0)
    (store.parent / "source" / "two.py").write_text(TEXT.replace("increment", "decrement"))
    updated = client.post("/admin/datastores/code/update").json()
    assert (updated["changed"], updated["added"], updated["unchanged"]) == (True, 1, 1)

    assert client.delete("/admin/datastores/code").json() == {"name": "code", "removed": True}
    assert client.get("/admin/datastores").json() == {"datastores": []}
    assert client.delete("/admin/datastores/code").status_code == 404
    assert client.post("/v1/completions", json=ask).json()["error"]["code"] == "unknown_datastore"
    assert (store / "MANIFEST").exists()


def test_requests_go_on_while_stores_come_and_go(client: httpx.Client, store: Path) -> None:
    ask = {"prompt": "def increment(value):\n", "max_tokens": 60, "ignore_eos": True, "seed": 1}
    expected = client.post("/v1/completions", json=ask).json()["choices"]
    stop, answers, failed = threading.Event(), [], []

    def keep_asking() -> None:
        with httpx.Client(base_url=client.base_url, timeout=60) as other:
            while not stop.is_set():
                answer = other.post("/v1/completions", json=ask)
                (answers if answer.status_code == 200 else failed).append(answer.json())

    threads = [threading.Thread(target=keep_asking) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert put(client, "code", store).status_code == 200
        assert put(client, "code", store).status_code == 200
        assert client.delete("/admin/datastores/code").status_code == 200
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed
    assert answers
    assert all(answer["choices"] == expected for answer in answers)


def test_what_is_no_datastore_of_this_model(client: httpx.Client, store: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path / "source", "\x00", "", "x" * 5000, "~", 7, None):
        refused = put(client, "code", path)
        assert refused.status_code == 400, path
        assert refused.json()["error"]["param"] == "path"
    for name in ("a b", "a%2Fb", "..%2F..", "a" * 65, "%00", "%ff"):
        assert put(client, name, store).status_code in (400, 404), name
    manifest = (store / "MANIFEST").read_text()
    (store / "MANIFEST").write_text(manifest[: len(manifest) // 2])
    assert put(client, "code", store).json()["error"]["code"] == "datastore_error"
    assert client.get("/admin/datastores").json() == {"datastores": []}


def test_a_store_that_was_let_go_of_and_is_gone(own: Engine, client: httpx.Client, store: Path) -> None:
    put(client, "code", store)
    own.datastores["code"].release()  # as those are that more than MAX_STORES are open beside
    shutil.rmtree(store)
    listed = client.get("/admin/datastores")
    assert (listed.status_code, listed.json()["error"]["code"]) == (400, "datastore_error")
    assert str(store) in listed.json()["error"]["message"]
    assert client.delete("/admin/datastores/code").status_code == 200


def test_a_store_that_somebody_else_writes(client: httpx.Client, store: Path) -> None:
    put(client, "code", store)
    with lock_for_writing(store):
        busy = client.post("/admin/datastores/code/update")
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "datastore_locked")
    assert client.post("/admin/datastores/code/update").status_code == 200


def test_a_store_for_some_keys(own: Engine, start_server: Callable[..., Server], store: Path) -> None:
    keys = (
        Key(key="key-of-team", name="team", stores=frozenset({"code"})),  # type: ignore[arg-type]
        Key(key="key-of-guest", name="guest", stores=frozenset()),  # type: ignore[arg-type]
    )
    server = start_server(own, ServerSettings(api_keys=keys, admin_keys=("boss:key-of-boss",)))  # type: ignore[arg-type]

    def ask(key: str, **more: Any) -> int:
        body = {"prompt": "def increment", "max_tokens": 2} | more
        return httpx.post(f"{server.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}).status_code

    headers = {"authorization": "Bearer key-of-boss"}
    assert httpx.put(f"{server.url}/admin/datastores/code", json={"path": str(store)}, headers=headers).status_code == 200
    assert [ask(f"key-of-{name}", datastore="code") for name in ("team", "guest", "boss")] == [200, 400, 200]
    assert [ask(f"key-of-{name}") for name in ("team", "guest", "boss")] == [200, 200, 200]
    own.remove_datastore("code")
