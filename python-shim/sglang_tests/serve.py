"""A server in a process of its own, for tests of restarts: serves the turns that it is told, prints what came of
each, and then stands there until it is killed.

Usage: serve.py DAEMON SEED MODE; a line of JSON `{"tokens": [..], "new": n}` on standard input is one turn.
"""

from __future__ import annotations

import json
import sys

from conftest import World
from engram_sglang.settings import Settings


def main(daemon: str, seed: str, mode: str) -> None:
    settings = Settings(daemon=daemon, ring_bytes=8 << 20, retry_ms=50, lookup_ms=10_000)
    w = World(settings=settings, seed=int(seed), **json.loads(mode))
    w.until(lambda: w.shim.session is not None, what="attaching")
    for line in sys.stdin:
        turn = json.loads(line)
        request = w.request(turn["tokens"], new=turn["new"])
        w.run(request)
        w.until(lambda: not w.shim.saves, what="saves")
        w.check()
        told = {"restored": w.admitted_prefix[request.rid], "tokens": turn["tokens"] + list(request.output_ids)}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
