"""GGUF files by their names on the hub, against a hub of this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ngramspec.errors import ModelNotFoundError
from ngramspec.models.hub import GgufName, parse_gguf_name, select_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "model-Q4_K_M.gguf": b"GGUF" + bytes(2_000_000),
    "model-Q8_0-00001-of-00002.gguf": b"first",
    "model-Q8_0-00002-of-00002.gguf": b"second",
    "mmproj-model-Q4_K_M.gguf": b"eyes",
    "README.md": b"words",
}


class FakeHub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": COMMIT} for name, data in FILES.items()]
            found = tree if "/tree/" in path else {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            self._answer(json.dumps(found).encode(), "application/json")
        elif path.startswith("/org/name/resolve/") and (data := FILES.get(path.rpartition("/")[2])) is not None:
            self._answer(data, "application/octet-stream")
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that asks this hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    server.shutdown()
    server.server_close()


LOCATE = (
    "import sys; from ngramspec.models.names import locate_gguf\n"
    "try: print(locate_gguf(sys.argv[1], print))\n"
    "except Exception as error: print(type(error).__name__, error)"
)


def ask(environment: dict[str, str], spec: str, code: str = LOCATE) -> list[str]:
    """Return what a process reports of a name, and the path or the error that it ends with."""
    run = subprocess.run(
        [sys.executable, "-c", code, spec], env=os.environ | environment, capture_output=True, text=True, timeout=120, check=True
    )
    return run.stdout.splitlines()


def test_a_tag_and_a_file_are_downloaded_once(hub: dict[str, str]) -> None:
    told = ask(hub, "org/name:q4_k_m")
    assert told[0] == "looking up org/name:q4_k_m on the hub"
    assert told[-2].startswith("downloading model-Q4_K_M.gguf: 100 %")
    path = Path(told[-1])
    assert (path.name, path.read_bytes()) == ("model-Q4_K_M.gguf", FILES["model-Q4_K_M.gguf"])
    assert ask(hub, "org/name/model-Q4_K_M.gguf")[1:] == [str(path)]
    assert ask(hub | {"HF_HUB_OFFLINE": "1"}, "org/name:Q4_K_M")[1:] == [str(path)], "the cache is enough without a connection"


def test_all_parts_are_downloaded(hub: dict[str, str]) -> None:
    path = Path(ask(hub, "org/name:Q8_0")[-1])
    assert [p.read_bytes() for p in sorted(path.parent.glob("model-Q8_0-*"))] == [b"first", b"second"]


def test_what_is_not_there_is_told(hub: dict[str, str]) -> None:
    assert "its GGUF files: model-Q4_K_M.gguf, model-Q8_0-00001-of-00002.gguf" in ask(hub, "org/name:Q2_K")[-1]
    assert ask(hub, "org/other:Q4_K_M")[-1].startswith("ModelNotFoundError 'org/other'")
    assert "could not be asked" in ask(hub | {"HF_HUB_OFFLINE": "1", "HF_HOME": "/none"}, "org/name:Q4_K_M")[-1]


def test_a_repository_of_gguf_files_names_them(hub: dict[str, str]) -> None:
    """Hub names of GGUF repositories without a quantisation are what people paste first; a folder's config.json was missed there."""
    code = (
        "import sys; from ngramspec.models.names import check_name\ntry: check_name(sys.argv[1])\nexcept Exception as error: print(error)"
    )
    for environment in (hub, hub | {"HF_HUB_OFFLINE": "1"}):
        told = ask(environment, "org/name", code)[-1]
        assert "name one of its GGUF files: org/name/model-Q4_K_M.gguf, org/name/model-Q8_0-00001-of-00002.gguf" in told
        ask(hub, "org/name:Q4_K_M"), ask(hub, "org/name:Q8_0")  # for the second turn, which has the cache alone


def test_the_cache_says_what_it_has(hub: dict[str, str]) -> None:
    ask(hub, "org/name:Q4_K_M")
    told = ask(hub | {"HF_HUB_OFFLINE": "1"}, "org/name:Q8_0")[-1]
    assert "its GGUF files: model-Q4_K_M.gguf, and the hub could not be asked: " in told


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("org/name:Q4_K_M", GgufName("org/name", "Q4_K_M", None)),
        ("org/name-GGUF:UD-Q4_K_XL", GgufName("org/name-GGUF", "UD-Q4_K_XL", None)),
        ("org/name/sub/x-00001-of-00002.gguf", GgufName("org/name", None, "sub/x-00001-of-00002.gguf")),
        ("org/name", None),
        ("org/name:", None),
        ("org/name/../x.gguf", None),
        ("/org/name/x.gguf", None),
        ("name:Q4_K_M", None),
    ],
)
def test_names(spec: str, wanted: GgufName | None) -> None:
    assert parse_gguf_name(spec) == wanted


def test_a_tag_is_a_whole_word() -> None:
    files = ["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "a-Q4_K.gguf", "Q5_0/a-00001-of-00002.gguf", "imatrix-Q4_K.gguf"]
    assert select_files(GgufName("o/n", "Q4_K", None), files) == ["a-Q4_K.gguf"]
    with pytest.raises(ModelNotFoundError, match=r"several files.*o/n/b-Q6_K.gguf, o/n/b-UD-Q6_K.gguf"):
        select_files(GgufName("o/n", "Q6_K", None), ["b-Q6_K.gguf", "b-UD-Q6_K.gguf"])
