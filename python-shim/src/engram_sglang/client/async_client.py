"""The client whose methods are awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from . import answers as _answers
from . import conversations as _conversations
from . import daemon as _daemon
from . import events as _events
from . import portable as _portable
from . import snapshots as _snapshots
from .async_stream import AsyncStream
from .async_wire import Pool
from .call import Call, Pages, Source
from .methods import as_method, with_tenant
from .settings import ANSWER_MAX, GENERATE_TIMEOUT_S, TIMEOUT_S, Settings

P = ParamSpec("P")
T = TypeVar("T")


def _one(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._settle(build(*args, **with_tenant(self._settings.tenant, build, kwargs)))

    return as_method(method, build)


def _list(build: Callable[P, Pages[T]]) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self._rows(build(*args, **with_tenant(self._settings.tenant, build, kwargs)))

    return as_method(method, build)


def _stream(build: Callable[P, Source[T]]) -> Callable[Concatenate[AsyncClient, P], AsyncStream[T]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncStream[T]:
        return AsyncStream(self._pool, build(*args, **with_tenant(self._settings.tenant, build, kwargs)))

    return as_method(method, build)


def _export(
    build: Callable[P, _portable.Export],
) -> Callable[Concatenate[AsyncClient, P], Awaitable[_portable.Exported]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> _portable.Exported:
        return await self._write(build(*args, **with_tenant(self._settings.tenant, build, kwargs)))

    return as_method(method, build)


def _import(
    build: Callable[P, _portable.Import],
) -> Callable[Concatenate[AsyncClient, P], Awaitable[_portable.ImportedSnapshot]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> _portable.ImportedSnapshot:
        both = build(*args, **kwargs)
        await self._settle(both.check)
        return await self._settle(both.send)

    return as_method(method, build)


class AsyncClient:
    """A daemon's REST surface, for the tasks of one event loop."""

    def __init__(
        self, url: str | None = None, *, token: str | None = None, tenant: str | None = None,
        timeout: float = TIMEOUT_S, generate_timeout: float = GENERATE_TIMEOUT_S, max_answer: int = ANSWER_MAX,
    ) -> None:
        """As of `Client`."""
        self._settings = Settings.of(url, token, tenant, timeout, generate_timeout, max_answer)
        self._pool = Pool(self._settings)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends its connections."""
        await self._pool.close()

    async def _settle(self, call: Call[T]) -> T:
        response = await self._pool.open(call.request)
        return call.settle(await response.whole(self._settings.max_answer))

    async def _rows(self, pages: Pages[T]) -> AsyncIterator[T]:
        at: int | None = pages.offset
        while at is not None:
            page = await self._settle(pages.page(at))
            for row in page.rows:
                yield row
            at = pages.after(at, page)

    async def _write(self, export: _portable.Export) -> _portable.Exported:
        async with await self._pool.open(export.request) as response:
            if not response.head.good:
                raise (await response.whole(self._settings.max_answer)).error()
            try:
                export.opened(response.head)
                while piece := await response.piece():
                    export.feed(piece)
                return export.finish()
            finally:
                export.close()

    save = _one(_snapshots.save)
    restore = _one(_snapshots.restore)
    resume = _one(_snapshots.resume)
    list_snapshots = _one(_snapshots.list_snapshots)
    snapshots = _list(_snapshots.snapshots)
    snapshot = _one(_snapshots.snapshot)
    snapshot_info = _one(_snapshots.snapshot_info)
    delete = _one(_snapshots.delete)
    pin = _one(_snapshots.pin)
    unpin = _one(_snapshots.unpin)
    label = _one(_snapshots.label)

    conversations = _list(_conversations.conversations)
    conversation = _one(_conversations.conversation)
    tokens = _one(_conversations.tokens)
    tree = _one(_conversations.tree)
    compare = _one(_conversations.compare)
    fork = _one(_conversations.fork)
    delete_turn = _one(_conversations.delete_turn)
    delete_branch = _one(_conversations.delete_branch)
    delete_conversation = _one(_conversations.delete_conversation)
    policy = _one(_conversations.policy)
    set_policy = _one(_conversations.set_policy)
    unset_policy = _one(_conversations.unset_policy)
    mark_tool_call = _one(_conversations.mark_tool_call)

    generate = _one(_answers.generate)
    generate_stream = _stream(_answers.generate_stream)
    chat = _one(_answers.chat)
    chat_stream = _stream(_answers.chat_stream)
    tokenize_chat = _one(_answers.tokenize_chat)

    status = _one(_daemon.status)
    health = _one(_daemon.health)
    ready = _one(_daemon.ready)
    tiers = _one(_daemon.tiers)
    set_budgets = _one(_daemon.set_budgets)
    workers = _one(_daemon.workers)
    namespaces = _list(_daemon.namespaces)
    events = _stream(_events.events)

    export_to = _export(_portable.export_to)
    import_from = _import(_portable.import_from)
