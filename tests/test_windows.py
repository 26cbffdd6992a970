"""Windows, as far as another system can show it: a process without Unix's modules and calls imports everything, builds and serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny

ROOT = Path(__file__).resolve().parent.parent

IMPORTS = """
import importlib, pkgutil
import ngramspec, ngramspec.datastore

for package in (ngramspec, ngramspec.datastore):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not any(part in module.name for part in (".cuda", ".integrations", "__main__", ".guests")):
            importlib.import_module(module.name)
"""

STORES = """
import sys
from pathlib import Path
from tokenizers import Tokenizer
from ngramspec.datastore import Datastore
from ngramspec.datastore.build import build
from ngramspec.datastore.commit import lock_for_writing
from ngramspec.datastore.errors import DatastoreLockedError
from ngramspec.datastore.update import merge, update

folder = Path(sys.argv[1])
corpus, store = folder / "corpus", folder / "store"
corpus.mkdir()
(corpus / "a.py").write_bytes(b"def area(width, height):\\r\\n    return width * height\\r\\n" * 20)
build([corpus], store, Tokenizer.from_file(str(folder / "model" / "tokenizer.json")), "bytes")
with Datastore.open(store) as opened, Datastore.open(store, copy=True) as copied:
    ids = [int(token) for token in b"def area(width"]
    assert opened.lookup(ids).length == copied.lookup(ids).length > 4, opened.lookup(ids)
    (corpus / "b.py").write_bytes(b"def volume(depth): return depth\\n" * 20)
    update(store)
    merge(store)
    assert opened.refresh()
    assert opened.lookup([int(token) for token in b"def volume(depth"]).length > 8
with lock_for_writing(store):
    try:
        with lock_for_writing(store):
            raise SystemExit("two writers")
    except DatastoreLockedError:
        pass
print("stores work")
"""

SERVER = """
import os, sys, threading, time
import httpx

folder, port = sys.argv[1], sys.argv[2]

def ask():
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 240
    while time.monotonic() < until:
        try:
            if httpx.get(url + "/health").status_code == 200:
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    answer = httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 5, "guided_regex": "[ab]{3}"}, timeout=200)
    print(answer.status_code, answer.text)
    chat = httpx.post(url + "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}, timeout=200)
    print(chat.status_code, chat.text, flush=True)
    os._exit(0 if answer.status_code == chat.status_code == 200 else 1)

threading.Thread(target=ask, daemon=True).start()
sys.argv = ["ngramspec", "serve", "--model", folder, "--port", port, "--threads", "1", "--max-seqs", "2", "--kv-memory", "16M"]
from ngramspec.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("windows")
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tiny.tiny_model("llama", vocab_size=320, max_position_embeddings=256).save_pretrained(made / "model")
    tokenizer.save_pretrained(made / "model")
    return made


def run(program: str, *arguments: object) -> str:
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import without_unix\n{program}"
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_module_is_imported() -> None:
    run(IMPORTS)


def test_stores_are_built_used_updated_and_locked(folder: Path) -> None:
    assert "stores work" in run(STORES, folder)


def test_a_server_answers(folder: Path, free_port: int) -> None:
    run(SERVER, folder / "model", free_port)


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
