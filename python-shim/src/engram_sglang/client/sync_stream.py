"""What comes piece by piece, for `Client`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from .call import Source, broken_off, is_stream
from .errors import EngramError
from .sync_wire import Pool, Response

T = TypeVar("T")


class Stream(Generic[T]):
    """Things as they come. Entering `with` asks for them, leaving it ends the request."""

    def __init__(self, pool: Pool, source: Source[T]) -> None:
        self._pool, self._source = pool, source
        self._response: Response | None = None
        self._things: deque[T] = deque()
        self._closed = False

    def __enter__(self) -> Stream[T]:
        if self._response is None and not self._closed:
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._things:
            if self._closed:
                raise StopIteration
            try:
                self._more()
            except EngramError as error:
                self._drop()
                time.sleep(self._lost(error))
            except BaseException:
                self._end()
                raise
        return self._things.popleft()

    def _open(self) -> None:
        request = self._source.request()
        response = self._pool.open(request)
        try:
            head = response.head
            self._source.opened(head if is_stream(head) else response.whole(self._pool.settings.max_answer))
        except BaseException:
            response.close()
            raise
        self._response = response

    def _more(self) -> None:
        if self._response is None:
            self._open()
        assert self._response is not None
        piece = self._response.piece()
        if piece:
            self._things.extend(self._source.feed(piece))
        elif not self._source.ended():
            raise broken_off(self._response.head)
        if self._source.over:
            if piece:
                self._response.wind_up()
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

    def close(self) -> None:
        """Ends the request; nothing more comes."""
        self._things.clear()
        self._end()

    def _end(self) -> None:
        self._closed = True
        self._drop()
