"""How long something may still take."""

from __future__ import annotations

import time


class Deadline:
    """All of an answer, or of a stream the time to its next piece."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Something came: the time begins anew."""
        self._end = time.monotonic() + self._seconds

    def left(self) -> float:
        """Seconds; raises TimeoutError when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left
