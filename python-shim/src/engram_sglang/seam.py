"""What the shim needs of SGLang, in its own words. Each adapter says it of one release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ._channel_layout import Finish
from .link import Beat

if TYPE_CHECKING:
    from .requests import Request


@dataclass
class Names:
    """What an adapter read off a request."""

    rid: str
    session_id: str | None
    extra_key: str | None
    cache_salt: str | None
    saved: bool
    """False: of a sort that is neither saved nor restored."""


@dataclass
class Ending:
    """How a request ended."""

    prompt_tokens: int
    total_tokens: int
    cached_tokens: int
    finish: Finish


@dataclass
class Room:
    """What is free on the device, beyond what running requests and this one reserved.

    Slots are not in it: a restored state can be evicted from the moment that it is in the tree, so that a
    restore never makes fewer slots for others.
    """

    tokens: int
    requests: int
    """How many more requests may run. What is placed for others is evicted before it is used."""
    idle: bool
    """Nothing runs that could free more."""


class Tree(Protocol):
    """SGLang's cache, as the shim needs it. Everything on the scheduler thread, nothing waits."""

    page_size: int

    def key(self, request: Request, upto: int) -> Any:
        """The key of the request's first `upto` tokens, to be used before the request goes on."""

    def full_match(self, key: Any) -> tuple[int, int]:
        """How much KV of the key is on the device, and the deepest node of it."""

    def state_match(self, key: Any) -> int:
        """The deepest boundary on the key that has a state on the device."""

    def state_node(self, key: Any) -> tuple[int, int]:
        """That boundary, and its node."""

    def lock_kv(self, node: int) -> Any:
        """Locks the KV of the path, no state. None: the node is gone."""

    def unlock(self, lock: Any) -> None:
        """Ends a lock."""

    def rows(self, node: int, start: int) -> tuple[int, int, Any] | None:
        """(first, end, rows): row numbers, on the device, of tokens [first, end) of the path, of which `end` is
        the node's own and `first` is `start` or less. None: the node is gone."""

    def slot(self, node: int) -> Any:
        """The slot of the node's state as a tensor of one number, or None."""

    def room(self, request: Request) -> Room:
        """What a restore may take."""

    def is_idle(self) -> bool:
        """Whether nothing runs."""

    def is_short(self) -> bool:
        """Whether what runs may find no room in this iteration, as too much is held."""

    def take(self, tokens: int) -> tuple[Any, Any] | None:
        """Rows for so many tokens and one slot, evicting where needed; or neither."""

    def give(self, rows: Any, slot: Any) -> None:
        """Gives back what `take` took and nobody inserted, or some of it; no slot: None."""

    def insert(self, key: Any, have: int, rows: Any, slot: Any) -> int:
        """Inserts the restored path, of which [0, have) is there. The node."""

    def load(self) -> Beat:
        """Numbers for the daemon's status."""
