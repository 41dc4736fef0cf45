"""Time to first token of second turns: cold, SGLang's own warm hit, and Engram from RAM and from disk.

    ENGRAM_BIN=... python benches/gpu/second_turns.py MODEL [LENGTH ...] [-- flags of SGLang]

For each length a first turn, and then second turns of it that differ in their last 100 tokens: as hits of SGLang's own tree;
after a flush (from RAM); after `kill -9` of SGLang (from RAM); and after `kill -9` of the daemon, with the page cache
dropped (from disk). One token out. Writes gpu-second-turns.md and .json into $OUT.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu"))

from common import OUT, Daemon, arguments, drop_caches, median, write_results
from server import Server, settled

REPEATS = 5


def main() -> None:
    own, flags = arguments()
    model, lengths = own[0], [int(n) for n in own[1:]] or [2048, 8192, 8224, 32768, 65536, 130816]
    probe = OUT / "probe-turns.jsonl"
    daemon = Daemon(pathlib.Path(tempfile.mkdtemp()), ram="24GiB", disk=True, service='write_after = "1s"\npreload = "0 B"')
    server = Server("sglang-turns", model, flags, daemon, probe, ENGRAM_PROBE_BYTES="0", ENGRAM_RING_BYTES="4GiB")
    rows: dict[int, dict[str, Any]] = {}
    turns: dict[int, list[int]] = {}
    rng = random.Random(11)
    ids = lambda n: [rng.randrange(10, 4000) for _ in range(n)]  # noqa: E731
    began, dropped = time.monotonic(), False

    def compiled() -> None:
        """Kernels are compiled and loaded, those that restore too."""
        for n in (300, 3000, 20000):
            first = ids(n)
            server.generate(first, 4)
            server.generate(first + ids(100), 1)
            settled(daemon)
            server.flush()
            server.generate(first + ids(100), 1)
        settled(daemon)

    def stored(what: str) -> None:
        """A turn from what the daemon has, and then the same server's warm hit of it."""
        for n, row in rows.items():
            server.flush()
            got = server.generate(turns[n] + ids(100), 1)
            hits = [server.generate(turns[n] + ids(100), 1)["ms"] for _ in range(3)]
            row |= {f"{what} ms": round(got["ms"], 1), f"{what} cached": got["cached"], f"{what}, its warm ms": round(median(hits), 1)}
            print(n, what, row[f"{what} ms"], got["cached"], [round(h) for h in hits], flush=True)
            settled(daemon)

    try:
        print(f"server up in {server.start():.0f} s", flush=True)
        settled(daemon, 90)
        compiled()
        for n in lengths:
            first = ids(n - 116)
            cold = [server.generate(ids(n), 1)["ms"] for _ in range(2)]
            first += server.generate(first, 16)["ids"]
            settled(daemon)
            warm = [server.generate(first + ids(100), 1) for _ in range(REPEATS)]
            settled(daemon)
            ram = []
            for _ in range(REPEATS):
                server.flush()
                ram.append(server.generate(first + ids(100), 1))
                settled(daemon)
            turns[n] = first
            warm_ms, ram_ms = median([w["ms"] for w in warm[1:]]), median([r["ms"] for r in ram[1:]])
            rows[n] = {
                "prompt": n, "cold ms": round(min(cold), 1), "warm ms": round(warm_ms, 1), "warm cached": warm[-1]["cached"],
                "RAM ms": round(ram_ms, 1), "RAM cached": ram[-1]["cached"], "RAM - warm ms": round(ram_ms - warm_ms, 1),
            }  # fmt: skip
            print(rows[n], [round(w["ms"]) for w in warm], [round(r["ms"]) for r in ram], round(time.monotonic() - began), "s", flush=True)
        settled(daemon, 120, durable=True)
        server.kill()
        print(f"kill -9 of SGLang; up again in {server.start():.0f} s", flush=True)
        settled(daemon, 90)
        compiled()
        stored("RAM, SGLang restarted")
        settled(daemon, 120, durable=True)
        daemon.kill(signal.SIGKILL)
        dropped = drop_caches()
        print(f"kill -9 of the daemon; ready again in {daemon.start():.2f} s, caches dropped: {dropped}", flush=True)
        settled(daemon, 60)
        stored("disk")
    finally:
        server.kill()
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill(signal.SIGTERM)
        (OUT / "daemon-turns.log").write_bytes(daemon.log.read_bytes()[-200_000:])
        events = [json.loads(line) for line in probe.read_text().splitlines()] if probe.exists() else []
        shim = [e for e in events if e["event"] == "shim"]
        hooks = shim[-1]["hooks"] if shim else {}
        if rows:
            columns = list(max(rows.values(), key=len))
            table = [{column: row.get(column, "") for column in columns} for row in rows.values()]
            times = "; ".join(f"{k}: {v['calls']} calls, mean {v['mean_us']}, p99 {v['p99_us']}, max {v['max_us']} us" for k, v in hooks.items())
            write_results("gpu-second-turns", table, f"Second turns: {pathlib.Path(model).name}",
                          f"Flags: `{' '.join(flags)}`. SGLang {os.environ.get('SGLANG_VERSION', '')}. One token out, idle server, whole request by HTTP; medians of "
                          f"{REPEATS - 1} after a first one, cold the better of two; after a restart once, beside the median of three warm hits of the "
                          f"same server. The file cache was dropped before disk: {dropped}. Hooks on the scheduler thread: {times}")  # fmt: skip
        if shim:
            print("counts:", json.dumps(shim[-1]["counts"]), flush=True)


if __name__ == "__main__":
    main()
