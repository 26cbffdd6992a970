"""Requests to a server over real sockets with the time of every event, from clients that can leave in rude ways.

A body enters, a `TimedAnswer` leaves. HTTP/1.1 is written out by hand: a client library costs a millisecond per request of the two cores
that the server runs on, and none of them can reset a connection. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

METRICS_PREFIX = "ngramspec:"
# How a client goes away: FIN, RST, or FIN of its own direction only, as some proxies do it.
WAYS = ("close", "reset", "half-close")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The port on which the server listens."""

    port: int
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def make_request(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Return the bytes of a request; GET without a body. It asks the server to close after its answer, so that the end is the end."""
        data = b"" if body is None else json.dumps(body).encode()
        head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(data)}"] if data else []
        return "\r\n".join([*head, "", ""]).encode() + data


@dataclass(slots=True)
class TimedAnswer:
    """What came of a request, on this process's clock (`time.perf_counter`)."""

    sent: float
    status: int = 0
    times: list[float] = field(default_factory=list)
    """When each event of a stream with something of a choice in it came; the whole body's time if nothing streams."""
    ended: float = 0.0
    tokens: int = 0
    done: bool = False
    """The server said that this was all."""
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        return (self.times[0] - self.sent) * 1e3

    @property
    def per_token_ms(self) -> float:
        """Mean time between two tokens."""
        return (self.times[-1] - self.times[0]) / max(self.tokens - 1, 1) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.times, self.times[1:], strict=False)]


class Connection:
    """One request under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: ServerAddress) -> None:
        self.reader, self.writer, self.server = reader, writer, server

    @classmethod
    async def open(cls, server: ServerAddress, receive_buffer: int | None = None, limit: int = 1 << 20) -> Connection:
        """Connect. `receive_buffer`: bytes that the system takes in for us; `limit`: the longest line, and half of what is read ahead."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (server.host, server.port))
            return cls(*await asyncio.open_connection(sock=sock, limit=limit), server)
        except BaseException:
            sock.close()
            raise

    def send(self, path: str, body: dict[str, Any] | None = None) -> None:
        self.writer.write(self.server.make_request(path, body))

    async def read_head(self) -> tuple[int, dict[str, str]]:
        """Return status and headers."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        return int(lines[0].split()[1]), headers

    async def read_events(self) -> AsyncIterator[bytes]:
        """Yield the data of server-sent events. Lines that frame chunks look like nothing else and are passed over."""
        while line := await self.reader.readline():
            if line.startswith(b"data: "):
                yield line[6:].strip()

    def drop(self, way: str) -> None:
        """Leave in one of WAYS, without another word to the server. After "half-close" the socket is still to be closed."""
        if way == "half-close":
            self.writer.write_eof()
            return
        if way == "reset":
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def aclose(self) -> None:
        self.writer.transport.abort()


async def fetch(server: ServerAddress, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Return status and body of an answer that does not stream."""
    async with contextlib.aclosing(await Connection.open(server)) as connection:
        connection.send(path, body)
        status, headers = await connection.read_head()
        if "content-length" in headers:
            return status, await connection.reader.readexactly(int(headers["content-length"]))
        return status, await connection.reader.read()


async def send_request(server: ServerAddress, body: dict[str, Any], path: str = "/v1/completions") -> TimedAnswer:
    """Send a request and read all of its answer. What the network does is in `TimedAnswer.error`, not raised."""
    answer = TimedAnswer(time.perf_counter())
    try:
        if body.get("stream"):
            await _read_stream(server, body | {"stream_options": {"include_usage": True}}, path, answer)
        else:
            answer.status, data = await fetch(server, path, body)
            answer.times.append(time.perf_counter())
            answer.done = answer.status == 200
            _count_tokens(answer, data)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    return answer


async def _read_stream(server: ServerAddress, body: dict[str, Any], path: str, answer: TimedAnswer) -> None:
    async with contextlib.aclosing(await Connection.open(server)) as connection:
        connection.send(path, body)
        answer.status, headers = await connection.read_head()
        if answer.status != 200:
            await connection.reader.readexactly(int(headers.get("content-length", 0)))
            return
        async for data in connection.read_events():
            if data == b"[DONE]":
                answer.done = True
            elif b'"choices":[]' in data.replace(b" ", b""):
                _count_tokens(answer, data)
            else:
                answer.times.append(time.perf_counter())


def _count_tokens(answer: TimedAnswer, data: bytes) -> None:
    usage = json.loads(data).get("usage") if answer.status == 200 else None
    answer.tokens = usage["completion_tokens"] if usage else 0


async def read_metrics(server: ServerAddress) -> dict[str, float]:
    """Return the server's own figures by name without our prefix; those with labels are added up."""
    status, body = await fetch(server, "/metrics")
    if status != 200:
        raise RuntimeError(f"/metrics answered {status}: {body[:200]!r}")
    figures: dict[str, float] = {}
    for line in body.decode().splitlines():
        if line.startswith(METRICS_PREFIX):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix(METRICS_PREFIX)
            figures[name] = figures.get(name, 0.0) + float(value)
    return figures


async def wait_until_settled(server: ServerAddress, is_settled: Callable[[int], bool], within_s: float = 10.0) -> bool:
    """Wait until `is_settled` of the number of sequences, running and waiting. Return False if it is not in time."""
    deadline = time.perf_counter() + within_s
    while True:
        figures = await read_metrics(server)
        if is_settled(int(figures["num_requests_running"] + figures["num_requests_waiting"])):
            return True
        if time.perf_counter() > deadline:
            return False
        await asyncio.sleep(0.005)


async def send_together(count: int, make: Callable[[int], Awaitable[TimedAnswer]]) -> list[TimedAnswer]:
    """Send `count` requests at once."""
    return list(await asyncio.gather(*(make(n) for n in range(count))))


@contextlib.asynccontextmanager
async def keep_busy(server: ServerAddress, count: int, make_body: Callable[[], dict[str, Any]]) -> AsyncIterator[None]:
    """Let `count` clients ask, read, and ask again for as long as the block runs."""

    async def run_client() -> None:
        while True:
            answer = await send_request(server, make_body())
            if answer.status != 200:
                await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(run_client()) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_prompt(rng: random.Random, length: int) -> list[int]:
    """Draw token ids that nothing repeats and no cache knows; every model has these."""
    return [rng.randrange(32, 250) for _ in range(length)]


def make_completion(ids: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """Return a body for /v1/completions of exactly `max_tokens` tokens."""
    return {"prompt": ids, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True} | more


def find_quantile(values: list[float], q: float) -> float | None:
    """Return the value below which a share of q lies, to the next one up; None of nothing."""
    return sorted(values)[min(int(q * len(values)), len(values) - 1)] if values else None
