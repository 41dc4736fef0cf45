"""What saving every turn costs those who decode: a server with Engram against the same one without, on one GPU.

    ENGRAM_BIN=... python benches/gpu/saving_cost.py MODEL [BATCH ...] [-- flags of SGLang]

Both servers are resident and used by turns, never at the same time; which one is first changes with each pair. A run is BATCH new
prompts as one request, PROMPT tokens each and NEW out: once streamed (when tokens come), once not (how long all takes).
Each Engram run begins when all of the one before is on disk, so that its own saves and
writes fall into its own time, and the other server's runs meet none. $PAIRS pairs (21). Writes gpu-saving-cost.md and .json into $OUT.
"""

from __future__ import annotations

import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu"))

from common import Daemon, Steps, arguments, median, ratio, write_results
from server import Server, settled

FLAGS = ("--attention-backend triton --page-size 64 --context-length 32768 --max-mamba-cache-size 160 --max-running-requests 32 "
         "--max-total-tokens 200064 --mamba-radix-cache-strategy extra_buffer")  # fmt: skip
PAIRS, PROMPT, NEW = int(os.environ.get("PAIRS", 21)), 440, 96
COUNTED = ("engram_saved_snapshots_total", "engram_saves_dropped_total", "engram_durable_snapshots_total", "engram_superseded_snapshots_total")


class Side:
    """One of the two servers."""

    def __init__(self, name: str, model: str, flags: list[str], daemon: Daemon | None) -> None:
        self.name, self.daemon = name, daemon
        self.server = Server(f"sglang-cost-{name}", model, flags, daemon, None, ENGRAM_RING_BYTES=os.environ.get("ENGRAM_RING_BYTES", "4GiB"))
        self.durable: list[float] = []
        self.gaps: list[float] = []

    def written(self) -> None:
        """Waits until everything that was saved is on disk."""
        if self.daemon is None:
            return
        began, quiet = time.monotonic(), 0
        while quiet < 3:
            worker = self.daemon.get("/v1/workers")["workers"]
            calm = len(worker) == 1 and worker[0]["saves"] == 0 and self.daemon.metric("engram_pending_writes") == 0
            quiet = quiet + 1 if calm else 0
            assert time.monotonic() < began + 60, "not all saves are on disk after 60 s"
            time.sleep(0.02)
        self.durable.append(time.monotonic() - began)

    def run(self, batch: int, rng: random.Random) -> dict[str, float]:
        """New prompts each time: nothing is a hit of what was before."""
        prompts = lambda: [[rng.randrange(10, 4000) for _ in range(PROMPT)] for _ in range(batch)]  # noqa: E731
        whole, times = self.server.stream(prompts(), NEW)
        gaps = [b - a for mine in times for a, b in zip(mine, mine[1:])]
        self.gaps += gaps
        first = max(mine[0] for mine in times)
        after = sum(at > first for mine in times for at in mine)
        plain = self.server.batch(prompts(), NEW)
        self.written()
        ordered = sorted(gaps)
        return {
            "streamed tokens/s": after / (max(mine[-1] for mine in times) - first), "request s": whole, "whole s": plain,
            "p50 ms": statistics.median(gaps) * 1e3, "p99 ms": ordered[int(len(ordered) * 0.99)] * 1e3, "max ms": ordered[-1] * 1e3,
        }  # fmt: skip


def counted(daemon: Daemon) -> dict[str, float]:
    return {name: daemon.metric(name) for name in COUNTED}


def row(batch: int, pairs: list[dict[str, dict[str, float]]], sides: dict[str, Side], before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    out: dict[str, Any] = {"batch": batch, "pairs": len(pairs)}
    of = lambda what: [(pair["without"][what], pair["with"][what]) for pair in pairs]  # noqa: E731
    for what in ("whole s", "streamed tokens/s", "p50 ms", "p99 ms"):
        found = ratio(of(what))
        a, b = median([x for x, _ in of(what)]), median([x for _, x in of(what)])
        out |= {f"{what} without": round(a, 3), f"{what} with": round(b, 3), f"{what} ratio [95 %]": f"{found['ratio']} [{found['low']}, {found['high']}]"}
    whole = [(batch * NEW / b, batch * NEW / a) for a, b in of("whole s")]
    out["tokens/s, whole request"] = f"{median([b for _, b in whole]):.0f} without, {median([a for a, _ in whole]):.0f} with"
    pooled = {name: sorted(side.gaps) for name, side in sides.items()}
    out["p99 ms of all gaps"] = ", ".join(f"{gaps[int(len(gaps) * 0.99)] * 1e3:.2f} {name}" for name, gaps in pooled.items())
    out |= {name.removeprefix("engram_").removesuffix("_total"): int(after[name] - before[name]) for name in COUNTED}
    out["longest until durable s"] = round(max(sides["with"].durable, default=0), 2)
    return out


def main() -> None:
    own, flags = arguments()
    steps, flags = Steps(500), flags or FLAGS.split()
    model, batches = own[0], [int(n) for n in own[1:]] or [1, 8, 32]
    rng, rows = random.Random(5), []
    daemon = Daemon(pathlib.Path(tempfile.mkdtemp()), ram=os.environ.get("RAM", "24GiB"), disk=True, service='write_after = "50ms"\nscrub_rate = "0 B"')
    sides = {"without": Side("without", model, flags, None), "with": Side("with", model, flags, daemon)}

    def write(show: bool = False) -> None:
        if rows:
            write_results("gpu-saving-cost", rows, f"The cost of saving every turn: {pathlib.Path(model).name}",
                          f"Ratios are with / without, geometric mean of pairs; of *whole s*, a request of BATCH x ({PROMPT} in, {NEW} out) that is not streamed, and of times between tokens, lower is better. "
                          f"Snapshots go to disk 50 ms after their save. SGLang {os.environ.get('SGLANG_VERSION', '')}, flags `{' '.join(flags)}`. Failures: {steps.failures or 'none'}.", show)  # fmt: skip

    try:
        with steps.whole():
            for side in sides.values():
                side.server.launch()
            for side in sides.values():
                print(f"{side.name} up in {side.server.wait():.0f} s", flush=True)
            settled(daemon, 60)
            with steps.step("compile"):
                for side in sides.values():
                    for batch in batches:
                        for _ in range(2):
                            side.run(batch, rng)
            for place, batch in enumerate(batches):
                with steps.step(f"batch {batch}"):
                    for side in sides.values():
                        side.durable, side.gaps = [], []
                    pairs, before, began = [], counted(daemon), steps.passed()
                    # Batches share what is left of the time.
                    until = began + (steps.left() - 15) * (1 / (len(batches) - place) if place < len(batches) - 1 else 1)
                    while len(pairs) < PAIRS and steps.passed() < until:
                        order = ("without", "with") if len(pairs) % 2 else ("with", "without")
                        pairs.append({name: sides[name].run(batch, rng) for name in order})
                        if len(pairs) % 5 == 0:
                            print(len(pairs), {name: {k: round(v, 3) for k, v in pairs[-1][name].items()} for name in sorted(pairs[-1])}, flush=True)
                    rows.append(row(batch, pairs, sides, before, counted(daemon)))
                    print(rows[-1], flush=True)
                    steps.check(rows[-1]["saves_dropped"] == 0, f"batch {batch}: dropped saves: {[k for k in daemon.metrics() if 'saves_dropped' in k]}")
                    steps.check(rows[-1]["saved_snapshots"] > 0, f"batch {batch}: nothing was saved")
                    steps.check(rows[-1]["longest until durable s"] < 30, f"batch {batch}: not durable within 30 s")
                write()
            print("worker:", daemon.get("/v1/workers")["workers"], flush=True)
    finally:
        write(show=True)
        for side in sides.values():
            side.server.kill()
        daemon.end("daemon-cost.log")
    steps.end("saving cost")


if __name__ == "__main__":
    main()
