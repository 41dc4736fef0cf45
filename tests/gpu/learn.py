"""What the daemon learns of a server's prefill, against what that takes: `service.learn_prefill`.

    ENGRAM_BIN=... python tests/gpu/learn.py MODEL [LENGTH ...] [-- flags of SGLang]

Cold prompts of several lengths, then the speed and the break-even lengths that /v1/workers tells; then second turns after a
flush, around the break-even, with the lookups that were skipped as slower than prefill. Writes gpu-learn.md and .json into $OUT.
"""

from __future__ import annotations

import os
import pathlib
import random
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from common import Daemon, Steps, arguments, median, write_results
from server import Server, settled

FLAGS = ("--attention-backend triton --page-size 64 --context-length 131072 --max-mamba-cache-size 80 --max-running-requests 16 "
         "--max-total-tokens 200064 --mamba-radix-cache-strategy extra_buffer")  # fmt: skip
REPEATS = 3


def skipped(daemon: Daemon) -> float:
    return sum(value for name, value in daemon.metrics().items() if "slower_than_prefill" in name)


def main() -> None:
    own, flags = arguments()
    steps, flags = Steps(150), flags or FLAGS.split()
    model, lengths = own[0], [int(n) for n in own[1:]] or [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
    rng, rows, told = random.Random(9), [], []
    ids = lambda n: [rng.randrange(10, 4000) for _ in range(n)]  # noqa: E731
    daemon = Daemon(pathlib.Path(tempfile.mkdtemp()), ram="16GiB", disk=True, service="learn_prefill = true")
    server = Server("sglang-learn", model, flags, daemon, None, ENGRAM_RING_BYTES="2GiB")

    def cost(when: str) -> dict[str, Any]:
        now: dict[str, Any] = daemon.get("/v1/workers")["workers"][0]["cost"]
        told.append(f"{when}: {now}")
        print(told[-1], flush=True)
        return now

    try:
        with steps.whole():
            print(f"server up in {server.start():.0f} s", flush=True)
            settled(daemon, 60)
            cost("at the start")
            with steps.step("compile"):
                for n in (300, 3000, 20000):
                    server.generate(ids(n), 4)
            settled(daemon, 60)
            floor = min(server.generate(ids(16), 1)["ms"] for _ in range(5))
            for n in lengths:
                with steps.step(f"cold {n}"):
                    ms = median([server.generate(ids(n), 1)["ms"] for _ in range(REPEATS)])
                    rows.append({"prompt": n, "cold ms": round(ms, 1), "tokens/s": round(n / ms * 1e3), "tokens/s beyond the floor": round(n / max(0.1, ms - floor) * 1e3)})
            settled(daemon, 60)
            learned = cost("after cold prompts")
            rate = learned["prefill_tokens_per_second"]
            steps.check(rate is not None, "no speed of prefill was learned")
            for row in rows:
                with steps.step(f"second turn {row['prompt']}"):
                    first = ids(row["prompt"])
                    first += server.generate(first, 16)["ids"]
                    settled(daemon, 60)
                    server.flush()
                    before = skipped(daemon)
                    got = server.generate(first + ids(100), 1)
                    even = learned["break_even_tokens"]["ram"]
                    row |= {
                        "second turn ms": round(got["ms"], 1), "cached": got["cached"], "skipped as slower": int(skipped(daemon) - before),
                        "learned tokens/s": round(rate) if rate else None, "break-even, RAM": even,
                    }  # fmt: skip
                    settled(daemon, 60)
            cost("at the end")
            rows.append({"prompt": f"floor (16 tokens): {floor:.1f} ms"})
    finally:
        server.kill()
        if rows:
            write_results("gpu-learn", rows, f"What is learned of prefill: {pathlib.Path(model).name}", f"Medians of {REPEATS} cold prompts, one token out, idle server. /v1/workers: {'; '.join(told)}. "
                          f"SGLang {os.environ.get('SGLANG_VERSION', '')}, flags `{' '.join(flags)}`. Failures: {steps.failures or 'none'}.")  # fmt: skip
        daemon.end("daemon-learn.log")
    steps.end("learn")


if __name__ == "__main__":
    main()
