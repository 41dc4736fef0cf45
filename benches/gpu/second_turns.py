"""Time to first token of second turns: cold, SGLang's own warm hit, and Engram from RAM and from disk.

    ENGRAM_BIN=... python benches/gpu/second_turns.py MODEL [LENGTH ...] [-- flags of SGLang]

For each length a first turn, and then second turns of it that differ in their last 100 tokens: as hits of SGLang's own tree;
after a flush (from RAM); and a third turn after the daemon was killed and the page cache dropped (from disk). One server, one
run, one token out. Writes gpu-second-turns.md and .json into $OUT.
"""

from __future__ import annotations

import json
import pathlib
import random
import signal
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu"))

from common import OUT, Daemon, median, write_results
from server import Server, settled

REPEATS = 5


def drop_caches() -> bool:
    try:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return True
    except OSError:
        return False


def main() -> None:
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    own, flags = arguments[:cut], arguments[cut + 1 :]
    model, lengths = own[0], [int(n) for n in own[1:]] or [2048, 8192, 8224, 32768, 65536, 130816]
    probe = OUT / "probe-turns.jsonl"
    daemon = Daemon(pathlib.Path(tempfile.mkdtemp()), ram="24GiB", disk=True, service='write_after = "2s"\npreload = "0 B"')
    server = Server("sglang-turns", model, flags, daemon, probe, ENGRAM_PROBE_BYTES="0", ENGRAM_RING_BYTES="4GiB")
    rows: list[dict[str, Any]] = []
    rng = random.Random(11)
    ids = lambda n: [rng.randrange(10, 4000) for _ in range(n)]  # noqa: E731
    began = time.monotonic()
    try:
        print(f"server up in {server.start():.0f} s", flush=True)
        settled(daemon, 90)
        for n in (300, 3000):  # kernels that compile
            warm = ids(n)
            server.generate(warm, 4)
            server.generate(warm + ids(100), 1)
            settled(daemon)
            server.flush()
            server.generate(warm + ids(100), 1)
        turns = {}
        for n in lengths:
            first = ids(n - 116)
            cold = []
            for _ in range(2):
                cold.append(server.generate(ids(n), 1)["ms"])
            first += server.generate(first, 16)["ids"]
            settled(daemon)
            warm = [server.generate(first + ids(100), 1) for _ in range(REPEATS)]
            settled(daemon)
            ram = []
            for _ in range(REPEATS):
                server.flush()
                last = first + ids(100)
                ram.append(server.generate(last, 1))
                settled(daemon)
            turns[n] = last
            warm_ms, ram_ms = median([w["ms"] for w in warm[1:]]), median([r["ms"] for r in ram[1:]])
            rows.append({
                "prompt": n, "cold ms": round(min(cold), 1), "warm ms": round(warm_ms, 1), "warm cached": warm[-1]["cached"],
                "RAM ms": round(ram_ms, 1), "RAM cached": ram[-1]["cached"], "RAM - warm ms": round(ram_ms - warm_ms, 1),
            })  # fmt: skip
            print(rows[-1], [round(w["ms"]) for w in warm], [round(r["ms"]) for r in ram], round(time.monotonic() - began), "s", flush=True)
        settled(daemon, 120, durable=True)
        daemon.kill(signal.SIGKILL)
        dropped = drop_caches()
        print(f"daemon ready again in {daemon.start():.2f} s, caches dropped: {dropped}", flush=True)
        settled(daemon, 60)
        for n, row in zip(lengths, rows):
            server.flush()
            before = daemon.metrics()
            got = server.generate(turns[n] + ids(100), 1)
            after = daemon.metrics()
            hits = {k: after[k] - before.get(k, 0) for k in after if k.startswith("engram_hits") or "lookup_hits" in k}
            row |= {"disk ms": round(got["ms"], 1), "disk cached": got["cached"], "tiers": str({k: v for k, v in hits.items() if v})}
            print(n, row["disk ms"], row["disk cached"], row["tiers"], flush=True)
            settled(daemon)
    finally:
        server.kill()
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill(signal.SIGTERM)
        (OUT / "daemon-turns.log").write_bytes(daemon.log.read_bytes()[-200_000:])
        events = [json.loads(line) for line in probe.read_text().splitlines()] if probe.exists() else []
        shim = [e for e in events if e["event"] == "shim"]
        hooks = shim[-1]["hooks"] if shim else {}
        if rows:
            for row in rows:
                for column in ("disk ms", "disk cached", "tiers"):
                    row.setdefault(column, "")
            times = "; ".join(f"{k}: {v['calls']} calls, mean {v['mean_us']}, p99 {v['p99_us']}, max {v['max_us']} us" for k, v in hooks.items())
            write_results("gpu-second-turns", rows, f"Second turns: {pathlib.Path(model).name}",
                          f"Flags: `{' '.join(flags)}`. One token out, idle server; medians of {REPEATS - 1}, cold the better of two; disk once. "
                          f"Hooks on the scheduler thread: {times}")  # fmt: skip
        if shim:
            print("counts:", json.dumps(shim[-1]["counts"]), flush=True)


if __name__ == "__main__":
    main()
