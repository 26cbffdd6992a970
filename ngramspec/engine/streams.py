"""The pieces of a request as an iterator: of a text, or of a chat's answer.

What a request delivers enters through a queue, deltas leave; closing an iterator cancels its request.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import AsyncGenerator, Iterator
from typing import Self

from ngramspec.engine.request import Request
from ngramspec.outputs import Completion, Delta
from ngramspec.prompts.chat_reply import ChatDelta, read_delta
from ngramspec.prompts.tool_calls.stream_parser import StreamParser


class Stream(Iterator[Delta]):
    """The pieces of one request. Closing it, dropping it or leaving its `with` block cancels what is not written yet.

    Several threads may take pieces: each piece goes to one of them, and all of them end with the last one.
    """

    def __init__(self, request: Request, pieces: queue.SimpleQueue[Delta | Exception | None]) -> None:
        """Make an iterator over what the request puts into `pieces`. This class adds None after the last one."""
        self._request, self._pieces, self._over = request, pieces, False

    def __next__(self) -> Delta:
        """Return the next piece. Raises the request's error, CallbackError, EngineClosedError."""
        if self._over:
            raise StopIteration
        self._request.check_caller()
        try:
            piece = self._pieces.get()
        except BaseException:  # an interrupt
            self.close()
            raise
        if piece is None or isinstance(piece, Exception) or piece.completion is not None:
            self._over = True
            self._pieces.put(None)  # another thread may wait for a piece
        if piece is None:
            raise StopIteration
        if isinstance(piece, Exception):
            raise piece
        return piece

    def close(self) -> None:
        """Cancel what is not written yet. A second call changes nothing."""
        if not self._over:
            self._over = True
            self._request.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Stream, {'over' if self._over else 'under way'}>"


class ChatStream(Iterator[ChatDelta]):
    """The pieces of a chat's answer. Closing it, dropping it or leaving its `with` block cancels what is not written yet."""

    def __init__(self, stream: Stream, parser: StreamParser) -> None:
        self._stream, self._parser = stream, parser

    def __next__(self) -> ChatDelta:
        """Return the next piece that has something to show. Raises the request's error."""
        while True:
            delta = read_delta(self._parser, next(self._stream))
            if delta is not None:
                return delta

    def close(self) -> None:
        """Cancel what is not written yet. A second call changes nothing."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def read_last(pieces: AsyncGenerator[Delta]) -> Completion:
    """Return the completion that the last piece carries. Cancelling the task cancels the request."""
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            if piece.completion is not None:
                return piece.completion
    raise AssertionError("a stream ends with its completion")
