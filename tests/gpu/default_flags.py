"""A server with nothing but SGLang's default flags: it works, and says what it found; and who dies leaves nothing behind.

    ENGRAM_BIN=... python tests/gpu/default_flags.py MODEL SCALE [-- flags of SGLang]

Page 1, strategy `auto`, default memory fraction; flags that the installation itself needs (an attention backend) go behind `--`.
One second turn, greedy with logprobs, as SGLang's warm hit; then after a flush; after the daemon ended and came back, while
SGLang stays as it is; and after `kill -9` of SGLang. `kill -9` of SGLang in the middle of a copy, and right after it attached:
its GPU memory must be free within a second of its end, and the daemon ready for the next. Writes gpu-default-flags.md and .json.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from common import OUT, Daemon, Steps, arguments, vram, write_results
from server import Server, settled

NEW, LONG = 48, int(os.environ.get("LONG", 50_000))
FOUND = ("page_size=[^,)]*", "mamba_radix_cache_strategy=[^,)]*", "mem_fraction_static=[^,)]*", "max_mamba_cache_size=[^,)]*", r"max_total_num_tokens=\d+",
         "chunked_prefill_size=[^,)]*", "disable_overlap_schedule=[^,)]*")  # fmt: skip


def memory() -> int:
    """MiB in use on the GPU; 0 where there is none."""
    try:
        return vram()[-1]
    except (OSError, subprocess.SubprocessError):
        return 0


def until(what: str, seconds: float, holds: Any) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() < began + seconds, f"not within {seconds} s: {what}"
        time.sleep(0.002)
    return time.monotonic() - began


def die(server: Server, daemon: Daemon, before: int, what: str, steps: Steps) -> dict[str, Any]:
    """`kill -9` of all of SGLang's processes: when they are gone, when the session is, and when the memory is."""
    during = memory()
    assert server.process is not None
    began = time.monotonic()
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(30)
    ended = time.monotonic() - began
    gone = until("no session", 10, lambda: not daemon.get("/v1/workers")["workers"])
    session = time.monotonic() - began
    # The daemon's own context stays for a while: about half a GiB.
    free = -1.0
    with contextlib.suppress(AssertionError):
        until("free memory", 15, lambda: memory() <= before + 1024)
        free = time.monotonic() - began
    row = {"": what, "session gone ms": round(session * 1e3), "process gone ms": round(ended * 1e3), "GPU MiB before": before, "during": during,
           "after": memory(), "memory free within ms": round(free * 1e3)}  # fmt: skip
    steps.check(0 <= free, f"{what}: memory is not free: {row}")
    steps.check(free <= max(ended, gone) + 1.5, f"{what}: memory was free {free:.2f} s after the kill: {row}")
    server.process = None
    print(row, flush=True)
    return row


def main() -> None:
    own, flags = arguments()
    steps, model, scale = Steps(300), own[0], own[1]
    before = memory()
    daemon = Daemon(pathlib.Path(tempfile.mkdtemp()), ram="8GiB", disk=True, service='write_after = "500ms"')
    server = Server("sglang-default", model, flags, daemon, OUT / "probe-default.jsonl", ENGRAM_PROBE_SCALE=scale, ENGRAM_PROBE_BYTES="0")
    rng, rows, found = random.Random(3), [], []
    prompt: list[int] = []
    warm: dict[str, Any] = {}

    def again(what: str) -> None:
        got = server.generate(prompt, NEW, logprobs=True)
        same = {key: got[key] == warm[key] for key in ("cached", "ids", "logprobs")}
        rows.append({"": what, "prompt": len(prompt), "cached": got["cached"], "warm hit's": warm["cached"], "tokens equal": same["ids"], "logprobs equal": same["logprobs"]})
        print(rows[-1], flush=True)
        steps.check(all(same.values()) and None not in got["logprobs"], f"{what}: not as the warm hit: {rows[-1]}")

    try:
        with steps.whole():
            print(f"server up in {server.start():.0f} s", flush=True)
            settled(daemon, 60)
            text = server.log.read_text(errors="replace")
            found += [matches[-1] for matches in (re.findall(pattern, text) for pattern in FOUND) if matches]
            found += sorted(set(re.findall("engram: .*", text)))[:8]
            worker = {k: v for k, v in daemon.get("/v1/workers")["workers"][0].items() if k not in ("load", "session", "instance", "fingerprint")}
            found.append(f"/v1/workers: {worker}")
            print("\n".join(found), flush=True)
            with steps.step("a second turn"):
                first = [rng.randrange(10, 4000) for _ in range(3000)]
                prompt += first + server.generate(first, 40)["ids"] + [rng.randrange(10, 4000) for _ in range(60)]
                server.generate(prompt, NEW)
                warm |= server.generate(prompt, NEW, logprobs=True)
                repeats = server.generate(prompt, NEW, logprobs=True)
                steps.check(warm["cached"] > 0, "no warm hit at all")
                print("repeats itself:", all(repeats[k] == warm[k] for k in ("ids", "logprobs")), flush=True)
                settled(daemon)
                server.flush()
                again("flush")
            with steps.step("the daemon comes back, SGLang stays"):
                settled(daemon, 60, durable=True)
                kept = daemon.get("/v1/snapshots")["snapshots"]
                daemon.kill(signal.SIGTERM)
                began = time.monotonic()
                ready = daemon.start()
                settled(daemon, 60)
                took = time.monotonic() - began
                now = daemon.get("/v1/snapshots")["snapshots"]
                tiers = {tier: sum(row["tier"] == tier for row in now) for tier in ("ram", "disk")}
                rows.append({"": "daemon ended and back", "ready s": round(ready, 2), "attached again s": round(took, 2), "snapshots before, after": f"{len(kept)}, {len(now)}", "by tier": str(tiers)})
                print(rows[-1], flush=True)
                steps.check(len(now) >= sum(row["durable"] for row in kept), "durable snapshots are missing")
                server.flush()
                again("restart of the daemon")
                settled(daemon, 60)
            with steps.step("kill -9 in the middle of a copy"):
                long = [rng.randrange(10, 4000) for _ in range(LONG)]

                def ask() -> None:
                    with contextlib.suppress(Exception):
                        server.generate(long, 200)

                thread = threading.Thread(target=ask, daemon=True)
                thread.start()
                took = until("a save under way", 60, lambda: any(w["saves"] for w in daemon.get("/v1/workers")["workers"]))
                print(f"a save was under way after {took:.2f} s", flush=True)
                rows.append(die(server, daemon, before, "killed in the middle of a copy", steps))
                thread.join(10)
            with steps.step("kill -9 right after attach"):
                server.kill()
                server.launch()
                took = until("attached", 150, lambda: any(w["bound"] for w in daemon.get("/v1/workers")["workers"]))
                print(f"attached after {took:.0f} s", flush=True)
                rows.append(die(server, daemon, before, "killed right after attach", steps))
            with steps.step("after kill -9"):
                server.kill()
                if steps.left() < 70:
                    print("no time for another start", flush=True)
                else:
                    print(f"server up again in {server.start():.0f} s", flush=True)
                    settled(daemon, 60)
                    again("kill -9 of SGLang")
    finally:
        server.kill()
        if rows or found:
            write_results("gpu-default-flags", rows, f"Default flags: {pathlib.Path(model).name}", f"Flags of the installation only: `{' '.join(flags)}`. SGLang {os.environ.get('SGLANG_VERSION', '')}. "
                          f"What it found: {'; '.join(found)}. Memory is free when no more than the daemon's context is left. Failures: {steps.failures or 'none'}.")  # fmt: skip
        daemon.end("daemon-default.log")
    steps.end("default flags")


if __name__ == "__main__":
    main()
