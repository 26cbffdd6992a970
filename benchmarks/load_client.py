"""Requests to a server over real sockets, with the time of every event, and clients that leave in rude ways.

A body enters, an `Answer` leaves. HTTP/1.1 written out by hand: a client library costs a millisecond a request of the two cores that the
server runs on, and none of them can reset a connection. Knows nothing of engines.
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

PREFIX = "ngramspec:"
WAYS = ("close", "reset", "half-close")
"""How a client goes away: FIN, RST, or FIN of its own direction only, as some proxies do it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server listens."""

    port: int
    host: str = "127.0.0.1"
    key: str | None = None

    def request(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The bytes of a request; GET without a body. The server is asked to close after its answer, so that the end is the end."""
        data = b"" if body is None else json.dumps(body).encode()
        head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        head += [f"Authorization: Bearer {self.key}"] if self.key else []
        head += ["Content-Type: application/json", f"Content-Length: {len(data)}"] if data else []
        return "\r\n".join([*head, "", ""]).encode() + data


@dataclass(slots=True)
class Answer:
    """What came of a request, on this process's clock (`time.perf_counter`)."""

    sent: float
    status: int = 0
    times: list[float] = field(default_factory=list)
    """When each event of a stream with something of a choice in it came; the whole body's time where nothing streams."""
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

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target) -> None:
        self.reader, self.writer, self.target = reader, writer, target

    @classmethod
    async def open(cls, target: Target, receive_buffer: int | None = None, limit: int = 1 << 20) -> Connection:
        """`receive_buffer`: bytes that the system takes in for us; `limit`: the longest line, and half of what is read ahead."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (target.host, target.port))
            return cls(*await asyncio.open_connection(sock=sock, limit=limit), target)
        except BaseException:
            sock.close()
            raise

    def send(self, path: str, body: dict[str, Any] | None = None) -> None:
        self.writer.write(self.target.request(path, body))

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        return int(lines[0].split()[1]), headers

    async def events(self) -> AsyncIterator[bytes]:
        """The data of server-sent events. Lines that frame chunks look like nothing else and are passed over."""
        while line := await self.reader.readline():
            if line.startswith(b"data: "):
                yield line[6:].strip()

    def leave(self, way: str) -> None:
        """Go away without a word to the server but what the way says. After "half-close" the socket is still to be closed."""
        if way == "half-close":
            self.writer.write_eof()
            return
        if way == "reset":
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def aclose(self) -> None:
        self.writer.transport.abort()


async def fetch(target: Target, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Status and body of an answer that does not stream."""
    async with contextlib.aclosing(await Connection.open(target)) as connection:
        connection.send(path, body)
        status, headers = await connection.head()
        if "content-length" in headers:
            return status, await connection.reader.readexactly(int(headers["content-length"]))
        return status, await connection.reader.read()


async def ask(target: Target, body: dict[str, Any], path: str = "/v1/completions") -> Answer:
    """Send a request and read all of its answer. What the network does is in `Answer.error`, not raised."""
    answer = Answer(time.perf_counter())
    try:
        if body.get("stream"):
            await _read_stream(target, body | {"stream_options": {"include_usage": True}}, path, answer)
        else:
            answer.status, data = await fetch(target, path, body)
            answer.times.append(time.perf_counter())
            answer.done = answer.status == 200
            _count(answer, data)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    return answer


async def _read_stream(target: Target, body: dict[str, Any], path: str, answer: Answer) -> None:
    async with contextlib.aclosing(await Connection.open(target)) as connection:
        connection.send(path, body)
        answer.status, headers = await connection.head()
        if answer.status != 200:
            await connection.reader.readexactly(int(headers.get("content-length", 0)))
            return
        async for data in connection.events():
            if data == b"[DONE]":
                answer.done = True
            elif b'"choices":[]' in data.replace(b" ", b""):
                _count(answer, data)
            else:
                answer.times.append(time.perf_counter())


def _count(answer: Answer, data: bytes) -> None:
    usage = json.loads(data).get("usage") if answer.status == 200 else None
    answer.tokens = usage["completion_tokens"] if usage else 0


async def metrics(target: Target) -> dict[str, float]:
    """The server's own figures by name, our prefix left out; those with labels added up."""
    status, body = await fetch(target, "/metrics")
    if status != 200:
        raise RuntimeError(f"/metrics answered {status}: {body[:200]!r}")
    figures: dict[str, float] = {}
    for line in body.decode().splitlines():
        if line.startswith(PREFIX):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix(PREFIX)
            figures[name] = figures.get(name, 0.0) + float(value)
    return figures


async def settled(target: Target, is_so: Callable[[int], bool], within_s: float = 10.0) -> bool:
    """Wait until the engine has so many sequences, running and waiting; False where it has not in time."""
    deadline = time.perf_counter() + within_s
    while True:
        figures = await metrics(target)
        if is_so(int(figures["num_requests_running"] + figures["num_requests_waiting"])):
            return True
        if time.perf_counter() > deadline:
            return False
        await asyncio.sleep(0.005)


async def together(count: int, make: Callable[[int], Awaitable[Answer]]) -> list[Answer]:
    """`count` requests at once."""
    return list(await asyncio.gather(*(make(n) for n in range(count))))


@contextlib.asynccontextmanager
async def busy(target: Target, count: int, make_body: Callable[[], dict[str, Any]]) -> AsyncIterator[None]:
    """`count` clients that ask, read, and ask again for as long as the block runs."""

    async def one() -> None:
        while True:
            answer = await ask(target, make_body())
            if answer.status != 200:
                await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def prompt(rng: random.Random, length: int) -> list[int]:
    """Token ids that nothing repeats and no cache knows; every model has these."""
    return [rng.randrange(32, 250) for _ in range(length)]


def completion(ids: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A body for /v1/completions of exactly `max_tokens` tokens."""
    return {"prompt": ids, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True} | more


def quantile(values: list[float], q: float) -> float | None:
    """The value below which a share of q lies, to the next one up; None of nothing."""
    return sorted(values)[min(int(q * len(values)), len(values) - 1)] if values else None
