"""A device without a device: a queue of work, and what copies in it."""

from __future__ import annotations

from collections import deque
from typing import Any

from engram_sglang.ring import HostRing


class Stream:
    """A device's queue of work, and the copies beside it that nothing in it waits for: they are done as late as may be."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Any, int]] = deque()
        self._beside: deque[tuple[int, int, Any, list[bool]]] = deque()
        self._carried: list[deque[tuple[int, Any, Any, list[bool]]]] = [deque(), deque()]
        self.done = 0
        self.queued = 0

    @property
    def work(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._queue or self._beside or any(self._carried))

    def put_carried(self, work: Any, after: Any, ready: int, lane: int) -> list[bool]:
        """Work in a lane of its own, not before `after` is done."""
        over: list[bool] = []
        self._carried[lane].append((ready, after, work, over))
        return over

    def put(self, work: Any, ready: int) -> int:
        """Queues work that is not done before tick `ready`."""
        self.queued += 1
        self._queue.append((ready, work, self.queued))
        return self.queued

    def put_beside(self, work: Any, ready: int) -> list[bool]:
        """Work that waits for all that is queued, and for which nothing waits: it is done from tick `ready` on, or when
        `catch_up` needs it. The answer becomes [True] then."""
        over: list[bool] = []
        self._beside.append((ready, self.queued, work, over))
        return over

    def catch_up(self, upto: int) -> None:
        """Does what was put beside the queue before its work number `upto`: copies are in order among themselves."""
        while self._beside and self._beside[0][1] < upto:
            *_, work, over = self._beside.popleft()
            work()
            over.append(True)

    def run(self, tick: int) -> None:
        """Does what is due, in order."""
        while self._queue and self._queue[0][0] <= tick:
            _, work, number = self._queue.popleft()
            work()
            self.done = number
        while self._beside and self._beside[0][0] <= tick and self._beside[0][1] <= self.done:
            *_, work, over = self._beside.popleft()
            work()
            over.append(True)
        for lane in self._carried:
            while lane and lane[0][0] <= tick and (lane[0][1] is None or lane[0][1].done()):
                *_, work, over = lane.popleft()
                work()
                over.append(True)


class StreamEvent:
    """A point in the queue."""

    def __init__(self, stream: Stream, number: int) -> None:
        self._stream, self._number = stream, number

    def done(self) -> bool:
        return self._stream.done >= self._number


class BesideEvent:
    """The end of a copy beside the queue."""

    def __init__(self, over: list[bool]) -> None:
        self._over = over

    def done(self) -> bool:
        return bool(self._over)


class StreamCopier:
    """Copies in the device's queue, as on a GPU; or beside it, where what is queued next does not wait for them."""

    LATE = 3

    def __init__(self, stream: Stream, lag: int = 0) -> None:
        self.stream, self.lag = stream, lag
        self.tick = 0

    def submit(self, copy: Any, *, before_next: bool) -> StreamEvent | BesideEvent:
        stream = self.stream
        if not before_next:
            return BesideEvent(stream.put_beside(copy, self.tick + self.lag + self.LATE))
        number = stream.queued + 1

        def in_order() -> None:
            stream.catch_up(number)
            copy()

        stream.put(in_order, self.tick + self.lag)
        return StreamEvent(stream, number)


    def carry(self, copy: Any, after: Any, *, inward: bool) -> BesideEvent:
        ready = self.tick + self.lag + self.LATE
        return BesideEvent(self.stream.put_carried(copy, after, ready, int(inward)))


def scribble_rooms() -> None:
    """Room in a ring becomes garbage as soon as it is given back, as if the next one wrote to it at once: who still
    reads it, be it a queued copy or the daemon, has that."""
    begin = HostRing.__init__

    def init(ring: Any, size: int) -> None:
        begin(ring, size)
        space, give = ring.space, ring.space.give

        def scribbled(start: int) -> None:
            for memory in (ring, ring._window):
                if memory is not None:
                    memory.bytes[start : start + space._taken.get(start, 0)] = 0xEE
            give(start)

        space.give = scribbled

    HostRing.__init__ = init  # type: ignore[method-assign]
