"""What comes piece by piece, for `AsyncClient`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from .async_wire import Pool, Response
from .call import Source, broken_off, is_stream
from .errors import EngramError

T = TypeVar("T")


class AsyncStream(Generic[T]):
    """Things as they come. Entering `async with` asks for them, leaving it ends the request."""

    def __init__(self, pool: Pool, source: Source[T]) -> None:
        self._pool, self._source = pool, source
        self._response: Response | None = None
        self._things: deque[T] = deque()
        self._closed = False

    async def __aenter__(self) -> AsyncStream[T]:
        if self._response is None and not self._closed:
            await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while not self._things:
            if self._closed:
                raise StopAsyncIteration
            try:
                await self._more()
            except EngramError as error:
                self._drop()
                await asyncio.sleep(self._lost(error))
            except BaseException:
                self._end()
                raise
        return self._things.popleft()

    async def _open(self) -> None:
        request = self._source.request()
        response = await self._pool.open(request)
        try:
            head = response.head
            self._source.opened(head if is_stream(head) else await response.whole(self._pool.settings.max_answer))
        except BaseException:
            response.close()
            raise
        self._response = response

    async def _more(self) -> None:
        if self._response is None:
            await self._open()
        assert self._response is not None
        piece = await self._response.piece()
        if piece:
            self._things.extend(self._source.feed(piece))
        elif not self._source.ended():
            raise broken_off(self._response.head)
        if self._source.over:
            if piece:
                await self._response.wind_up()
            self._end()

    def _lost(self, error: EngramError) -> float:
        try:
            return self._source.lost(error)
        except BaseException:
            self._closed = True
            raise

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    async def close(self) -> None:
        """Ends the request; nothing more comes."""
        self._things.clear()
        self._end()

    def _end(self) -> None:
        self._closed = True
        self._drop()
