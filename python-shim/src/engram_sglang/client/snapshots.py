"""Snapshots: what is kept of a conversation, saved, restored, looked at, marked and deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .answers import Origin, Usage
from .call import Call, Page, Pages, Request, dump, flat, get, given, ids, path, post, rows, target
from .errors import ProtocolError
from .records import Record

PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Snapshot(Record):
    """A snapshot, as a turn or branch of a conversation where one names it."""

    snapshot_id: str
    conversation_id: str | None = None
    turn_number: int | None = None
    """Counted from 1."""
    branch_name: str | None = None
    rid: str | None = None
    """The request whose tokens these are."""
    timestamp: float = 0
    """When the turn finished, or else when the snapshot was made; unix time in seconds."""
    created_at: float = 0
    token_count: int = 0
    """Tokens that it holds: the same as `boundary`."""
    boundary: int = 0
    tokens_after_boundary: int = 0
    """Tokens of the turn past the boundary: they are prefilled again."""
    model_name: str = ""
    fingerprint: str = ""
    """Identity of the model."""
    parent_snapshot: str | None = None
    tier: str = ""
    """The highest tier that holds all of it."""
    size_bytes: int = 0
    """The state and all KV from token 0, shared ones included."""
    durable: bool = False
    """It survives a crash."""
    pinned: bool = False
    """It is kept from eviction now."""
    label: str | None = None
    fill_ids: tuple[int, ...] | None = None
    """Its tokens, where they were asked for."""


@dataclass(frozen=True, kw_only=True)
class SavedSnapshot(Snapshot):
    """What was saved."""

    written_bytes: int = 0
    """That had to be written to disk; 0 when all was there."""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class RestoredSnapshot(Snapshot):
    """What is in RAM now, for the next request."""

    from_tier: str = ""
    moved_bytes: int = 0
    restore_time_ms: float = 0
    pinned_until: float = 0
    """Unix time in seconds."""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class ResumedSnapshot(Snapshot):
    """The answer of a request that went on from a snapshot; the other fields are the snapshot's."""

    output_ids: tuple[int, ...] = ()
    output_text: str | None = None
    finish_reason: Any = None
    usage: Usage | None = None
    engram: Origin | None = None
    base_tokens: int = 0
    """Tokens that were known before the continuation."""
    request_id: str | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Deleted(Record):
    """What a deletion removed."""

    snapshots: tuple[str, ...] = ()
    """Those that are gone. One that another turn or branch names stays, and is not here."""
    names: int = 0
    """Turns and branches that are gone."""
    objects: int = 0
    """What nothing refers to any longer, removed from every tier."""
    bytes: int = 0


def select(
    conversation_id: str | None, rid: str | None, turn: int | None, branch: str | None, snapshot_id: str | None,
    tenant: str | None,
) -> dict[str, Any]:
    """The fields that name one snapshot, or the newest of a conversation."""
    return given(
        conversation_id=conversation_id, rid=rid, turn_number=turn, branch_name=branch, snapshot_id=snapshot_id,
        tenant=tenant,
    )


def save(
    conversation_id: str | None = None, *, rid: str | None = None, turn: int | None = None, branch: str | None = None,
    snapshot_id: str | None = None, durable: bool = True, tenant: str | None = None,
) -> Call[SavedSnapshot]:
    """Keeps the state of a conversation, of its latest turn where none is named; `branch` names it. Returns once it is
    on disk, or with `durable=False` once it is noted."""
    body = select(conversation_id, rid, turn, branch, snapshot_id, tenant)
    return post("/save_snapshot", {**body, "durable": durable}, flat(SavedSnapshot))


def restore(
    conversation_id: str | None = None, *, rid: str | None = None, turn: int | None = None, branch: str | None = None,
    snapshot_id: str | None = None, pin_seconds: float | None = None, tenant: str | None = None,
) -> Call[RestoredSnapshot]:
    """Brings a snapshot into RAM, and keeps it there for a while, for the next request."""
    body = select(conversation_id, rid, turn, branch, snapshot_id, tenant)
    body |= given(pin_seconds=pin_seconds)
    return post("/restore_snapshot", body, flat(RestoredSnapshot), repeatable=True)


def resume(
    conversation_id: str | None = None, *, continuation_ids: Iterable[int], max_new_tokens: int, rid: str | None = None,
    turn: int | None = None, branch: str | None = None, snapshot_id: str | None = None,
    sampling_params: Mapping[str, Any] | None = None, append_to: str | None = None, request_id: str | None = None,
    tenant: str | None = None,
) -> Call[ResumedSnapshot]:
    """A restore with `create_new_request`: goes on from a snapshot with these tokens and generates. `append_to`
    (`boundary`, `turn`) says where they follow, where they do not show it."""
    body = select(conversation_id, rid, turn, branch, snapshot_id, tenant)
    body |= {"create_new_request": True, "continuation_ids": ids(continuation_ids), "max_new_tokens": max_new_tokens}
    body |= given(sampling_params=sampling_params, append_to=append_to, request_id=request_id)
    return post("/restore_snapshot", body, flat(ResumedSnapshot), long=True)


def list_snapshots(
    conversation_id: str, *, limit: int | None = None, offset: int = 0, tenant: str | None = None,
) -> Call[Page[Snapshot]]:
    """A page of the snapshots of one conversation, turns before branches; empty where nobody knows it."""
    body = given(conversation_id=conversation_id, limit=limit, offset=offset, tenant=tenant)
    return post("/list_snapshots", body, rows(Snapshot, "snapshots"), repeatable=True)


def snapshots(
    conversation_id: str | None = None, *, page_size: int = PAGE, offset: int = 0, tenant: str | None = None,
) -> Pages[Snapshot]:
    """All snapshots, the newest first, or those of one conversation; asked for in pages while you iterate."""

    def page(at: int) -> Call[Page[Snapshot]]:
        where = target("/v1/snapshots", conversation_id=conversation_id, tenant=tenant, limit=page_size, offset=at)
        return get(where, rows(Snapshot, "snapshots"))

    return Pages(page, offset)


def snapshot(snapshot_id: str) -> Call[Snapshot]:
    """One snapshot."""
    return get(path("v1", "snapshots", snapshot_id), flat(Snapshot))


def snapshot_info(
    conversation_id: str | None = None, *, rid: str | None = None, turn: int | None = None, branch: str | None = None,
    snapshot_id: str | None = None, with_tokens: bool = True, tenant: str | None = None,
) -> Call[Snapshot]:
    """One snapshot by any of its names, with its tokens."""

    def read(value: Any) -> Snapshot:
        if not isinstance(value, dict):
            raise ProtocolError("it is no object", type="protocol")
        return Snapshot.read(value.get("metadata"))

    body = select(conversation_id, rid, turn, branch, snapshot_id, tenant)
    return post("/get_snapshot_info", {**body, "with_tokens": with_tokens}, read, repeatable=True)


def delete(snapshot_id: str) -> Call[Deleted]:
    """Deletes a snapshot, with all its names."""
    return Call(Request("DELETE", path("v1", "snapshots", snapshot_id)), flat(Deleted))


def _mark(snapshot_id: str, **fields: Any) -> Call[Snapshot]:
    request = Request("PATCH", path("v1", "snapshots", snapshot_id), dump(fields), repeatable=True)
    return Call(request, flat(Snapshot))


def pin(snapshot_id: str, *, label: str | None = None) -> Call[Snapshot]:
    """Never evicted from now on, over restarts, too; with a label, if one is given."""
    return _mark(snapshot_id, pinned=True, **given(label=label))


def unpin(snapshot_id: str) -> Call[Snapshot]:
    """As any other snapshot again."""
    return _mark(snapshot_id, pinned=False)


def label(snapshot_id: str, label: str | None) -> Call[Snapshot]:
    """What people call it; None takes that away."""
    return _mark(snapshot_id, label=label)
