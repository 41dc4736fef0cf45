"""What the tests and benches on a GPU share: the daemon as a process, and a worker that speaks its protocol.

The worker is made of the shim's own modules, without SGLang: it attaches with pools of any shape, and saves
and restores whatever lies in its ring.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
import urllib.request
from array import array
from collections.abc import Callable, Iterator
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
ARGV = list(sys.argv)
# Bytes that a worker of mode engine carries at once.
_AT_ONCE = 32 << 20


def _mode() -> str:
    """The transfer mode: `--mode auto|ipc|engine`, which every script takes, or else `ENGRAM_MODE`, by which SGLang gets it."""
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    if "--mode" in sys.argv[: end - 1]:
        at = sys.argv.index("--mode")
        os.environ["ENGRAM_MODE"] = sys.argv[at + 1]
        del sys.argv[at : at + 2]
    return Settings.from_env().mode


MODE = _mode()


def arguments() -> tuple[list[str], list[str]]:
    """The script's own ones, and the flags of SGLang behind `--`."""
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    return given[:cut], given[cut + 1 :]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class OutOfTime(BaseException):
    """The time that the script may take is over. No `except Exception` holds it up."""


class Steps:
    """Parts of a script, each of which runs whatever became of those before it, until the time is over.

    `LIMIT` seconds (of the environment, or `seconds`) after this was made the step under way is broken off: what a script
    measured by then is written all the same.
    """

    def __init__(self, seconds: float) -> None:
        self.began = time.monotonic()
        self.limit = float(os.environ.get("LIMIT", seconds))
        self.failures: list[str] = []
        signal.signal(signal.SIGALRM, self._over)
        signal.signal(signal.SIGTERM, self._over)
        signal.setitimer(signal.ITIMER_REAL, self.limit)

    def _over(self, number: int, frame: Any) -> None:
        raise OutOfTime(f"{self.passed():.0f} s")

    def passed(self) -> float:
        return time.monotonic() - self.began

    def left(self) -> float:
        return self.limit - self.passed()

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        print(f"[{self.passed():.0f} s] {what}", flush=True)
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fail(f"{what}: {type(error).__name__}: {str(error)[-300:]}")

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """All of the script but its end: time that ran out is a failure, and the end still comes."""
        try:
            yield
        except OutOfTime as over:
            self.fail(f"broken off after {over}")
        except Exception as error:
            traceback.print_exc()
            self.fail(f"{type(error).__name__}: {str(error)[-300:]}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def fail(self, what: str) -> None:
        self.failures.append(" ".join(what.split()))
        print("FAILED:", self.failures[-1], flush=True)

    def check(self, holds: bool, what: str) -> bool:
        if not holds:
            self.fail(what)
        return holds

    def end(self, name: str) -> None:
        """Says how it went, and ends the script accordingly."""
        print(f"{name}: {'FAILED' if self.failures else 'ok'} in {self.passed():.0f} s", self.failures or "", flush=True)
        sys.exit(bool(self.failures))


def started(process: subprocess.Popen[bytes]) -> None:
    """Notes a process in the file $PIDS, for whoever ends what a killed script left behind."""
    if os.environ.get("PIDS"):
        with open(os.environ["PIDS"], "a") as file:
            file.write(f"{process.pid}\n")


def ratio(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Of (without, with): the geometric mean of with / without, its 95 % confidence interval, and the ratio of medians."""
    logs = [math.log(b / a) for a, b in pairs if a > 0 and b > 0]
    if len(logs) < 2:
        return {}
    # Two-sided 95 % of Student's t, from below for numbers in between.
    table = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 12: 2.18, 15: 2.13, 19: 2.093, 24: 2.064, 30: 2.042, 40: 2.021, 60: 2.0}
    t = table[max(n for n in table if n <= len(logs) - 1)]
    mean, half = statistics.fmean(logs), t * statistics.stdev(logs) / math.sqrt(len(logs))
    return {
        "ratio": round(math.exp(mean), 4), "low": round(math.exp(mean - half), 4), "high": round(math.exp(mean + half), 4),
        "medians": round(statistics.median(b for _, b in pairs) / statistics.median(a for a, _ in pairs), 4), "pairs": len(logs),
    }  # fmt: skip


def drop_caches() -> bool:
    """Whether the system's file cache was emptied, after what was written is on the disk."""
    try:
        subprocess.run(["sync"], timeout=60, check=True)
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return True
    except (OSError, subprocess.SubprocessError):
        return False


def write_results(name: str, rows: list[dict[str, Any]], title: str, notes: str = "", show: bool = True) -> None:
    """`name`.json and `name`.md: one table, with the command that made it. Rows may lack columns."""
    command = " ".join([pathlib.Path(sys.executable).name, *ARGV])
    name += "-engine" if MODE == "engine" else ""
    (OUT / f"{name}.json").write_text(json.dumps({"command": command, "notes": notes, "rows": rows}, indent=1))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"# {title}", "", f"`{command}`", ""] + ([notes, ""] if notes else [])
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(c, "")) for c in columns) + " |" for row in rows]
    (OUT / f"{name}.md").write_text("\n".join(lines) + "\n")
    if show:
        print("\n".join(lines), flush=True)


class Daemon:
    """`engram serve`."""

    def __init__(self, folder: pathlib.Path, *, ram: str = "8GiB", disk: bool = False, service: str = "", budget: str = "20GiB") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port, self.log = folder, free_port(), folder / "daemon.log"
        path = folder / "data" if disk else ""
        (folder / "engram.toml").write_text(
            f'[rest]\nlisten = "127.0.0.1:{self.port}"\n[grpc]\nsocket = "{folder}/g.sock"\n'
            f'[store]\nram = "{ram}"\n[store.disk]\npath = "{path}"\nbudget = "{budget}"\nmin_free = "1MiB"\n'
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
        started(self.process)
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

    def metric(self, name: str) -> float:
        """The sum of all numbers of this name, whatever their labels; 0 if there is none."""
        return sum(value for key, value in self.metrics().items() if key.partition("{")[0] == name)

    def kill(self, how: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(60)

    def end(self, keep_log: str = "") -> None:
        """Ends it in any case; `keep_log`: a name in $OUT for the end of its log."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(8)
            except subprocess.TimeoutExpired:
                self.process.kill()
        if keep_log:
            (OUT / keep_log).write_bytes(self.log.read_bytes()[-200_000:])


def vram() -> dict[int, int]:
    """MiB of GPU memory of each process, and under -1 of all, on the first GPU that this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    which = ["-i", seen] if seen else []
    command = ["nvidia-smi", *which, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = {-1: int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])}
    command = ["nvidia-smi", *which, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        pid, _, mib = line.partition(",")
        if mib.strip().isdigit():
            used[int(pid)] = int(mib)
    return used


def _copier(ring: Any) -> Any:
    from engram_sglang.copier import HostCopier

    if ring.fd is not None:
        return HostCopier()
    from engram_sglang.cuda import CudaCopier

    return CudaCopier(ring.bytes.device)


class Worker:
    """One attached worker with a state of `state_bytes` and KV of `row_bytes` a token, or with the shapes of `pools`."""

    def __init__(
        self, daemon: Daemon, state_bytes: int, row_bytes: int, ring_bytes: int, new_ring: Callable[[int], Any] = HostRing, pools: Any = None,
        weights: bytes = b"",
    ) -> None:  # fmt: skip
        fixed = pb.AttachRequest(
            instance=os.urandom(16),
            shard=pb.Shard(attn_tp_size=1, attn_tp_rank=0),
            model=pb.ModelIdentity(architecture="Bench", config_digest=bytes(31) + b"\1", display_name="bench", packing=1),
            state=[pb.StateTensor(name="temporal", dtype=1, layers=[0], shape=[state_bytes])],
            kv=[pb.KvLayer(layer=1, dtype=1, heads=1, k_head_dim=row_bytes // 2, v_head_dim=row_bytes // 2)],
            layout=pb.POOL_LAYOUT_PER_LAYER, page_size=1, slots=2, rows=1 << 20,
        )
        if pools is not None:
            del fixed.state[:], fixed.kv[:]
            fixed.state.extend(pb.StateTensor(name=t.name, dtype=t.dtype, layers=list(t.layers), shape=list(t.shape)) for t in pools.state)
            fixed.kv.extend(pb.KvLayer(layer=k.layer, dtype=k.dtype, heads=k.heads, k_head_dim=k.k_head_dim, v_head_dim=k.v_head_dim) for k in pools.kv)
            state_bytes, row_bytes = pools.state_bytes, pools.row_bytes
        self.state_bytes, self.row_bytes = state_bytes, row_bytes
        self.link = Link(Settings(daemon=daemon.target, retry_ms=50, mode=MODE), lambda r: r.MergeFrom(fixed), ring_bytes, new_ring)
        self.link.weights = Weights(1, weights or os.urandom(32))
        self.link.start()
        end = time.monotonic() + 60
        session = None
        while session is None:
            session = self.link.take()
            assert time.monotonic() < end, f"no session: {self.link.state} {self.link.reason}"
            time.sleep(0.001)
        self.session, self.ring, self.numbers = session, session.ring, 0
        self.carrier = session.carrier
        self.copier: Any = None if self.carrier is None else _copier(self.ring)
        assert MODE in ("auto", self.link.mode)

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
        if self.carrier is not None and message is layout.Drain:
            said = self.carry_out(number, parts)
        self.say(*said)
        left, last = len(parts), None
        while left:
            answered = self.hear(answer)
            assert answered.status == layout.Status.OK, answered
            left -= answered.count
            if self.carrier is not None and message is layout.Fill:
                first = answered.index + (answered.piece == KV)
                places = [(at, size) for *_, at, size in parts[first : first + answered.count]]
                last = self.copier.carry(lambda places=places: self.carrier.into(places), None, inward=True)
        while last is not None and not last.done():
            pass

    def carry_out(self, number: int, parts: list[tuple[Any, int, int, int]]) -> list[Any]:
        """Copies parts into the window, some at a time, and says so as they are there; what is left to be said."""
        groups, event = [[parts[0]]], self.copier.submit(lambda: None, before_next=False)
        for part in parts[1:]:
            first = groups[-1][0]
            if first[0] == STATE or part[2] + part[3] - first[2] > _AT_ONCE:
                groups.append([])
            groups[-1].append(part)
        under_way = []
        for group in groups:
            (kind, index, block, _), (*_, at, size) = group[0], group[-1]
            places = [(block, at + size - block)]
            carried = self.copier.carry(lambda places=places: self.carrier.out(places), event, inward=False)
            under_way.append((carried, layout.Drain(number, kind, index, len(group), *places[0])))
        for carried, message in under_way:
            while not carried.done():
                pass
            self.say(message)
        return []

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
