"""Exactness on a GPU under SGLang: what is restored is what was saved, and is used as a hit of SGLang's own is.

    ENGRAM_BIN=... python tests/gpu/exact.py MODEL SCALE [LENGTH ...] [-- flags of SGLang]

For each length: two turns; the second again and again as hits of SGLang's own tree; then after (a) a flush, (b) kill -9 of
SGLang and its restart, (c) a restart of both with nothing but the disk. Bytes of the pools (by the tests' plug-in), greedy
tokens, logprobs of 64 new tokens and `cached_tokens` must be equal. $PHASES chooses (flush,kill,disk), $RAM is the daemon's
(16GiB), $LABEL another name than the model's. Writes gpu-exact-NAME.md and .json into $OUT.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from common import OUT, Daemon, arguments, write_results
from server import Server, settled

NEW = 64


def main() -> None:
    own, flags = arguments()
    model, scale, lengths = own[0], own[1], [int(n) for n in own[2:]] or [1060, 2111, 4096, 4097]
    phases = os.environ.get("PHASES", "flush,kill,disk").split(",")
    name = os.environ.get("LABEL", pathlib.Path(model).name)
    probe = OUT / f"probe-{name}.jsonl"
    probe.unlink(missing_ok=True)
    daemon = Daemon(pathlib.Path(tempfile.mkdtemp()), ram=os.environ.get("RAM", "16GiB"), disk=True, service='write_after = "200ms"')
    server = Server(f"sglang-{name}", model, flags, daemon, probe, ENGRAM_PROBE_SCALE=scale)
    rows: list[dict[str, Any]] = []
    cases = []
    failed = False

    def phase(what: str) -> None:
        nonlocal failed
        for length, prompt, warm in cases:
            got = server.generate(prompt, NEW, logprobs=True)
            same = [got[key] == warm[key] for key in ("cached", "ids", "logprobs")]
            # A model whose weights are too wide computes no numbers: then nothing was compared.
            numbers = None not in got["logprobs"] and None not in warm["logprobs"]
            worst = max(abs(a - b) for a, b in zip(got["logprobs"], warm["logprobs"])) if numbers else "not a number"
            failed |= not all(same) or not numbers
            rows.append({
                "after": what, "prompt": len(prompt), "cached": got["cached"], "warm hit's": warm["cached"], "tokens equal": same[1],
                "logprobs equal": same[2], "largest difference": worst, "distinct tokens": len(set(got["ids"])), "ms": round(got["ms"]),
            })  # fmt: skip
            print(rows[-1], flush=True)

    try:
        print(f"server up in {server.start():.0f} s", flush=True)
        settled(daemon, 90)
        rng = random.Random(7)
        for length in lengths:
            first = [rng.randrange(10, 4000) for _ in range(length)]
            answer = server.generate(first, 40)
            prompt = first + answer["ids"] + [rng.randrange(10, 4000) for _ in range(60)]
            server.generate(prompt, NEW)
            warm = server.generate(prompt, NEW, logprobs=True)
            again = server.generate(prompt, NEW, logprobs=True)
            stable = all(warm[key] == again[key] for key in ("cached", "ids", "logprobs"))
            print(f"length {length}: warm hit {warm['cached']} of {len(prompt)}, {warm['ms']:.0f} ms, repeats itself: {stable}", flush=True)
            cases.append((length, prompt, warm))
        settled(daemon)
        if "flush" in phases:
            server.flush()
            phase("flush")
        if "kill" in phases:
            settled(daemon)
            server.kill()
            print(f"kill -9 of SGLang; up again in {server.start():.0f} s", flush=True)
            settled(daemon, 90)
            phase("kill -9 of SGLang")
        if "disk" in phases:
            settled(daemon, durable=True)
            server.kill()
            daemon.kill(signal.SIGKILL)
            print(f"kill -9 of both; the daemon is ready in {daemon.start():.2f} s", flush=True)
            print(f"SGLang up in {server.start():.0f} s", flush=True)
            settled(daemon, 90)
            phase("kill -9 of both: disk only")
        settled(daemon)
    finally:
        server.kill()
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill(signal.SIGTERM)
        (OUT / f"daemon-{name}.log").write_bytes(daemon.log.read_bytes()[-200_000:])
        events = [json.loads(line) for line in probe.read_text().splitlines()] if probe.exists() else []
        saved = {e["name"]: e["bytes"] for e in events if e["event"] == "saved" and e["bytes"] != "gone"}
        pairs = [(e, saved.get(e["name"])) for e in events if e["event"] == "restored" and e["bytes"] != "gone"]
        equal = sum(e["bytes"] == was for e, was in pairs)
        unknown = sum(was is None for _, was in pairs)
        hooks = [e for e in events if e["event"] == "shim"]
        notes = (
            f"Pool bytes of restored prefixes, read {len(pairs)} times some ticks after the restore: {equal} equal to what was "
            f"read when they were saved, {unknown} never seen saved, {len(pairs) - equal - unknown} different. "
            f"Flags: `{' '.join(flags)}`. Weights ±{scale}. SGLang {os.environ.get('SGLANG_VERSION', '')}."
        )
        if rows:
            write_results(f"gpu-exact-{name}", rows, f"Exactness: {name}", notes)
        if hooks:
            print("last counts:", json.dumps(hooks[-1]["counts"]), flush=True)
            print("hooks:", json.dumps(hooks[-1]["hooks"]), flush=True)
        failed |= not pairs or equal < len(pairs)
    print("exact: FAILED" if failed else "exact: ok", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
