"""The simulation of many users: what users get falls with their number, and rises with servers, speed and memory for prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import users


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*options: str) -> list[dict[str, Any]]:
        users.main(["--think", "30", "--seconds", "60", *options])
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert document["program"] == "users"
        return document["results"]  # type: ignore[no-any-return]

    return run


def test_more_users_wait_longer(run: Any) -> None:
    few, many = run("--users", "2,40")
    assert few["busy"] < many["busy"] <= 1.05
    assert few["shown_per_user_minute"] > many["shown_per_user_minute"]
    assert run("--users", "400")[0]["refused"] > 0


def test_memory_and_speed_help(run: Any) -> None:
    (slow,), (fast,), (cramped,) = (run("--users", "20", *more) for more in ((), ("--speed", "20"), ("--speed", "20", "--prefixes", "5")))
    assert fast["busy"] < slow["busy"]
    assert cramped["cached"] < fast["cached"]


def test_a_users_requests_find_their_prompt_on_one_server(run: Any) -> None:
    (together,), (apart,) = (run("--users", "40", "--servers", "4", "--speed", "20", "--routing", how) for how in ("hash", "spread"))
    assert together["cached"] > apart["cached"]
    assert together["busy"] < apart["busy"]
