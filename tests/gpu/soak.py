"""Conversations at the same time on a server that is much too small for them, and a daemon that is stopped and killed.

    ENGRAM_BIN=... python tests/gpu/soak.py MODEL SCALE SECONDS [-- flags of SGLang]

16 conversations take turns, each with tokens of its own, and begin anew when they are long. What SGLang can keep is a
fraction of it. A third of the way the daemon is stopped for 5 s; at two thirds it is killed and started again. All
requests must succeed; every restored prefix must have bytes that were saved for its tokens, token by token (by the
tests' plug-in); at the end, after a flush, as many slots and rows are free as at the start, and neither the GPU's memory nor that of
the processes has grown since the first minute. Start and end take about a minute beside SECONDS. Writes gpu-soak.md and .json into $OUT.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from common import OUT, Daemon, OutOfTime, Steps, arguments, vram, write_results
from server import Server, settled

CONVERSATIONS, LONGEST, NEW = 16, 7000, 24


class Talk(threading.Thread):
    """One conversation after another."""

    def __init__(self, server: Server, number: int, until: float) -> None:
        super().__init__(daemon=True)
        self.server, self.until, self.rng = server, until, random.Random(number)
        self.turns = self.conversations = self.cached = self.prompt = 0
        self.errors: list[str] = []

    def run(self) -> None:
        while time.monotonic() < self.until:
            self.conversations += 1
            tokens = self.words(self.rng.randrange(300, 1500))
            while len(tokens) < LONGEST and time.monotonic() < self.until:
                try:
                    answer = self.server.generate(tokens, NEW)
                except Exception as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                    break
                if len(answer["ids"]) != NEW:
                    self.errors.append(f"{len(answer['ids'])} tokens")
                self.turns += 1
                self.cached += answer["cached"]
                self.prompt += len(tokens)
                tokens = tokens + answer["ids"] + self.words(self.rng.randrange(60, 600))
                time.sleep(self.rng.random() * 0.5)

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(10, 4000) for _ in range(count)]


def resident(pid: int) -> int:
    """MiB of memory that a process has to itself; 0 of one that is gone."""
    try:
        text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text if line.startswith("Private")) >> 10


def scheduler(daemon: Daemon) -> int:
    """The process in which SGLang's scheduler runs."""
    workers = daemon.get("/v1/workers")["workers"]
    return int(workers[0]["pid"] or 0) if workers else 0


def grown(rows: list[dict[str, Any]], what: str) -> int:
    """MiB more at the end than after the first minute, or after as much of a shorter run as there is."""
    early = [row[what] for row in rows if row["s"] <= 60]
    return int(rows[-1][what] - max(early)) if early else 0


def free(daemon: Daemon) -> tuple[int, int]:
    load = daemon.get("/v1/workers")["workers"][0]["load"]
    return load["slots_free"], load["rows_free"]


def main() -> None:
    (model, scale, seconds), flags = arguments()
    Steps(float(seconds) + 150)
    probe = OUT / "probe-soak.jsonl"
    probe.unlink(missing_ok=True)
    daemon = Daemon(pathlib.Path(tempfile.mkdtemp()), ram="4GiB", disk=True, service='write_after = "1s"')
    server = Server("sglang-soak", model, flags, daemon, probe, ENGRAM_PROBE_SCALE=scale)
    rows: list[dict[str, Any]] = []
    talks: list[Talk] = []
    failures: list[str] = []
    try:
        print(f"server up in {server.start():.0f} s", flush=True)
        settled(daemon, 90)
        server.generate(list(range(10, 400)), 4)
        server.flush()
        settled(daemon)
        time.sleep(2)
        at_start, scheduling = free(daemon), scheduler(daemon)
        began, length = time.monotonic(), float(seconds)
        talks = [Talk(server, n, began + length) for n in range(CONVERSATIONS)]
        for talk in talks:
            talk.start()

        def sample(what: str) -> None:
            assert daemon.process is not None and server.process is not None
            rows.append({
                "s": round(time.monotonic() - began), "": what, "turns": sum(t.turns for t in talks), "errors": sum(len(t.errors) for t in talks),
                "GPU MiB": vram()[-1], "daemon MiB": resident(daemon.process.pid), "SGLang MiB": resident(server.process.pid),
                "scheduler MiB": resident(scheduling),
            })  # fmt: skip
            print(rows[-1], flush=True)

        events = [(length / 3, "daemon stopped for 5 s"), (length * 2 / 3, "daemon killed")]
        while any(talk.is_alive() for talk in talks):
            passed = time.monotonic() - began
            if events and passed > events[0][0]:
                _, what = events.pop(0)
                sample(what)
                assert daemon.process is not None
                if what == "daemon killed":
                    daemon.kill(signal.SIGKILL)
                    print(f"daemon ready again in {daemon.start():.2f} s", flush=True)
                else:
                    daemon.process.send_signal(signal.SIGSTOP)
                    time.sleep(5)
                    daemon.process.send_signal(signal.SIGCONT)
            elif not rows or passed > rows[-1]["s"] + 30:
                sample("")
            time.sleep(0.2)
        settled(daemon, 60)
        server.flush()
        settled(daemon)
        time.sleep(2)
        sample("end, flushed")
        at_end = free(daemon)
        if at_end != at_start:
            failures.append(f"slots and rows free: {at_start} at the start, {at_end} at the end")
    except (Exception, OutOfTime) as error:
        traceback.print_exc()
        failures.append(f"{type(error).__name__}: {str(error)[-300:]}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        server.kill()
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.process.send_signal(signal.SIGCONT)
            daemon.kill(signal.SIGTERM)
        (OUT / "daemon-soak.log").write_bytes(daemon.log.read_bytes()[-200_000:])
    events_seen = [json.loads(line) for line in probe.read_text().splitlines()] if probe.exists() else []
    restored = [e for e in events_seen if e["event"] == "restored" and e["bytes"] != "gone"]
    compared = [e for e in restored if e["state"] != "unknown" and not e["unknown"]]
    wrong = [e for e in restored if e["foreign"] or e["state"] == "foreign"]
    shim = [e for e in events_seen if e["event"] == "shim"]
    counts = shim[-1]["counts"] if shim else {}
    errors = [error for talk in talks for error in talk.errors]
    failures += errors[:5]
    if wrong:
        failures.append(f"{len(wrong)} restored prefixes have bytes that were never saved for their tokens: {wrong[:3]}")
    if rows:
        flat = {what: grown(rows, what) for what in ("GPU MiB", "daemon MiB", "SGLang MiB")}
        failures += [f"{what} grew by {by}" for what, by in flat.items() if by > 256]
    if len(compared) < 10:
        failures.append(f"only {len(compared)} restored prefixes were compared")
    if counts.get("faults"):
        failures.append(f"{counts['faults']} faults of the shim")
    asked = sum(talk.turns for talk in talks)
    if float(seconds) >= 480 and asked < 300:
        failures.append(f"only {asked} requests")
    turns, prompt, cached = (sum(getattr(t, what) for t in talks) for what in ("turns", "prompt", "cached"))
    notes = (
        f"{turns} requests of {CONVERSATIONS} conversations at a time ({sum(t.conversations for t in talks)} in all), {len(errors)} errors; "
        f"{cached / max(1, prompt):.1%} of {prompt} prompt tokens cached. MiB more at the end than after a minute: {flat if rows else 'unknown'} (the scheduler remembers for the test what was saved, and grows). Restored prefixes: {len(restored)}, of which {len(compared)} "
        f"were compared whole, {len(wrong)} with bytes of KV or state that were never saved for their tokens. Counts of the shim: `{json.dumps(counts)}`. Flags: `{' '.join(flags)}`. "
        f"SGLang {os.environ.get('SGLANG_VERSION', '')}, weights ±{scale}. Failures: {failures or 'none'}."
    )
    if rows:
        write_results("gpu-soak", rows, f"Soak: {pathlib.Path(model).name}", notes)
    print("soak: FAILED" if failures else "soak: ok", failures, flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
