"""A device without a device: a queue of work, and what copies in it."""

from __future__ import annotations

from collections import deque
from typing import Any

from engram_sglang.ring import HostRing


class Stream:
    """A device's queue of work."""

    def __init__(self) -> None:
        self.work: deque[tuple[int, Any, Any]] = deque()
        self.done = 0
        self.queued = 0

    def put(self, work: Any, ready: int) -> int:
        """Queues work that is not done before tick `ready`."""
        self.queued += 1
        self.work.append((ready, work, self.queued))
        return self.queued

    def run(self, tick: int) -> None:
        """Does what is due, in order."""
        while self.work and self.work[0][0] <= tick:
            _, work, number = self.work.popleft()
            work()
            self.done = number


class StreamEvent:
    """A point in the queue."""

    def __init__(self, stream: Stream, number: int) -> None:
        self._stream, self._number = stream, number

    def done(self) -> bool:
        return self._stream.done >= self._number


class StreamCopier:
    """Copies in the device's queue, as on a GPU."""

    def __init__(self, stream: Stream, lag: int = 0) -> None:
        self.stream, self.lag = stream, lag
        self.tick = 0

    def submit(self, copy: Any, *, before_next: bool) -> StreamEvent:
        return StreamEvent(self.stream, self.stream.put(copy, self.tick + self.lag))


def scribble_rooms() -> None:
    """Room in a ring becomes garbage as soon as it is given back, as if the next one wrote to it at once: who still
    reads it, be it a queued copy or the daemon, has that."""
    begin = HostRing.__init__

    def init(ring: Any, size: int) -> None:
        begin(ring, size)
        space, give = ring.space, ring.space.give

        def scribbled(start: int) -> None:
            ring.bytes[start : start + space._taken.get(start, 0)] = 0xEE
            give(start)

        space.give = scribbled

    HostRing.__init__ = init  # type: ignore[method-assign]
