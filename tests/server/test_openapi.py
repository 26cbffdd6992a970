"""What the server says of itself in its OpenAPI document is so: schemathesis tries every operation, as documented and otherwise."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr
from tiny_server import Server

from ngramspec.engine.llm_engine import Engine
from ngramspec.sampling_params import SamplingParams
from ngramspec.server import logs
from ngramspec.server.settings import Key, ServerSettings

KEY = "the-administrators"
GOOD = {"prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], fim_engine: Engine) -> Server:
    """With keys: schemathesis asks for each operation without one, too."""
    return start_server(fim_engine, ServerSettings(admin_keys=(Key(key=SecretStr(KEY)),)))


class Answers(logging.Handler):
    """Counts what the server answers, by its log."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """By operation."""

    def emit(self, record: logging.LogRecord) -> None:
        facts = record.__dict__["facts"]
        path = re.sub(r":\w+}", "}", facts["route"])
        self.statuses[f"{facts['method']} {path}"][facts["status"]] += 1


@pytest.fixture
def answers() -> Iterator[Answers]:
    handler = Answers()
    before = logs.access.level
    logs.access.setLevel(logging.INFO)
    logs.access.addHandler(handler)
    yield handler
    logs.access.removeHandler(handler)
    logs.access.setLevel(before)


def attempt(server: Server, folder: Path, *options: str) -> None:
    """Let schemathesis try everything that is documented; it may write in the folder.

    Its checks: no 5xx, documented statuses, content types, headers and shapes; what the document forbids, and requests without a key, are
    refused. Not that all else is accepted: that a stop string is no half character, or n no more than fits, a schema does not say.
    """
    fixed = {"--generation-codec": "unicode_escape", "--generation-allow-x00": "true", "--generation-database": "none", "--seed": "1"}
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "-H", f"Authorization: Bearer {KEY}"]
    command += [word for option in fixed.items() for word in option]
    command += ["--request-timeout", "300"]  # whoever runs this may be held up for longer than any answer takes
    command += ["--exclude-checks", "positive_data_acceptance", "--suppress-health-check", "all", "--continue-on-failure", "--no-color"]
    here = Path(__file__).parent
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "schema_hooks", "PYTHONPATH": str(here), "MODEL": server.engine.name}
    done = subprocess.run([*command, *options], env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check(server: Server, answers: Answers, times: int) -> None:
    """Every operation was tried half as often at least, and one that reads JSON with success; what none of them reads is refused; the
    server is as it was.

    That an operation refused something is not counted by its tries: nearly every text is one that /tokenize takes.
    """
    refused: Counter[str] = Counter()
    for path, operations in server.app.openapi()["paths"].items():
        for method, operation in operations.items():
            statuses = answers.statuses[f"{method.upper()} {path}"]
            assert statuses, path
            assert max(statuses) < 500
            if "requestBody" in operation:
                assert statuses.total() >= times // 2, (path, statuses)  # the others were no JSON
                refused[f"{method.upper()} {path}"] = statuses[400]
                assert statuses[200] or any(off in path for off in ("/admin/", "/slots/")), (path, statuses)
    assert sum(map(bool, refused.values())) >= 0.8 * len(refused), refused
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}) as client:
        for operation in refused:
            method, path = operation.split()
            assert client.request(method, re.sub("{.*?}", "x", path), json=["no object"]).status_code == 400, operation
        assert client.get("/health").json() == {"status": "ok"}
        text = client.post("/v1/completions", json=GOOD).json()["choices"][0]["text"]
    alone = server.engine.complete(list(b"def add(a, b):"), SamplingParams(max_tokens=24, ignore_eos=True), speculation=False)
    assert text == alone.text


@pytest.mark.slow
def test_the_document_is_so(server: Server, answers: Answers, tmp_path: Path) -> None:
    attempt(server, tmp_path, "--phases", "fuzzing", "--max-examples", "15")
    check(server, answers, 15)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_the_document_is_so_however_long_one_tries(server: Server, answers: Answers, tmp_path: Path) -> None:
    attempt(server, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "200")
    # in chains of requests schemathesis cannot write half a character itself
    attempt(server, tmp_path, "--phases", "stateful", "--max-examples", "200", "--generation-codec", "utf-8")
    check(server, answers, 200)
