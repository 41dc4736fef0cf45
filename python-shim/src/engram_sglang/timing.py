"""How long each hook keeps the scheduler thread."""

from __future__ import annotations

from typing import Any


class Times:
    """Count, sum, longest and a histogram by powers of two, in microseconds, of each hook."""

    BUCKETS = 20

    def __init__(self) -> None:
        self._hooks: dict[str, list[int]] = {}

    def add(self, hook: str, nanoseconds: int) -> None:
        """One call."""
        micros = nanoseconds // 1000
        row = self._hooks.get(hook)
        if row is None:
            row = self._hooks[hook] = [0, 0, 0] + [0] * self.BUCKETS
        row[0] += 1
        row[1] += nanoseconds
        if nanoseconds > row[2]:
            row[2] = nanoseconds
        row[3 + min(micros.bit_length(), self.BUCKETS - 1)] += 1

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Per hook: calls, mean, p99 (upper bound of its bucket) and longest, in microseconds."""
        out = {}
        for hook, (count, total, longest, *buckets) in sorted(self._hooks.items()):
            seen, p99 = 0, 0
            for power, n in enumerate(buckets):
                seen += n
                if seen * 100 >= count * 99:
                    p99 = 1 << power
                    break
            out[hook] = {
                "calls": count,
                "mean_us": round(total / count / 1000, 1),
                "p99_us": p99,
                "max_us": round(longest / 1000, 1),
            }
        return out
