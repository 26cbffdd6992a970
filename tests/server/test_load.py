"""The server under load and beside rude clients: the short forms of `python -m benchmarks.server`, and what that program reports."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_gguf
from tiny_server import Server, left_clean, tiny_engine

from benchmarks import rude_clients
from benchmarks import server as server_benchmark
from benchmarks.http_client import ServerAddress, TimedAnswer, find_quantile, make_completion, send_request, send_together
from benchmarks.server_process import Resources, make_tiny, serve
from ngramspec.engine.llm_engine import Engine
from ngramspec.sampling_params import SamplingParams
from ngramspec.server.settings import ServerSettings


def target_of(server: Server) -> ServerAddress:
    return ServerAddress(int(server.url.rpartition(":")[2]))


@pytest.fixture(scope="module")
def small_engine() -> Iterator[Engine]:
    """As many sequences at a time as the measurements count on."""
    with left_clean(tiny_engine(max_seqs=rude_clients.MAX_SEQS)) as engine:
        yield engine


@pytest.fixture(scope="module")
def small_server(start_server: Callable[..., Server], small_engine: Engine) -> Server:
    return start_server(small_engine, ServerSettings(max_queue=rude_clients.MAX_QUEUE))


# ---------------------------------------------------------------------------- the server


@pytest.mark.slow
def test_clients_that_leave_free_their_sequence(small_server: Server) -> None:
    found = asyncio.run(rude_clients.measure_disconnects(target_of(small_server), 48, random.Random(0), long_prompt=900))
    assert found["count"] == 48
    assert len(found["cases"]) == 24
    assert found["late"] == found["leaked"] == found["sequences_left"] == found["kv_in_use"] == 0
    assert found["all_places_free"]


@pytest.mark.slow
def test_streams_that_nobody_reads_are_dropped_and_hurt_nobody(start_server: Callable[..., Server]) -> None:
    with tiny_engine(max_seqs=16) as engine:
        server = start_server(engine, ServerSettings(send_timeout=0.5))
        found = asyncio.run(rude_clients.measure_stalled(target_of(server), 8, 2.0, random.Random(0)))
    assert found["all_freed"]
    assert found["dropped"] == 8
    assert found["unread_against_read"] <= 2  # 1.5 where the machine is ours alone


@pytest.mark.slow
def test_ten_times_what_it_carries_is_refused_soon_and_costs_little(tmp_path: Path) -> None:
    """A server in a process of its own: in one interpreter with it, clients take the time that refusals need."""
    settings = {"max_seqs": server_benchmark.MAX_SEQS, "max_queue": 2 * server_benchmark.MAX_SEQS}
    with serve(make_tiny(tmp_path), **settings) as server:
        for _ in range(3):  # a neighbour that takes the processor for seconds delays refusals more than answers, and answers too
            found = asyncio.run(server_benchmark.measure_capacity(server.address, 2.0, 64, random.Random(0)))
            most = found["levels"]["10x"]
            if most["refusal_ms"]["p50"] < most["ttft_ms"]["p50"] / 2 and found["goodput_at_10x"] >= 0.2:
                break
    assert most["refused"] > most["answered"] > 0
    assert all(level["failed"] == 0 for level in found["levels"].values())
    # The program, with more clients for longer, measures 0.9 and 50 ms.
    assert found["goodput_at_10x"] >= 0.2
    assert most["refusal_ms"]["p50"] < most["ttft_ms"]["p50"] / 2


def test_a_prompt_that_begins_like_the_last_one_is_sooner(server: Server) -> None:
    found = asyncio.run(server_benchmark.measure_prefix(target_of(server), 4, random.Random(0), shared_tokens=960))
    assert found["second_ms"] < found["first_ms"]
    assert found["hit_share"] > 0


def test_a_refusal_is_an_answer(small_server: Server) -> None:
    """As many at once as the server takes are taken; the rest is told so, and nothing of it stays."""

    async def flood() -> list[TimedAnswer]:
        body = make_completion([40, 41, 42], 200)
        return await send_together(30, lambda _: send_request(target_of(small_server), body))

    answers = asyncio.run(flood())
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= rude_clients.MAX_SEQS + rude_clients.MAX_QUEUE
    assert all(answer.done and answer.tokens == 200 for answer in answers if answer.status == 200)


# ---------------------------------------------------------------------------- the program


def test_soak_counts_what_it_did(small_server: Server) -> None:
    resources = iter(Resources(100 + 0.5 * i, 10, 5) for i in range(1000))
    found = asyncio.run(rude_clients.measure_soak(target_of(small_server), lambda: next(resources), 3.0, random.Random(0)))
    assert found["requests"] == sum(found["outcomes"].values())
    assert {"abandoned", "done"} <= set(found["outcomes"]) <= {"abandoned", "done", "status 400", "status 429"}
    assert found["slope_mib_per_1000_requests"] > 0
    assert (found["files_min"], found["threads_max"]) == (10, 5)


def test_slope_is_that_of_the_line_and_one_step_does_not_tilt_it() -> None:
    x = list(range(0, 1000, 10))
    assert rude_clients.find_slope(x, [3 + 0.25 * v for v in x]) == pytest.approx(0.25)
    assert rude_clients.find_slope(x, [100.0 if i < 20 else 150.0 for i in range(100)]) == 0
    assert rude_clients.find_slope([5, 5], [1.0, 2.0]) == 0


def test_quantile_is_a_value_that_was_measured() -> None:
    assert find_quantile([], 0.5) is None
    assert [find_quantile([3.0, 1.0, 2.0], q) for q in (0, 0.5, 0.99, 1)] == [1, 2, 3, 3]


def test_goodput_leaves_out_what_failed_and_what_came_too_late() -> None:
    good = TimedAnswer(0.0, 200, [0.5, 1.5, 2.5, 3.5], 3.5, tokens=8, done=True)
    cut = TimedAnswer(0.0, 200, [0.5, 1.5], 1.6, tokens=0)
    refused = TimedAnswer(1.0, 429, [], 1.01)
    level = server_benchmark.summarise_level([good, cut, refused], 0.0, 2.0)
    assert level["goodput_tok_s"] == 2
    assert (level["answered"], level["refused"], level["failed"]) == (1, 1, 1)
    assert level["refusal_ms"]["max"] == 10


def test_the_model_that_is_made_chats(tmp_path: Path) -> None:
    with Engine(make_tiny(tmp_path, hidden=64, layers=2), threads=1, max_seqs=1, max_model_len=64, kv_memory=1 << 20) as engine:
        reply = engine.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(reply.completion.prompt_token_ids) == len("user: a\nassistant:")
    assert len(reply.completion.token_ids) == 4


@pytest.mark.slow
def test_load_starts_a_server_and_keeps_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gguf.write_started(tmp_path / "m.gguf", threads=1, metadata={"llama.context_length": 4096})
    server_benchmark.main(["prefix", "--model", str(model), "--rounds", "2", "--threads", "1"])
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert document["prefix"]["first_ms"] > 0
    assert document["prefix"]["hit_share"] > 0
    assert document["settings"]["rounds"] == 2
    assert document["versions"]["ngramspec"]
