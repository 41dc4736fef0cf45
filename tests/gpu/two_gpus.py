"""Two GPUs, `--tp-size 2`: the shards of both ranks are saved and restored together, or not at all.

    ENGRAM_BIN=... python tests/gpu/two_gpus.py MODEL SCALE [LENGTH ...] [-- flags of SGLang]

As `exact.py`: pool bytes of both ranks (by the tests' plug-in), greedy tokens, logprobs and `cached_tokens` of second turns, as those of
SGLang's own warm hit; after a flush, with one rank stopped again and again, after `kill -9` of SGLang, and from disk alone. Then the
files of one rank of one conversation are deleted: a miss on both, answered as a cold prompt, while others are hits.
Writes gpu-two-gpus.md and .json into $OUT.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from common import OUT, Daemon, Steps, arguments, write_results
from server import Server, settled

FLAGS = ("--attention-backend triton --page-size 64 --mamba-radix-cache-strategy extra_buffer --context-length 32768 --max-mamba-cache-size 60 "
         "--max-running-requests 8 --max-total-tokens 131072")  # fmt: skip
NEW = 64
RANKS = int(os.environ.get("RANKS", 2))


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[list[int]]:
    """The process stands still for 0.2 s of each 0.3 s."""
    over, stops = threading.Event(), [0]

    def work() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            stops[0] += 1
            time.sleep(0.2)
            os.kill(pid, signal.SIGCONT)
            over.wait(0.1)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield stops
    finally:
        over.set()
        thread.join(5)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def main() -> None:
    own, flags = arguments()
    steps, flags = Steps(450), flags or FLAGS.split()
    model, scale, lengths = own[0], own[1], [int(n) for n in own[2:]] or [1025, 4096, 8449]
    probe = OUT / "probe-two.jsonl"
    probe.unlink(missing_ok=True)
    daemon = Daemon(pathlib.Path(tempfile.mkdtemp()), ram="16GiB", disk=True, service='write_after = "200ms"\npreload = "0 B"\nscrub_rate = "0 B"')
    more = ["--tp-size", str(RANKS)] if RANKS > 1 else []
    # NVLink's multicast needs what many machines do not grant.
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1")):
        os.environ.setdefault(name, value)
    server = Server("sglang-two", model, [*flags, *more], daemon, probe, ENGRAM_PROBE_SCALE=scale)
    rng, rows = random.Random(7), []
    cases: list[tuple[list[int], dict[str, Any]]] = []
    lone: list[int] = []
    cold: dict[str, Any] = {}

    def calm(durable: bool = False) -> None:
        settled(daemon, 90, durable, RANKS)

    def ask(what: str, prompt: list[int], wanted: dict[str, Any], cached: int) -> None:
        got = server.generate(prompt, NEW, logprobs=True)
        numbers = None not in got["logprobs"] and None not in wanted["logprobs"]
        worst = max(abs(a - b) for a, b in zip(got["logprobs"], wanted["logprobs"])) if numbers else "not a number"
        rows.append({
            "": what, "prompt": len(prompt), "cached": got["cached"], "wanted": cached, "tokens equal": got["ids"] == wanted["ids"],
            "logprobs equal": got["logprobs"] == wanted["logprobs"], "largest difference": worst, "distinct tokens": len(set(got["ids"])), "ms": round(got["ms"]),
        })  # fmt: skip
        print(rows[-1], flush=True)
        steps.check(got["cached"] == cached and got["ids"] == wanted["ids"] and got["logprobs"] == wanted["logprobs"], f"{what}, {len(prompt)} tokens: {rows[-1]}")

    def phase(what: str) -> None:
        for prompt, warm in cases:
            ask(what, prompt, warm, warm["cached"])
        calm()

    def shards(rank: int) -> set[pathlib.Path]:
        return set((daemon.folder / "data").rglob(f"*.{rank}.safetensors"))

    mine: set[pathlib.Path] = set()
    try:
        with steps.whole():
            print(f"server up in {server.start():.0f} s", flush=True)
            calm()
            workers = [{k: w[k] for k in ("attn_tp_size", "attn_tp_rank", "pid", "mode", "device", "ring_bytes")} for w in daemon.get("/v1/workers")["workers"]]
            print(workers, flush=True)
            for length in lengths:
                with steps.step(f"turns of {length}"):
                    first = [rng.randrange(10, 4000) for _ in range(length)]
                    prompt = first + server.generate(first, 40)["ids"] + [rng.randrange(10, 4000) for _ in range(60)]
                    server.generate(prompt, NEW)
                    warm, again = server.generate(prompt, NEW, logprobs=True), server.generate(prompt, NEW, logprobs=True)
                    print(f"warm hit {warm['cached']} of {len(prompt)}, repeats itself: {all(warm[k] == again[k] for k in ('cached', 'ids', 'logprobs'))}", flush=True)
                    steps.check(warm["cached"] > 0, f"{length}: no warm hit")
                    cases.append((prompt, warm))
            with steps.step("one more, whose shards are deleted later"):
                calm(durable=True)
                before = shards(RANKS - 1)
                lone += [rng.randrange(10, 4000) for _ in range(3000)]
                cold |= server.generate(lone, NEW, logprobs=True)
                server.generate(lone, NEW)
                hit = server.generate(lone, NEW, logprobs=True)
                calm(durable=True)
                mine |= shards(RANKS - 1) - before
                print(f"cold {cold['cached']}, warm {hit['cached']} cached; {len(mine)} files of the last rank", flush=True)
                steps.check(hit["cached"] > 0 and bool(mine), "nothing of it was saved")
            with steps.step("flush"):
                server.flush()
                phase("flush")
                ask("flush, the one more", lone, hit, hit["cached"])
            with steps.step("one rank slow"):
                calm()
                server.flush()
                slow = next(w["pid"] for w in daemon.get("/v1/workers")["workers"] if w["attn_tp_rank"] == RANKS - 1)
                with slowed(slow) as stops:
                    for prompt, warm in cases:
                        ask("one rank slow", prompt, warm, warm["cached"])
                    new = [rng.randrange(10, 4000) for _ in range(2000)]
                    new += server.generate(new, 40)["ids"] + [11] * 60
                print(f"stopped {stops[0]} times", flush=True)
                calm()
                server.generate(new, NEW)
                warm = server.generate(new, NEW, logprobs=True)
                calm()
                server.flush()
                ask("saved while one rank was slow", new, warm, warm["cached"])
            with steps.step("kill -9 of SGLang"):
                calm()
                server.kill()
                print(f"up again in {server.start():.0f} s", flush=True)
                calm()
                phase("kill -9 of SGLang")
            with steps.step("disk only"):
                calm(durable=True)
                daemon.kill(signal.SIGKILL)
                print(f"the daemon is ready in {daemon.start():.2f} s", flush=True)
                calm()
                server.flush()
                phase("kill -9 of the daemon: disk only")
            with steps.step("one rank's shards deleted"):
                calm()
                daemon.kill(signal.SIGKILL)
                daemon.start()
                calm()
                gone = [path.unlink() for path in mine if path.exists()]
                server.flush()
                ask(f"{len(gone)} files of one rank deleted: a miss", lone, cold, 0)
                prompt, warm = cases[0]
                ask("beside it, a hit", prompt, warm, warm["cached"])
                print({k: v for k, v in daemon.metrics().items() if v and ("misses" in k or "quarantined" in k or "unused" in k or "errors" in k)}, flush=True)
                calm()
    finally:
        server.kill()
        events = [json.loads(line) for line in probe.read_text().splitlines()] if probe.exists() else []
        saved = {(e["rank"], e["name"]): e["bytes"] for e in events if e["event"] == "saved" and e["bytes"] != "gone"}
        pairs = [(e["rank"], e["bytes"], saved.get((e["rank"], e["name"]))) for e in events if e["event"] == "restored" and e["bytes"] != "gone"]
        told = []
        for rank in range(RANKS):
            of = [(now, was) for at, now, was in pairs if at == rank]
            equal, unknown = sum(now == was for now, was in of), sum(was is None for _, was in of)
            told.append(f"rank {rank}: {len(of)} restored prefixes read, {equal} with the bytes that were read when they were saved, {unknown} never seen saved")
            steps.check(bool(of) and equal == len(of), f"pool bytes of {told[-1]}")
        if rows:
            write_results("gpu-two-gpus", rows, f"Two GPUs, tensor parallel: {pathlib.Path(model).name}", f"{'; '.join(told)}. SGLang {os.environ.get('SGLANG_VERSION', '')}, weights ±{scale}, "
                          f"flags `{' '.join([*flags, *more])}`. Failures: {steps.failures or 'none'}.")  # fmt: skip
        shim = [e for e in events if e["event"] == "shim"]
        print("last counts:", json.dumps(shim[-1]["counts"]) if shim else "none", flush=True)
        daemon.end("daemon-two.log")
    steps.end("two GPUs")


if __name__ == "__main__":
    main()
