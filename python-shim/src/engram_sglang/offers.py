"""Work that the daemon asks of all ranks of a server: to offer states again.

It is numbered for each server, without gaps, and comes to each rank on its own stream. A rank that attached in
between does not have the older numbers; so ranks agree on the numbers that all of them have.
"""

from __future__ import annotations

from typing import Any

_NONE = 1 << 62


def received(session: Any) -> tuple[int, int]:
    """The first and the last number that this rank has and did not do; (a number beyond all, 0) if there is none."""
    if session is None or not session.work:
        return _NONE, 0
    return session.work[0].number, session.work[-1].number


def take(session: Any, first: int, last: int) -> list[str]:
    """Takes all numbers up to `last`; those from `first` on are to be done."""
    chosen = []
    while session is not None and session.work and session.work[0].number <= last:
        work = session.work.popleft()
        if work.number >= first and work.WhichOneof("work") == "offer_again":
            chosen.append(work.offer_again.conversation)
    return chosen
