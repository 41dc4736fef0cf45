"""What the tests and benches on a GPU share: the daemon as a process, and a worker that speaks its protocol.

The worker is made of the shim's own modules, without SGLang: it attaches with pools of any shape, and saves
and restores whatever lies in its ring.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from array import array
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python-shim" / "src"))

from engram_sglang import _channel_layout as layout  # noqa: E402
from engram_sglang import channel  # noqa: E402
from engram_sglang._pb.engram.v1 import engram_pb2 as pb  # noqa: E402
from engram_sglang.link import Link, Weights  # noqa: E402
from engram_sglang.ring import HostRing  # noqa: E402
from engram_sglang.settings import Settings  # noqa: E402

BINARY = pathlib.Path(os.environ.get("ENGRAM_BIN", ROOT / "target" / "release" / "engram"))
OUT = pathlib.Path(os.environ.get("OUT", "."))
STATE, KV = layout.Piece.STATE, layout.Piece.KV


def arguments() -> tuple[list[str], list[str]]:
    """The script's own ones, and the flags of SGLang behind `--`."""
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    return given[:cut], given[cut + 1 :]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def write_results(name: str, rows: list[dict[str, Any]], title: str, notes: str = "") -> None:
    """`name`.json and `name`.md: one table, with the command that made it."""
    command = " ".join([pathlib.Path(sys.executable).name, *sys.argv])
    (OUT / f"{name}.json").write_text(json.dumps({"command": command, "notes": notes, "rows": rows}, indent=1))
    columns = list(rows[0]) if rows else []
    lines = [f"# {title}", "", f"`{command}`", ""] + ([notes, ""] if notes else [])
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row[c]) for c in columns) + " |" for row in rows]
    (OUT / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)


class Daemon:
    """`engram serve`."""

    def __init__(self, folder: pathlib.Path, *, ram: str = "8GiB", disk: bool = False, service: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port, self.log = folder, free_port(), folder / "daemon.log"
        path = folder / "data" if disk else ""
        (folder / "engram.toml").write_text(
            f'[rest]\nlisten = "127.0.0.1:{self.port}"\n[grpc]\nsocket = "{folder}/g.sock"\n'
            f'[store]\nram = "{ram}"\n[store.disk]\npath = "{path}"\nbudget = "20GiB"\nmin_free = "1MiB"\n'
            f'[service]\nfd_socket = "{folder}/fd.sock"\n{service}\n'
        )
        self.target = f"unix://{folder}/g.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> float:
        """Starts it and waits until it is ready; seconds that this took."""
        began = time.monotonic()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([BINARY, "serve", "--config", self.folder / "engram.toml"], stdout=log, stderr=log)
        while True:
            try:
                self.get("/readyz", raw=True)
                return time.monotonic() - began
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-2000:]
                assert time.monotonic() < began + 60, "not ready: " + self.log.read_text()[-2000:]
                time.sleep(0.01)

    def get(self, path: str, raw: bool = False) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            body = answer.read()
        return body if raw else json.loads(body)

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics", raw=True).decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs}

    def kill(self, how: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(60)


def vram() -> dict[int, int]:
    """MiB of GPU memory of each process, and under -1 of all."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = {-1: int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])}
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        pid, _, mib = line.partition(",")
        if mib.strip().isdigit():
            used[int(pid)] = int(mib)
    return used


class Worker:
    """One attached worker with a state of `state_bytes` and KV of `row_bytes` a token."""

    def __init__(self, daemon: Daemon, state_bytes: int, row_bytes: int, ring_bytes: int, new_ring: Callable[[int], Any] = HostRing) -> None:
        fixed = pb.AttachRequest(
            instance=os.urandom(16),
            shard=pb.Shard(attn_tp_size=1, attn_tp_rank=0),
            model=pb.ModelIdentity(architecture="Bench", config_digest=bytes(31) + b"\1", display_name="bench", packing=1),
            state=[pb.StateTensor(name="temporal", dtype=1, layers=[0], shape=[state_bytes])],
            kv=[pb.KvLayer(layer=1, dtype=1, heads=1, k_head_dim=row_bytes // 2, v_head_dim=row_bytes // 2)],
            layout=pb.POOL_LAYOUT_PER_LAYER, page_size=1, slots=2, rows=1 << 20,
        )
        self.state_bytes, self.row_bytes = state_bytes, row_bytes
        self.link = Link(Settings(daemon=daemon.target, retry_ms=50), lambda r: r.MergeFrom(fixed), ring_bytes, new_ring)
        self.link.weights = Weights(1, os.urandom(32))
        self.link.start()
        end = time.monotonic() + 60
        session = None
        while session is None:
            session = self.link.take()
            assert time.monotonic() < end, f"no session: {self.link.state} {self.link.reason}"
            time.sleep(0.001)
        self.session, self.ring, self.numbers = session, session.ring, 0

    def close(self) -> None:
        self.session.left.set()
        self.link.stop()
        assert self.link._thread is not None
        self.link._thread.join(30)

    def say(self, *messages: Any) -> None:
        for message in messages:
            while not self.session.end.tx.push(message):
                self.session.end.beat()
        if self.session.end.tx.take_written():
            channel.ring(self.session.doorbell)

    def hear(self, *kinds: type) -> Any:
        """The next message of these kinds."""
        end = time.monotonic() + 60
        while True:
            message = self.session.end.rx.pop()
            if isinstance(message, kinds):
                return message
            self.session.end.beat()
            assert time.monotonic() < end and not self.session.lost, f"no {kinds}"

    def request(self, tokens: array[int]) -> int:
        self.numbers += 1
        number = self.numbers
        self.say(layout.RequestOpen(number, 0, layout.RequestFlags(0), 1, f"r{number}", "", "", "", "", bytes(32)))
        told = 0
        while told < len(tokens):
            told += self.session.end.tx.push_tokens(number, told, tokens[told:])
            channel.ring(self.session.doorbell)
        return number

    def parts(self, pairs: Any, base: int = 0) -> list[tuple[Any, int, int, int]]:
        """(kind, index, offset in the ring, bytes) of the state and of pieces of KV, one after another."""
        out, at = [(STATE, 0, base, self.state_bytes)], base + -(-self.state_bytes // 4096) * 4096
        for index, (a, b) in enumerate(zip(pairs[0::2], pairs[1::2])):
            size = (b - a) * self.row_bytes
            out.append((KV, index, at, size))
            at += -(-size // 4096) * 4096
        assert at <= self.ring.size, "the ring is too small"
        return out

    def move(self, message: Any, answer: Any, number: int, parts: list[tuple[Any, int, int, int]]) -> None:
        """Says `message` of the state and of all KV as one run, and waits until all of it is answered."""
        (_, _, block, size), *kv = parts
        said = [message(number, STATE, 0, 1, block, size)]
        if kv:
            first, last = kv[0][2], kv[-1][2] + kv[-1][3]
            said.append(message(number, KV, 0, len(kv), first, last - first))
        self.say(*said)
        left = len(parts)
        while left:
            answered = self.hear(answer)
            assert answered.status == layout.Status.OK, answered
            left -= answered.count

    def save(self, tokens: array[int], before: Callable[[Any], None] = lambda parts: None) -> tuple[float, float, int]:
        """Saves what lies in the ring. Seconds from the first Drain to the last Drained, and to Saved; and bytes."""
        number = self.request(tokens)
        self.say(layout.Offer(number, number, 0, len(tokens), 1))
        want = self.hear(layout.Want, layout.Decline)
        assert isinstance(want, layout.Want), want
        parts = self.parts(want.parts)
        before(parts)
        began = time.perf_counter()
        self.move(layout.Drain, layout.Drained, number, parts)
        moved = time.perf_counter() - began
        saved = self.hear(layout.Saved)
        assert saved.status == layout.Status.OK, saved
        whole = time.perf_counter() - began
        self.say(layout.RequestClose(number))
        return moved, whole, sum(size for *_, size in parts)

    def restore(self, tokens: array[int], after: Callable[[Any], None] = lambda parts: None) -> tuple[float, float, int]:
        """Restores into the ring. Seconds from Lookup to its answer, from the first Fill to the last Filled; and bytes."""
        more = array("I", [*tokens, 7])
        number = self.request(more)
        began = time.perf_counter()
        self.say(layout.Lookup(number, 0, len(tokens), 0, 0))
        found = self.hear(layout.LookupResult)
        looked = time.perf_counter() - began
        assert found.lease and found.boundary == len(tokens), found
        parts = self.parts(found.parts)
        began = time.perf_counter()
        self.move(layout.Fill, layout.Filled, found.lease, parts)
        moved = time.perf_counter() - began
        after(parts)
        self.say(layout.Release(found.lease, layout.Outcome.USED, len(tokens)), layout.RequestClose(number))
        return looked, moved, sum(size for *_, size in parts)


def median(numbers: list[float]) -> float:
    return statistics.median(numbers)
