"""Both clients with one face, so that a test says once what both have to do."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from engram_sglang.client import AsyncClient, AsyncStream, Client

T = TypeVar("T")


class Waiting:
    """An `AsyncClient` in a loop of its own that a test can use as a `Client`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = AsyncClient(*args, **kwargs)

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(_awaited(work))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made = method(*args, **kwargs)
            if inspect.isawaitable(made):
                return self.run(made)
            return WaitingStream(self, made) if isinstance(made, AsyncStream) else self._iterate(made)

        return call

    def _iterate(self, rows: Any) -> Iterator[Any]:
        while True:
            try:
                row = self.run(rows.__anext__())
            except StopAsyncIteration:
                return
            yield row

    def close(self) -> None:
        self.run(self.client.close())
        self.run(self.loop.shutdown_asyncgens())
        self.loop.close()


class WaitingStream:
    """The same for a stream."""

    def __init__(self, waiting: Waiting, stream: Any) -> None:
        self.waiting, self.stream = waiting, stream

    def __enter__(self) -> WaitingStream:
        self.waiting.run(self.stream.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.waiting.run(self.stream.__aexit__(None, None, None))

    def __iter__(self) -> WaitingStream:
        return self

    def __next__(self) -> Any:
        try:
            return self.waiting.run(self.stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        self.waiting.run(self.stream.close())


async def _awaited(work: Awaitable[T]) -> T:
    return await work


@contextlib.contextmanager
def maker(kind: str) -> Iterator[Callable[..., Any]]:
    """Makes clients of one kind, and closes them."""
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(Client(*args, **kwargs) if kind == "sync" else Waiting(*args, **kwargs))
        return made[-1]

    try:
        yield make
    finally:
        for client in made:
            client.close()
