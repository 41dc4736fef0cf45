"""Conversations: looked at, forked, compared, deleted, and which of their states are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .call import Call, Page, Pages, Request, dump, get, given, path, post, rows, target
from .records import Record
from .snapshots import PAGE, Deleted


@dataclass(frozen=True, kw_only=True)
class Conversation(Record):
    """A row of the list of conversations."""

    conversation_id: str
    tenant: str | None = None
    turns: int = 0
    """Finished ones."""
    branches: tuple[str, ...] = ()
    snapshots: int = 0
    """Distinct ones that it names."""
    total_tokens: int = 0
    """Of the latest turn."""
    updated_at: float = 0
    """Unix time in seconds."""


@dataclass(frozen=True, kw_only=True)
class Parting(Record):
    """Another conversation that this one parted from, or that parted from this one."""

    conversation_id: str
    turn_number: int
    """The last turn that both have."""


@dataclass(frozen=True, kw_only=True)
class Turn(Record):
    """One turn."""

    turn_number: int
    rid: str = ""
    snapshot_id: str | None = None
    """The deepest on its tokens; None: it has no state."""
    boundary: int = 0
    prompt_tokens: int | None = None
    total_tokens: int = 0
    """Of prompt and answer."""
    tokens_after_boundary: int = 0
    finish: str = ""
    """`stop`, `length`, `abort` or `error`."""
    finished_at: float = 0
    tier: str | None = None
    durable: bool = False
    branches: tuple[str, ...] = ()
    label: str | None = None


@dataclass(frozen=True, kw_only=True)
class Branch(Record):
    """A named snapshot of a conversation."""

    branch_name: str
    snapshot_id: str
    turn_number: int | None = None
    durable: bool = False


@dataclass(frozen=True, kw_only=True)
class ConversationView(Record):
    """One conversation, with a page of its turns."""

    conversation_id: str
    tenant: str | None = None
    unnamed: bool = False
    """No client named it: requests go on with it by their tokens."""
    origin: Parting | None = None
    turns: tuple[Turn, ...] = ()
    turns_total: int = 0
    branches: tuple[Branch, ...] = ()
    forks: tuple[Parting, ...] = ()
    policy: str | None = None
    """Its own; None: as configured."""
    running: int = 0
    total_tokens: int = 0
    updated_at: float = 0


@dataclass(frozen=True, kw_only=True)
class TokenStream(Record):
    """Every token of a turn, prompt and answer."""

    token_ids: tuple[int, ...]
    token_count: int = 0
    turn_number: int | None = None
    boundary: int = 0
    snapshot_id: str | None = None
    rid: str = ""
    messages: Any = None
    """What was said in words, where that is known."""


@dataclass(frozen=True, kw_only=True)
class TreeTurn(Record):
    """A turn in a tree."""

    turn_number: int
    total_tokens: int = 0
    snapshot_id: str | None = None
    branches: tuple[str, ...] = ()
    forks: tuple[TreeNode, ...] = ()
    """What parted after it."""


@dataclass(frozen=True, kw_only=True)
class TreeNode(Record):
    """A conversation in the tree of all that parted from one another."""

    conversation_id: str
    selected: bool = False
    """It is the one that was asked for."""
    turns: tuple[TreeTurn, ...] = ()
    """Those that the one it parted from does not have."""
    forks: tuple[TreeNode, ...] = ()
    """What parted before any of these turns."""


@dataclass(frozen=True, kw_only=True)
class Side(Record):
    """One side of a comparison."""

    conversation_id: str
    turn_number: int = 0
    """0: a branch that is no turn's snapshot."""
    tokens: int = 0
    snapshot_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """Two turns or branches beside each other."""

    a: Side
    b: Side
    common_tokens: int
    """That both begin with."""
    relation: str
    """`same`, `a_extends_b`, `b_extends_a` or `parted`."""
    common_snapshot: str | None = None
    """The deepest that both go on from."""
    common_boundary: int = 0


@dataclass(frozen=True, kw_only=True)
class Policy(Record):
    """Which states of a conversation go to disk by themselves."""

    policy: str
    """`every_turn`, `every_n_turns`, `on_tool_call`, `on_eviction` or `manual_only`."""
    every_n_turns: int = 1
    min_interval_seconds: float = 0
    own: bool = False
    """It is the conversation's own, not the configured one."""


def _at(conversation_id: str, *more: str | int) -> str:
    return path("v1", "conversations", conversation_id, *more)


def conversations(*, page_size: int = PAGE, offset: int = 0) -> Pages[Conversation]:
    """All conversations, the last changed first; asked for in pages while you iterate."""

    def page(at: int) -> Call[Page[Conversation]]:
        where = target("/v1/conversations", limit=page_size, offset=at)
        return get(where, rows(Conversation, "conversations"))

    return Pages(page, offset)


def conversation(
    conversation_id: str, *, limit: int | None = None, offset: int | None = None, tenant: str | None = None,
) -> Call[ConversationView]:
    """One conversation by any of its names, with `limit` of its turns."""
    where = target(_at(conversation_id), limit=limit, offset=offset, tenant=tenant)
    return get(where, ConversationView.read)


def tokens(
    conversation_id: str, *, turn: int | None = None, branch: str | None = None, tenant: str | None = None,
) -> Call[TokenStream]:
    """Every token of a turn, of the latest where none is named."""
    where = target(_at(conversation_id, "tokens"), turn=turn, branch=branch, tenant=tenant)
    return get(where, TokenStream.read)


def tree(conversation_id: str, *, tenant: str | None = None) -> Call[TreeNode]:
    """All that parted from one another around it."""
    return get(target(_at(conversation_id, "tree"), tenant=tenant), TreeNode.read)


def compare(
    conversation_id: str, a: int | str | None = None, b: int | str | None = None, *, other: str | None = None,
    tenant: str | None = None,
) -> Call[Comparison]:
    """Where two turns (a number) or branches (a name) part; None is the latest turn. `b` is of the conversation
    `other`, if one is given."""

    def side(it: int | str | None) -> str | None:
        return None if it is None else f"turn:{it}" if isinstance(it, int) else f"branch:{it}"

    query: dict[str, Any] = {"a": side(a), "b": side(b), "with": other, "tenant": tenant}
    return get(target(_at(conversation_id, "compare"), **query), Comparison.read)


def fork(
    conversation_id: str, new_id: str, *, turn: int | None = None, branch: str | None = None, tenant: str | None = None,
) -> Call[ConversationView]:
    """A new conversation begins with the turns up to this one; no payload is copied."""
    body = given(new_id=new_id, turn=turn, branch=branch, tenant=tenant)
    return post(_at(conversation_id, "fork"), body, ConversationView.read)


def _delete(where: str, tenant: str | None) -> Call[Deleted]:
    return Call(Request("DELETE", target(where, tenant=tenant)), Deleted.read)


def delete_turn(conversation_id: str, turn: int, *, tenant: str | None = None) -> Call[Deleted]:
    """Deletes a turn, from every tier, but for what something else names."""
    return _delete(_at(conversation_id, "turns", turn), tenant)


def delete_branch(conversation_id: str, branch: str, *, tenant: str | None = None) -> Call[Deleted]:
    """Deletes a branch, from every tier, but for what something else names."""
    return _delete(_at(conversation_id, "branches", branch), tenant)


def delete_conversation(conversation_id: str, *, tenant: str | None = None) -> Call[Deleted]:
    """Deletes all of a conversation, from every tier, but for what something else names."""
    return _delete(_at(conversation_id), tenant)


def policy(conversation_id: str, *, tenant: str | None = None) -> Call[Policy]:
    """Which of its states are written."""
    return get(target(_at(conversation_id, "policy"), tenant=tenant), Policy.read)


def set_policy(
    conversation_id: str, policy: str, *, every_n_turns: int | None = None, min_interval_seconds: float | None = None,
    tenant: str | None = None,
) -> Call[Policy]:
    """Gives it a policy of its own, also before its first turn; what is None is as configured."""
    body = given(policy=policy, every_n_turns=every_n_turns, min_interval_seconds=min_interval_seconds)
    where = target(_at(conversation_id, "policy"), tenant=tenant)
    return Call(Request("PUT", where, dump(body), repeatable=True), Policy.read)


def unset_policy(conversation_id: str, *, tenant: str | None = None) -> Call[Policy]:
    """As configured from now on."""
    where = target(_at(conversation_id, "policy"), tenant=tenant)
    return Call(Request("DELETE", where, repeatable=True), Policy.read)


def mark_tool_call(
    conversation_id: str, *, rid: str | None = None, turn: int | None = None, tenant: str | None = None,
) -> Call[None]:
    """Says that a turn calls a tool, for the policy `on_tool_call`; without a word the latest."""
    where = target(_at(conversation_id, "tool_call"), tenant=tenant)
    return post(where, given(rid=rid, turn=turn), lambda _: None, repeatable=True)
