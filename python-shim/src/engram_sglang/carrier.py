"""Copies between the staging ring and its window, in mode engine.

What. Where the daemon has no way into this process's GPU, it reaches a *window*: a memfd as large as the ring, in which
each place stands for the same place in the ring (proto/engram/v1/channel.toml, "Modes"). What is saved is copied there
before the daemon is told of it; what is restored is copied from there after the daemon answered. Who gives a place in the
ring back gives that place in the window back, too, so one account of room is enough.

Order. The copies run beside SGLang's streams, a lane for each direction: nothing that SGLang computes waits for the bus.
A copy out waits on the device for the gather that filled the ring. A copy in is over, as the tick sees by its event,
before anything is scattered; the daemon is not asked in between, so that its death strands nothing.

Errors. Memory that cannot be had, or that the GPU cannot be made to read, is found when the carrier is made: then there is
no session (`ring.NoRing`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Place = tuple[int, int]
"""Where in ring and window, and how many bytes."""


class Carrier:
    """Copies between a ring and its window. What it does is queued where the caller's stream is."""

    def __init__(self, ring: Any, window: Any, step: int) -> None:
        """Tensors of bytes. `step`: the window consists of parts of so many bytes, and no copy goes across two."""
        self._ring, self._window, self._step = ring, window, step

    def out(self, places: Iterable[Place]) -> None:
        """Ring to window."""
        for start, end in self._cut(places):
            self._window[start:end].copy_(self._ring[start:end], non_blocking=True)

    def into(self, places: Iterable[Place]) -> None:
        """Window to ring."""
        for start, end in self._cut(places):
            self._ring[start:end].copy_(self._window[start:end], non_blocking=True)

    def _cut(self, places: Iterable[Place]) -> Iterable[Place]:
        step = self._step
        for start, size in places:
            end = start + size
            while start < end:
                upto = min(end, (start // step + 1) * step)
                yield start, upto
                start = upto
