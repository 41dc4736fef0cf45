"""Who copies between the pools and the ring, and what says that a copy is over.

The order is what matters. A copy must come after everything that SGLang has already queued on the
device: under overlap scheduling a state that is in the tree may still be being written. What SGLang
queues later must come after the copy where the copy's memory is not held by a lock: then
`submit(.., before_next=True)`.

In mode engine there are further copies, between the ring and its window (see `carrier`): `carry` queues them beside all
that, behind the gather that they belong to, and nothing of SGLang waits for them.

On a device this is done by events between streams, without waiting. On the host the forward is over
when the scheduler goes on, and so a copy is made at once. Tests inject a copier with a queue of its
own, as a device has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Everything before it is over. Never waits."""


class Copier(Protocol):
    """Queues copies in the right order."""

    def submit(self, copy: Callable[[], None], *, before_next: bool) -> Event:
        """Queues `copy` behind what SGLang queued so far. With `before_next`, what SGLang queues from
        now on waits for it."""

    def carry(self, copy: Callable[[], None], after: Event | None, *, inward: bool) -> Event:
        """Queues a copy between ring and window behind `after`, and behind what was carried the same way before; but
        neither behind nor before anything else."""


class _Done:
    def done(self) -> bool:
        return True


DONE: Event = _Done()


class HostCopier:
    """For pools in host memory."""

    def submit(self, copy: Callable[[], None], *, before_next: bool) -> Event:
        del before_next
        copy()
        return DONE

    def carry(self, copy: Callable[[], None], after: Event | None, *, inward: bool) -> Event:
        del after, inward
        copy()
        return DONE
