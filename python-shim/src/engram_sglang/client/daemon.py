"""The daemon: how it is, what it holds, and who is attached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .call import Call, Page, Pages, Request, dump, get, given, rows, target
from .records import Record
from .snapshots import PAGE


@dataclass(frozen=True, kw_only=True)
class Status(Record):
    """The daemon at a glance."""

    version: str
    boot: str = ""
    """Another with each start."""
    ready: bool = False
    not_ready: tuple[str, ...] = ()
    """What it waits for, or what is broken."""
    warnings: tuple[str, ...] = ()
    """What is wrong although it does its work."""
    workers: int = 0
    snapshots: int = 0
    conversations: int = 0
    pending_writes: int = 0
    """Snapshots that wait to be written to disk."""
    pending_names: int = 0
    """Conversations whose names and turns wait for that."""


@dataclass(frozen=True, kw_only=True)
class Health(Record):
    """The process answers."""

    status: str


@dataclass(frozen=True, kw_only=True)
class Readiness(Record):
    """Whether the daemon can do its work."""

    ready: bool
    reasons: tuple[str, ...] = ()
    """Why it cannot."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tier(Record):
    """One tier."""

    tier: str
    used_bytes: int = 0
    budget_bytes: int = 0
    objects: int = 0
    min_free_bytes: int | None = None
    """Of the file system, whatever the budget; of the disk only."""
    healthy: bool = True
    """It takes writes, but for a lack of room."""
    full: bool = False
    full_since: float | None = None
    trouble: str | None = None
    """Why it refuses writes: `full`, `quota`, `read_only`, `removed`, `failing` or `fsync`."""
    trouble_since: float | None = None
    last_failure_at: float | None = None
    last_failure: str | None = None
    direct_io: bool | None = None
    io_engine: str | None = None


@dataclass(frozen=True, kw_only=True)
class Hook(Record):
    """How long one hook of a worker took since its start."""

    calls: int = 0
    mean_ns: int = 0
    p99_ns: int = 0
    max_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Load(Record):
    """A worker's own numbers."""

    ticks: int = 0
    slots_free: int = 0
    slots_total: int = 0
    rows_free: int = 0
    rows_total: int = 0
    running: int = 0
    waiting: int = 0
    hooks: Mapping[str, Hook] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True)
class Worker(Record):
    """One attached worker."""

    session: str
    instance: str = ""
    attn_tp_size: int = 1
    attn_tp_rank: int = 0
    model_name: str = ""
    fingerprint: str | None = None
    """What its states are interchangeable with; None while its weights change."""
    mode: str = ""
    """Who copies between its ring and memory that the daemon reaches: `ipc` or `engine`."""
    mode_why: str = ""
    device: str = ""
    ring_bytes: int = 0
    page_size: int = 0
    epoch: int = 0
    pid: int | None = None
    bound: bool = False
    """Its ring is bound, its channel is open."""
    requests: int = 0
    saves: int = 0
    leases: int = 0
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    attached_at: float = 0
    load: Load | None = None


@dataclass(frozen=True, kw_only=True)
class Refusal(Record):
    """A worker that was not attached."""

    reason: str
    message: str = ""
    model_name: str = ""
    attn_tp_size: int = 0
    attn_tp_rank: int = 0
    pid: int | None = None
    times: int = 1
    at: float = 0


@dataclass(frozen=True, kw_only=True)
class Workers(Record):
    """Who is attached, and who was refused."""

    workers: tuple[Worker, ...] = ()
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Namespace(Record):
    """Who holds how much."""

    namespace: str
    name: str | None = None
    tenant: str | None = None
    extra_key: str | None = None
    salted: bool = False
    snapshots: int = 0
    objects: int = 0
    used_bytes: int = 0
    quota_bytes: int | None = None
    keep_snapshots: int | None = None
    keep_bytes: int | None = None
    keep_seconds: int | None = None


def status() -> Call[Status]:
    """The daemon at a glance."""
    return get("/v1/status", Status.read)


def health() -> Call[Health]:
    """The process answers; else an error."""
    return get("/healthz", Health.read)


def ready() -> Call[Readiness]:
    """Whether it can do its work, and why not."""
    return Call(Request("GET", "/readyz", repeatable=True), Readiness.read, frozenset({503}))


def tiers() -> Call[tuple[Tier, ...]]:
    """What its tiers hold, and what troubles them."""
    read = rows(Tier, "tiers")

    def only_rows(value: Any) -> tuple[Tier, ...]:
        return read(value).rows

    return get("/v1/tiers", only_rows)


def set_budgets(
    *, ram_budget_bytes: int | None = None, disk_budget_bytes: int | None = None, disk_min_free_bytes: int | None = None,
) -> Call[tuple[Tier, ...]]:
    """Changes what tiers may hold, at once and until the daemon's next start; what is left out stays."""
    read = rows(Tier, "tiers")
    body = given(
        ram_budget_bytes=ram_budget_bytes, disk_budget_bytes=disk_budget_bytes, disk_min_free_bytes=disk_min_free_bytes,
    )

    def only_rows(value: Any) -> tuple[Tier, ...]:
        return read(value).rows

    return Call(Request("PATCH", "/v1/tiers", dump(body), repeatable=True), only_rows)


def workers() -> Call[Workers]:
    """Who is attached, and who was refused."""
    return get("/v1/workers", Workers.read)


def namespaces(*, page_size: int = PAGE, offset: int = 0) -> Pages[Namespace]:
    """Who holds how much, those that hold most first; asked for in pages while you iterate."""

    def page(at: int) -> Call[Page[Namespace]]:
        return get(target("/v1/namespaces", limit=page_size, offset=at), rows(Namespace, "namespaces"))

    return Pages(page, offset)
