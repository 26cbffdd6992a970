"""Working trees that a server drafts from: their stores come while it serves, follow what is saved, and do not mix."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tiny
import tiny_gguf
from fair_time import wait_until
from tiny_server import Server, chat_tokenizer

from ngramspec.datastore import Datastore
from ngramspec.datastore.cache_dir import cache_dir
from ngramspec.engine.llm_engine import Engine
from ngramspec.server.app import create_app
from ngramspec.server.auth import Identity
from ngramspec.server.error_responses import ApiError
from ngramspec.server.repositories import Repositories
from ngramspec.server.settings import Key, ServerSettings

WAIT_S = 300
ASK = {"prompt": "def increment", "max_tokens": 2}


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.1)
    return found


def make_tree(folder: Path, *packages: str) -> str:
    folder.mkdir()
    (folder / "one.py").write_text(f"def increment(value):\n    return value + {len(folder.name)}\n")
    for package in packages:
        (folder / ".venv" / "lib" / "python3.11" / "site-packages" / f"{package}.dist-info").mkdir(parents=True)
        (folder / ".venv" / "pyvenv.cfg").touch()
        (folder / ".venv" / "lib" / "python3.11" / "site-packages" / "module.py").write_text("installed = 1\n" * 3)
    return str(folder)


@pytest.fixture
def serve(own: Engine, start_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`serve(paths, settings, **more)` -> (client, repositories), with every request's datastores and tenant in `serve.hints`."""
    made: list[Repositories] = []
    hints: list[tuple[Any, str]] = []
    submit = own.submit

    def noted(*arguments: Any, **more: Any) -> Any:
        hints.append((more.get("datastores"), more.get("tenant")))
        return submit(*arguments, **more)

    monkeypatch.setattr(own, "submit", noted)

    def begin(paths: dict[str, str], settings: ServerSettings | None = None, **more: Any) -> tuple[httpx.Client, Repositories]:
        made.append(Repositories(paths, tmp_path / "cache", **more))
        url = start_server(own, settings, made[-1]).url
        made[-1].start(own)
        return httpx.Client(base_url=url, timeout=WAIT_S), made[-1]

    begin.hints = hints  # type: ignore[attr-defined]
    yield begin
    for each in made:
        each.close()
    for name in own.datastores:
        own.remove_datastore(name)


def stores(client: httpx.Client) -> dict[str, dict[str, Any]]:
    listed = client.get("/admin/repositories").json()["repositories"]
    return {store["name"]: store for tree in listed for store in tree["stores"]}


def drafted_from(serve: Any, client: httpx.Client, address: str = "", **more: Any) -> Any:
    """The stores and the tenant that the engine was told of."""
    answer = client.post(f"{address}/v1/completions", json=ASK | more)
    assert answer.status_code == 200, answer.text
    return serve.hints[-1]


def test_a_trees_store_comes_while_it_serves_and_follows_it(serve: Any, own: Engine, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "project")
    client, repositories = serve({"project": tree})
    assert client.post("/v1/completions", json=ASK).status_code == 200, "whatever the store's state"
    until(lambda: stores(client)["project"]["state"] == "followed")
    assert drafted_from(serve, client) == (None, ""), "of one tree, every request drafts"
    assert drafted_from(serve, client, "/repo/project") == (None, "")
    store = own.datastores["project"]
    (Path(tree) / "two.py").write_text("def decrement(value):\n    return value - 1\n")
    until(lambda: Datastore.open(store.path).info()["documents"] == 2)
    listed = client.get("/admin/repositories").json()["repositories"]
    assert (listed[0]["path"], listed[0]["address"]) == (tree, "/repo/project")
    Path(tree).rename(tmp_path / "moved")
    until(lambda: "is gone" in stores(client)["project"]["message"])
    assert stores(client)["project"]["ready"]
    (tmp_path / "moved").rename(tree)
    until(lambda: stores(client)["project"]["state"] == "followed")
    (Path(tree) / "three.py").write_text("def negate(value):\n    return -value\n")
    until(lambda: Datastore.open(store.path).info()["documents"] == 3)
    repositories.close()
    again = Repositories({"project": tree}, tmp_path / "cache")
    own.remove_datastore("project")
    again.start(own)
    until(lambda: "project" in own.datastores)
    assert own.datastores["project"].path == store.path
    again.close()


def test_two_trees_do_not_see_each_other_unless_asked(serve: Any, own: Engine, tmp_path: Path) -> None:
    client, _ = serve({"a": make_tree(tmp_path / "a"), "b": make_tree(tmp_path / "other")})
    until(lambda: {"a", "b"} <= set(own.datastores))
    own.add_datastore("shared", own.datastores["a"].path)
    assert drafted_from(serve, client) == (["shared"], "")
    assert drafted_from(serve, client, "/repo/a") == (["a", "shared"], "/a"), "nor share answers and cached prompts"
    assert drafted_from(serve, client, "/repo/b") == (["b", "shared"], "/b")
    assert drafted_from(serve, client, "/repo/b", datastore="a") == (["a"], "/b")
    assert drafted_from(serve, client, datastore=["a", "b"]) == (["a", "b"], "")
    config = client.get("/playground/config").json()
    assert (sorted(config["datastores"]), config["hidden"]) == (["a", "b", "shared"], ["a", "b"])


def test_packages_are_shared_by_trees_with_the_same_versions(serve: Any, own: Engine, tmp_path: Path) -> None:
    paths = {name: make_tree(tmp_path / name, *packages) for name, packages in {"a": ["x-1.0"], "b": ["x-1.0"], "c": []}.items()}
    client, repositories = serve(paths, with_installed=True)
    until(lambda: len(own.datastores) == 4)
    (packages,) = set(own.datastores) - {"a", "b", "c"}
    assert drafted_from(serve, client, "/repo/a")[0] == ["a", packages]
    assert drafted_from(serve, client, "/repo/b")[0] == ["b", packages]
    assert drafted_from(serve, client, "/repo/c")[0] == ["c"]
    assert drafted_from(serve, client)[0] == []
    wait_until(lambda: stores(client)[packages]["state"] == "ready", 2)  # a moment after it is drafted from
    assert [each.stores for each in repositories.trees.values()] == [["a", packages], ["b", packages], ["c"]]


def test_every_route_answers_at_a_trees_address(serve: Any, tmp_path: Path) -> None:
    client, _ = serve({"my tree": make_tree(tmp_path / "t")})
    for path in ("/health", "/v1/models", "/props", "/slots", "/metrics", "/"):
        assert client.get(f"/repo/my%20tree{path}").status_code == 200, path
    assert client.get("/repo/my%20tree").status_code == 200
    assert client.post("/repo/my%20tree/completion", json={"prompt": "x", "n_predict": 1}).status_code == 200
    for wrong in ("/repo/yours/v1/models", "/repo/my%20tree%2F/v1/models", "/repo/my%20tree/repo/my%20tree/v1/models", "/repo", "/repo/"):
        refused = client.get(wrong)
        assert refused.status_code == 404, wrong
        assert refused.json()["error"]["message"]
        assert refused.headers["x-request-id"]


def test_a_key_opens_its_trees(serve: Any, own: Engine, tmp_path: Path) -> None:
    keys = (Key(key="key-of-team", name="team", stores=frozenset({"a"})), Key(key="key-of-ops", name="ops", admin=True))  # type: ignore[arg-type]
    client, _ = serve({"a": make_tree(tmp_path / "a"), "b": make_tree(tmp_path / "b")}, ServerSettings(api_keys=keys))
    until(lambda: {"a", "b"} <= set(own.datastores))
    assert client.get("/repo/a/v1/models").status_code == 401, "before anything is told"
    assert client.get("/repo/nothing/v1/models").status_code == 401
    assert client.get("/repo/a/health").status_code == 200
    client.headers["authorization"] = "Bearer key-of-team"
    assert drafted_from(serve, client, "/repo/a") == (["a"], "team/a")
    assert client.post("/repo/b/v1/completions", json=ASK).json() == client.post("/repo/b/v1/completions", json=ASK).json()
    assert client.post("/repo/b/v1/completions", json=ASK).json()["error"]["code"] == "unknown_repository"
    assert client.post("/repo/a/v1/completions", json=ASK | {"datastore": "b"}).json()["error"]["code"] == "unknown_datastore"
    assert client.get("/admin/repositories").status_code == 403
    client.headers["authorization"] = "Bearer key-of-ops"
    assert set(stores(client)) == {"a", "b"}


def test_who_sees_what() -> None:
    one, two = Repositories({"a": "/a"}), Repositories({"a": "/a", "b": "/b"})
    who = Identity("me", admin=False, tenant="me", stores=None, local=True)
    assert who.in_tree(None, Repositories()) == who.in_tree(None, one) == who.in_tree("a", one) == who
    assert (who.in_tree("a", two).tenant, who.in_tree("a", two).hidden) == ("me/a", {"b"})
    assert (who.in_tree(None, two).tenant, who.in_tree(None, two).hidden) == ("me", {"a", "b"})
    with pytest.raises(ApiError, match="there is no repository 'c'"):
        who.in_tree("c", two)


def test_an_engine_that_does_not_take_a_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is wrong is in the log and in the list, and the server goes on."""

    def refuse(name: str, store: str) -> None:
        raise ValueError("no more than 63 datastores")

    tokenizer = tiny.byte_tokenizer()
    engine: Any = SimpleNamespace(add_datastore=refuse, tokenizer=tokenizer, name="m")
    repositories = Repositories({"a": make_tree(tmp_path / "a")}, tmp_path / "cache")
    with caplog.at_level(logging.INFO, "ngramspec.server"):
        repositories.start(engine)
        progress = repositories.trees["a"].progress["a"]
        until(lambda: progress.state == "failed")
        repositories.close()
    assert progress.message == "no more than 63 datastores"
    assert any("no more than 63" in record.getMessage() for record in caplog.records)


def test_no_trees_cost_nothing(own: Engine) -> None:
    repositories = Repositories()
    repositories.start(own)
    repositories.close()
    assert create_app(own, ServerSettings()).state.server.repositories.trees == {}


BUILD = """
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from tokenizers import Tokenizer
from ngramspec.server.repositories import Repositories
tokenizer = SimpleNamespace(backend_tokenizer=Tokenizer.from_file(sys.argv[1]))
Repositories({"tree": sys.argv[2]}, Path(sys.argv[3])).start(SimpleNamespace(tokenizer=tokenizer, name="m"))
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_during_the_first_build_leaves_nothing_of_it(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of its own, with everything that the command does when it is interrupted. Killed, it leaves the child alone."""
    tree = Path(make_tree(tmp_path / "tree"))
    for n in range(4000):
        (tree / f"more{n}.py").write_text(f"x = {n}\n" * 200)
    model, cache = tmp_path / "model", tmp_path / "cache"
    cache.mkdir()
    code = (cache_dir() / "code").resolve()
    monkeypatch.setenv("NGRAMSPEC_CACHE", str(cache))
    if number == signal.SIGKILL:
        chat_tokenizer().save_pretrained(model)
        command = ["-c", BUILD, str(model / "tokenizer.json"), str(tree), str(cache / "stores")]
    else:
        (cache / "code").symlink_to(code)  # it is killed before it had compiled any
        tiny_gguf.write_started(model, threads=1)
        command = ["-m", "ngramspec", "serve", "--model", str(model), "--port", "0", "--threads", "1", "--repo", str(tree)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, *command], **quiet) as process:
        trees = cache / "stores" / "trees"
        until(lambda: trees.exists() and list(trees.iterdir()))
        process.send_signal(number)
        assert process.wait(WAIT_S) == (-number if number == signal.SIGKILL else 0)
        until(lambda: not list(trees.iterdir()))
