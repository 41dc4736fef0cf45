"""The client whose methods wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from . import answers as _answers
from . import conversations as _conversations
from . import daemon as _daemon
from . import events as _events
from . import portable as _portable
from . import snapshots as _snapshots
from .call import Call, Pages, Source
from .methods import as_method, with_tenant
from .settings import ANSWER_MAX, GENERATE_TIMEOUT_S, TIMEOUT_S, Settings
from .sync_stream import Stream
from .sync_wire import Pool

P = ParamSpec("P")
T = TypeVar("T")


def _one(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._settle(build(*args, **with_tenant(self._settings.tenant, build, kwargs)))

    return as_method(method, build)


def _list(build: Callable[P, Pages[T]]) -> Callable[Concatenate[Client, P], Iterator[T]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._rows(build(*args, **with_tenant(self._settings.tenant, build, kwargs)))

    return as_method(method, build)


def _stream(build: Callable[P, Source[T]]) -> Callable[Concatenate[Client, P], Stream[T]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]:
        return Stream(self._pool, build(*args, **with_tenant(self._settings.tenant, build, kwargs)))

    return as_method(method, build)


def _export(build: Callable[P, _portable.Export]) -> Callable[Concatenate[Client, P], _portable.Exported]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> _portable.Exported:
        return self._write(build(*args, **with_tenant(self._settings.tenant, build, kwargs)))

    return as_method(method, build)


def _import(build: Callable[P, _portable.Import]) -> Callable[Concatenate[Client, P], _portable.ImportedSnapshot]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> _portable.ImportedSnapshot:
        both = build(*args, **kwargs)
        self._settle(both.check)
        return self._settle(both.send)

    return as_method(method, build)


class Client:
    """A daemon's REST surface. Threads may share it."""

    def __init__(
        self, url: str | None = None, *, token: str | None = None, tenant: str | None = None,
        timeout: float = TIMEOUT_S, generate_timeout: float = GENERATE_TIMEOUT_S, max_answer: int = ANSWER_MAX,
    ) -> None:
        """`url` is `http://HOST:PORT` or `unix:/PATH`; without one `ENGRAM_URL` says it, or it is the daemon's
        default, and `ENGRAM_TOKEN` says the token. `tenant` is whose the conversations are, where a method is not
        told. `timeout` is in seconds, for all of an answer; of what generates, and of whole snapshots on their way,
        it is `generate_timeout`; of streams it is the time between two pieces. Nothing is sent yet. Raises
        ValueError."""
        self._settings = Settings.of(url, token, tenant, timeout, generate_timeout, max_answer)
        self._pool = Pool(self._settings)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends its connections."""
        self._pool.close()

    def _settle(self, call: Call[T]) -> T:
        return call.settle(self._pool.open(call.request).whole(self._settings.max_answer))

    def _rows(self, pages: Pages[T]) -> Iterator[T]:
        at: int | None = pages.offset
        while at is not None:
            page = self._settle(pages.page(at))
            yield from page.rows
            at = pages.after(at, page)

    def _write(self, export: _portable.Export) -> _portable.Exported:
        with self._pool.open(export.request) as response:
            if not response.head.good:
                raise response.whole(self._settings.max_answer).error()
            try:
                export.opened(response.head)
                while piece := response.piece():
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
