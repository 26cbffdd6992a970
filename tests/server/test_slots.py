"""llama.cpp's saved slots: what was computed for a prompt is there again after a restart, for its own key alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from starlette.testclient import TestClient
from tiny_server import left_clean, routes_of

from ngramspec.engine.llm_engine import Engine
from ngramspec.outputs import BLOCK

PROMPT = "0123456789" * 12
ASKED: dict[str, Any] = {"prompt": PROMPT, "n_predict": 9, "temperature": 0, "id_slot": 1}
KEYS = [{"key": "first-key", "name": "a"}, {"key": "second-key", "name": "b"}]


def make_engine(cache: Path | None) -> Engine:
    model = tiny.tiny_model("llama", vocab_size=320, max_position_embeddings=512)
    path = None if cache is None else str(cache)
    return Engine(model, tokenizer=tiny.byte_tokenizer(), max_seqs=4, kv_memory=16 << 20, threads=1, prefix_cache_path=path)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with left_clean(make_engine(None)) as engine:
        yield engine


@pytest.fixture
def client(engine: Engine, tmp_path: Path) -> Iterator[TestClient]:
    with routes_of(engine, slot_save_path=tmp_path) as client:
        yield client


def change(client: TestClient, action: str, slot: int = 1, filename: Any = "a.bin", headers: dict[str, str] | None = None) -> Any:
    return client.post(f"/slots/{slot}?action={action}", json={"filename": filename}, headers=headers)


def test_a_prompt_is_there_after_a_restart(tmp_path: Path) -> None:
    texts = []
    for restored in (False, True):
        with make_engine(tmp_path / "cache") as engine, routes_of(engine, slot_save_path=tmp_path / "slots") as client:
            if restored:
                answer = change(client, "restore", 3).json()
                assert (answer["id_slot"], answer["filename"], answer["n_restored"]) == (3, "a.bin", len(PROMPT) + 9)
                assert answer["n_read"] > 0
                assert engine.status().prefix_hits >= len(PROMPT) // BLOCK * BLOCK, "from the folder, which nothing else has filled"
            whole = client.post("/completion", json=ASKED).json()
            texts.append(whole["content"])
            assert (whole["timings"]["cache_n"] > 0) == restored
            if not restored:
                answer = change(client, "save").json()
                assert (answer["n_saved"], answer["id_slot"]) == (len(PROMPT) + 9, 1)
                assert answer["n_written"] > 0
                assert answer["timings"]["save_ms"] > 0
    assert texts[0] == texts[1]


def test_a_stream_is_noted_too_and_erased(client: TestClient) -> None:
    with client.stream("POST", "/completion", json=ASKED | {"stream": True}) as answer:
        assert list(answer.iter_lines())
    assert change(client, "erase").json() == {"id_slot": 1, "n_erased": len(PROMPT) + 9}
    assert client.post("/slots/1?action=erase", json={}).json()["n_erased"] == 0
    assert change(client, "save").json()["n_saved"] == 0
    assert change(client, "restore").json()["n_restored"] == 0


def test_each_key_has_its_own_slots_and_files(engine: Engine, tmp_path: Path) -> None:
    with routes_of(engine, api_keys=KEYS, slot_save_path=tmp_path) as client:
        first, second = ({"Authorization": f"Bearer {key['key']}"} for key in KEYS)
        client.post("/completion", json=ASKED, headers=first)
        assert change(client, "save", headers=second).json()["n_saved"] == 0
        assert change(client, "save", filename="mine", headers=first).json()["n_saved"] == len(PROMPT) + 9
        assert change(client, "restore", filename="mine", headers=second).json()["error"]["code"] == "slot_not_found"
        assert change(client, "restore", filename="a.bin", headers=first).json()["error"]["code"] == "slot_not_found"
        assert client.post("/slots/1?action=erase").status_code == 401
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir() if os.name == "posix")


@pytest.mark.parametrize(
    "filename",
    ["", ".", "..", "../a", "a/b", "/etc/passwd", "a\\b", ".hidden", "a\0", "a\n", "ä", "x" * 129, "C:a", "~", 1, None, ["a"], {"a": 1}],
)
def test_a_name_leads_nowhere_else(client: TestClient, tmp_path: Path, filename: Any) -> None:
    before = [*sorted(tmp_path.parent.iterdir()), *sorted(tmp_path.rglob("*"))]
    for action in ("save", "restore"):
        assert change(client, action, filename=filename).status_code == 400
    assert [*sorted(tmp_path.parent.iterdir()), *sorted(tmp_path.rglob("*"))] == before


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"tokens": [1]}', b"x" * 100_000, b"[" * 3000])
def test_files_that_are_no_slots(client: TestClient, tmp_path: Path, damage: bytes) -> None:
    assert change(client, "save").status_code == 200
    ((path,),) = [list(folder.iterdir()) for folder in tmp_path.iterdir()]
    path.write_bytes(damage)
    assert change(client, "restore").json()["error"]["code"] == "slot_not_usable"
    assert change(client, "save").status_code == 200, "in its place"


@pytest.mark.parametrize("tokens", [[320], [-1], [1.5], [True], ["a"], [None], [1] * 512, "aaa"])
def test_tokens_that_the_model_has_not(client: TestClient, tmp_path: Path, tokens: Any) -> None:
    change(client, "save")
    ((path,),) = [list(folder.iterdir()) for folder in tmp_path.iterdir()]
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"tokens": tokens}))
    assert change(client, "restore").json()["error"]["code"] == "slot_not_usable"


@pytest.mark.skipif(os.name != "posix", reason="about symbolic links")
def test_a_link_is_no_slot(client: TestClient, tmp_path: Path) -> None:
    change(client, "save")
    ((path,),) = [list(folder.iterdir()) for folder in tmp_path.iterdir()]
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert change(client, "restore").status_code == 400
    content = elsewhere.read_bytes()
    client.post("/completion", json=ASKED)
    assert change(client, "save").status_code == 200
    assert elsewhere.read_bytes() == content


def test_what_is_wrong_is_told(client: TestClient, engine: Engine) -> None:
    for slot in (4, -1, 2**70):
        assert change(client, "save", slot).status_code == 400
    assert change(client, "other").status_code == 400
    assert client.post("/slots/1?action=save").status_code == 400
    assert client.post("/slots/x?action=save", json={"filename": "a"}).status_code in (400, 404)
    assert client.post("/slots/1", json={"filename": "a"}).status_code == 400
    assert client.post("/slots/1?action=erase", headers={"Origin": "https://other.example"}).status_code == 403
    with routes_of(engine) as other:
        assert change(other, "save").json()["error"]["code"] == "not_supported"
